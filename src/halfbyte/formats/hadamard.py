"""The 16-point Hadamard transform of the recipe, in bfloat16.

    y = x H,   H = diag(s) * Sylvester16 * 1/4,   H H^T = I

on each run of 16 numbers. It spreads an outlier over its 16 neighbours, so that one number no longer sets the scale of
a whole block; both WGRAD operands take the same H, and it cancels in the product. The signs s are fixed (mask of the
negatives 0xD7E8).

bfloat16 in, float32 sums, one rounding to bfloat16 out. The sums are made in a fixed order, so that every backend
rounds alike: signs first, then butterflies (a + b, a - b) at distance 1, 2, 4, 8. The factor 1/4 goes in with the
signs, so that huge numbers do not overflow on the way; a sum that cancels is +0.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .bits import MAGNITUDE, SIGN, copy_sign, float32_bits, float_of_bits, round_bfloat16
from .exact import LIFT, lift

SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
SMALL_BITS = int(np.float32(2.0**-60).view(np.uint32))  # smaller runs are transformed where nothing is flushed
BFLOAT16_STEPS = 133  # 2**-133 is the smallest bfloat16 subnormal


def _butterflies(v: jax.Array, axis: int) -> jax.Array:
    """v H in float32 along `axis` (length 16), before the rounding."""
    shape = [1] * v.ndim
    shape[axis] = SIZE
    v = v * jnp.broadcast_to((jnp.array(SIGNS, jnp.float32) * jnp.float32(0.25)).reshape(shape), v.shape)
    lead, tail = v.shape[:axis], v.shape[axis + 1 :]
    for distance in (1, 2, 4, 8):
        # [..., 16, ...] -> [..., 16 / (2 * distance), 2, distance, ...] and back
        pairs = v.reshape(*lead, SIZE // (2 * distance), 2, distance, *tail)
        a, b = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
        v = jnp.stack([a + b, a - b], axis + 1).reshape(v.shape)
    return v


def _signed(magnitude: jax.Array, bits: jax.Array) -> jax.Array:
    """`magnitude` with the sign of the float32 `bits`; a zero has none."""
    return jnp.where(bits & jnp.uint32(MAGNITUDE) == 0, magnitude, magnitude | (bits & jnp.uint32(SIGN)))


def _plain(bits: jax.Array, axis: int) -> jax.Array:
    """float32 bits of the transformed runs, on the bfloat16 grid."""
    wide = float32_bits(_butterflies(float_of_bits(bits), axis))
    return _signed(float32_bits(round_bfloat16(float_of_bits(wide & jnp.uint32(MAGNITUDE)))), wide)


def _with_subnormals(bits: jax.Array, axis: int) -> jax.Array:
    """`_plain` on a device that flushes subnormals: runs of small numbers are transformed times 2**64, and settled."""
    magnitude = bits & jnp.uint32(MAGNITUDE)
    small = jnp.max(magnitude, axis=axis, keepdims=True) < jnp.uint32(SMALL_BITS)
    small = jnp.broadcast_to(small, bits.shape)
    lifted = copy_sign(jnp.where(small, lift(magnitude), float_of_bits(magnitude)), bits)
    wide = float32_bits(_butterflies(lifted, axis))
    wide_magnitude = float_of_bits(wide & jnp.uint32(MAGNITUDE))
    rounded = float32_bits(round_bfloat16(wide_magnitude))
    normal = jnp.where(small, rounded - jnp.uint32(LIFT << 23), rounded)
    steps = jnp.round(wide_magnitude * jnp.float32(2.0 ** (BFLOAT16_STEPS - LIFT)))  # of a subnormal, half to even
    subnormal = steps.astype(jnp.int32).astype(jnp.uint32) << 16
    is_subnormal = small & (wide_magnitude < jnp.float32(2.0 ** (LIFT - 126)))
    return _signed(jnp.where(is_subnormal, subnormal, normal), wide)


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
    # [..., size, ...] -> [..., runs, 16, ...]
    bits = float32_bits(rounded).reshape(*x.shape[:axis], size // SIZE, SIZE, *x.shape[axis + 1 :])
    on_cpu, elsewhere = (functools.partial(f, axis=axis + 1) for f in (_with_subnormals, _plain))
    y = lax.platform_dependent(bits, cpu=on_cpu, default=elsewhere)
    # Already on the bfloat16 grid: a shift, not a cast that may flush. [..., runs, 16, ...] -> [..., size, ...]
    return lax.bitcast_convert_type((y >> 16).astype(jnp.uint16), jnp.bfloat16).reshape(x.shape)


def hadamard16(x: jax.Array) -> jax.Array:
    """x H on each run of 16 along the last axis, as bfloat16. Infinity and NaN spread over their run."""
    return transform_runs(x, axis=-1)
