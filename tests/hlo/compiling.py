"""What tests that compile programs share: shapes and meshes."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "context", "tensor")
F32, BF16 = jnp.float32, jnp.bfloat16


def shape(*dims, dtype=F32, sharding=None):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)


def mesh_of(where, **sizes):
    dims = tuple(sizes.get(axis, 1) for axis in AXES)
    return Mesh(where.reshape(dims), AXES, axis_types=(AxisType.Auto,) * 4), dict(zip(AXES, dims, strict=True))
