"""What is kept of a compiled step, and its memory by category. Oracle: bytes counted by hand, calls of the compiler."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest

import halfbyte.plan.reading  # noqa: F401 (the module is changed below)
from halfbyte.devices import device
from halfbyte.plan import by_hand, cluster, placed, reading
from halfbyte.plan.reading import _memory
from halfbyte.program import read
from halfbyte.runs import run_config

MODULE = sys.modules["halfbyte.plan.reading"]
STEP = """HloModule jit_step, is_scheduled=true

%body (b: (s32[], bf16[4,64,8], f32[4,8,8])) -> (s32[], bf16[4,64,8], f32[4,8,8]) {
  ROOT %b = (s32[], bf16[4,64,8]{2,1,0}, f32[4,8,8]{2,1,0}) parameter(0)
}

%condition (c: (s32[], bf16[4,64,8], f32[4,8,8])) -> pred[] {
  %c = (s32[], bf16[4,64,8]{2,1,0}, f32[4,8,8]{2,1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (w: f32[4,8,8], k: bf16[4,64,8]) -> f32[4,8,8] {
  %w = f32[4,8,8]{2,1,0} parameter(0)
  %zero = s32[] constant(0)
  %empty = bf16[4,64,8]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  %scratch = (f32[8], s8[100]{0}) custom-call(%w), custom_call_target="__cublas$gemm"
  %start = (s32[], bf16[4,64,8]{2,1,0}, f32[4,8,8]{2,1,0}) tuple(%zero, %empty, %w)
  %loop = (s32[], bf16[4,64,8]{2,1,0}, f32[4,8,8]{2,1,0}) while(%start), condition=%condition, body=%body
  ROOT %out = f32[4,8,8]{2,1,0} get-tuple-element(%loop), index=2
}
"""


@pytest.fixture
def eight():
    on = cluster(device("gb200"), 8)
    return placed(run_config("llama3-8b"), on)[0], on


def test_memory_by_category_adds_up(eight):
    weights = 4 * 8 * 8 * 4
    config = dataclasses.replace(eight[0], model=dataclasses.replace(eight[0].model, layers=4))
    found = SimpleNamespace(
        argument_size_in_bytes=3 * weights, temp_size_in_bytes=10_000, output_size_in_bytes=3 * weights,
        alias_size_in_bytes=3 * weights,
    )  # fmt: skip
    parts = _memory(found, read(STEP), config, weights=weights, state=3 * weights)
    assert sum(parts.values()) == 3 * weights + 10_000
    assert (parts["weights"], parts["optimizer"], parts["gradients"]) == (weights, 2 * weights, weights)
    assert (parts["residuals"], parts["workspace"]) == (2 * 4 * 64 * 8, 100)  # the stack that is no parameter


def test_a_step_is_compiled_once(eight, monkeypatch, tmp_path):
    config, on = eight
    made = []
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    monkeypatch.setattr(MODULE, "can_compile", lambda: True)
    monkeypatch.setattr(MODULE, "compiled", lambda *step: made.append(step) or by_hand(*step))
    first = reading(config, on, say=lambda _: None)
    assert reading(config, on, say=lambda _: None) == first and len(made) == 1
    reading(dataclasses.replace(config, batch=64), on, say=lambda _: None)
    assert len(made) == 2
    for file in tmp_path.rglob("*.json"):
        file.write_text("{ half")
    assert reading(config, on, say=lambda _: None) == first and len(made) == 3
