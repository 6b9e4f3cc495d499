"""A dead peer raises by itself; a peer that hangs is noticed by nobody. The watchdog ends a process whose step does
not end."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

FAILED = 1


def _exit() -> None:
    os._exit(FAILED)  # a thread stuck inside a collective cannot be unwound


class Watchdog:
    """Ends the process with every thread's stack when `beat` is not called for `limit_s` seconds. 0: does nothing."""

    def __init__(self, limit_s: float, *, end: Callable[[], None] = _exit):
        self._limit, self._end = limit_s, end
        self._step, self._beat = 0, time.monotonic()
        self._closed = threading.Event()
        self._paused = True
        self._thread = threading.Thread(target=self._watch, name="halfbyte-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._limit:
            self._thread.start()
        return self

    def beat(self, step: int) -> None:
        """A step has ended."""
        self._step, self._beat, self._paused = step, time.monotonic(), False

    def pause(self) -> None:
        """What follows (a compile, a validation) may take long: wait for the next beat."""
        self._paused = True

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._limit / 4)):
            silent = time.monotonic() - self._beat
            if not self._paused and silent > self._limit:
                print(
                    f"halfbyte: no step has ended for {silent:.0f} s after step {self._step} "
                    f"(watchdog_s {self._limit:g}); "
                    "a peer or a device hangs. Stacks follow; the last checkpoint is intact.",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(file=sys.stderr)
                self._end()
                return

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
