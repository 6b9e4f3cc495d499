"""Signals that come before a command has its own way of stopping, none of which may be lost."""

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.cli.result import PREEMPTED

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAID = b"halfbyte: stopped before the run began; nothing is lost, start it again\n"


def keep_interrupts() -> None:
    """Ctrl-C where nobody can catch it (a callback of the garbage collector, of which JAX has one) comes again."""
    if not isinstance(sys.unraisablehook, _Again):
        sys.unraisablehook = _Again(sys.unraisablehook)


@dataclass(frozen=True)
class _Again:
    """A hook for exceptions that nobody can catch: a KeyboardInterrupt is raised once more, a moment later."""

    before: Callable[[Any], Any]

    def __call__(self, unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            _thread.start_new_thread(_interrupt, ())  # no lock is taken: the main thread may hold any of them
        else:
            self.before(unraisable)


def _interrupt() -> None:
    time.sleep(0.01)  # until the callback has returned
    _thread.interrupt_main()


def terminated_as_interrupted() -> contextlib.AbstractContextManager[None]:
    """SIGTERM and SIGHUP end the work as Ctrl-C does: what is half made is removed, and what is made is kept."""
    return _handling((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler)


def resumable() -> contextlib.AbstractContextManager[None]:
    """A signal while nothing has begun yet is a preemption like any other: exit 75, which schedulers put back."""
    return _handling(STOPPING, _leave)


@contextlib.contextmanager
def _handling(numbers: Sequence[signal.Signals], handler: Callable[..., Any]) -> Iterator[None]:
    """With another handler, on the main thread; elsewhere nobody may set one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _leave(*_: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, SAID)
    os._exit(PREEMPTED)
