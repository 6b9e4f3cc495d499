"""Real signals to this process."""

import os
import signal
import threading

import pytest

from halfbyte.distributed import ProcessGroup, SignalHandler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_becomes_a_reason_to_stop(number, until):
    before = signal.getsignal(number)
    group = ProcessGroup()
    group.enter_step_loop()
    with SignalHandler(group.request_stop):
        assert group.stop_reason_before(1) is None
        os.kill(os.getpid(), number)
        until(lambda: group.stop_reason_before(2) is not None)
        assert group.stop_reason_before(2) == number.name
    assert signal.getsignal(number) == before


def test_before_the_first_step_it_ends_at_once_with_75():
    ends = []
    group = ProcessGroup(leave=ends.append)
    group.request_stop("SIGTERM")
    assert ends[0].code == 75
    finished = ProcessGroup(leave=ends.append)
    finished.leave_step_loop()
    finished.request_stop("SIGTERM")
    assert len(ends) == 1


def test_second_interrupt_stops_at_once():
    def interrupt_twice():
        signal.raise_signal(signal.SIGINT)  # to this thread, so that the second cannot come before the first is seen
        signal.raise_signal(signal.SIGINT)

    with SignalHandler(lambda name: None), pytest.raises(KeyboardInterrupt):
        interrupt_twice()


def test_nothing_listens_or_watches_after_the_end():
    before = set(threading.enumerate())
    group = ProcessGroup().open()
    with SignalHandler(group.request_stop):
        assert {"halfbyte-signals", "halfbyte-watch"} <= {thread.name for thread in threading.enumerate()}
        group.close()
    assert not set(threading.enumerate()) - before
