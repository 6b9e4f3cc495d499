"""Terminal feedback while a command compiles, and signals before a command handles them itself.

A compiler may keep the main thread for minutes. Two threads stay responsive. One writes the activity of the main thread
after four seconds of silence, on one line that the next output erases. The other reads SIGINT from the interpreter's
wake-up pipe, because Python's own handlers cannot run meanwhile. It acknowledges the first Ctrl-C, and ends the
process `FORCED_EXIT_S` after the second. Both are silent if standard error is no terminal. No signal is lost before the
handlers of the command are installed.
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from types import FrameType
from typing import Any

from halfbyte.cli.console import EXIT_FAILED, EXIT_PREEMPTED

QUIET_INTERVAL_S = 4.0
FORCED_EXIT_S = 3.0
"""From the second Ctrl-C on, what is left to the main thread to close files and to say what it has to."""
ERASE = b"\r\x1b[K"
SHOW_CURSOR = b"\x1b[?25h"


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOPPED_MESSAGE = b"halfbyte: stopped before the run began; nothing is lost, start it again\n"


def write_line(text: str) -> None:
    """Writes a line to standard error in place of the line that is being written; takes no lock."""
    with contextlib.suppress(OSError):
        os.write(2, ERASE + text.encode() + b"\n")


@dataclass
class TerminalFeedback:
    """Answers to Ctrl-C, how they are written, and the words for a long silence. A command with a live display passes
    `say`: the display draws over what others write."""

    first: Callable[[], str] = lambda: "stopping as soon as what runs now returns; Ctrl-C again stops at once"
    second: Callable[[], str] = lambda: "stopping at once"
    say: Callable[[str], None] = write_line
    activity: Callable[[], str] = lambda: ""
    """What the command does now; empty: as `describe_activity` sees it."""


_feedback = TerminalFeedback()


@contextmanager
def terminal_feedback(feedback: TerminalFeedback) -> Iterator[None]:
    """Uses this feedback meanwhile."""
    global _feedback
    before, _feedback = _feedback, feedback
    try:
        yield
    finally:
        _feedback = before


@contextmanager
def keep_user_informed(name: str) -> Iterator[None]:
    """While the command `name` runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    silence = Silence(name) if sys.stderr.isatty() else None
    targets: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(_listen, (reading, silence is not None))]
    if silence is not None:
        targets.append((silence.speak, ()))
    for target, args in targets:
        threading.Thread(target=target, args=args, name="halfbyte-attending", daemon=True).start()
    try:
        with _noted(silence) if silence is not None else nullcontext():
            yield
    finally:
        if silence is not None:
            silence.ended.set()
            silence.broken("")
        signal.set_wakeup_fd(before)
        os.close(writing)  # the listener reads the end of its pipe


@contextmanager
def _noted(silence: "Silence") -> Iterator[None]:
    with (
        redirect_stdout(Noted(sys.stdout, silence)) if sys.stdout.isatty() else nullcontext(),
        redirect_stderr(Noted(sys.stderr, silence)),
    ):
        yield


def _listen(reading: int, on_terminal: bool) -> None:
    interrupts = 0
    while content := os.read(reading, 64):
        for _ in range(content.count(signal.SIGINT)):
            interrupts += 1
            if interrupts == 2:  # the main thread may be in a step of minutes, and cannot be interrupted there
                timer = threading.Timer(FORCED_EXIT_S, _force_exit, (on_terminal,))
                timer.daemon = True
                timer.start()
            if interrupts <= 2 and on_terminal:
                _acknowledge(_feedback.first if interrupts == 1 else _feedback.second)
    os.close(reading)


def _acknowledge(message: Callable[[], str]) -> None:
    text = message()
    if text:
        _feedback.say(f"halfbyte: Ctrl-C: {text}")


def _force_exit(on_terminal: bool) -> None:
    if on_terminal:
        with contextlib.suppress(OSError):
            os.write(2, ERASE + SHOW_CURSOR)
    os._exit(EXIT_FAILED)


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
        self._last = time.monotonic()
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
            if now - self._last < QUIET_INTERVAL_S:
                continue
            activity = _feedback.activity() or describe_activity(sys._current_frames().get(main))
            line = f"halfbyte {self.name}: {activity}; last output {format_seconds(now - self._last)} ago"
            start = b"\n" if self._inside and not self._shown else ERASE
            self._shown = True
            os.write(2, start + line.encode())
            time.sleep(0.5)


def format_seconds(seconds: float) -> str:
    """`12 s`, or `2:05` from a minute on."""
    return f"{seconds:.0f} s" if seconds < 60 else f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def describe_activity(frame: FrameType | None) -> str:
    """Returns `compiling`, `loading` (modules) or `working`."""
    while frame is not None:
        file = frame.f_code.co_filename.replace(os.sep, "/")
        if "/jax/" in file and "compile" in frame.f_code.co_name:
            return "compiling"
        if file == "<frozen importlib._bootstrap>":
            return "loading modules"
        frame = frame.f_back
    return "working"


def reraise_lost_interrupts() -> None:
    """Raises a KeyboardInterrupt again that no code can catch: one in a garbage collector callback (JAX has one)."""
    if not isinstance(sys.unraisablehook, _ReraiseInterrupt):
        sys.unraisablehook = _ReraiseInterrupt(sys.unraisablehook)


@dataclass(frozen=True)
class _ReraiseInterrupt:
    """Hook for unraisable exceptions that raises a KeyboardInterrupt again a moment later."""

    before: Callable[[Any], Any]

    def __call__(self, unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            _thread.start_new_thread(_interrupt, ())  # no lock is taken: the main thread may hold any of them
        else:
            self.before(unraisable)


def _interrupt() -> None:
    time.sleep(0.01)  # until the callback has returned
    _thread.interrupt_main()


def sigterm_as_interrupt() -> contextlib.AbstractContextManager[None]:
    """SIGTERM and SIGHUP end the work as Ctrl-C does: partial files are removed, finished ones kept."""
    return _handling((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler)


def exit_as_preempted() -> contextlib.AbstractContextManager[None]:
    """A signal while nothing has begun yet is a preemption like any other: exit 75, which schedulers put back."""
    return _handling(STOP_SIGNALS, _leave)


@contextlib.contextmanager
def _handling(numbers: Sequence[signal.Signals], handler: Callable[..., Any]) -> Iterator[None]:
    """Installs `handler` on the main thread. Other threads may not set one."""
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
        os.write(2, STOPPED_MESSAGE)
    os._exit(EXIT_PREEMPTED)
