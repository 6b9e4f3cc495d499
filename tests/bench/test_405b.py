"""The whole path of llama3.1-405b, without owning one GPU: specs and shardings on 128 devices, and the real train
step compiled for GB300.

Oracle for the program: the model's own FLOPs. A device multiplies its 128th of 9 FP4 GEMMs a layer (three linears,
three directions), of the two forward GEMMs that full rematerialization repeats (gate and up; the output of down is not
needed again), and of the attention's and the head's linears in bfloat16. Calls are not counted: a misplaced program
makes the same calls over larger arrays.
"""

import dataclasses
import math

import jax
import numpy as np
import pytest

from halfbyte import models, ops
from halfbyte.bench import native_calls, needed_flops, operand_traffic, placement
from halfbyte.devices import device, target_cudnn, topology
from halfbyte.program import flops_by_kind, gemms, read
from halfbyte.runs import run_config
from halfbyte.sharding import parse_mesh
from halfbyte.train import abstract_state, check, lower_train_step, phases, run_mesh
from halfbyte.train.preflight import estimate_memory


@pytest.fixture(scope="module")
def where():
    """(config, device, mesh of 32 hosts x 4 GB300)."""
    config, gb300 = run_config("llama3.1-405b"), device("gb300")
    return config, gb300, run_mesh(config, np.array(topology(gb300, hosts=32, per_host=4).devices))


@pytest.mark.cuda_compiler
def test_state_and_memory_of_a_device(where):
    config, gb300, mesh = where
    found = check(config, mesh, seq=config.seq, device=gb300, memory=gb300.memory_bytes)
    parameters = models.count_params(config.model)
    assert parameters == 405_853_388_800
    # float32 weights and two moments over the 64 devices of a rack; norms are replicated, and small.
    assert found.memory.state == pytest.approx(12 * parameters / 64, rel=2e-3)
    assert found.manifests[0].share_4bit == pytest.approx(0.784, abs=5e-4)
    shapes = jax.tree.leaves(abstract_state(config, mesh))
    assert all(leaf.sharding is not None for leaf in shapes)


@pytest.mark.cuda_compiler
def test_one_device_cannot_hold_it(where):
    config, gb300, _ = where
    alone = run_mesh(dataclasses.replace(config, mesh=""), np.array(topology(gb300, hosts=1, per_host=1).devices))
    with pytest.raises(ValueError, match="GiB a device"):
        check(config, alone, seq=config.seq, device=gb300, memory=gb300.memory_bytes)


MESHES = [pytest.param("fsdp=128", 128), pytest.param("dcn.data=128,fsdp=16,tensor=4", 2048)]


@pytest.mark.slow
@pytest.mark.cuda_compiler
@pytest.mark.parametrize("mesh_text, batch", MESHES)
def test_a_device_multiplies_its_part_and_no_more(where, mesh_text, batch):
    config, gb300, _ = where
    config = dataclasses.replace(config, mesh=mesh_text, batch=batch)
    hosts = math.prod(parse_mesh(mesh_text).values()) // 4
    mesh = run_mesh(config, np.array(topology(gb300, hosts=hosts, per_host=4).devices))
    assert config.remat == "full"
    with ops.compile_for(gb300), target_cudnn():
        compiled = lower_train_step(config, phases(config)[0].resolved(config), mesh, seq=config.seq).compile()
    program, found = read(compiled.as_text()), placement(compiled, config, mesh)

    needed = needed_flops(config)
    in_four_bits = sum(flops for path, flops in needed.items() if "/mlp/" in path) / mesh.size
    assert flops_by_kind(gemms(program))["block-scaled"] == pytest.approx(in_four_bits, rel=0.02)
    assert found.excess <= 1.02

    operands, (native, calls) = operand_traffic(program, config, mesh.shape), native_calls(program, config)
    assert operands.excess <= 1.5  # 7x by XLA's passes, 2.3x while weights were unpacked on their way
    assert sum(gemm.times for gemm in native) == calls == (3 * 3 + 2) * config.model.layers
    # wgrad's results are float32, and sums that are partial over `tensor`: those of down, and of the gradients of x.
    partial = 3 * (mesh.shape["tensor"] > 1)
    wide = sum(gemm.times for gemm in native if gemm.result.dtype == "f32")
    assert wide == (3 + partial) * config.model.layers
    assert {gemm.result.dtype for gemm in native} == {"f32", "bf16"}

    mlp = 3 * config.model.embed * config.model.mlp * config.model.layers // mesh.shape["tensor"]
    assert not found.wide_gathers and not found.whole_reduces
    # Half a byte an element for the forward pass, the same for the backward pass, and a scale for every 256 elements.
    assert mlp < found.gathered["u8"] <= 1.02 * mlp

    assert estimate_memory(config, mesh, seq=config.seq).floor < found.bytes_needed < gb300.memory_bytes
    sizes = f"{found.bytes_needed / 2**30:.1f} GiB, {operands.moved / 1e9:.0f} GB for operands ({operands.excess:.2f}x)"
    print(f"405B on {mesh_text}: {found.excess:.3f}x the FLOPs, {sizes}")
