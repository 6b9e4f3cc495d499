"""The cells of a parity: one run for each arm and seed, as it lies on the disk, and whether it is what the plan says.

A cell counts if it was made from the same data, tokenizer, code and recipe files as all others, and if its own config
is its arm's: a folder that was exchanged with another's would turn the verdict round.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.evaluation.curves import Curve, read_curve
from halfbyte.inputs import read_json
from halfbyte.metrics import number, read_rows
from halfbyte.train import jsonconfig, open_source
from halfbyte.train.config import COSMETIC
from halfbyte.train.identity import fingerprint, versions
from halfbyte.train.reading import open_directory

from .arms import Arm
from .pairing import COMPUTED, facts_of
from .plan import Plan

DONE, DIVERGED, PARTIAL, MISSING = "done", "diverged", "partial", "missing"
OVER = (DONE, DIVERGED)
ELSEWHERE = (*COSMETIC, "data")  # a data set is what it holds, not where it lies


def run_directory(directory: Path, arm: Arm, seed: int) -> Path:
    return directory / "arms" / arm.name / f"seed-{seed}"


def manifest_of(folder: Path) -> dict[str, Any] | None:
    """The precision manifest of a run that has begun."""
    path = folder / "manifest.json"
    return read_json(path) if path.is_file() else None


def executions(manifest: Mapping[str, Any]) -> list[str]:
    """native, emulated or plain: how the quantized GEMMs of a manifest ran."""
    words = {gemm["execution"] for site in manifest["sites"] for gemm in site["gemms"].values()}
    return sorted(words - {"plain"}) or ["plain"]


@dataclass(frozen=True)
class Status:
    """How far a run is; `detail` says why it diverged, `loss` is the validation loss after its last step."""

    state: str
    step: int = 0
    detail: str = ""
    loss: float | None = None


def status_of(folder: Path, steps: int) -> Status:
    """Read from what the run left behind. It is done when the row of its last step has a validation loss: that of
    another step is no outcome."""
    if (folder / "diverged.json").is_file():
        found = read_json(folder / "diverged.json")
        try:
            return Status(DIVERGED, int(found["step"]), str(found["error"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ValueError(f"{folder / 'diverged.json'} is damaged; remove it, and the run goes on") from None
    if not (folder / "metrics.jsonl").is_file():
        return Status(MISSING)
    rows = {row["step"]: row for row in read_rows(folder / "metrics.jsonl") if "step" in row}
    step = max(rows, default=0)
    if "validation_loss" not in rows.get(steps, {}):
        return Status(PARTIAL, step)
    loss = number(rows[steps]["validation_loss"])
    return Status(DONE, step, loss=loss) if math.isfinite(loss) else Status(DIVERGED, step, f"validation loss {loss}")


@dataclass(frozen=True)
class Cell:
    """One arm of one seed."""

    arm: Arm
    seed: int
    status: Status
    folder: Path
    curve: Curve | None

    @property
    def final(self) -> float | None:
        """Validation loss after the last step."""
        return self.status.loss


Cells = dict[tuple[str, int], Cell]


def read_cells(plan: Plan, directory: Path) -> Cells:
    """Every run of the plan, there or not; ValueError where one is not what the plan says."""
    check_cells(plan, directory)
    cells = {}
    for arm, seed in plan.jobs():
        folder = run_directory(directory, arm, seed)
        status = status_of(folder, plan.base.steps)
        curve = read_curve(folder, f"{arm.name} seed {seed}") if status.state != MISSING and status.step else None
        cells[arm.name, seed] = Cell(arm, seed, status, folder, curve)
    return cells


def check_cells(plan: Plan, directory: Path, now: dict[str, str] | None = None) -> None:
    """ValueError, naming run and field, unless every run that has begun is its arm's and all were made from the same
    things, which are also what a run that begins `now` would be made from."""
    first: dict[str, tuple[str, str]] = {name: (value, "now") for name, value in (now or {}).items()}
    for arm, seed in plan.jobs():
        folder = run_directory(directory, arm, seed)
        if not (folder / "config.json").is_file():
            if (folder / "metrics.jsonl").exists():
                raise ValueError(
                    f"{folder} holds metrics and no config.json, so that nobody knows whose they are; put config.json "
                    "back, or remove the folder: it is trained anew"
                )
            continue
        config = open_directory(folder, say=lambda text: None).values
        _check_config(plan, arm, seed, config, folder)
        for name, value in facts_of(folder, config).items():
            other, where = first.setdefault(name, (value, str(folder)))
            if other != value:
                raise ValueError(
                    f"{name}: {folder} was made from {value}, and {other} is what "
                    f"{'there is now' if where == 'now' else f'{where} was made from'}; a gap between them would not "
                    "be the recipe's. Put back what the runs began with, or begin anew with another --out"
                )


def _check_config(plan: Plan, arm: Arm, seed: int, config: Mapping[str, Any], folder: Path) -> None:
    """Fields that the run's version did not know yet are not compared."""
    planned = jsonconfig.flatten(arm.values(plan.base, seed))
    for name, value in jsonconfig.flatten(config).items():
        if name.split(".")[0] in COMPUTED and name not in ELSEWHERE and value != planned.get(name, value):
            raise ValueError(
                f"{name}: {folder} holds a run with {value!r}; arm {arm.name!r}, seed {seed} has {planned[name]!r}. "
                "The folder is another arm's: put the folders back where they were, or begin anew with another --out"
            )


def made_from(plan: Plan) -> dict[str, str]:
    """What a run that begins now is made from."""
    return {"data": fingerprint(open_source(plan.base).dataset), **versions()}
