"""What making operands costs in bytes. Oracle: the compulsory bytes, counted by hand for one layer; and the compiled
program's own text, in which an MLP that XLA quantizes must be found out.
"""

import dataclasses

import numpy as np
import pytest
from step_placement import native_calls, operand_traffic

from halfbyte import ops, plan
from halfbyte.devices import device_by_name, target_cudnn, topology
from halfbyte.hlo import parse_hlo
from halfbyte.ops.backends import BACKENDS, native
from halfbyte.plan.operand_traffic import compulsory_bytes, operand_bytes
from halfbyte.recipes import recipe
from halfbyte.train import run_mesh
from halfbyte.train.run_presets import run_config

GB200 = device_by_name("gb200")
CONFIG = dataclasses.replace(run_config("llama3-8b"), mesh="fsdp=8", batch=32, data="synthetic")


def test_an_operand_of_nvfp4_has_four_and_a_half_bits():
    assert operand_bytes(recipe("nvfp4").fprop_x) == 0.5625


def test_compulsory_bytes_of_one_layer_by_hand():
    """One sequence a device: x and dy of 8192 x 4096, g, u and dh of 8192 x 14336."""
    model = dataclasses.replace(CONFIG.model, layers=1)
    x, h, w = 8192 * 4096, 8192 * 14336, 4096 * 14336
    plain = dataclasses.replace(CONFIG, model=model, mesh="fsdp=1", batch=1, remat="none")
    tokens = x * (4 + 2 * 0.5625) * 2 + h * (8 + 0.5625 + 12 + 5 * 0.5625)
    weights = 3 * w * (8 + 0.5625) + 6 * w * 0.5625
    assert compulsory_bytes(plain, {}) == tokens + weights
    # Remat makes the row of x in the forward pass, both operands in the backward pass, and weights twice.
    again = dataclasses.replace(plain, remat="full")
    repeated = x * (4 + 0.5625) + 3 * w * (8 + 0.5625) + 2 * w * 0.5625
    assert compulsory_bytes(again, {}) == tokens + weights + repeated


def test_compulsory_bytes_of_attention_by_hand():
    """One sequence a device under all_linear: q, k and v share x; k and v are a quarter as wide."""
    model = dataclasses.replace(CONFIG.model, layers=1)
    x, w, code = 8192 * 4096, 4096 * 4096, 0.5625
    mlp = dataclasses.replace(CONFIG, model=model, mesh="fsdp=1", batch=1, remat="none")
    both = dataclasses.replace(mlp, policy="all_linear")
    weights = 2.5 * w * (8 + code + 2 * code)  # q, k, v and o
    gradients = 2.5 * x * (4 + 2 * code)
    kept = 2 * x * (4 + 2 * code)  # x of q, k and v, and of o
    assert compulsory_bytes(both, {}) - compulsory_bytes(mlp, {}) == weights + gradients + kept
    # Nothing of it is kept: rows are made in the forward pass, columns in the backward pass, weights in both.
    small = [compulsory_bytes(dataclasses.replace(c, remat="quantized"), {}) for c in (both, mlp)]
    assert small[0] - small[1] == weights + 2.5 * w * (8 + code) + gradients + 2 * x * (8 + 2 * code)


def test_mxfp8_is_read_once_and_has_two_weights():
    """No scale of the tensor, so no maxima; fprop and dgrad read other codes, made in one reading of the master."""
    model = dataclasses.replace(CONFIG.model, layers=1)
    x, h, w, code = 8192 * 4096, 8192 * 14336, 4096 * 14336, 1 + 1 / 32
    plain = dataclasses.replace(CONFIG, model=model, mesh="fsdp=1", batch=1, remat="none", recipe="mxfp8")
    tokens = x * (2 + 2 * code) * 2 + h * (4 + code + 6 + 5 * code)
    assert compulsory_bytes(plain, {}) == tokens + 3 * w * (4 + 2 * code) + 6 * w * code
    # Two kinds of blocks in one MLP: its activation is no part of a pass, and dg, du and h are sources of their own.
    mixed = dataclasses.replace(plain, policy="mlp; mlp/down=nvfp4")
    tokens = x * (2 + 2 * code) + x * (4 + 2 * 0.5625) + h * (2 * (2 + 2 * code) + 2 * (4 + 0.5625))
    assert compulsory_bytes(mixed, {}) == tokens + 2 * w * (4 + 4 * code) + w * (8 + 3 * 0.5625)


def test_what_is_not_counted_is_refused():
    with pytest.raises(ValueError, match="accumulate"):
        compulsory_bytes(dataclasses.replace(CONFIG, accumulate=2), {"fsdp": 8})


def program(config):
    mesh = run_mesh(config, np.array(topology(GB200, hosts=2, per_host=4).devices))
    with ops.compile_for(GB200), target_cudnn():
        config = dataclasses.replace(config, schedule_by="xla")  # the order changes no bytes of operands
        return parse_hlo(plan.compile_step(config, mesh, seq=config.seq).as_text())


SMALL = dataclasses.replace(
    CONFIG, model=dataclasses.replace(CONFIG.model, layers=2, embed=512, mlp=2048, heads=4, kv_heads=4), batch=8,
    seq=1024,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.cuda_compiler
def test_a_step_that_xla_quantizes_is_found_out(monkeypatch):
    """The same reader over the same small model whose kernels were taken away: far beyond the limit that it keeps with
    them, below. In MXFP8, whose passes XLA compiles in a third of the time that NVFP4's take."""
    monkeypatch.setitem(
        BACKENDS, "native", dataclasses.replace(BACKENDS["native"], passes=(native.REFERENCE_NATIVE_PASSES,))
    )
    plain = dataclasses.replace(SMALL, recipe="mxfp8", remat="none")
    assert operand_traffic(program(plain), plain, {"fsdp": 8}).excess > 5


@pytest.mark.slow
@pytest.mark.cuda_compiler
def test_mxfp8_in_every_linear_makes_its_operands_once():
    """All seven linears of a layer, on a mesh that gathers their weights as codes."""
    config = dataclasses.replace(SMALL, recipe="mxfp8", policy="all_linear")
    found = program(config)
    gemms, calls = native_calls(found, config)
    assert sum(gemm.execution_count for gemm in gemms) == calls == (3 * 7 + 2) * config.model.layers
    assert {gemm.dtype for gemm in gemms} == {"f8e4m3fn"}
    operands = operand_traffic(found, config, {"fsdp": 8})
    assert operands.excess <= 1.5
    print(f"MXFP8 in every linear of a small model on 8 GB200: {operands.excess:.2f}x")
