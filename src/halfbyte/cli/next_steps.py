"""What to type after a run: commands that reproduce it with one change, and that can be typed as they are printed."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from halfbyte.recipe import is_own
from halfbyte.recipe.own import FILE
from halfbyte.train.config import TrainConfig

PLAIN = "bf16"
DEMO, SYNTHETIC = "demo", "synthetic"  # data that is not the person's own


@dataclass(frozen=True)
class Step:
    """A sentence, and the commands that it announces."""

    why: str
    commands: tuple[tuple[str, ...], ...]


def program() -> str:
    """How the person who started this process can start the next one: by name where the shell finds it, else by the
    path of the script, else as a module."""
    script = sys.argv[0]
    if Path(script).name != "halfbyte" or not os.path.isfile(script):
        return f"{shlex.quote(sys.executable)} -m halfbyte"
    found = shutil.which("halfbyte")
    if found is not None and os.path.samefile(found, script):
        return "halfbyte"
    return shlex.quote(min(os.path.relpath(script), os.path.abspath(script), key=len))


def next_steps(config: TrainConfig, directory: Path, *, started: Sequence[str] = ()) -> list[Step]:
    """The same run in another precision, compared; whether the difference is noise; how to go on; and what its data
    allows beside it. `started` are flags that the run was started with and that its config does not hold."""
    run = str(directory)
    again = ("train", "--config", f"{run}/config.json")
    plain = not quantizes(config, config.recipe)
    other = "nvfp4" if plain else PLAIN
    changed = (*again, *in_precision(config, other), "--run-dir", f"{run}-{other}", *started)
    pair = (run, f"{run}-{other}") if plain else (f"{run}-{other}", run)
    own = programs(config)
    recipe = own[:2] if own[:1] == ("--recipe",) else ()
    write = ("generate", run, "--prompt", "We the people", "--temperature", "0.8", *recipe)
    longer = ("train", "--run-dir", run, "--steps", str(2 * config.steps), *own, *started)
    size, length = f"bpe:{config.model.vocab_size}", str(config.seq or 2048)
    prepare = ("data", "prepare", "FILES", "--tokenizer", size, "--seq-len", length, "--out", "data/own")
    steps = [
        Step(f"this run in {other}, all else equal, and the two side by side", (changed, ("compare", *pair))),
        Step("is that gap noise? paired runs, and a verdict", (parity(config, run, plain=plain),)),
        Step("go on where it stopped", (longer,)),
    ]
    if config.data != SYNTHETIC:  # whose tokens are no text
        steps.insert(2, Step("let it write", (write,)))
    if config.data in (DEMO, SYNTHETIC):
        on_own = (*again, "--data", "data/own", *own, *started)
        steps.append(Step("the same run on text of your own (FILES)", (prepare, on_own)))
    return steps


def as_text(steps: Sequence[Step], start: str) -> list[str]:
    """Lines to print: comments and commands, which a shell takes as they are."""
    lines = []
    for step in steps:
        lines.append(f"  # {step.why}")
        lines += [f"  {start} {shlex.join(words)}" for words in step.commands]
    return lines


def quantizes(config: TrainConfig, recipe_name: str) -> bool:
    """True where the run's policy quantizes any linear, given this recipe; a rule may name one of its own."""
    from halfbyte.models import linear_sites
    from halfbyte.recipe import policy, recipe

    resolved = policy(config.policy, recipe(recipe_name)).resolve(linear_sites(config.model), config.model.layers)
    used = [*resolved.outside.values(), *(made for part in resolved.segments for made in part.recipes.values())]
    return any(made.quantized for made in used)


def in_precision(config: TrainConfig, other: str) -> tuple[str, ...]:
    """Flags that change the precision: the recipe, and the policy too where its rules name recipes of their own."""
    reached = quantizes(config, other) == (other != PLAIN)
    return ("--recipe", other) if reached else ("--recipe", other, "--policy", "mlp")


def programs(config: TrainConfig) -> tuple[str, ...]:
    """Flags that name the programs of the config: no command executes what only a run names."""
    given = {"--recipe": config.recipe, "--policy": config.policy}
    return tuple(word for flag, text in given.items() if FILE.match(text) for word in (flag, text))


def parity(config: TrainConfig, run: str, *, plain: bool) -> tuple[str, ...]:
    """Three seeds against bf16; for a recipe that has no name, branches from the checkpoints of this run."""
    name = "nvfp4" if plain else config.recipe
    if is_own(name):
        return ("parity", f"{run}/config.json", "--baseline", PLAIN, "--candidates", name)
    baseline = "@".join(in_precision(config, PLAIN)[1::2])
    return ("parity", f"{run}/config.json", "--baseline", baseline, "--candidates", name, "--out", f"{run}-parity")
