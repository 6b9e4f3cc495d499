"""Bit views of float32 and bfloat16 numbers: the only casts that no compiler simplifies away."""

import jax
import jax.numpy as jnp
from jax import lax

MAGNITUDE = 0x7FFF_FFFF
EXPONENT = 0x7F80_0000
SIGN = 0x8000_0000


def float32_bits(x: jax.Array) -> jax.Array:
    """uint32 bits of x as float32; bfloat16 is widened by a shift, so that subnormals survive."""
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def magnitude_bits(x: jax.Array) -> jax.Array:
    """uint32 bits of |x|. Their integer order is the order of the magnitudes, with NaN above infinity."""
    return float32_bits(x) & jnp.uint32(MAGNITUDE)


def float_of_bits(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def copy_sign(magnitude: jax.Array, bits: jax.Array) -> jax.Array:
    """magnitude (non-negative float32) with the sign of the float whose bits are given; -0.0 keeps its sign."""
    return float_of_bits(lax.bitcast_convert_type(magnitude, jnp.uint32) | (bits & jnp.uint32(SIGN)))


def round_bfloat16(x: jax.Array) -> jax.Array:
    """float32 x rounded half to even to a bfloat16 value, still float32.

    Survives jit, where a cast and back may not.
    """
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
