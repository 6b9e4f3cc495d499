"""What to type after a run: commands that reproduce it with one change, and that can be typed as they are printed."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from halfbyte.recipe.own import FILE
from halfbyte.train.config import TrainConfig

PLAIN = "bf16"
DEMO, SYNTHETIC = "demo", "synthetic"  # data that is not the user's own
Step = tuple[str, list[tuple[str, ...]]]
"""(a sentence, the commands that it announces)."""


def program() -> str:
    """How the person who started this process can start the next one: by name where the shell finds it, else by the
    path of the script, else as a module."""
    script = sys.argv[0]
    if Path(script).name != "halfbyte" or not os.path.isfile(script):
        return f"{shlex.quote(sys.executable)} -m halfbyte"
    known = shutil.which("halfbyte")
    if known is not None and os.path.samefile(known, script):
        return "halfbyte"
    return shlex.quote(min(os.path.relpath(script), os.path.abspath(script), key=len))


def next_steps(config: TrainConfig, directory: Path, *, started: Sequence[str] = ()) -> list[Step]:
    """Returns the same run in another precision, a study, how to go on, and what the data allows. `started` are flags
    of the run that its config does not hold."""
    run, plain = str(directory), not quantizes(config, config.recipe)
    other, again = "nvfp4" if plain else PLAIN, ("train", "--config", f"{run}/config.json")
    changed = (*again, *in_precision(config, other), "--run-dir", f"{run}-{other}", *started)
    pair = (run, f"{run}-{other}") if plain else (f"{run}-{other}", run)
    steps: list[Step] = [
        (f"this run in {other}, all else equal, and the two side by side", [changed, ("compare", *pair)])
    ]
    recipe, baseline = "nvfp4" if plain else config.recipe, "@".join(in_precision(config, PLAIN)[1::2])
    if not recipe.startswith("{"):  # commas of a recipe that is spelled out would separate candidates
        study = ("--baseline", baseline, "--candidates", recipe, "--out", f"{run}-parity")
        steps.append(("is that gap noise? paired runs, and a verdict", [("parity", f"{run}/config.json", *study)]))
    own = programs(config)
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


def as_text(steps: Sequence[Step], start: str) -> list[str]:
    """Returns lines to print: comments, and commands as a shell takes them."""
    return [line for why, commands in steps
            for line in (f"  # {why}", *(f"  {start} {shlex.join(words)}" for words in commands))]  # fmt: skip


def quantizes(config: TrainConfig, recipe_name: str) -> bool:
    """True where the run's policy quantizes any linear, given this recipe; a rule may name one of its own."""
    from halfbyte.models import linear_sites
    from halfbyte.recipe import policy, recipe

    resolved = policy(config.policy, recipe(recipe_name)).resolve(linear_sites(config.model), config.model.layers)
    recipes = [*resolved.outside.values(), *(used for part in resolved.segments for used in part.recipes.values())]
    return any(used.quantized for used in recipes)


def in_precision(config: TrainConfig, other: str) -> tuple[str, ...]:
    """Flags that change the precision: the recipe, and the policy too where its rules name recipes of their own."""
    reached = quantizes(config, other) == (other != PLAIN)
    return ("--recipe", other) if reached else ("--recipe", other, "--policy", "mlp")


def programs(config: TrainConfig) -> tuple[str, ...]:
    """Flags that name the programs of the config: no command executes what only a run names."""
    flags = {"--recipe": config.recipe, "--policy": config.policy}
    return tuple(word for flag, text in flags.items() if FILE.match(text) for word in (flag, text))
