"""A step of a model with experts as compiled for GB300. Oracle: the rows that there is room for, counted by hand."""

import dataclasses

import numpy as np
import pytest

from halfbyte import bench, devices, models, ops, runs
from halfbyte.bench.load import even_load
from halfbyte.bench.placement import EXPERTS
from halfbyte.plan import cluster
from halfbyte.plan.reading import read_step
from halfbyte.plan.schedule import walk
from halfbyte.program import gemms, read
from halfbyte.train import run_mesh

pytestmark = [pytest.mark.slow, pytest.mark.cuda_compiler]
MODEL = models.preset("qwen3-30b-a3b").replace(
    name="small", layers=2, embed=128, mlp=256, vocab_size=512, heads=2, kv_heads=2, head_dim=64, experts=16
)
CONFIG = dataclasses.replace(
    runs.run_config("qwen3-30b-a3b"), model=MODEL, recipe="nvfp4", policy="experts", data="synthetic", batch=2, seq=128,
    schedule_by="xla", mesh="",
)  # fmt: skip
TILES = "ops/grouped_linear"  # whose loops multiply where no kernel does
PAIRS = 2 * 128 * 8
ROOM = -(-(PAIRS + 16 * 127) // 128) * 128


def test_a_step_holds_the_kernel_and_no_loop_of_tiles():
    gb300 = devices.device("gb300")
    mesh = run_mesh(CONFIG, np.array(devices.topology(gb300, hosts=1, per_host=1).devices))
    with ops.compile_for(gb300), devices.target_cudnn():
        compiled = bench.compile_step(CONFIG, mesh, seq=CONFIG.seq)
    program, load = read(compiled.as_text()), even_load(CONFIG, 1)
    found = gemms(program, turns=load.turns, branches=load.branches)
    ours = [gemm for gemm in found if gemm.kind == "mosaic"]
    assert {gemm.format for gemm in ours} == {"fp4"} and {gemm.rows for gemm in ours} == {ROOM}
    needed = sum(bench.needed_flops(CONFIG)[path] for path in EXPERTS)
    assert sum(gemm.flops for gemm in ours) == needed * ROOM // PAIRS
    assert not [gemm for gemm in found if gemm.kind != "mosaic" and TILES in str(gemm.instruction.source)]
    assert not [each for each in program.instructions.values() if each.opcode == "while" and TILES in str(each.source)]

    planned = read_step(compiled, CONFIG, mesh, cluster(gb300, 1))
    assert planned.native == planned.native_expected == sum(gemm.times for gemm in ours) == 24  # as the manifest has it
    experts = [each for each, _ in walk(planned.events) if each.what == "gemm" and each.purpose == "experts"]
    assert {each.format for each in experts} == {"grouped fp4"}
