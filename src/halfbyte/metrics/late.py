"""Metrics read one step late: the numbers of a step are fetched after the next step was dispatched, so the device
never waits.

Step time is the time between the moments at which two results were ready, so the compile of the first step is counted
once, apart.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass(frozen=True)
class Finished:
    """A step whose numbers are on the host."""

    step: int
    values: dict[str, float]
    step_time_s: float
    joules: float | None
    """Of a device; None where nobody counts."""
    host: Mapping[str, Any]


@dataclass
class OneStepLate:
    """Holds the newest step on the device and hands out the one before it."""

    clock: Callable[[], float] = time.perf_counter
    energy: Callable[[], float | None] = lambda: None
    """Joules of a device so far."""
    _held: tuple[int, Mapping[str, Any], Mapping[str, Any]] | None = None
    _ready_at: float = field(default=0.0)
    _drawn_at: float | None = None

    def __post_init__(self) -> None:
        self.restart_clock()

    def push(self, step: int, values: Mapping[str, Any], **host: Any) -> Finished | None:
        """Take a step just dispatched; return the one before it, waiting for that one only. `host` is carried along."""
        finished = self.flush()
        self._held = (step, values, host)
        return finished

    def flush(self) -> Finished | None:
        """The step still held, if any."""
        if self._held is None:
            return None
        (step, values, host), self._held = self._held, None
        fetched = {name: float(value) for name, value in jax.device_get(dict(values)).items()}
        ready, drawn = self._ready_at, self._drawn_at
        self.restart_clock()
        joules = None if drawn is None or self._drawn_at is None else self._drawn_at - drawn
        return Finished(step=step, values=fetched, step_time_s=self._ready_at - ready, joules=joules, host=host)

    def restart_clock(self) -> None:
        """Do not count what happened until now (validation, a checkpoint) as part of the next step."""
        self._ready_at, self._drawn_at = self.clock(), self.energy()
