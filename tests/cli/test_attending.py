"""A person at a terminal hears something every five seconds, and of Ctrl-C within two. In a pseudo-terminal, with the
main thread in a call of C that no signal ends: what a compiler is to Python."""

import os
import pty
import select
import signal
import subprocess
import sys
import time

STUCK = """if True:
    import ctypes, sys, threading
    from halfbyte.cli import main, recipes

    def stuck(args):
        print("begun", flush=True)
        c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        c.pthread_mutex_lock(mutex)
        threading.Timer(float(sys.argv[1]), c.pthread_mutex_unlock, (mutex,)).start()
        c.pthread_mutex_lock(mutex)
        print("ended", flush=True)

    recipes.run = stuck
    sys.exit(main.main(["recipes"]))
"""


def heard(seconds, *, interrupt_after):
    """([(when, what)] read from a terminal, exit code); Ctrl-C so many seconds after the command has begun."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", STUCK, str(seconds)], stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    found, begun = [], None
    while process.poll() is None or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                content = os.read(ours, 1000)
            except OSError:  # the terminal's end
                break
            begun = begun or (time.monotonic() if b"begun" in content else None)
            found.append((time.monotonic(), content))
        if begun and interrupt_after and time.monotonic() - begun > interrupt_after:
            process.send_signal(signal.SIGINT)
            found.append((time.monotonic(), b"<Ctrl-C>"))
            interrupt_after = None
    os.close(ours)
    return found, process.wait()


def test_neither_silence_nor_a_ctrl_c_without_an_answer():
    found, code = heard(7.0, interrupt_after=5.5)
    names = [content for _, content in found]
    first = next(i for i, content in enumerate(names) if b"begun" in content)
    pressed = names.index(b"<Ctrl-C>")
    gaps = [later[0] - earlier[0] for earlier, later in zip(found[first:], found[first + 1 :])]
    assert max(gaps) < 5.0 + 2.0  # five, and what a busy machine adds
    answered = next(when for when, content in found[pressed:] if b"Ctrl-C: stopping" in content)
    assert answered - found[pressed][0] < 2.0
    assert b"working (cli/" in b"".join(names) and b"ended" not in b"".join(names)
    assert code == 1 and b"was interrupted" in b"".join(names)
