"""Write text with a trained run.

halfbyte generate RUN --prompt "The state of the union"
halfbyte generate RUN --prompt "..." --temperature 0.8 --top-p 0.95 --seed 1 --samples 3

Greedy unless --temperature is given. The text appears as it is made and stops at the end of text or after --max-tokens.
`--prompt -` reads the prompt from standard input."""

import shutil
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import tyro

from halfbyte.cli.console import CommandResult, WordWrap, print_note
from halfbyte.io import check_int


@dataclass(frozen=True)
class Args:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory, or a Hugging Face folder."""
    prompt: str = ""
    """Text to continue; empty: a new document; -: read standard input."""
    max_tokens: int = 100
    """Tokens to write at most; as many as fit the model, if fewer."""
    temperature: float = 0.0
    """0 takes the likeliest token, 1 draws from the model's own distribution."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that make up this share of probability."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0: all."""
    seed: int = 0
    samples: int = 1
    """Texts to write, with seeds SEED, SEED + 1, ..."""
    recipe: str = ""
    """Of the forward pass; empty: the recipe that the run trained with."""
    step: int | None = None
    """Checkpoint to use; without it, the newest."""
    mesh: str = ""
    """AXIS=SIZE,... for a model that one device cannot hold (tensor=8); empty: one device."""
    compute_dtype: Literal["", "bfloat16", "float32"] = ""
    """Of activations; empty: as the run trained, bfloat16 for a folder."""


def run(args: Args) -> CommandResult:
    from halfbyte.evaluation import GENERATION_RULES, Sampling, TextGenerator
    from halfbyte.hf.model_loading import open_model

    sampling = Sampling(args.temperature, args.top_p, args.top_k, args.seed)
    check_int("--samples", args.samples, least=1)
    prompt = read_prompt(args.prompt)
    loaded = open_model(
        args.run, recipe_name=args.recipe, mesh=args.mesh, rules=GENERATION_RULES, step=args.step,
        compute_dtype=args.compute_dtype,
    )  # fmt: skip
    print_note(loaded.describe())
    generator = TextGenerator(loaded.model, sampling)
    texts = []
    for number in range(args.samples):
        made = write_one(generator, prompt, max_tokens=args.max_tokens, seed=args.seed + number)
        fields = asdict(made)
        fields["ended"] = fields.pop("hit_end_of_text")  # the key of 0.1
        texts.append({**fields, "tokens_per_s": made.tokens_per_s, "seed": args.seed + number})
    data: dict[str, Any] = {"run": args.run, "step": loaded.step, "recipe": loaded.recipe, "sampling": asdict(sampling)}
    return CommandResult({**data, "samples": texts})


def read_prompt(text: str) -> str:
    """Returns the prompt, that of standard input for `-`. ValueError if it is not UTF-8."""
    try:
        if text != "-":
            text.encode()  # bytes of the command line that are not UTF-8 are lone surrogates
            return text
        return sys.stdin.buffer.read().decode() if sys.stdin is not None else ""
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ValueError(f"--prompt: it is not valid UTF-8 ({error.reason}); convert it to UTF-8") from None


def write_one(generator: Any, prompt: str, *, max_tokens: int, seed: int) -> Any:
    """One text, shown as it is made; the prompt dim on a terminal."""
    on_terminal = sys.stdout.isatty()
    screen = WordWrap(shutil.get_terminal_size().columns if on_terminal else None)
    dim, plain = ("\x1b[2m", "\x1b[0m") if on_terminal else ("", "")
    print(dim, end="")
    screen.write(prompt)
    screen.close()
    print(plain, end="", flush=True)
    made = generator.generate(prompt, max_tokens=max_tokens, seed=seed, show=screen.write)
    screen.close()
    print(flush=True)
    speed = f", {made.tokens_per_s:,.0f} tokens/s" if made.tokens_per_s else ""
    end = "end of text" if made.hit_end_of_text else "cut at the limit"
    print_note(f"{len(made.tokens)} tokens, {end}{speed}, seed {seed}")
    return made
