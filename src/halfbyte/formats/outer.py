"""What a float32 outer scale is the scale of: the tensor, a row of it, or 128 neighbours.

A row is what a GEMM does not sum over: a token of x, an output of W in fprop, a feature of x in wgrad. The scale of a
row multiplies the GEMM's sums, like that of a tensor. The scale of 128 neighbours lies inside the sum: no GEMM applies
it, and the numbers that are multiplied hold it.

Where there is more than one, maxima and scales are kept one a block, like block scales, so that they are cut, gathered
and transposed with them.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .bits import float32_bits, float_of_bits
from .exact import multiply_short_bits
from .views import BlockView

OUTERS = ("tensor", "row", "128")
NEIGHBOURS = 128


def block_axis(view: BlockView) -> int:
    """The axis of a scale array along which blocks follow each other, of runs along one axis."""
    (inside,) = view.shared
    return inside - 1


def per_group(values: jax.Array, view: BlockView, join: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """What blocks have, joined in order over each 128 neighbours (their sums, their maxima), one a block again."""
    axis = block_axis(view)
    count = NEIGHBOURS // view.shape[axis + 1]
    size = values.shape[axis]
    if size % count:
        raise ValueError(
            f"scales of {NEIGHBOURS} neighbours need a multiple of {NEIGHBOURS} along the blocked axis, got "
            f"{size * view.shape[axis + 1]}; pad that axis, or exclude this tensor in the layer policy"
        )
    # [..., blocks, ...] -> [..., groups, blocks of a group, ...] and back
    grouped = values.reshape(*values.shape[:axis], size // count, count, *values.shape[axis + 1 :])
    made = functools.reduce(join, (lax.index_in_dim(grouped, i, axis + 1) for i in range(count)))
    return jnp.broadcast_to(made, grouped.shape).reshape(values.shape)


def step(scales: jax.Array, outer: jax.Array) -> jax.Array:
    """Block scales times the decode scales above them, rounded once."""
    spread = jnp.broadcast_to(float32_bits(outer), scales.shape)
    return float_of_bits(multiply_short_bits(float32_bits(scales), spread))


def contracted(view: BlockView) -> tuple[int, ...]:
    """The axes of a scale array that a GEMM sums over: the last, or all but the last."""
    last = len(view.scale_shape) - 1
    return (last,) if block_axis(view) == last else tuple(range(last))


def outer_maxima(largest: jax.Array, view: BlockView, outer: str) -> jax.Array:
    """Bits of the maxima that outer scales are made of: a number, or one a block."""
    if outer == "tensor":
        return jnp.max(largest)
    if outer == "128":
        return per_group(largest, view, jnp.maximum)
    return jnp.broadcast_to(jnp.max(largest, axis=contracted(view), keepdims=True), largest.shape)
