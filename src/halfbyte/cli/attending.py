"""A person at a terminal is never left alone: a line after seconds of silence, and an answer to Ctrl-C at once.

A compiler may keep the main thread for minutes. Two threads stay awake: one writes, where nothing was written for four
seconds, what the main thread is at, on one line that the next output erases; the other hears of SIGINT from the
interpreter's wake-up pipe, which is written to while Python's own handlers cannot run. Where standard error is no
terminal, nothing of this happens.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SILENCE_S = 4.0
ERASE = b"\r\x1b[K"
HEARD = ERASE + b"halfbyte: Ctrl-C: stopping as soon as what runs now returns\n"


@contextlib.contextmanager
def attended(name: str) -> Iterator[None]:
    """While the command `name` runs."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not sys.stderr.isatty():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watch = Watch(name)
    for target, args in ((watch.speak, ()), (_listen, (reading,))):
        threading.Thread(target=target, args=args, name="halfbyte-attending", daemon=True).start()
    try:
        with watch.hearing(sys.stdout), watch.hearing(sys.stderr):
            yield
    finally:
        watch.ended.set()
        signal.set_wakeup_fd(before)
        os.close(writing)  # the listener reads the end of its pipe


def _listen(reading: int) -> None:
    while content := os.read(reading, 64):
        if signal.SIGINT in content:
            os.write(2, HEARD)
    os.close(reading)


class Watch:
    """Knows when something was last written, and says what goes on where that is long ago."""

    def __init__(self, name: str):
        self.name, self.ended = name, threading.Event()
        self._begun = self._last = time.monotonic()
        self._shown = self._inside = False  # our line is on the screen; somebody's line has no end yet
        self._main = threading.main_thread().ident

    @contextlib.contextmanager
    def hearing(self, stream: Any) -> Iterator[None]:
        """Note what is written to a stream that is seen, and erase our own line before it."""
        if not stream.isatty():
            yield
            return
        write: Callable[[str], int] = stream.write

        def heard(text: str) -> int:
            self._last, self._inside = time.monotonic(), not text.endswith("\n")
            self._erase()
            return write(text)

        stream.write = heard
        try:
            yield
        finally:
            self._erase()
            del stream.write  # the stream's own is found again

    def _erase(self) -> None:
        if self._shown:
            self._shown = False
            os.write(2, ERASE)

    def speak(self) -> None:
        while not self.ended.wait(0.5):
            now = time.monotonic()
            if now - self._last < SILENCE_S:
                continue
            frame = sys._current_frames().get(self._main or 0)
            line = f"halfbyte {self.name}: {doing(frame)}, {now - self._begun:.0f} s so far"
            start = b"\n" if self._inside and not self._shown else ERASE
            self._shown = True
            os.write(2, start + line.encode())
            time.sleep(0.5)


def doing(frame: FrameType | None) -> str:
    """What a thread is at, in words: compiling, tracing, or the innermost room of ours that it is in."""
    room = "working"
    while frame is not None:
        file, name = frame.f_code.co_filename.replace(os.sep, "/"), frame.f_code.co_name
        if "/jax/" in file and "compile" in name:
            return "compiling"
        if room == "working" and "/halfbyte/" in file:
            room = f"working ({file.rpartition('/halfbyte/')[2].removesuffix('.py')})"
        frame = frame.f_back
    return room
