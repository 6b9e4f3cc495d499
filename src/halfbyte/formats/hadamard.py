"""The 16-point Hadamard transform of the recipe, in bfloat16.

    y = x H,   H = diag(s) * Sylvester16 * 1/4,   H H^T = I

on each run of 16 numbers. It spreads an outlier over its 16 neighbours, so that one number no longer sets the scale of
a whole block; both WGRAD operands take the same H, and it cancels in the product. The signs s are fixed (mask of the
negatives 0xD7E8).

bfloat16 in, float32 sums, one rounding to bfloat16 out. The sums are made in a fixed order, so that every backend
rounds alike: signs first, then butterflies (a + b, a - b) at distance 1, 2, 4, 8. The factor 1/4 goes in with the
signs, so that huge numbers do not overflow on the way; a sum that cancels is +0.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .bits import SIGN, copy_sign, float32_bits, float_of_bits, magnitude_bits, power_of_two_below, round_bfloat16
from .exact import LIFT, lift, settle

SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
SMALL = 2.0**-60  # runs below this are transformed times 2**64, out of reach of flushed subnormals


def _butterflies(v: jax.Array, axis: int) -> jax.Array:
    """v H in float32 along `axis` (length 16), before the rounding."""
    shape = [1] * v.ndim
    shape[axis] = SIZE
    v = v * jnp.broadcast_to((jnp.array(SIGNS, jnp.float32) * jnp.float32(0.25)).reshape(shape), v.shape)
    lead, tail = v.shape[:axis], v.shape[axis + 1 :]
    for distance in (1, 2, 4, 8):
        pairs = v.reshape(*lead, SIZE // (2 * distance), 2, distance, *tail)
        a, b = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
        v = jnp.stack([a + b, a - b], axis + 1).reshape(v.shape)
    bits = float32_bits(v)
    return float_of_bits(jnp.where(bits == jnp.uint32(SIGN), jnp.uint32(0), bits))


def _plain(v: jax.Array, axis: int) -> jax.Array:
    return round_bfloat16(_butterflies(v, axis))


def _careful(v: jax.Array, axis: int) -> jax.Array:
    """`_plain`, with runs of small numbers transformed times 2**64 and brought back through integers."""
    bits = float32_bits(v)
    top = jnp.max(magnitude_bits(v), axis=axis, keepdims=True)
    small = jnp.broadcast_to(top < float32_bits(jnp.float32(SMALL)), v.shape)
    lifted = copy_sign(lift(jnp.where(small, magnitude_bits(v), jnp.uint32(0))), bits)
    wide = _butterflies(lifted, axis)
    magnitude = jnp.abs(wide)
    floor = jnp.maximum(power_of_two_below(magnitude), jnp.float32(2.0 ** (LIFT - 126)))
    magic = floor * jnp.float32(1.5 * 2.0 ** (23 - 7))
    rounded = settle((magnitude + magic) - magic)
    return jnp.where(small, copy_sign(float_of_bits(rounded), float32_bits(wide)), _plain(v, axis))


def _needs_care(v: jax.Array, axis: int) -> jax.Array:
    top = jnp.max(magnitude_bits(v), axis=axis)
    return jnp.any((top != 0) & (top < float32_bits(jnp.float32(SMALL))))


def transform_runs(x: jax.Array, *, axis: int = -1) -> jax.Array:
    """H applied to each run of 16 along `axis`; x of any float dtype is rounded to bfloat16 first. Returns bfloat16."""
    axis = axis % x.ndim
    size = x.shape[axis]
    if size % SIZE:
        raise ValueError(
            f"the Hadamard transform needs a multiple of {SIZE} along its axis, got {size} of shape {x.shape}; "
            f"pad the axis or leave the transform out of the recipe"
        )
    rounded = x if x.dtype == jnp.bfloat16 else round_bfloat16(x.astype(jnp.float32))
    v = float_of_bits(float32_bits(rounded)).reshape(*x.shape[:axis], size // SIZE, SIZE, *x.shape[axis + 1 :])
    inner = axis + 1

    def on_cpu(v):
        return lax.cond(_needs_care(v, inner), lambda u: _careful(u, inner), lambda u: _plain(u, inner), v)

    y = lax.platform_dependent(v, cpu=on_cpu, default=lambda u: _plain(u, inner))
    # Already on the bfloat16 grid: a shift, not a cast that may flush.
    bits = lax.bitcast_convert_type(y, jnp.uint32) >> 16
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16).reshape(x.shape)


def hadamard16(x: jax.Array) -> jax.Array:
    """x H on each run of 16 along the last axis, as bfloat16. Infinity and NaN spread over their run."""
    return transform_runs(x, axis=-1)
