"""The scale S of a tensor, exactly: float32(top / amax), and 1 / S, from the bits of amax.

Zero, infinity and NaN give no scale: S is 1 then. `once` keeps what all blocks share from being computed by each.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .bits import float32_bits, float_of_bits
from .exact import INFINITY_BITS, MAX_BITS, divide_bits


def encode_scale_bits(amax_bits: jax.Array, top: float) -> jax.Array:
    """Bits of S for the bits of an amax that gives one."""
    return jnp.minimum(divide_bits(top, amax_bits), jnp.uint32(MAX_BITS))


def once(compute: Callable[[jax.Array], jax.Array], unscaled: np.ndarray, amax_bits: jax.Array) -> jax.Array:
    """compute(amax_bits), or `unscaled` for an amax that gives no scale: zero, infinity, NaN.

    On a CPU it is computed in a loop of one turn: XLA copies plain scalar arithmetic into every consumer, and would do
    it again for each block. A loop it leaves whole.
    """
    usable = (amax_bits != 0) & (amax_bits < jnp.uint32(INFINITY_BITS))
    start = jnp.asarray(unscaled)

    def in_a_loop(bits: jax.Array, usable: jax.Array) -> jax.Array:
        turns = usable.astype(jnp.int32)
        # A start that depends on the tensor varies over a mesh as the result does, which shard_map asks for.
        return lax.fori_loop(0, turns, lambda _, made: compute(bits), jnp.where(usable, jnp.zeros_like(start), start))

    def plain(bits: jax.Array, usable: jax.Array) -> jax.Array:
        return lax.optimization_barrier(jnp.where(usable, compute(bits), start))

    return lax.platform_dependent(amax_bits, usable, cpu=in_a_loop, default=plain)


def outer_scales(amax_bits: jax.Array, top: float) -> tuple[jax.Array, jax.Array]:
    """(S, 1/S) for maxima in any shape; 1 where a maximum gives no scale."""
    if amax_bits.ndim == 0:
        return tensor_scales(amax_bits, top)
    usable = (amax_bits != 0) & (amax_bits < jnp.uint32(INFINITY_BITS))
    encode = jnp.where(usable, encode_scale_bits(amax_bits, top), float32_bits(jnp.float32(1)))
    return float_of_bits(encode), float_of_bits(divide_bits(1.0, encode))


@functools.partial(jax.jit, static_argnums=1)
def tensor_scales(amax_bits: jax.Array, top: float) -> tuple[jax.Array, jax.Array]:
    """(S, 1/S) for a tensor's amax that is to become `top`."""

    def compute(amax_bits: jax.Array) -> jax.Array:
        encode_scale = encode_scale_bits(amax_bits, top)
        return float_of_bits(jnp.where(jnp.arange(2) == 0, encode_scale, divide_bits(1.0, encode_scale)))

    lanes = once(compute, np.ones(2, np.float32), amax_bits)
    return lanes[0], lanes[1]
