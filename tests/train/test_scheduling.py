"""Who orders a step on several GPUs. Oracle: what a compiler that only listens was given."""

import hashlib
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from halfbyte.train.train_step import PROFILE, StepScheduling

STEP = """HloModule jit_step, is_scheduled=true

ENTRY %main (x: bf16[8192,8192]) -> bf16[8192,8192] {
  %x = bf16[8192,8192]{1,0} parameter(0)
  ROOT %dot.1 = bf16[8192,8192]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


class Lowered:
    def __init__(self, text=STEP):
        self.text, self.given = text, []

    def as_text(self):
        return "the step"

    def compile(self, compiler_options=None):
        path = (compiler_options or {}).get(PROFILE)
        self.given.append(Path(path).read_text() if path else None)
        return SimpleNamespace(as_text=lambda: self.text)


@pytest.fixture
def on(tmp_path, monkeypatch):
    """on(kind, count): a mesh of so many GPUs; what is kept is kept for this test alone."""
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))

    def mesh(kind="NVIDIA H200", count=8, platform="gpu"):
        gpu = SimpleNamespace(platform=platform, device_kind=kind, compute_capability="9.0", core_count=132)
        return SimpleNamespace(devices=np.array([gpu] * count), size=count, shape={"fsdp": count})

    return mesh


def test_step_is_compiled_twice_and_the_next_start_once(on):
    first, again, told = Lowered(), Lowered(), []
    StepScheduling(on(), say=told.append).compile(first)
    StepScheduling(on(), say=told.append).compile(again)
    plain, ordered = first.given
    assert plain is None and re.fullmatch(r'costs \{ name: "dot.1" cost_us: [\d.]+ \}\n', ordered)
    assert again.given == [ordered] and len(told) == 1


def test_damaged_file_counts_as_none(on, tmp_path):
    StepScheduling(on(), say=lambda _: None).compile(Lowered())
    for kept in (tmp_path / "schedule").glob("*.json"):
        kept.write_bytes(kept.read_bytes().replace(b"dot", b"not"))
    again = Lowered()
    StepScheduling(on(), say=lambda _: None).compile(again)
    assert len(again.given) == 2 and "dot.1" in again.given[1]


@pytest.mark.parametrize("given", [{"count": 1}, {"platform": "cpu"}, {"by": "xla"}])
def test_where_nothing_is_ordered_nothing_is_compiled_twice(on, given):
    by, lowered, told = given.pop("by", "roofline"), Lowered(), []
    StepScheduling(on(**given), by, say=told.append).compile(lowered)
    assert lowered.given == [None] and not told


def test_xlas_own_guess_is_never_taken_silently(on, monkeypatch):
    told = []
    StepScheduling(on(kind="NVIDIA Unheard"), say=told.append).compile(Lowered())
    StepScheduling(on(), say=told.append).compile(
        Lowered(STEP.replace("dot(%x, %x)", 'custom-call(%x), custom_call_target="?"'))
    )
    monkeypatch.setenv("XLA_FLAGS", f"--{PROFILE}=/mine")
    StepScheduling(on(), say=told.append).compile(Lowered())
    assert sum("own guess" in line for line in told) == 3


def test_another_profile_has_another_path(on):
    """JAX's compile cache knows a profile by its path alone."""
    paths = []
    listening = SimpleNamespace(
        as_text=lambda: "the step",
        compile=lambda compiler_options=None: (
            paths.append((compiler_options or {}).get(PROFILE)), SimpleNamespace(as_text=lambda: STEP)
        )[1],
    )  # fmt: skip
    for kind in ("NVIDIA H200", "NVIDIA GB300"):
        StepScheduling(on(kind), say=lambda _: None).compile(listening)
    used = [Path(path) for path in paths if path]
    assert len(set(used)) == 2
    assert all(path.stem == hashlib.sha256(path.read_bytes()).hexdigest()[:32] for path in used)


def test_ranks_take_the_times_of_the_first(on, monkeypatch):
    """One that has none kept takes part in the compilation only if the first needs it, too."""
    shared = {"known": True, "times": {"dot.1": 7.0}}
    monkeypatch.setattr("jax.process_index", lambda: 1)
    lowered = Lowered()
    StepScheduling(on(), share=lambda topic, value: {0: shared[topic], 1: value}, say=lambda _: None).compile(lowered)
    assert lowered.given == ['costs { name: "dot.1" cost_us: 7.0 }\n']
    shared["known"] = False
    StepScheduling(on(), share=lambda topic, value: {0: shared[topic], 1: value}, say=lambda _: None).compile(lowered)
    assert lowered.given[1:] == [None, lowered.given[0]]
