"""A person at a terminal hears something in every silence, and of Ctrl-C at once. In a pseudo-terminal, with the main
thread in a call of C that no signal ends: what a compiler is to Python. It ends when all was heard, so that a slow
machine changes nothing."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from halfbyte.cli.terminal_signals import QUIET_INTERVAL_S

pytestmark = pytest.mark.slow

STUCK = """if True:
    import contextlib, ctypes, os, sys, threading
    from halfbyte.cli import main, recipes
    from halfbyte.distributed import SignalHandler

    def stuck(args):
        c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        c.pthread_mutex_lock(mutex)
        free = lambda: (os.read(int(sys.argv[1]), 1), c.pthread_mutex_unlock(mutex))
        threading.Thread(target=free, daemon=True).start()
        with SignalHandler(print) if sys.argv[2] == "stops by itself" else contextlib.nullcontext():
            print("begun", flush=True)
            c.pthread_mutex_lock(mutex)
            print("ended", flush=True)
        return main.CommandResult()

    recipes.run = stuck
    sys.exit(main.main(["recipes"]))
"""
LIMIT_S = 300  # to begin, to speak and to answer, on the slowest machine


class Terminal:
    """A command that is stuck in a terminal, what it has shown there, and what frees it."""

    def __init__(self, way):
        self.ours, theirs = pty.openpty()
        waiting, self.free = os.pipe()
        words, ends = (
            [sys.executable, "-c", STUCK, str(waiting), way],
            dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        )
        self.process = subprocess.Popen(words, **ends, pass_fds=[waiting])
        self.shown, self.limit = b"", time.monotonic() + LIMIT_S
        os.close(theirs)
        os.close(waiting)

    def until(self, words):
        while words not in self.shown:
            assert time.monotonic() < self.limit, self.shown
            if select.select([self.ours], [], [], 1)[0]:
                self.shown += os.read(self.ours, 1000)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.free)


def test_second_ctrl_c_ends_a_stuck_command():
    """The main thread never returns from C: what a step of minutes is. The prompt is back within 5 s."""
    with contextlib.closing(Terminal("stops by itself")) as terminal:
        terminal.until(b"begun")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until(b"Ctrl-C again stops at once")
        began = time.monotonic()
        terminal.process.send_signal(signal.SIGINT)
        terminal.until(b"stopping at once")
        assert terminal.process.wait(LIMIT_S) == 1 and time.monotonic() - began < 5


ENDS = {"is interrupted": (b"was interrupted", 1), "stops by itself": (b"ended", 0)}


def test_neither_silence_nor_a_ctrl_c_without_an_answer():
    """Of commands that Ctrl-C interrupts, and of those, as `train`, that end the step in progress; both are waited for
    at a time."""
    assert QUIET_INTERVAL_S < 5
    with contextlib.ExitStack() as opened:
        terminals = {way: opened.enter_context(contextlib.closing(Terminal(way))) for way in ENDS}
        for way, terminal in terminals.items():
            end, code = ENDS[way]
            terminal.until(b"begun")
            terminal.until(b"halfbyte recipes: working; last output ")
            terminal.process.send_signal(signal.SIGINT)
            terminal.until(b"Ctrl-C: stopping")
            os.write(terminal.free, b".")
            terminal.until(end)
            assert terminal.process.wait(LIMIT_S) == code
            assert (b"ended" in terminal.shown) == (code == 0)
