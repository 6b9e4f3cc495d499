"""Which layouts a search compiles, in which time, and how it ranks them. Oracle: a compiler and a clock of our own."""

import dataclasses
import functools
import sys
from types import SimpleNamespace

import pytest

import halfbyte.plan.search  # noqa: F401 (the module is changed below)
from halfbyte.devices import device
from halfbyte.plan import by_hand, cluster, placed
from halfbyte.plan.search import NEAR, coverage, front, rank, search
from halfbyte.program import Unreadable
from halfbyte.runs import run_config

MODULE = sys.modules["halfbyte.plan.search"]
MINUTE = 60.0


BY_HAND = functools.cache(by_hand)  # every search asks for the same layouts


@pytest.fixture(autouse=True)
def _once(monkeypatch):
    monkeypatch.setattr(MODULE, "by_hand", BY_HAND)


class Compiler:
    """Takes a minute a step; what it has compiled is kept."""

    def __init__(self, monkeypatch, found=BY_HAND):
        self.now, self.made, self.found = 0.0, [], found
        monkeypatch.setattr(MODULE, "can_compile", lambda: True)
        monkeypatch.setattr(MODULE, "time", SimpleNamespace(monotonic=lambda: self.now))

    def read(self, config, on, *, say):
        if config not in self.made:
            self.now += MINUTE
            self.made.append(config)
        return self.found(config, on)

    def search(self, config, on, *, minutes):
        kept = lambda config, on: config in self.made  # noqa: E731
        return search(config, on, minutes=minutes, say=lambda _: None, read=self.read, kept=kept)


@pytest.fixture(scope="module")
def eight():
    on = cluster(device("h200"), 8)
    return placed(run_config("llama3-8b"), on)[0], on


@pytest.mark.slow
def test_all_that_are_near_the_best_by_the_bound_are_compiled(eight, monkeypatch):
    compiler = Compiler(monkeypatch)
    found = compiler.search(*eight, minutes=1000)
    best = min(c.bound.shared.seconds for c in found)
    near = [c for c in found if c.bound.shared.seconds <= NEAR * best]
    assert len(near) > 3 and all(c.compiled for c in near)
    assert coverage(found)["near_not_compiled"] == 0 and rank(eight[0], found) is not None
    assert compiler.made[0].mesh == eight[0].mesh  # the run's own layout is known, whatever the time


def test_a_search_ends_in_time_and_goes_on_where_it_ended(eight, monkeypatch):
    compiler = Compiler(monkeypatch)
    first = compiler.search(*eight, minutes=2.5)
    assert compiler.now <= 2.5 * MINUTE and len(compiler.made) == 2
    assert coverage(first)["near_not_compiled"] == coverage(first)["near"] - 2
    second = compiler.search(*eight, minutes=2.5)
    assert len(compiler.made) == len(set(map(str, compiler.made))) == 4 and coverage(second)["compiled"] == 4


def test_what_fails_or_does_not_fit_is_said_and_wins_nothing(eight, monkeypatch):
    def found(config, on):
        read = BY_HAND(config, on)
        if config.precision.reduce_dtype == "bfloat16":
            raise Unreadable("no such thing")
        grown = {**read.memory, "workspace": 2.0**40 if config.remat == "none" else 0.0}
        return dataclasses.replace(read, memory=grown)

    listed = Compiler(monkeypatch, found).search(*eight, minutes=1000)
    said = {c.known_from for c in listed if c.near}
    assert {"refused: no such thing", "compiled, does not fit"} & said
    assert listed[0].known_from == "compiled" and {c.known_from for c in front(listed)} == {"compiled"}
    assert [c.order for c in listed] == sorted(c.order for c in listed)


def test_the_front_has_what_nothing_else_beats():
    made = [SimpleNamespace(seconds=s, bytes_needed=b, known_from="bound") for s, b in ((1, 9), (1, 9), (2, 9), (3, 8))]
    assert front(made) == [made[0], made[1], made[3]]  # the third is slower in the same memory


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_cut_into_microbatches(eight):
    config = dataclasses.replace(eight[0], batch=256)
    found = search(config, eight[1], minutes=0, say=lambda _: None)
    assert {c.config.batch for c in found} == {256} and max(c.config.accumulate for c in found) > 1
    assert all(c.bound.fits for c in found)
