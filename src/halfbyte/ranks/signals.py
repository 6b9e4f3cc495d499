"""Signals, at any moment: SIGTERM, SIGINT and SIGHUP become a request to stop, also while the main thread is inside a
compiler or a collective and Python's own handlers cannot run. A second SIGINT interrupts at once.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
JOIN_S = 5.0


class Signals:
    """Context, on the main thread: `on_signal(name)` is called, on a thread of its own, for every signal. `afterwards`
    is the handler that stays; None: the one that was there before."""

    def __init__(self, on_signal: Callable[[str], None], *, afterwards: Any = None):
        self.on_signal, self._afterwards = on_signal, afterwards
        self._old: dict[int, Any] = {}
        self._old_fd = -1
        self._interrupts = 0
        self._write = -1

    def __enter__(self) -> "Signals":
        reading, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old = {number: signal.signal(number, self._receive) for number in WATCHED}
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, args=(reading,), name="halfbyte-signals", daemon=True)
        self._thread.start()
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Python's part: the wake-up pipe has told the thread already."""
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt

    def _listen(self, reading: int) -> None:
        while content := os.read(reading, 64):
            with contextlib.suppress(OSError):  # whoever listened before, if anybody, answers a person at a terminal
                os.write(self._old_fd, content)
            for number in content:
                if number in WATCHED:
                    self.on_signal(signal.Signals(number).name)
        os.close(reading)

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old.items():
            signal.signal(number, handler if self._afterwards is None else self._afterwards)
        os.close(self._write)  # the thread reads the end of its pipe
        self._thread.join(JOIN_S)  # bounded: `on_signal` may be talking to peers that do not answer
