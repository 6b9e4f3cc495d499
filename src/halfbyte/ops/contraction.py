"""A general dot product seen as a linear y = x W, so that `qdot` can compute it.

`lax.dot_general` without batch dims contracts some dims of one operand with some of the other. With the free dims of
x first and those of W last, and the contracted dims flattened to K, that is x [..., K] times W [K, N]: a reshape, and
a transpose where the dims do not already lie so.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from halfbyte.ops.qdot import qdot
from halfbyte.ops.surroundings import explicit_sharding, in_auto_axes, replica_key, vary_alike
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


@dataclass(frozen=True)
class Rounded:
    """How a dot is computed: in this recipe by this backend, its float32 result rounded once, to `dtype`."""

    recipe: Recipe
    backend: str
    dtype: DTypeLike


def linear(
    x: jax.Array,
    w: jax.Array,
    dims: tuple[Sequence[int], Sequence[int]],
    *,
    how: Rounded,
    key: jax.Array | None,
    out_sharding: NamedSharding | None = None,
) -> jax.Array:
    """x contracted with the weight w over `dims` = (dims of x, dims of w): [free dims of x, free dims of w].

    The gradients come back in the dtypes of x and w. Equal calls are traced and lowered once a program. On a mesh with
    explicit axes the result has the sharding that `lax.dot_general` would give it.
    """
    plan = _Plan((tuple(dims[0]), tuple(dims[1])), how.recipe, how.backend, jnp.dtype(how.dtype), qdot)
    x, w = vary_alike(x, w)
    key = None if key is None else replica_key(key, x, w)
    if explicit_sharding(x, w) is None:
        y = _linear(plan, x, w, key)
        return y if out_sharding is None else lax.with_sharding_constraint(y, out_sharding)
    like = jax.eval_shape(lambda x, w: lax.dot_general(x, w, (plan.dims, ((), ())), out_sharding=out_sharding), x, w)
    return in_auto_axes(functools.partial(_linear, plan), x, w, key, out=like.sharding)


@dataclass(frozen=True)
class _Plan:
    """What is settled before tracing: one compiled function for each value of it, and for each shape."""

    dims: tuple[tuple[int, ...], tuple[int, ...]]
    recipe: Recipe
    backend: str
    dtype: jnp.dtype
    dot: Callable[..., jax.Array]  # qdot, or what stands in for it in a test


@functools.partial(jax.jit, static_argnums=0)
def _linear(plan: _Plan, x: jax.Array, w: jax.Array, key: jax.Array | None) -> jax.Array:
    x_dims, w_dims = plan.dims
    x_free, w_free = _others(x.ndim, x_dims), _others(w.ndim, w_dims)
    k = math.prod(x.shape[d] for d in x_dims)
    x2 = lax.transpose(x, (*x_free, *x_dims)).reshape(*(x.shape[d] for d in x_free), k)
    w2 = lax.transpose(w, (*w_dims, *w_free)).reshape(k, math.prod(w.shape[d] for d in w_free))
    operand = x2 if x.dtype in (jnp.bfloat16, jnp.float32) else x2.astype(jnp.float32)
    y = plan.dot(operand, w2, recipe=plan.recipe, key=key, backend=plan.backend, out_dtype=plan.dtype)
    return y.reshape(*x2.shape[:-1], *(w.shape[d] for d in w_free))


def weight_first(y: jax.Array, free: int) -> jax.Array:
    """[free dims of x, free dims of w] -> [free dims of w, free dims of x], x having `free` of them."""
    return lax.transpose(y, (*range(free, y.ndim), *range(free)))


def _others(ndim: int, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(d for d in range(ndim) if d not in set(dims))
