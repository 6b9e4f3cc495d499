"""A step of a model with experts as compiled for eight H200. Oracle: the pairs that there are, counted by hand."""

import dataclasses
import math

import numpy as np
import pytest

from halfbyte import devices, models, ops, plan
from halfbyte.hlo import find_collectives, find_gemms, parse_hlo
from halfbyte.hlo.collective_ops import collective_kind
from halfbyte.models import moe
from halfbyte.plan.step_placement import EXPERT_LINEARS, balanced_expert_load
from halfbyte.train import run_mesh, run_presets

pytestmark = [pytest.mark.slow, pytest.mark.cuda_compiler]
MODEL = models.preset("qwen3-30b-a3b").replace(
    name="small", layers=2, embed=128, mlp=256, vocab_size=512, heads=2, kv_heads=2, head_dim=64, experts=64
)
CONFIG = dataclasses.replace(
    run_presets.run_config("qwen3-30b-a3b"),
    model=MODEL,
    recipe="bf16",
    data="synthetic",
    batch=8,
    seq=128,
    schedule_by="xla",
)
PAIRS, OWN = 8 * 128 * 8, 64 // 8


@pytest.fixture(scope="module")
def program():
    h200 = devices.device_by_name("h200")
    mesh = run_mesh(CONFIG, np.array(devices.topology(h200, hosts=1, per_host=8).devices))
    with pytest.MonkeyPatch.context() as patch, ops.compile_for(h200), devices.target_cudnn():
        patch.setattr(moe, "MIN_TWO_CAPACITY_PAIRS", 0)  # as for models that are not small
        return parse_hlo(plan.compile_step(CONFIG, mesh, seq=CONFIG.seq).as_text())


def gemms_of(program):
    """Those of the program for few rows."""
    return find_gemms(program, branches=balanced_expert_load(CONFIG, 8).branches)


def test_grouped_gemms_are_those_that_are_needed(program):
    """In room for twice the mean load: tiles without rows are skipped."""
    found = [gemm for gemm in gemms_of(program) if gemm.kind == "mosaic"]
    room = math.ceil((2 * PAIRS // 8 + OWN * 127) / 128) * 128
    needed = sum(plan.needed_flops(CONFIG)[path] for path in EXPERT_LINEARS)
    assert sum(gemm.flops for gemm in found) == needed * room // PAIRS
    assert {gemm.rhs.dims[0] for gemm in found if len(gemm.rhs.dims) == 3} == {OWN}


def test_devices_meet_in_no_branch(program):
    """One may have room where another has not: a collective there would wait for ever."""
    branches = [found for found in program.instructions.values() if found.opcode == "conditional"]
    assert len(branches) >= 3 and all(len(found.called_computations) == 2 for found in branches)
    assert not [part for found in branches for part in program.nested_instructions(found) if collective_kind(part)]


def test_no_array_is_rows_times_experts(program):
    most = max(array.elements for found in program.instructions.values() for array in found.results)
    assert most < PAIRS * OWN * min(MODEL.embed, MODEL.mlp)


def test_a_row_of_each_pair_travels_in_bfloat16(program):
    """To its expert and back, both again under full remat, and the gradients of both."""
    found = find_collectives(program, {"expert": 8})
    rows = [each for each in found if each.kind == "ragged-all-to-all"]
    assert {each.arrays[0].dtype for each in rows} == {"bf16"}
    assert {each.array_bytes_per_call for each in rows} == {2 * PAIRS // 8 * MODEL.embed}
    assert sum(each.execution_count for each in rows) == 6 * MODEL.layers
    others = [array for each in found if each not in rows for array in each.arrays if array.dtype == "bf16"]
    assert all(array.elements < PAIRS * MODEL.embed // 8 for array in others)  # gradients are float32


def test_other_gemms_are_those_that_are_needed(program):
    """Attention's linears, whose forward GEMMs full remat runs again, the head, routers of a device's own tokens."""
    found = sum(gemm.flops for gemm in gemms_of(program) if gemm.kind != "mosaic")
    needed = {path: flops for path, flops in plan.needed_flops(CONFIG).items() if path not in EXPERT_LINEARS}
    assert needed["layers/mlp/router"] == 4 * 2 * CONFIG.batch * CONFIG.seq * MODEL.embed * MODEL.experts * MODEL.layers
    assert found <= 1.05 * sum(needed.values()) / 8
