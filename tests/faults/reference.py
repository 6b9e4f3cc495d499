"""The undisturbed run that every fault is held against, and the list of faults.

A fault is a function of (bench, folder, random generator). It returns a sentence about what happened, and raises
AssertionError when that is not what must happen.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

from outside import STACKS, Started, Trainer, last_step, losses, saved_state, wait_until
from places import Places


@dataclass
class Bench:
    """The trainer and its references: `whole` is an undisturbed run of one process, `reference` its losses and state.
    Both layouts (one process of two devices, two of one) give the same bits."""

    trainer: Trainer
    whole: Path
    steps: int
    every: int
    data: Path | None = None
    places: Places = field(default_factory=Places)

    def same_end(self, folder: Path) -> None:
        """The run in `folder` ended as the undisturbed one did, bit for bit."""
        assert losses(folder) == losses(self.whole), "losses differ from the undisturbed run"
        assert saved_state(folder) == saved_state(self.whole), "the end state differs from the undisturbed run"

    def goes_on(self, folder: Path, *flags: str, ranks: int = 1) -> str:
        """Start again, run to the end, compare; the output."""
        code, output = self.trainer.finish(folder, *flags, ranks=ranks)
        assert code == 0, f"ended with {code}: {output[-800:]}"
        self.same_end(folder)
        return output


Fault = Callable[[Bench, Path, Random], str]


class Kind(NamedTuple):
    """A fault, how often a full run tries it, and how many cores it keeps busy."""

    fault: Fault
    times: int
    cores: int


KINDS: dict[str, Kind] = {}


def kind(times: int, cores: int = 1) -> Callable[[Fault], Fault]:
    """Register a fault under its function's name. Two ranks that train wait for each other in every collective: beside
    another process each of their steps takes ten times as long, so they are given two cores."""

    def register(fault: Fault) -> Fault:
        KINDS[fault.__name__] = Kind(fault, times, cores)
        return fault

    return register


def at_random_step(bench: Bench, folder: Path, started: list[Started], random: Random) -> int:
    """Wait for a step somewhere in the middle of the run, and a little longer."""
    step = random.randint(bench.every // 2, bench.steps - bench.every)
    assert wait_until(lambda: last_step(folder) >= step, started), f"step {step} never came: {started[0].output[-800:]}"
    time.sleep(random.random() * 0.05)
    return step


def is_sentence(output: str) -> None:
    """No page of C++ stack, no Python traceback."""
    assert not STACKS.search(output), "a C++ stack"
    assert "Traceback (most recent call last)" not in output, "a traceback"
