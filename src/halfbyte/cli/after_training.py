"""What a run says when it is done: losses beside n-gram models, a sample of text, what to try next, and its page."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from halfbyte.cli.next_steps import as_text, next_steps, program
from halfbyte.cli.screen import PlainConsole
from halfbyte.data import ngram_baselines
from halfbyte.evaluation import WRITING_RULES, Generator, LanguageModel, Sampling
from halfbyte.models import Context
from halfbyte.parity.run_page import write_run_page
from halfbyte.train import RunResult, TrainConfig, open_source

Say = Callable[[str], None]
FILES = ("config.json", "manifest.json", "metrics.jsonl", "tensorboard/", "checkpoints/")


def report(
    config: TrainConfig, result: RunResult, console: PlainConsole, *, sample: bool, started: Sequence[str]
) -> dict[str, Any]:
    """Prints what was reached, writes report.html, and returns both as data."""
    say = console.say
    data: dict[str, Any] = {}
    dataset = open_source(config).dataset
    alone = dataset is not None and jax.process_count() == 1  # one process holds the model, the data has a tokenizer
    written = sample_text(config, result.params, dataset) if sample and alone else None
    say("")
    if dataset is not None and config.validation.batches == 0 and result.validation:
        data["baselines"] = show_baselines(dataset, result, say)
    if written is not None:
        data["sample"] = "".join(written)
        show_sample(written, console)
    data["report"] = str(write_run_page(result.directory, sample=written))
    there = [name for name in FILES if (result.directory / name).exists()]
    say(f"run directory: {result.directory} ({', '.join(there)})")
    say(f"report: {data['report']}     one file, to forward")
    say("what to try next:")
    for line in as_text(next_steps(config, result.directory, started=started), program()):
        say(line)
    return data


def sample_text(config: TrainConfig, params: Any, dataset: Any) -> tuple[str, str]:
    """(prompt, a few words after it), in bf16, drawn with the seed of the run."""
    mesh = params["embed"].sharding.mesh
    context = Context(mesh=mesh if mesh.size > 1 else None, rules=WRITING_RULES)
    model = LanguageModel(config.model, params, dataset.tokenizer(), context, config.seq or dataset.seq_len)
    found = Generator(model, Sampling(temperature=0.7, top_p=0.9)).write("The", max_tokens=60, seed=config.seed)
    return found.prompt, found.text


def show_sample(written: tuple[str, str], console: PlainConsole) -> None:
    """The prompt apart from what the model wrote after it; its lines as one."""
    prompt, text = written
    console.print(f"sample, after {prompt!r}: ", style="bold", end="")
    console.print(" ".join(text.split()), soft_wrap=True)
    console.print("")


def show_baselines(dataset: Any, result: RunResult, say: Say) -> dict[str, float]:
    """The validation loss between those of two n-gram models of the same text, and by how much it is better."""
    found = ngram_baselines(dataset)
    reached = result.validation["all"]
    against = ", ".join(difference(reached, found[name], f"the {name} model") for name in ("unigram", "bigram"))
    say(f"validation loss, nats a token (lower is better), after {result.step} steps:")
    say(f"  unigram model            {found['unigram']:.4f}")
    say(f"  bigram model, back-off   {found['bigram']:.4f}")
    say(f"  this model               {reached:.4f}   {against}")
    say("")
    return found


def difference(loss: float, other: float, name: str) -> str:
    """How a loss lies against another, in a word instead of a sign."""
    return f"{abs(loss - other):.3f} {'better' if loss < other else 'worse'} than {name}"
