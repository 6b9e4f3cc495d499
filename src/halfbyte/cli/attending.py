"""A line on the terminal after seconds of silence, and an answer to Ctrl-C at once.

A compiler may keep the main thread for minutes. Two threads stay awake. One writes what the main thread is at, where
nothing was written for four seconds, on one line that the next output erases. The other reads SIGINT from the
interpreter's wake-up pipe, which is written to while Python's own handlers cannot run. Where standard error is no
terminal, nothing of this happens.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from types import FrameType
from typing import Any

SILENCE_S = 4.0
ERASE = b"\r\x1b[K"
HEARD = ERASE + b"halfbyte: Ctrl-C: stopping as soon as what runs now returns\n"


@contextmanager
def attended(name: str) -> Iterator[None]:
    """While the command `name` runs."""
    if threading.current_thread() is not threading.main_thread() or not sys.stderr.isatty():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    silence = Silence(name)
    for target, args in ((silence.speak, ()), (_listen, (reading,))):
        threading.Thread(target=target, args=args, name="halfbyte-attending", daemon=True).start()
    on_terminal = sys.stdout.isatty()
    try:
        with (
            redirect_stdout(Noted(sys.stdout, silence)) if on_terminal else nullcontext(),
            redirect_stderr(Noted(sys.stderr, silence)),
        ):
            yield
    finally:
        silence.ended.set()
        silence.broken("")
        signal.set_wakeup_fd(before)
        os.close(writing)  # the listener reads the end of its pipe


def _listen(reading: int) -> None:
    while content := os.read(reading, 64):
        if signal.SIGINT in content:
            os.write(2, HEARD)
    os.close(reading)


class Noted:
    """A stream that ends the silence before it is written to."""

    def __init__(self, stream: Any, silence: "Silence"):
        self._stream, self._silence = stream, silence

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._silence.broken(text)
        return int(self._stream.write(text))


class Silence:
    """Knows when something was last written, and writes a line where that is long ago."""

    def __init__(self, name: str):
        self.name, self.ended = name, threading.Event()
        self._begun = self._last = time.monotonic()
        self._shown = self._inside = False  # our line is on the screen; other output has not ended its line

    def broken(self, text: str) -> None:
        """Erase our line: `text` is written next."""
        self._last, self._inside = time.monotonic(), not text.endswith("\n")
        if self._shown:
            self._shown = False
            os.write(2, ERASE)

    def speak(self) -> None:
        main = threading.main_thread().ident or 0
        while not self.ended.wait(0.5):
            now = time.monotonic()
            if now - self._last < SILENCE_S:
                continue
            line = f"halfbyte {self.name}: {doing(sys._current_frames().get(main))}, {now - self._begun:.0f} s so far"
            start = b"\n" if self._inside and not self._shown else ERASE
            self._shown = True
            os.write(2, start + line.encode())
            time.sleep(0.5)


def doing(frame: FrameType | None) -> str:
    """Returns `compiling` or `working`."""
    while frame is not None:
        if "/jax/" in frame.f_code.co_filename.replace(os.sep, "/") and "compile" in frame.f_code.co_name:
            return "compiling"
        frame = frame.f_back
    return "working"
