"""Summary at the end of a run: losses against n-gram models, a sample of text, the report, and commands to try next.

The commands repeat the run with one change and can be typed as they are printed.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.text import Text

from halfbyte.cli.console import PlainConsole
from halfbyte.data import ngram_baselines
from halfbyte.evaluation import GENERATION_RULES, LanguageModel, Sampling, TextGenerator
from halfbyte.io import escape_control_chars
from halfbyte.models import ModelContext
from halfbyte.recipes.user_recipes import USER_FILE_PATTERN
from halfbyte.study.run_report import write_run_report
from halfbyte.train import RunResult, TrainConfig, open_batch_source

BASELINE_RECIPE = "bf16"
DEMO, SYNTHETIC = "demo", "synthetic"  # data sets that the package provides
REPORT_FILE_NAMES = ("config.json", "manifest.json", "metrics.jsonl", "tensorboard/", "checkpoints/")
Say = Callable[[str], None]


SuggestedStep = tuple[str, list[tuple[str, ...]]]
"""(a sentence, the commands that it announces)."""


def program_name() -> str:
    """How the person who started this process can start the next one: by name where the shell finds it, else by the
    path of the script, else as a module."""
    script = sys.argv[0]
    if Path(script).name != "halfbyte" or not os.path.isfile(script):
        return f"{shlex.quote(sys.executable)} -m halfbyte"
    known = shutil.which("halfbyte")
    if known is not None and os.path.samefile(known, script):
        return "halfbyte"
    return shlex.quote(min(os.path.relpath(script), os.path.abspath(script), key=len))


def suggest_next_steps(config: TrainConfig, directory: Path, *, started: Sequence[str] = ()) -> list[SuggestedStep]:
    """Returns the same run in another precision, a study, how to go on, and what the data allows. `started` are flags
    of the run that its config does not hold."""
    run, plain = str(directory), not has_quantized_linears(config, config.recipe)
    other, again = "nvfp4" if plain else BASELINE_RECIPE, ("train", "--config", f"{run}/config.json")
    changed = (*again, *precision_flags(config, other), "--run-dir", f"{run}-{other}", *started)
    pair = (run, f"{run}-{other}") if plain else (f"{run}-{other}", run)
    steps: list[SuggestedStep] = [
        (f"this run in {other}, all else equal, and the two side by side", [changed, ("compare", *pair)])
    ]
    recipe, baseline = "nvfp4" if plain else config.recipe, "@".join(precision_flags(config, BASELINE_RECIPE)[1::2])
    if not recipe.startswith("{"):  # commas of a recipe that is spelled out would separate candidates
        study = ("--baseline", baseline, "--candidates", recipe, "--out", f"{run}-parity")
        steps.append(("is that gap noise? paired runs, and a verdict", [("parity", f"{run}/config.json", *study)]))
    own = program_flags(config)
    if config.data != SYNTHETIC:  # whose tokens are no text
        forward = own[:2] if own[:1] == ("--recipe",) else ()
        write = ("generate", run, "--prompt", "We the people", "--temperature", "0.8", *forward)
        steps.append(("let it write", [write]))
    longer = ("train", "--run-dir", run, "--steps", str(2 * config.steps), *own, *started)
    steps.append(("go on where it stopped", [longer]))
    if config.data in (DEMO, SYNTHETIC):
        shape = ("--tokenizer", f"bpe:{config.model.vocab_size}", "--seq-len", str(config.seq or 2048))
        prepare, on_own = ("data", "prepare", "FILES", *shape, "--out", "data/own"), (*again, "--data", "data/own")
        steps.append(("the same run on text of your own (FILES)", [prepare, (*on_own, *own, *started)]))
    return steps


def steps_to_text(steps: Sequence[SuggestedStep], start: str) -> list[str]:
    """Returns lines to print: comments, and commands as a shell takes them."""
    return [line for why, commands in steps
            for line in (f"  # {why}", *(f"  {start} {shlex.join(words)}" for words in commands))]  # fmt: skip


def has_quantized_linears(config: TrainConfig, recipe_name: str) -> bool:
    """True where the run's policy quantizes any linear, given this recipe; a rule may name one of its own."""
    from halfbyte.models import linear_sites
    from halfbyte.recipes import policy, recipe

    resolved = policy(config.policy, recipe(recipe_name)).resolve(linear_sites(config.model), config.model.layers)
    recipes = [
        *resolved.non_layer_recipes.values(),
        *(used for part in resolved.segments for used in part.recipes.values()),
    ]
    return any(used.quantized for used in recipes)


def precision_flags(config: TrainConfig, other: str) -> tuple[str, ...]:
    """Flags that change the precision: the recipe, and the policy too where its rules name recipes of their own."""
    reached = has_quantized_linears(config, other) == (other != BASELINE_RECIPE)
    return ("--recipe", other) if reached else ("--recipe", other, "--policy", "mlp")


def program_flags(config: TrainConfig) -> tuple[str, ...]:
    """Flags that name the programs of the config: no command executes what only a run names."""
    flags = {"--recipe": config.recipe, "--policy": config.policy}
    return tuple(word for flag, text in flags.items() if USER_FILE_PATTERN.match(text) for word in (flag, text))


def report_run(
    config: TrainConfig, result: RunResult, console: PlainConsole, *, sample: bool, started: Sequence[str]
) -> dict[str, Any]:
    """Prints what was reached, writes report.html, and returns both as data."""
    say = console.say
    data: dict[str, Any] = {}
    dataset = open_batch_source(config).dataset
    alone = dataset is not None and jax.process_count() == 1  # one process holds the model, the data has a tokenizer
    written = sample_text(config, result.params, dataset) if sample and alone else None
    say("")
    if dataset is not None and config.validation.batches == 0 and result.validation:
        data["baselines"] = show_baselines(dataset, result, say)
    if written is not None:
        data["sample"] = "".join(written)
        show_sample(written, console)
    data["report"] = str(write_run_report(result.directory, sample=written))
    there = [name for name in REPORT_FILE_NAMES if (result.directory / name).exists()]
    say(f"run directory: {result.directory} ({', '.join(there)})")
    say(f"report: {data['report']}     one file, to forward")
    say("what to try next:")
    for line in steps_to_text(suggest_next_steps(config, result.directory, started=started), program_name()):
        say(line)
    return data


def sample_text(config: TrainConfig, params: Any, dataset: Any) -> tuple[str, str]:
    """(prompt, a few words after it), in bf16, drawn with the seed of the run."""
    mesh = params["embed"].sharding.mesh
    context = ModelContext(mesh=mesh if mesh.size > 1 else None, rules=GENERATION_RULES)
    model = LanguageModel(config.model, params, dataset.tokenizer(), context, config.seq or dataset.seq_len)
    found = TextGenerator(model, Sampling(temperature=0.7, top_p=0.9)).generate("The", max_tokens=60, seed=config.seed)
    return found.prompt, found.text


def show_sample(written: tuple[str, str], console: PlainConsole) -> None:
    """The prompt apart from what the model wrote after it; its lines as one."""
    prompt, text = written
    line = Text.assemble((f"sample, after {prompt!r}: ", "bold"), escape_control_chars(" ".join(text.split())))
    console.print(line, soft_wrap=not console.is_terminal)
    console.print("")


def show_baselines(dataset: Any, result: RunResult, say: Say) -> dict[str, float]:
    """The validation loss between those of two n-gram models of the same text, and by how much it is better."""
    found = ngram_baselines(dataset)
    reached = result.validation["all"]
    say(f"validation loss, nats a token (lower is better), after {result.step} steps:")
    for label, name in (("unigram model", "unigram"), ("bigram model, back-off", "bigram")):
        say(f"  {label:<24} {found[name]:.4f}   {describe_loss_difference(reached, found[name])}")
    say(f"  {'this model':<24} {reached:.4f}")
    say("")
    return found


def describe_loss_difference(loss: float, other: float) -> str:
    """Returns the distance of this model's loss from another's with `better` or `worse` instead of a sign."""
    return f"this model is {abs(loss - other):.3f} {'better' if loss < other else 'worse'}"
