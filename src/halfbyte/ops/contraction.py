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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from halfbyte.ops.execution import Execution
from halfbyte.ops.first_order import first_order
from halfbyte.ops.mlp import mlp_in_stacks
from halfbyte.ops.qdot import qdot, qdots
from halfbyte.ops.surroundings import explicit_sharding, in_auto_axes, own_key, replica_key, vary_alike
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


def linears(
    sides: Sequence[tuple[jax.Array, jax.Array, tuple[Sequence[int], Sequence[int]]]], *, how: Rounded,
    keys: Sequence[jax.Array | None],
) -> list[jax.Array]:  # fmt: skip
    """`linear` of each (x, w, dims), bit for bit, where every x is the same: its operands are made once. No axis is
    explicit or manual. JAX adds the gradients of x from the last one to the first, as those of dots in this order.
    """
    plans = [
        _Plan((tuple(dims[0]), tuple(dims[1])), how.recipe, how.backend, jnp.dtype(how.dtype), qdots)
        for _, _, dims in sides
    ]
    xs, weights, _ = zip(*sides[::-1], strict=True)
    return list(_linears(tuple(plans[::-1]), xs, weights, tuple(keys[::-1])))[::-1]


@functools.partial(jax.jit, static_argnames=("recipe", "backend"))
def swiglu(
    x: jax.Array, weights: tuple[jax.Array, jax.Array, jax.Array], *, keys: tuple[jax.Array | None, ...],
    recipe: Recipe, backend: str,
) -> jax.Array:  # fmt: skip
    """(silu(x Wg) * (x Wu)) Wd of `weights` gate, up and down as one op, as `mlp` computes it, with a key each."""
    for key, w in zip(keys, weights, strict=True):
        own_key(key, (recipe,), (x, w))
    y, _ = mlp_in_stacks(x, weights, None, recipe=recipe, key=keys, execution=Execution(backend))
    return first_order(y, x, *weights)


@dataclass(frozen=True)
class _Plan:
    """What is settled before tracing: one compiled function for each value of it, and for each shape."""

    dims: tuple[tuple[int, ...], tuple[int, ...]]
    recipe: Recipe
    backend: str
    dtype: jnp.dtype
    dot: Callable[..., Any]  # qdot, qdots, or what stands in for it in a test

    def matrices(self, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [free dims, K] and w [K, N]."""
        (x_dims, w_dims), x_free, w_free = self.dims, _others(x.ndim, self.dims[0]), _others(w.ndim, self.dims[1])
        k = math.prod(x.shape[d] for d in x_dims)
        x2 = lax.transpose(x, (*x_free, *x_dims)).reshape(*(x.shape[d] for d in x_free), k)
        w2 = lax.transpose(w, (*w_dims, *w_free)).reshape(k, math.prod(w.shape[d] for d in w_free))
        return x2 if x.dtype in (jnp.bfloat16, jnp.float32) else x2.astype(jnp.float32), w2

    def result(self, y: jax.Array, w: jax.Array) -> jax.Array:
        """y [free dims of x, N] with the free dims of w."""
        return y.reshape(*y.shape[:-1], *(w.shape[d] for d in _others(w.ndim, self.dims[1])))


@functools.partial(jax.jit, static_argnums=0)
def _linear(plan: _Plan, x: jax.Array, w: jax.Array, key: jax.Array | None) -> jax.Array:
    x2, w2 = plan.matrices(x, w)
    return plan.result(plan.dot(x2, w2, recipe=plan.recipe, key=key, backend=plan.backend, out_dtype=plan.dtype), w)


@functools.partial(jax.jit, static_argnums=0)
def _linears(
    plans: tuple[_Plan, ...], xs: tuple[jax.Array, ...], weights: tuple[jax.Array, ...], keys: tuple[Any, ...]
) -> list[jax.Array]:
    pairs = [plan.matrices(x, w) for plan, x, w in zip(plans, xs, weights, strict=True)]
    recipes, (first, *copies) = [plan.recipe for plan in plans], [x for x, _ in pairs]
    for key, recipe, (x, w) in zip(keys, recipes, pairs, strict=True):
        own_key(key, (recipe,), (x, w))
    execution, dtype = Execution(plans[0].backend), plans[0].dtype
    made = plans[0].dot(first, [w for _, w in pairs], recipes=recipes, keys=keys, execution=execution, out_dtype=dtype,
                 copies=copies)  # fmt: skip
    each = zip(plans, made, xs, weights, strict=True)
    return [plan.result(first_order(y, x, w), w) for plan, y, x, w in each]


def weight_first(y: jax.Array, free: int) -> jax.Array:
    """[free dims of x, free dims of w] -> [free dims of w, free dims of x], x having `free` of them."""
    return lax.transpose(y, (*range(free, y.ndim), *range(free)))


def _others(ndim: int, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(d for d in range(ndim) if d not in set(dims))
