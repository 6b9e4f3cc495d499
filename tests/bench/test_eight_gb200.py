"""How the 8B step lies on eight GB200, compiled without one. Oracle: the model's own FLOPs and bytes."""

import pytest
from eight_gpus import check, compile_for, config_of

from halfbyte import bench
from halfbyte.devices import device
from halfbyte.plan import cluster
from halfbyte.plan.reading import read_step

GB200 = device("gb200")


@pytest.mark.slow
@pytest.mark.cuda_compiler
def test_a_device_multiplies_gathers_and_hides_what_it_should():
    """Other recipes have the kernels and calls of an H200 there: test_placement.py."""
    config = config_of("nvfp4", batch=32)
    mesh, compiled = compile_for(GB200, config, hosts=2)
    _, program = check(compiled, config, mesh, GB200)
    makes_its_operands_once(program, config)
    is_read_as_a_plan_needs_it(compiled, config, mesh)


def makes_its_operands_once(program, config):
    """The trip count of the layers' loop makes the figures those of all 32."""
    operands, (gemms, calls) = bench.operand_traffic(program, config, {"fsdp": 8}), bench.native_calls(program, config)
    assert operands.excess <= 1.5  # 8.4x by XLA's passes
    assert sum(gemm.times for gemm in gemms) == calls == (3 * 3 + 2) * 32
    results = [gemm.result.dtype for gemm in gemms for _ in range(gemm.times)]
    assert results.count("f32") == 3 * 32 and results.count("bf16") == calls - 3 * 32  # wgrad, and the others once
    print(f"8B on 8 GB200: {operands.moved / 1e9:.0f} GB for operands, {operands.excess:.2f}x")


def is_read_as_a_plan_needs_it(compiled, config, mesh):
    """What `halfbyte plan` makes of the same program: nothing lost, nothing counted twice."""
    found = read_step(compiled, config, mesh, cluster(GB200, 8))
    assert found.native == found.native_expected == (3 * 3 + 2) * 32
    assert found.gemm_flops == pytest.approx(found.needed_flops, rel=0.02)
    assert found.bytes_needed == bench.bytes_needed(compiled) and min(found.memory.values()) > 0
    assert found.compulsory < found.operand_bytes < 1.5 * found.compulsory
