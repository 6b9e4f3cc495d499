"""What tests that compile programs share: shapes, meshes, and who needs the CUDA compiler."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh

needs_plugin = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin")),
    reason="needs the CUDA compiler: pip install 'halfbyte[plan]'",
)
AXES = ("data", "fsdp", "context", "tensor")
F32, BF16 = jnp.float32, jnp.bfloat16


def shape(*dims, dtype=F32, sharding=None):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)


def mesh_of(where, **sizes):
    dims = tuple(sizes.get(axis, 1) for axis in AXES)
    return Mesh(where.reshape(dims), AXES, axis_types=(AxisType.Auto,) * 4), dict(zip(AXES, dims, strict=True))
