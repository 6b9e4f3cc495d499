"""A signal is never lost, wherever it finds the main thread. The oracle: exit codes and what is raised."""

import gc
import signal
import subprocess
import sys
import time

import pytest

from halfbyte.cli import interrupting, train
from halfbyte.cli.interrupting import keep_interrupts
from halfbyte.cli.main import main
from halfbyte.cli.result import BAD_INPUT, DONE, Result


def test_ctrl_c_in_a_callback_of_the_garbage_collector_comes_again(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    keep_interrupts()
    left = [1, 2]  # raised where nobody can catch it, twice

    def callback(phase, info):
        if left:
            left.pop()
            signal.raise_signal(signal.SIGINT)

    def collect():
        gc.collect()
        time.sleep(10)

    gc.callbacks.append(callback)
    try:
        with pytest.raises(KeyboardInterrupt):
            collect()
    finally:
        gc.callbacks.remove(callback)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_before_a_run_begins_a_signal_in_a_callback_ends_it_with_75(number):
    program = f"""if True:
        import gc, signal
        from halfbyte.cli.interrupting import resumable
        gc.callbacks.append(lambda *_: signal.raise_signal({int(number)}))
        with resumable():
            gc.collect()
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=1800)
    assert done.returncode == 75
    assert b"nothing is lost" in done.stderr


@pytest.mark.parametrize("code", [DONE, BAD_INPUT])
def test_a_signal_after_the_run_has_ended_changes_no_exit_code(code, monkeypatch, tmp_path):
    monkeypatch.setattr(interrupting, "_leave", lambda *_: pytest.fail("taken for a preemption"))
    monkeypatch.setattr(train, "_train", lambda *_: Result({}, code))
    run = train.run

    def and_then_a_signal(args):
        result = run(args)
        for number in interrupting.STOPPING:
            signal.raise_signal(number)
        return result

    monkeypatch.setattr(train, "run", and_then_a_signal)
    assert main(["train", "--run-dir", str(tmp_path / "run")]) == code
