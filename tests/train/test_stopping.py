"""Real signals to this process; a watchdog with a short limit."""

import os
import signal
import time

import pytest

from halfbyte.train.signals import StopRequest
from halfbyte.train.watchdog import Watchdog


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_the_step(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.reached(1)
        os.kill(os.getpid(), number)
        assert stop.reached(2)
        assert stop.signal == number.name
    assert signal.getsignal(number) == before


def test_a_second_interrupt_stops_at_once():
    def interrupt_twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    with StopRequest(), pytest.raises(KeyboardInterrupt):
        interrupt_twice()


def test_watchdog_barks_with_stacks_when_steps_stop(capfd):
    ended = []
    with Watchdog(0.2, end=lambda: ended.append(True)) as dog:
        dog.beat(7)
        time.sleep(1.0)
    assert ended
    error = capfd.readouterr().err
    assert "after step 7" in error
    assert "test_stopping.py" in error


def test_watchdog_waits_while_paused_and_before_the_first_step():
    ended = []
    with Watchdog(0.1, end=lambda: ended.append(True)) as dog:
        time.sleep(0.4)
        dog.beat(1)
        dog.pause()
        time.sleep(0.4)
    assert not ended
