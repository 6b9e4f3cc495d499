"""Hadamard transforms: the 16-point transform of the recipe in bfloat16, larger ones in float32.

    y = x H,   H = diag(s) * Sylvester16 * 1/4,   H H^T = I

on each run of 16 elements. H spreads an outlier over its 16 neighbours, so that one element no longer determines the
scale of a whole block; both wgrad operands take the same H, which cancels in the product. The signs s are fixed (mask
of the negatives 0xD7E8).

bfloat16 in, float32 sums, one rounding to bfloat16 out. Sums have a fixed order, so that every backend rounds
identically: signs first, then butterflies (a + b, a - b) at distance 1, 2, 4, 8. The factor 1/4 is applied with the
signs, so that large values do not overflow in between; a sum that cancels is +0.

Runs of n = 32, 64 or 128 have H = diag(s) * Sylvester_n / sqrt(n), with the 16 signs repeated. They stay in float32,
because 1/sqrt(32) and sums of 128 are no bfloat16 values; a factor 1/sqrt(2) is applied last. Signs may also be drawn
from a key (`random_signs`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfbyte.formats.exact_float32 import (
    MAGNITUDE_MASK,
    SIGN_MASK,
    SUBNORMAL_LIFT_EXPONENT,
    bitcast_to_float32,
    bitcast_to_uint32,
    copy_sign,
    round_bfloat16,
    scale_out_of_subnormals,
)
from halfbyte.formats.random_bits import Key, counter_hash, key_words

HADAMARD_SIZE = 16
SIZES = (16, 32, 64, 128)
FIXED_RHT_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
# Runs with a smaller amax are multiplied by 2**64 before the transform, so that no subnormal is flushed.
SUBNORMAL_GUARD_BITS = int(np.float32(2.0**-60).view(np.uint32))
BFLOAT16_STEPS = 133  # 2**-133 is the smallest bfloat16 subnormal


def _butterflies(v: jax.Array, axis: int, signs: jax.Array | None = None) -> jax.Array:
    """Returns v H in float32 along `axis` (length n), before rounding; `signs` None: the fixed ones."""
    shape, size = [1] * v.ndim, v.shape[axis]
    shape[axis] = size
    signs = jnp.array(FIXED_RHT_SIGNS * (size // HADAMARD_SIZE), jnp.float32) if signs is None else signs
    stages = size.bit_length() - 1
    # Signs times a power of two: their products are exact, so an FMA rounds like two operations.
    v = v * jnp.broadcast_to((signs * jnp.float32(0.5 ** (stages // 2))).reshape(shape), v.shape)
    lead, tail = v.shape[:axis], v.shape[axis + 1 :]
    for distance in (2**stage for stage in range(stages)):
        # [..., n, ...] -> [..., n / (2 * distance), 2, distance, ...] and back
        pairs = v.reshape(*lead, size // (2 * distance), 2, distance, *tail)
        a, b = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
        v = jnp.stack([a + b, a - b], axis + 1).reshape(v.shape)
    return v * jnp.float32(0.5**0.5) if stages % 2 else v


def _signed(magnitude: jax.Array, bits: jax.Array) -> jax.Array:
    """Returns `magnitude` with the sign of the float32 `bits`; zero is +0."""
    return jnp.where(bits & jnp.uint32(MAGNITUDE_MASK) == 0, magnitude, magnitude | (bits & jnp.uint32(SIGN_MASK)))


def random_signs(key: Key, size: int) -> jax.Array:
    """Returns float32 [size] of +1 or -1, drawn from a key."""
    negative = counter_hash(jnp.arange(size, dtype=jnp.uint32), *key_words(key)) & jnp.uint32(SIGN_MASK)
    return bitcast_to_float32(bitcast_to_uint32(jnp.ones(size, jnp.float32)) | negative)


def _transform_normals(bits: jax.Array, axis: int, signs: jax.Array | None = None) -> jax.Array:
    """Returns the float32 bits of the transformed runs, on the bfloat16 grid."""
    wide = bitcast_to_uint32(_butterflies(bitcast_to_float32(bits), axis, signs))
    return _signed(bitcast_to_uint32(round_bfloat16(bitcast_to_float32(wide & jnp.uint32(MAGNITUDE_MASK)))), wide)


def _with_subnormals(bits: jax.Array, axis: int, signs: jax.Array | None = None) -> jax.Array:
    """`_transform_normals` on a device that flushes subnormals: small runs are transformed times 2**64."""
    magnitude = bits & jnp.uint32(MAGNITUDE_MASK)
    small = jnp.max(magnitude, axis=axis, keepdims=True) < jnp.uint32(SUBNORMAL_GUARD_BITS)
    small = jnp.broadcast_to(small, bits.shape)
    lifted = copy_sign(jnp.where(small, scale_out_of_subnormals(magnitude), bitcast_to_float32(magnitude)), bits)
    wide = bitcast_to_uint32(_butterflies(lifted, axis, signs))
    wide_magnitude = bitcast_to_float32(wide & jnp.uint32(MAGNITUDE_MASK))
    rounded = bitcast_to_uint32(round_bfloat16(wide_magnitude))
    normal = jnp.where(small, rounded - jnp.uint32(SUBNORMAL_LIFT_EXPONENT << 23), rounded)
    units = jnp.round(
        wide_magnitude * jnp.float32(2.0 ** (BFLOAT16_STEPS - SUBNORMAL_LIFT_EXPONENT))
    )  # of 2**-133, half to even
    subnormal = units.astype(jnp.int32).astype(jnp.uint32) << 16
    is_subnormal = small & (wide_magnitude < jnp.float32(2.0 ** (SUBNORMAL_LIFT_EXPONENT - 126)))
    return _signed(jnp.where(is_subnormal, subnormal, normal), wide)


def hadamard_transform(
    x: jax.Array, *, axis: int = -1, points: int = HADAMARD_SIZE, signs: jax.Array | None = None
) -> jax.Array:
    """Applies H to each run of `points` along `axis`, with `signs` or the fixed ones.

    For 16 points x is rounded to bfloat16 first and the result is bfloat16; for more the result is float32.
    """
    axis = axis % x.ndim
    size = x.shape[axis]
    if size % points:
        raise ValueError(
            f"the Hadamard transform needs a multiple of {points} along its axis, got {size} of shape {x.shape}; "
            f"pad the axis or leave the transform out of the recipe"
        )
    if points != HADAMARD_SIZE:
        runs = x.astype(jnp.float32).reshape(*x.shape[:axis], size // points, points, *x.shape[axis + 1 :])
        return _butterflies(runs, axis + 1, signs).reshape(x.shape)
    rounded = x if x.dtype == jnp.bfloat16 else round_bfloat16(x.astype(jnp.float32))
    # [..., size, ...] -> [..., runs, 16, ...]
    bits = bitcast_to_uint32(rounded).reshape(
        *x.shape[:axis], size // HADAMARD_SIZE, HADAMARD_SIZE, *x.shape[axis + 1 :]
    )
    on_cpu, elsewhere = (
        functools.partial(f, axis=axis + 1, signs=signs) for f in (_with_subnormals, _transform_normals)
    )
    y = lax.platform_dependent(bits, cpu=on_cpu, default=elsewhere)
    # Already on the bfloat16 grid: a shift, not a cast that may flush. [..., runs, 16, ...] -> [..., size, ...]
    return lax.bitcast_convert_type((y >> 16).astype(jnp.uint16), jnp.bfloat16).reshape(x.shape)


def hadamard16(x: jax.Array) -> jax.Array:
    """Returns x H of each run of 16 along the last axis, as bfloat16. Infinity and NaN spread over their run."""
    return hadamard_transform(x, axis=-1)
