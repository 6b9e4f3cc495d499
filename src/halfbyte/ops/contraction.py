"""A general dot product seen as a linear y = x W, so that `qdot` can compute it.

`lax.dot_general` without batch dims contracts some dims of one operand with some of the other. With the free dims of
x first and those of W last, and the contracted dims flattened to K, that is x [..., K] times W [K, N]: a reshape, and
a transpose where the dims do not already lie so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from halfbyte.ops.qdot import qdot
from halfbyte.recipe import Recipe

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def refusal(x_dtype: DTypeLike, w_dtype: DTypeLike, dimension_numbers: DimensionNumbers) -> str | None:
    """Why this dot is no linear, None if it is one."""
    (contracted, _), (batch, _) = dimension_numbers
    if batch:
        return "it has batch dims, so no operand is a single weight"
    if not contracted:
        return "it contracts nothing"
    if not (jnp.issubdtype(x_dtype, jnp.floating) and jnp.issubdtype(w_dtype, jnp.floating)):
        return f"its operands are {jnp.dtype(x_dtype).name} and {jnp.dtype(w_dtype).name}, not floating point"
    return None


def linear(
    x: jax.Array,
    w: jax.Array,
    dims: tuple[Sequence[int], Sequence[int]],
    *,
    recipe: Recipe,
    key: jax.Array | None,
    backend: str,
    dtype: DTypeLike,
    out_sharding: NamedSharding | None = None,
) -> jax.Array:
    """x contracted with the weight w over `dims` = (dims of x, dims of w): [free dims of x, free dims of w] in `dtype`.

    The GEMM's float32 result is rounded once, to `dtype`; the gradients come back in the dtypes of x and w.
    """
    x_dims, w_dims = dims
    x_free, w_free = _others(x.ndim, x_dims), _others(w.ndim, w_dims)
    k = math.prod(x.shape[d] for d in x_dims)
    x2 = lax.transpose(x, (*x_free, *x_dims)).reshape(*(x.shape[d] for d in x_free), k)
    w2 = lax.transpose(w, (*w_dims, *w_free)).reshape(k, math.prod(w.shape[d] for d in w_free))
    operand = x2 if x.dtype in (jnp.bfloat16, jnp.float32) else x2.astype(jnp.float32)
    y = qdot(
        operand, w2, recipe=recipe, key=key, backend=backend, out_sharding=out_sharding, out_dtype=jnp.dtype(dtype)
    )
    return y.reshape(*x2.shape[:-1], *(w.shape[d] for d in w_free))


def _others(ndim: int, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(d for d in range(ndim) if d not in set(dims))
