"""A step of a model with experts as compiled for GB300. Oracle: the rows that there is room for, counted by hand."""

import dataclasses

import numpy as np
import pytest

from halfbyte import devices, models, ops, plan
from halfbyte.hlo import find_gemms, parse_hlo
from halfbyte.plan import make_cluster
from halfbyte.plan.compiled_step import parse_compiled_step
from halfbyte.plan.simulator import iter_events
from halfbyte.plan.step_placement import EXPERT_LINEARS, balanced_expert_load
from halfbyte.train import run_mesh, run_presets

pytestmark = [pytest.mark.slow, pytest.mark.cuda_compiler]
MODEL = models.preset("qwen3-30b-a3b").replace(
    name="small", layers=2, embed=128, mlp=256, vocab_size=512, heads=2, kv_heads=2, head_dim=64, experts=16
)
CONFIG = dataclasses.replace(
    run_presets.run_config("qwen3-30b-a3b"), model=MODEL, recipe="nvfp4", policy="experts", data="synthetic", batch=2,
    seq=128, schedule_by="xla", mesh="",
)  # fmt: skip
TILES = "ops/grouped_linear"  # whose loops multiply where no kernel does
PAIRS = 2 * 128 * 8
ROOM = -(-(PAIRS + 16 * 127) // 128) * 128


def test_a_step_holds_the_kernel_and_no_loop_of_tiles():
    gb300 = devices.device_by_name("gb300")
    mesh = run_mesh(CONFIG, np.array(devices.topology(gb300, hosts=1, per_host=1).devices))
    with ops.compile_for(gb300), devices.target_cudnn():
        compiled = plan.compile_step(CONFIG, mesh, seq=CONFIG.seq)
    program, load = parse_hlo(compiled.as_text()), balanced_expert_load(CONFIG, 1)
    found = find_gemms(program, turns=load.trip_count, branches=load.branches)
    ours = [gemm for gemm in found if gemm.kind == "mosaic"]
    assert {gemm.format for gemm in ours} == {"fp4"} and {gemm.rows for gemm in ours} == {ROOM}
    needed = sum(plan.needed_flops(CONFIG)[path] for path in EXPERT_LINEARS)
    assert sum(gemm.flops for gemm in ours) == needed * ROOM // PAIRS
    assert not [gemm for gemm in found if gemm.kind != "mosaic" and TILES in str(gemm.instruction.source)]
    assert not [each for each in program.instructions.values() if each.opcode == "while" and TILES in str(each.source)]

    planned = parse_compiled_step(compiled, CONFIG, mesh, make_cluster(gb300, 1))
    assert (
        planned.native == planned.native_expected == sum(gemm.execution_count for gemm in ours) == 24
    )  # as the manifest has it
    experts = [each for each, _ in iter_events(planned.events) if each.what == "gemm" and each.purpose == "experts"]
    assert {each.format for each in experts} == {"grouped fp4"}
