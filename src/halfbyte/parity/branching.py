"""The branch test: an answer without a second full run.

From checkpoints of one run in few bits, short branches go on in the baseline's recipe and in the run's own, on the same
batches and schedule. If the baseline's branch soon stands much lower, precision costs something now. (NVIDIA argued so
for a 550B model, at three checkpoints.) All branches stem from one run: what it shows is of that run, and no interval
over seeds exists.
"""

import dataclasses
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from halfbyte.checkpoint import Checkpoints
from halfbyte.evaluation.curves import Curve, differences, read_curve
from halfbyte.inputs import check_whole
from halfbyte.recipe import recipe
from halfbyte.train import Diverged, TrainConfig, phases, train
from halfbyte.train.reading import open_directory

from .margin import Margin
from .runner import Say, Stop
from .statistics import moving_block_bootstrap
from .verdict import SINGLE


@dataclasses.dataclass(frozen=True)
class Branches:
    """What is branched: `run`, its checkpoints `at`, for `steps` steps, in `baseline` and in its own recipe."""

    run: Path
    config: TrainConfig
    at: tuple[int, ...]
    steps: int
    baseline: str


def plan_branches(run: Path, *, baseline: str, steps: int) -> Branches:
    """Every checkpoint that the run has kept; ValueError where there is nothing to branch from."""
    check_whole("branch_steps", steps, zero="a twentieth of the run")
    config = open_directory(run).config
    phases(config)  # a recipe of the run's own that this command does not name is refused before anything is made
    chosen = recipe(baseline).name
    if chosen == config.recipe:
        raise ValueError(f"{run} was trained in {chosen} itself; name another --baseline to branch into")
    if not (run / "checkpoints").is_dir():
        raise ValueError(f"{run} has no checkpoint to branch from; train it first")
    store = Checkpoints(run / "checkpoints")
    kept = tuple(store.steps())
    store.close()
    if not kept:
        raise ValueError(f"{run} has no checkpoint to branch from; train it first")
    return Branches(run, config, kept, steps or max(1, config.steps // 20), chosen)


def run_branches(plan: Branches, out: Path, *, say: Say) -> tuple[list[dict[str, Any]], str | None]:
    """One entry a checkpoint: losses of both branches and their gap; and the signal that stopped it."""
    found: list[dict[str, Any]] = []
    with Stop(say) as stop:
        for step in plan.at:
            folders = {}
            for name in (plan.config.recipe, plan.baseline):
                folders[name] = grow(plan, out, step, name, say=say, stop=stop)
                if stop.asked:
                    return found, stop.asked
            found.append(compare(plan, step, folders))
    return found, stop.asked


def grow(plan: Branches, out: Path, step: int, name: str, *, say: Say, stop: Stop) -> Path:
    """Train one branch: the checkpoint copied, the recipe changed, everything else as it was. A branch of another
    length is another branch: its learning rates and its end are not this one's."""
    end = step + plan.steps
    called = re.sub(r"[^A-Za-z0-9._+@-]", "-", Path(name).name)[:100]  # a recipe of a file has its path in its name
    folder = out / f"step-{step}-to-{end}" / called
    config = dataclasses.replace(
        plan.config, recipe=name, precision=dataclasses.replace(plan.config.precision, switch_at=0.0, reset_at=0.0),
        steps=max(plan.config.steps, end), validation=dataclasses.replace(plan.config.validation, every=0),
        log=dataclasses.replace(plan.config.log, tensorboard=False, wandb=""),
        compile_cache=str((out / "compiled").absolute()),
    )  # fmt: skip
    if not folder.exists():  # in place when it is whole: half of a copy would begin at step 0
        half = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(plan.run / "checkpoints" / str(step), half / "checkpoints" / str(step))
        for name_of_file in ("config.json", "run.json"):  # a checkpoint goes on in the run that it belongs to
            if (plan.run / name_of_file).is_file():
                shutil.copy(plan.run / name_of_file, half / name_of_file)
        half.rename(folder)
    say(f"[step {step}, {name}] {plan.steps} steps")
    with open(out / f"{folder.parent.name}-{folder.name}.log", "a", encoding="utf-8") as log:
        console = Console(file=log, width=160, force_terminal=False, color_system=None)
        try:
            with stop.group(config) as group:
                train(config, folder, console=console, group=group, allow_change=True, until=end)
        except Diverged as trouble:
            say(f"[step {step}, {name}] DIVERGED: {trouble}")
    return folder


def compare(plan: Branches, step: int, folders: dict[str, Path]) -> dict[str, Any]:
    """The run's own branch minus the baseline's."""
    own, base = (read_curve(folders[name], name) for name in (plan.config.recipe, plan.baseline))
    validation = [_last(curve) for curve in (own, base)]
    apart = differences(own, base)
    bounds = moving_block_bootstrap(apart)
    return {
        "step": step,
        "tokens": int(own.tokens[-1]),
        "validation": dict(zip((plan.config.recipe, plan.baseline), validation, strict=True)),
        "gap": None if None in validation else validation[0] - validation[1],  # type: ignore[operator]
        "training_gap": float(apart.mean()) if len(apart) else None,
        "within_run": bounds,
    }


def _last(curve: Curve) -> float | None:
    _, losses = curve.validation()
    return float(losses[-1]) if len(losses) and np.isfinite(losses[-1]) else None


def verdict_line(plan: Branches, found: Sequence[dict[str, Any]], margin: Margin) -> str:
    """The one line: gaps at each checkpoint, and that one run has no interval."""
    gaps = []
    for row in found:
        base = row["validation"][plan.baseline]
        if row["gap"] is None or base is None:
            gaps.append(f"step {row['step']}: diverged")
        else:
            gaps.append(f"step {row['step']}: {margin.show(margin.measure(base + row['gap'], base))}")
    return (
        f"VERDICT: CANNOT TELL {plan.config.recipe}: {SINGLE}; branches into {plan.baseline} of {plan.steps} steps: "
        f"{', '.join(gaps)} (margin ±{margin})"
    )
