"""Faults share the cores. Oracle: counts by hand."""

import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from places import Places


def started(places: Places, cores: int) -> tuple[threading.Thread, threading.Event]:
    """A thread that takes so many cores, and the event that it has them; it gives them back at once."""
    has = threading.Event()

    def work() -> None:
        with places.taken(cores):
            has.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, has


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_who_asks_waits_until_enough_are_free_and_comes_before_those_behind_it(cores):
    places = Places(2)
    with places.taken(2):
        first, has_first = started(places, cores)
        while len(places.queue) < 1:
            pass
        second, has_second = started(places, 1)
        while len(places.queue) < 2:
            pass
        assert not has_first.is_set() and not has_second.is_set()
    for thread in (first, second):
        thread.join(600)
    assert has_first.is_set() and has_second.is_set() and places.free == 2


def test_who_waits_for_something_else_lends_its_cores_and_gets_them_back():
    places = Places(2)
    with places.taken(2):
        with places.idle():
            other, has = started(places, 2)
            assert has.wait(600)
            other.join(600)
        assert places.free == 0
    assert places.free == 2


def test_what_needs_no_core_does_not_wait():
    places = Places(1)
    with places.taken(1):
        behind, _ = started(places, 1)
        while len(places.queue) < 1:
            pass
        other, has = started(places, 0)
        assert has.wait(600)
        other.join(600)
    behind.join(600)
