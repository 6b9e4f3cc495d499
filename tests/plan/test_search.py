"""Which layouts a search compiles, in which time, and how it ranks them. Oracle: a compiler and a clock of our own."""

import dataclasses
import functools
import sys
from types import SimpleNamespace

import pytest
from jax.sharding import AbstractMesh

import halfbyte.plan.layout_search  # noqa: F401 (the module is changed below)
from halfbyte.devices import device_by_name
from halfbyte.distributed import parse_mesh
from halfbyte.distributed.mesh import total_axis_sizes
from halfbyte.hlo import HloParseError
from halfbyte.models import check_mesh
from halfbyte.plan import make_cluster, place_run, profile_from_config
from halfbyte.plan.layout_search import (
    NEAR_BEST_FACTOR,
    coverage,
    enumerate_layouts,
    pareto_front,
    rank_of_current,
    search_layouts,
)
from halfbyte.train.run_presets import run_config

MODULE = sys.modules["halfbyte.plan.layout_search"]
MINUTE = 60.0


BY_HAND = functools.cache(profile_from_config)  # every search asks for the same layouts


@pytest.fixture(autouse=True)
def _once(monkeypatch):
    monkeypatch.setattr(MODULE, "profile_from_config", BY_HAND)


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
        return search_layouts(config, on, minutes=minutes, say=lambda _: None, read=self.read, kept=kept)


@pytest.fixture(scope="module")
def eight():
    on = make_cluster(device_by_name("h200"), 8)
    return place_run(run_config("llama3-8b"), on)[0], on


@pytest.mark.slow
def test_all_that_are_near_the_best_by_the_bound_are_compiled(eight, monkeypatch):
    compiler = Compiler(monkeypatch)
    found = compiler.search(*eight, minutes=1000)
    best = min(c.bound.shared.seconds for c in found)
    near = [c for c in found if c.bound.shared.seconds <= NEAR_BEST_FACTOR * best]
    assert len(near) >= 3 and all(c.compiled for c in near)
    assert coverage(found)["near_not_compiled"] == 0 and rank_of_current(eight[0], found) is not None
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
            raise HloParseError("no such thing")
        grown = {**read.memory, "workspace": 2.0**40 if config.remat == "none" else 0.0}
        return dataclasses.replace(read, memory=grown)

    listed = Compiler(monkeypatch, found).search(*eight, minutes=1000)
    said = {c.estimate_note for c in listed if c.is_near_best}
    assert {"refused: no such thing", "compiled, does not fit"} & said
    assert listed[0].estimate_note == "compiled" and {c.estimate_note for c in pareto_front(listed)} == {"compiled"}
    assert [c.sort_key for c in listed] == sorted(c.sort_key for c in listed)


def test_the_front_has_what_nothing_else_beats():
    points = ((1, 9), (1, 9), (2, 9), (3, 8))
    made = [SimpleNamespace(seconds=s, bytes_needed=b, estimate_note="bound") for s, b in points]
    assert pareto_front(made) == [made[0], made[1], made[3]]  # the third is slower in the same memory


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8"])
def test_search_lists_only_layouts_that_train_accepts(recipe):
    """72 GB300: 72 does not divide a weight of 405B into whole blocks; 8 do, in 9 copies. Oracle: models.check_mesh."""
    on = make_cluster(device_by_name("gb300"), 72)
    config, _ = place_run(dataclasses.replace(run_config("llama3.1-405b"), recipe=recipe), on)
    meshes = {each.mesh for each in enumerate_layouts(config, on)}
    assert {"data=9,fsdp=8", "data=9,fsdp=4,tensor=2"} <= meshes and not {"fsdp=72", "fsdp=36,tensor=2"} & meshes
    for mesh in meshes:
        sizes = total_axis_sizes(parse_mesh(mesh))
        check_mesh(config.model, AbstractMesh(tuple(sizes.values()), tuple(sizes)), batch=config.batch, seq=config.seq)


def test_rank_of_a_layout_counts_programs_and_not_bounds(eight, monkeypatch):
    """Two of many layouts are compiled: the preset's is one of two, whatever the bounds of the others."""
    found = Compiler(monkeypatch).search(*eight, minutes=2.5)
    known = coverage(found)
    assert known["ranked"] == 2 < known["fitting"] and rank_of_current(eight[0], found) <= 2
    unread = coverage([dataclasses.replace(c, compiled=None) for c in found])  # a layout is near the best or another
    assert unread["near"] + unread["not_ruled_out"] == unread["fitting"]


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_cut_into_microbatches(eight):
    config = dataclasses.replace(eight[0], batch=256)
    found = search_layouts(config, eight[1], minutes=0, say=lambda _: None)
    assert {c.config.batch for c in found} == {256} and max(c.config.accumulate for c in found) > 1
    assert all(c.bound.fits for c in found)
