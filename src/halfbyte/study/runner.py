"""Runs the cells of a study one after another. A stopped cell resumes, and a diverged one does not stop the others.

Each run has the directory arms/ARM/seed-S with the layout of any run. All runs share one compilation cache, so that a
program is compiled once per arm instead of once per seed.
"""

import contextlib
import dataclasses
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from halfbyte.checkpoint import RunDirectoryLockedError
from halfbyte.distributed import ProcessGroup, SignalHandler, WatchdogLimits
from halfbyte.distributed.heartbeat import PREEMPTED
from halfbyte.io import atomic_write
from halfbyte.study.analysis import analyse_study
from halfbyte.study.arms import Arm
from halfbyte.study.study_plan import StudyPlan
from halfbyte.study.study_runs import DIVERGED, FINISHED_STATES, cell_directory, check_cells, provenance, run_status
from halfbyte.train import DivergedError, TrainConfig, train
from halfbyte.train.progress_display import format_duration

Say = Callable[[str], None]
Observers = Callable[[TrainConfig, Path], Sequence[Any]]
LINES_A_RUN = 8
# A stop waits for these activities, but not for compilation or a radar probe.
AWAITED_ACTIVITIES = ("step", "validation", "save", "finish")
PATIENCE_S = 0.5  # after the last awaited activity, until the process exits
LOCKED_HINT = "wait for it, stop it, or give --out another directory (several hosts share one: --host INDEX/HOSTS)"


class StopSignal:
    """Context around several runs, entered on the main thread, in which the first signal ends all of them. A step,
    validation or save in progress is completed. Compilation cannot be interrupted: `leave(signal)`, which writes a
    report of the finished runs, is called on the signal thread, and the process exits with 75."""

    def __init__(self, say: Say, leave: Callable[[str], Any] | None = None):
        self.asked: str | None = None
        self._say, self._leave = say, leave
        self._group: ProcessGroup | None = None
        self._over, self._ending = threading.Event(), threading.Lock()
        self._signals = SignalHandler(self._on_signal)

    def __enter__(self) -> "StopSignal":
        self._signals.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        with self._ending:  # blocks while the signal thread is ending the process
            pass
        self._signals.__exit__(*error)  # joins the signal thread, which may be waiting for the lock

    @contextlib.contextmanager
    def group(self, config: TrainConfig) -> Iterator[ProcessGroup]:
        """Open a process group of this process only, for one run. If another process has locked the run directory, the
        error names --out, because a study has no --run-dir."""
        group = ProcessGroup(limits=WatchdogLimits(step_timeout_s=config.watchdog_s)).open()
        group.enter_step_loop()
        self._group = group
        if self.asked:
            group.request_stop(self.asked)
        try:
            yield group
        except RunDirectoryLockedError as error:
            raise RunDirectoryLockedError(error.why, LOCKED_HINT) from None
        finally:
            self._group = None
            group.close()

    def _on_signal(self, name: str) -> None:
        if self.asked is not None:
            return
        self.asked = name
        self._say(f"{name}: stopping; what is done is kept")
        if self._group is not None:
            self._group.request_stop(name)
        last_awaited = time.monotonic()
        while not self._over.wait(0.05):
            if self._group is not None and self._group.activity in AWAITED_ACTIVITIES:
                last_awaited = time.monotonic()
            if time.monotonic() - last_awaited > PATIENCE_S:
                self._exit_process(name)

    def _exit_process(self, name: str) -> None:
        with self._ending:
            if self._over.is_set():
                return
            try:
                if self._leave is not None:
                    self._leave(name)
                sys.stdout.flush()
                sys.stderr.flush()
            except Exception as error:  # no caller of this thread would end the process
                with contextlib.suppress(Exception):
                    self._say(f"no report was written ({error}); what is done is kept, and the same command goes on")
            finally:
                os._exit(PREEMPTED)


class RunLog:
    """Console of one run. It writes everything to the log file of the run, and reports about LINES_A_RUN step lines and
    each compilation through `say`."""

    def __init__(self, file: TextIO, say: Say, *, every: int):
        self._file, self._say, self._every = file, say, every
        self._line, self._steps = "", 0

    def write(self, text: str) -> int:
        self._file.write(text)
        self._line += text
        while "\n" in self._line:
            line, _, self._line = self._line.partition("\n")
            if line.startswith(("compil", "still compiling")):
                self._say(line.partition(";")[0])
            if line.startswith("step "):
                self._steps += 1
                if self._steps % self._every == 1 or self._every == 1:
                    self._say(line.split("  lr ")[0])
        return len(text)

    def flush(self) -> None:
        self._file.flush()


@dataclass
class StudyProgress:
    """Durations of the finished runs, for an estimate of the remaining time."""

    total: int
    began: float
    finished: int = 0
    fastest_run_s: float = 0.0
    last: float = 0.0

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def end_run(self) -> None:
        self.finished += 1
        self.fastest_run_s, self.last = min(self.fastest_run_s or math.inf, self.elapsed() - self.last), self.elapsed()

    def remaining(self) -> str:
        if not self.finished:
            return ""
        seconds_per_run = self.elapsed() / self.finished
        return f", about {format_duration(seconds_per_run * (self.total - self.finished))} left"


def run_cells(
    plan: StudyPlan, directory: Path, jobs: Sequence[tuple[Arm, int]], *, say: Say, observers: Observers | None = None,
    leave: Callable[[str], Any] | None = None, within: float = math.inf,
) -> str | None:  # fmt: skip
    """Run the unfinished cells of `jobs`, up to the first look that decides. Returns the name of the signal that
    stopped the runs, or None.

    Args:
        leave: see StopSignal.
        within: seconds. No run is started that would end later if it took as long as the fastest one so far.
    """
    waiting = [
        (a, s)
        for a, s in jobs
        if run_status(cell_directory(directory, a, s), plan.base.steps).state not in FINISHED_STATES
    ]
    if len(waiting) < len(jobs):
        say(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are done already")
    progress = StudyProgress(len(waiting), time.monotonic())
    num_looks_passed, has_extra_seeds = 0, len(plan.seeds) > plan.looks[-1]  # added seeds are run in any case
    current: dict[str, str] = {}
    with StopSignal(say, leave) as stop:
        for number, (arm, seed) in enumerate(waiting, 1):
            num_looks = sum(look <= plan.seeds.index(seed) for look in plan.looks)
            if num_looks > num_looks_passed and not has_extra_seeds and analyse_study(plan, directory)["decided"]:
                say(f"decided at the look after {plan.looks[num_looks - 1]} seeds; the others need not be run")
                break
            num_looks_passed = num_looks
            if progress.elapsed() + progress.fastest_run_s > within:
                say(f"{format_duration(within)} are over: the other {len(waiting) + 1 - number} runs are not begun")
                break
            prefix = f"[{number}/{len(waiting)} {arm.name} seed {seed}]"
            say_prefixed = lambda text, prefix=prefix: say(f"{prefix} {text}")  # noqa: E731
            if provenance(plan) != current:  # before the first run, and whenever data or code changed since
                current = provenance(plan)
                check_cells(plan, directory, current)
            run_cell(plan, directory, arm, seed, say=say_prefixed, observers=observers, stop=stop)
            if stop.asked:
                break
            progress.end_run()
            say_prefixed(
                f"{_cell_outcome(cell_directory(directory, arm, seed), plan.base.steps)}{progress.remaining()}"
            )
    return stop.asked


def run_cell(
    plan: StudyPlan, directory: Path, arm: Arm, seed: int, *, say: Say, observers: Observers | None, stop: StopSignal
) -> None:
    """Train one arm with one seed. A divergence is recorded and raises nothing. A complete run whose last row cannot be
    read has no outcome: its directory is moved to damaged/ and the run is trained again, once."""
    folder = cell_directory(directory, arm, seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    config = dataclasses.replace(arm.configure(plan.base, seed), compile_cache=str((directory / "compiled").absolute()))
    num_lines = -(-config.steps // config.log.every)
    logs = directory / "logs"
    logs.mkdir(exist_ok=True)
    with open(logs / f"{arm.name}-seed-{seed}.txt", "a", encoding="utf-8") as file:
        log = RunLog(file, say, every=max(1, num_lines // LINES_A_RUN))
        console = Console(file=log, width=160, force_terminal=False, color_system=None)  # type: ignore[arg-type]
        for is_retry in (False, True):
            run_observers = observers(config, folder) if observers else ()
            try:
                with stop.group(config) as group:
                    train(config, folder, console=console, group=group, observers=run_observers)
            except DivergedError as error:
                record = {"step": run_status(folder, config.steps).step, "error": str(error)}
                atomic_write(folder / "diverged.json", json.dumps(record) + "\n")
            if stop.asked or run_status(folder, config.steps).state in FINISHED_STATES:
                return
            if is_retry:
                raise ValueError(f"{folder} is trained to its end and has no validation loss there; see {file.name}")
            moved_to = _move_to_damaged(folder, directory / "damaged", f"{arm.name}-seed-{seed}")
            say(f"complete, but its last row is damaged or lost: kept as {moved_to}, trained anew")


def _move_to_damaged(folder: Path, parent: Path, name: str) -> Path:
    parent.mkdir(exist_ok=True)
    target = parent / f"{name}-{len(list(parent.glob(f'{name}-*'))) + 1}"
    folder.rename(target)
    return target


def _cell_outcome(folder: Path, steps: int) -> str:
    status = run_status(folder, steps)
    if status.state == DIVERGED:
        return f"DIVERGED at step {status.step}; the other runs go on"
    return f"done, validation loss {status.loss:.4f}"
