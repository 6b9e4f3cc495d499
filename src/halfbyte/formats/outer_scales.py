"""Float32 outer scales S and 1 / S, exactly, from the bits of amax: per tensor, per row or per 128 elements.

A row is the dim that a GEMM does not contract: a token of x, an output of W in fprop, a feature of x in wgrad.
Per-tensor and per-row scales multiply the GEMM's accumulator. A scale per 128 elements varies along the contraction, so
no GEMM can apply it to its accumulator, and the operand's values include it. Amaxes and scales other than per-tensor
ones are stored one per block, like block scales, so that they are sharded, gathered and transposed with them.

S = float32(top / amax). An amax of zero, infinity or NaN gives no scale: S is 1 then.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfbyte.formats.block_view import BlockView
from halfbyte.formats.exact_float32 import (
    INFINITY_BITS,
    MAX_BITS,
    bitcast_to_float32,
    bitcast_to_uint32,
    divide_constant_rne,
    multiply_short_significand_rne,
)

OUTER_GRANULARITIES = ("tensor", "row", "128")
OUTER_GROUP_SIZE = 128


def block_axis(view: BlockView) -> int:
    """Returns the axis of a scale array along which the blocks of a 1D view are consecutive."""
    (element_axis,) = view.reduce_axes
    return element_axis - 1


def reduce_per_group(
    values: jax.Array, view: BlockView, join: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Reduces values per block, in order, over every 128 elements (a sum, a maximum); returns one per block."""
    axis = block_axis(view)
    count = OUTER_GROUP_SIZE // view.shape[axis + 1]
    size = values.shape[axis]
    if size % count:
        raise ValueError(
            f"scales of {OUTER_GROUP_SIZE} neighbours need a multiple of {OUTER_GROUP_SIZE} along the blocked axis, "
            f"got {size * view.shape[axis + 1]}; pad that axis, or exclude this tensor in the layer policy"
        )
    # [..., blocks, ...] -> [..., groups, blocks of a group, ...] and back
    grouped = values.reshape(*values.shape[:axis], size // count, count, *values.shape[axis + 1 :])
    reduced = functools.reduce(join, (lax.index_in_dim(grouped, i, axis + 1) for i in range(count)))
    return jnp.broadcast_to(reduced, grouped.shape).reshape(values.shape)


def effective_block_scale(scales: jax.Array, outer: jax.Array) -> jax.Array:
    """Returns block scales times their outer decode scales, rounded once."""
    spread = jnp.broadcast_to(bitcast_to_uint32(outer), scales.shape)
    return bitcast_to_float32(multiply_short_significand_rne(bitcast_to_uint32(scales), spread))


def contracted_scale_axes(view: BlockView) -> tuple[int, ...]:
    """Returns the axes of a scale array that a GEMM contracts: the last, or all but the last."""
    last = len(view.scale_shape) - 1
    return (last,) if block_axis(view) == last else tuple(range(last))


def outer_amax_bits(block_amax: jax.Array, view: BlockView, outer: str) -> jax.Array:
    """Returns the bits of the amaxes under the outer scales: a scalar, or one per block."""
    if outer == "tensor":
        return jnp.max(block_amax)
    if outer == "128":
        return reduce_per_group(block_amax, view, jnp.maximum)
    return jnp.broadcast_to(jnp.max(block_amax, axis=contracted_scale_axes(view), keepdims=True), block_amax.shape)


def encode_scale_bits(amax_bits: jax.Array, top: float) -> jax.Array:
    """Returns the bits of S, from those of a finite amax above zero."""
    return jnp.minimum(divide_constant_rne(top, amax_bits), jnp.uint32(MAX_BITS))


def compute_without_duplication(
    compute: Callable[[jax.Array], jax.Array], unscaled: np.ndarray, amax_bits: jax.Array
) -> jax.Array:
    """Returns compute(amax_bits), or `unscaled` for an amax that gives no scale: zero, infinity, NaN.

    On a CPU it is computed in a loop of one iteration: XLA copies plain scalar arithmetic into every consumer, and
    would repeat it for each block. A loop is not copied.
    """
    usable = (amax_bits != 0) & (amax_bits < jnp.uint32(INFINITY_BITS))
    start = jnp.asarray(unscaled)

    def in_a_loop(bits: jax.Array, usable: jax.Array) -> jax.Array:
        trip_count = usable.astype(jnp.int32)
        # A start that depends on the tensor varies over mesh axes like the result, as shard_map requires.
        return lax.fori_loop(0, trip_count, lambda *_: compute(bits), jnp.where(usable, jnp.zeros_like(start), start))

    def plain(bits: jax.Array, usable: jax.Array) -> jax.Array:
        return lax.optimization_barrier(jnp.where(usable, compute(bits), start))

    return lax.platform_dependent(amax_bits, usable, cpu=in_a_loop, default=plain)


def scales_from_amax_bits(amax_bits: jax.Array, top: float) -> tuple[jax.Array, jax.Array]:
    """Returns (S, 1/S) for amaxes in any shape; 1 where an amax gives no scale."""
    if amax_bits.ndim == 0:
        return tensor_scales_from_amax(amax_bits, top)
    usable = (amax_bits != 0) & (amax_bits < jnp.uint32(INFINITY_BITS))
    encode = jnp.where(usable, encode_scale_bits(amax_bits, top), bitcast_to_uint32(jnp.float32(1)))
    return bitcast_to_float32(encode), bitcast_to_float32(divide_constant_rne(1.0, encode))


@functools.partial(jax.jit, static_argnums=1)
def tensor_scales_from_amax(amax_bits: jax.Array, top: float) -> tuple[jax.Array, jax.Array]:
    """Returns (S, 1/S) for a tensor's amax that is mapped to `top`."""

    def compute(amax_bits: jax.Array) -> jax.Array:
        encode_scale = encode_scale_bits(amax_bits, top)
        return bitcast_to_float32(jnp.where(jnp.arange(2) == 0, encode_scale, divide_constant_rne(1.0, encode_scale)))

    scales = compute_without_duplication(compute, np.ones(2, np.float32), amax_bits)
    return scales[0], scales[1]
