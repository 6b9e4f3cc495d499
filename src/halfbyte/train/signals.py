"""Stopping on request: SIGTERM or SIGINT ends the run after the step in progress, with a checkpoint and exit code 75.

With several processes all must stop after the same step. JAX's preemption service agrees on it: it watches for
SIGTERM itself, so there our handler
only turns SIGINT into one. A second SIGINT stops at once.
"""

import os
import signal
from types import FrameType, TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Context that watches for signals; `reached(step)` says, on every process alike, whether to stop after `step`."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._old: dict[int, Any] = {}
        self._many = jax.process_count() > 1

    def __enter__(self) -> "StopRequest":
        self._old[signal.SIGINT] = signal.signal(signal.SIGINT, self._receive)
        if not self._many:
            self._old[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name
        if self._many:
            os.kill(os.getpid(), signal.SIGTERM)

    def reached(self, step: int) -> bool:
        """True on all processes after the same step, once any of them was asked to stop."""
        if not self._many:
            return self.signal is not None
        if multihost_utils.reached_preemption_sync_point(step):
            self.signal = self.signal or "SIGTERM"
            return True
        return False

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
