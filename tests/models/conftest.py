"""A model small enough to compile in seconds, with what a large one has: grouped heads, rotary scaling, own head."""

import dataclasses
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte import devices, kernels, models
from halfbyte.ops import gemm_problem
from halfbyte.ops.backends import BACKENDS

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import LLAMA as TINY


@pytest.fixture(autouse=True, scope="module")
def _small_models(quick_compiles, float32_products):
    """Compiling is most of what these tests cost; they compare to the last digits."""


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
