"""The runs of a plan, one after another: resumed where they stopped, and one that diverges does not stop the others.

Each run lives in arms/ARM/seed-S as any run does. All of them share one directory of compiled programs, so that a
program is compiled once an arm and not once a seed.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from halfbyte.inputs import read_json, replace_file
from halfbyte.metrics import read_rows
from halfbyte.metrics.display import clock
from halfbyte.ranks import Group, Limits, Signals
from halfbyte.train import Diverged, TrainConfig, train

from .arms import Arm
from .plan import Plan

Say = Callable[[str], None]
Observers = Callable[[TrainConfig, Path], Sequence[Any]]
DONE, DIVERGED, PARTIAL, MISSING = "done", "diverged", "partial", "missing"
LINES_A_RUN = 8


def run_directory(directory: Path, arm: Arm, seed: int) -> Path:
    return directory / "arms" / arm.name / f"seed-{seed}"


@dataclass(frozen=True)
class Status:
    """How far a run is; `detail` says why it diverged."""

    state: str
    step: int = 0
    detail: str = ""


def status_of(folder: Path, steps: int) -> Status:
    """Read from what the run left behind."""
    if not (folder / "metrics.jsonl").is_file():
        return Status(MISSING)
    if (folder / "diverged.json").is_file():
        found = read_json(folder / "diverged.json")
        return Status(DIVERGED, int(found["step"]), str(found["error"]))
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "step" in row]
    step = max((row["step"] for row in rows), default=0)
    finished = step >= steps and rows[-1].get("validation_loss") is not None
    return Status(DONE if finished else PARTIAL, step)


class Log:
    """The console of one run: everything goes to its log file, a line now and then to the person."""

    def __init__(self, file: TextIO, prefix: str, say: Say, *, every: int):
        self._file, self._prefix, self._say, self._every = file, prefix, say, every
        self._line, self._steps = "", 0

    def write(self, text: str) -> int:
        self._file.write(text)
        self._line += text
        while "\n" in self._line:
            line, _, self._line = self._line.partition("\n")
            if line.startswith("step "):
                self._steps += 1
                if self._steps % self._every == 1 or self._every == 1:
                    self._say(f"{self._prefix} {line.split('  lr ')[0]}")
        return len(text)

    def flush(self) -> None:
        self._file.flush()


@dataclass
class Progress:
    """What the runs took, for an estimate of what is left."""

    total: int
    began: float
    finished: int = 0

    def left(self) -> str:
        if not self.finished:
            return ""
        each = (time.monotonic() - self.began) / self.finished
        return f", about {clock(each * (self.total - self.finished))} left"


def run_jobs(
    plan: Plan, directory: Path, jobs: Sequence[tuple[Arm, int]], *, say: Say, observers: Observers | None = None
) -> str | None:
    """Run what is not done yet; the name of the signal that stopped it, or None."""
    waiting = [(a, s) for a, s in jobs if status_of(run_directory(directory, a, s), plan.base.steps).state
               not in (DONE, DIVERGED)]  # fmt: skip
    if len(waiting) < len(jobs):
        say(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are done already")
    progress = Progress(len(waiting), time.monotonic())
    for number, (arm, seed) in enumerate(waiting, 1):
        prefix = f"[{number}/{len(waiting)} {arm.name} seed {seed}]"
        stopped = run_one(plan, directory, arm, seed, prefix=prefix, say=say, observers=observers)
        if stopped:
            return stopped
        progress.finished += 1
        say(f"{prefix} {_outcome(run_directory(directory, arm, seed), plan.base.steps)}{progress.left()}")
    return None


def run_one(
    plan: Plan, directory: Path, arm: Arm, seed: int, *, prefix: str, say: Say, observers: Observers | None
) -> str | None:
    """Train one arm of one seed; a divergence is written down and is no error."""
    folder = run_directory(directory, arm, seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    config = dataclasses.replace(arm.configure(plan.base, seed), compile_cache=str((directory / "compiled").absolute()))
    lines = -(-config.steps // config.log.every)
    logs = directory / "logs"
    logs.mkdir(exist_ok=True)
    with open(logs / f"{arm.name}-seed-{seed}.txt", "a", encoding="utf-8") as file:
        log = Log(file, prefix, say, every=max(1, lines // LINES_A_RUN))
        console = Console(file=log, width=160, force_terminal=False, color_system=None)  # type: ignore[arg-type]
        watching = observers(config, folder) if observers else ()
        try:
            with waiting_group(config) as group:
                result = train(config, folder, console=console, group=group, observers=watching)
        except Diverged as stop:
            record = {"step": _last_step(folder), "error": str(stop)}
            replace_file(folder / "diverged.json", json.dumps(record) + "\n")
            return None
    return result.stopped


@contextlib.contextmanager
def waiting_group(config: TrainConfig) -> Iterator[Group]:
    """This process alone; a signal waits for the step in progress, from the first on, and a report is written."""
    group = Group(limits=Limits(progress=config.watchdog_s)).open()
    group.begin_steps()
    try:
        with Signals(group.request_stop):
            yield group
    finally:
        group.close()


def _last_step(folder: Path) -> int:
    rows = read_rows(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []
    return max((row.get("step", 0) for row in rows), default=0)


def _outcome(folder: Path, steps: int) -> str:
    status = status_of(folder, steps)
    if status.state == DIVERGED:
        return f"DIVERGED at step {status.step}; the other runs go on"
    loss = next(
        (r["validation_loss"] for r in reversed(read_rows(folder / "metrics.jsonl")) if "validation_loss" in r), None
    )
    return "done" if loss is None else f"done, validation loss {loss:.4f}"
