"""A model small enough to compile in seconds, with what a large one has: grouped heads, rotary scaling, own head."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte import devices, kernels, models
from halfbyte.ops import gemm_problem
from halfbyte.ops.backends import BACKENDS
from halfbyte.ops.rope import RopeScaling

TINY = models.LlamaConfig(
    name="tiny", vocab_size=96, embed=64, mlp=96, layers=2, heads=4, kv_heads=2, head_dim=16, max_seq=128,
    rope_theta=10_000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16),
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _float32_products():
    """On a GPU float32 GEMMs are TF32 unless asked; comparisons to the last digits need real ones."""
    with jax.default_matmul_precision("float32"):
        yield


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_compiles):
    """Compiling is most of what these tests cost."""


@pytest.fixture(scope="session")
def tiny():
    return TINY


@pytest.fixture(scope="session")
def tiny_params():
    return jax.jit(lambda key: models.init(TINY, key))(jax.random.key(0))


@pytest.fixture(scope="session")
def packed_batch():
    """4 rows of 32: two documents each, of lengths 13 + b and 15 - b, and padding."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, TINY.vocab_size, (4, 32))
    segments, positions = np.zeros((4, 32), int), np.zeros((4, 32), int)
    targets = np.full((4, 32), -1)
    for b in range(4):
        for number, (start, stop) in enumerate(((0, 13 + b), (13 + b, 28)), 1):
            segments[b, start:stop] = number
            positions[b, start:stop] = np.arange(stop - start)
            targets[b, start : stop - 1] = tokens[b, start + 1 : stop]
    rows = {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions}
    return {name: jnp.asarray(value, jnp.int32) for name, value in rows.items()}


@pytest.fixture
def h200():
    """Choices are those of an H200; kernels are interpreted, and the GEMM kernel, which cannot be, is XLA's."""
    by_xla = dataclasses.replace(BACKENDS["fused"], unsupported=lambda problem, gemm: "not interpreted")
    patched = mock.patch.dict(BACKENDS, fused=by_xla)
    with kernels.interpret_kernels(), patched, gemm_problem._target(devices.device_by_name("h200")):
        yield
