"""Hadamard transforms: the 16-point one of the recipe in bfloat16, larger ones in float32.

    y = x H,   H = diag(s) * Sylvester16 * 1/4,   H H^T = I

on each run of 16 numbers. It spreads an outlier over its 16 neighbours, so that one number no longer sets the scale of
a whole block; both WGRAD operands take the same H, and it cancels in the product. The signs s are fixed (mask of the
negatives 0xD7E8).

bfloat16 in, float32 sums, one rounding to bfloat16 out. The sums are made in a fixed order, so that every backend
rounds alike: signs first, then butterflies (a + b, a - b) at distance 1, 2, 4, 8. The factor 1/4 goes in with the
signs, so that huge numbers do not overflow on the way; a sum that cancels is +0.

Runs of n = 32, 64 or 128 have H = diag(s) * Sylvester_n / sqrt(n), with the 16 signs repeated. They stay in float32,
because 1/sqrt(32) and sums of 128 are no bfloat16 numbers; a factor 1/sqrt(2) comes last. Signs may also be drawn from
a key (`fresh_signs`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .bits import MAGNITUDE, SIGN, copy_sign, float32_bits, float_of_bits, round_bfloat16
from .exact import LIFT, lift
from .noise import Key, hash_words, key_words

SIZE = 16
SIZES = (16, 32, 64, 128)
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
SMALL_BITS = int(np.float32(2.0**-60).view(np.uint32))  # smaller runs are transformed where nothing is flushed
BFLOAT16_STEPS = 133  # 2**-133 is the smallest bfloat16 subnormal


def _butterflies(v: jax.Array, axis: int, signs: jax.Array | None = None) -> jax.Array:
    """v H in float32 along `axis` (length n), before the rounding; fixed signs if none are given."""
    shape, size = [1] * v.ndim, v.shape[axis]
    shape[axis] = size
    signs = jnp.array(SIGNS * (size // SIZE), jnp.float32) if signs is None else signs
    steps = size.bit_length() - 1
    # With the signs goes a power of two, so that no fused product and sum rounds otherwise than two operations.
    v = v * jnp.broadcast_to((signs * jnp.float32(0.5 ** (steps // 2))).reshape(shape), v.shape)
    lead, tail = v.shape[:axis], v.shape[axis + 1 :]
    for distance in (2**step for step in range(steps)):
        # [..., n, ...] -> [..., n / (2 * distance), 2, distance, ...] and back
        pairs = v.reshape(*lead, size // (2 * distance), 2, distance, *tail)
        a, b = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
        v = jnp.stack([a + b, a - b], axis + 1).reshape(v.shape)
    return v * jnp.float32(0.5**0.5) if steps % 2 else v


def _signed(magnitude: jax.Array, bits: jax.Array) -> jax.Array:
    """`magnitude` with the sign of the float32 `bits`; a zero has none."""
    return jnp.where(bits & jnp.uint32(MAGNITUDE) == 0, magnitude, magnitude | (bits & jnp.uint32(SIGN)))


def fresh_signs(key: Key, size: int) -> jax.Array:
    """float32 [size]: +1 or -1, drawn from a key."""
    negative = hash_words(jnp.arange(size, dtype=jnp.uint32), *key_words(key)) & jnp.uint32(SIGN)
    return float_of_bits(float32_bits(jnp.ones(size, jnp.float32)) | negative)


def _plain(bits: jax.Array, axis: int, signs: jax.Array | None = None) -> jax.Array:
    """float32 bits of the transformed runs, on the bfloat16 grid."""
    wide = float32_bits(_butterflies(float_of_bits(bits), axis, signs))
    return _signed(float32_bits(round_bfloat16(float_of_bits(wide & jnp.uint32(MAGNITUDE)))), wide)


def _with_subnormals(bits: jax.Array, axis: int, signs: jax.Array | None = None) -> jax.Array:
    """`_plain` on a device that flushes subnormals: runs of small numbers are transformed times 2**64, and settled."""
    magnitude = bits & jnp.uint32(MAGNITUDE)
    small = jnp.max(magnitude, axis=axis, keepdims=True) < jnp.uint32(SMALL_BITS)
    small = jnp.broadcast_to(small, bits.shape)
    lifted = copy_sign(jnp.where(small, lift(magnitude), float_of_bits(magnitude)), bits)
    wide = float32_bits(_butterflies(lifted, axis, signs))
    wide_magnitude = float_of_bits(wide & jnp.uint32(MAGNITUDE))
    rounded = float32_bits(round_bfloat16(wide_magnitude))
    normal = jnp.where(small, rounded - jnp.uint32(LIFT << 23), rounded)
    steps = jnp.round(wide_magnitude * jnp.float32(2.0 ** (BFLOAT16_STEPS - LIFT)))  # of a subnormal, half to even
    subnormal = steps.astype(jnp.int32).astype(jnp.uint32) << 16
    is_subnormal = small & (wide_magnitude < jnp.float32(2.0 ** (LIFT - 126)))
    return _signed(jnp.where(is_subnormal, subnormal, normal), wide)


def transform_runs(x: jax.Array, *, axis: int = -1, points: int = SIZE, signs: jax.Array | None = None) -> jax.Array:
    """H applied to each run of `points` along `axis`, with `signs` or the fixed ones. For 16 points x is rounded to
    bfloat16 first and bfloat16 returned; for more, float32.
    """
    axis = axis % x.ndim
    size = x.shape[axis]
    if size % points:
        raise ValueError(
            f"the Hadamard transform needs a multiple of {points} along its axis, got {size} of shape {x.shape}; "
            f"pad the axis or leave the transform out of the recipe"
        )
    if points != SIZE:
        runs = x.astype(jnp.float32).reshape(*x.shape[:axis], size // points, points, *x.shape[axis + 1 :])
        return _butterflies(runs, axis + 1, signs).reshape(x.shape)
    rounded = x if x.dtype == jnp.bfloat16 else round_bfloat16(x.astype(jnp.float32))
    # [..., size, ...] -> [..., runs, 16, ...]
    bits = float32_bits(rounded).reshape(*x.shape[:axis], size // SIZE, SIZE, *x.shape[axis + 1 :])
    on_cpu, elsewhere = (functools.partial(f, axis=axis + 1, signs=signs) for f in (_with_subnormals, _plain))
    y = lax.platform_dependent(bits, cpu=on_cpu, default=elsewhere)
    # Already on the bfloat16 grid: a shift, not a cast that may flush. [..., runs, 16, ...] -> [..., size, ...]
    return lax.bitcast_convert_type((y >> 16).astype(jnp.uint16), jnp.bfloat16).reshape(x.shape)


def hadamard16(x: jax.Array) -> jax.Array:
    """x H on each run of 16 along the last axis, as bfloat16. Infinity and NaN spread over their run."""
    return transform_runs(x, axis=-1)
