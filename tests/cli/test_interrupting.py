"""A signal is never lost, wherever it finds the main thread. The oracle: exit codes and what is raised."""

import signal
import subprocess
import sys

import pytest

from halfbyte.cli import terminal_signals, train
from halfbyte.cli.console import EXIT_BAD_INPUT, EXIT_OK, CommandResult
from halfbyte.cli.main import main


def test_ctrl_c_in_a_callback_of_the_garbage_collector_comes_again():
    """In a process of its own: the callback raises when a collection begins and when it ends, so two may come."""
    program = """if True:
        import gc, signal, time
        from halfbyte.cli.terminal_signals import reraise_lost_interrupts as keep_interrupts
        keep_interrupts()
        left = [signal.SIGINT, signal.SIGINT]  # raised where nobody can catch it, twice
        gc.callbacks.append(lambda *_: left and signal.raise_signal(left.pop()))
        gc.collect()
        for _ in range(6000):  # it comes between two instructions: a sleep would be slept out
            time.sleep(0.01)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=1800)
    assert done.returncode == -signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_before_a_run_begins_a_signal_in_a_callback_ends_it_with_75(number):
    program = f"""if True:
        import gc, signal
        from halfbyte.cli.terminal_signals import exit_as_preempted as resumable
        gc.callbacks.append(lambda *_: signal.raise_signal({int(number)}))
        with resumable():
            gc.collect()
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=1800)
    assert done.returncode == 75
    assert b"nothing is lost" in done.stderr


@pytest.mark.parametrize("code", [EXIT_OK, EXIT_BAD_INPUT])
def test_a_signal_after_the_run_has_ended_changes_no_exit_code(code, monkeypatch, tmp_path):
    monkeypatch.setattr(terminal_signals, "_leave", lambda *_: pytest.fail("taken for a preemption"))
    monkeypatch.setattr(train, "_train", lambda *_: CommandResult({}, code))
    run = train.run

    def and_then_a_signal(args):
        result = run(args)
        for number in terminal_signals.STOP_SIGNALS:
            signal.raise_signal(number)
        return result

    monkeypatch.setattr(train, "run", and_then_a_signal)
    assert main(["train", "--run-dir", str(tmp_path / "run")]) == code
