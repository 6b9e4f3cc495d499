"""IEEE float32 arithmetic that no compiler can spoil.

Two things stand between NumPy's float32 and a jitted program's. XLA may turn a division into a multiplication by a
reciprocal, or into an approximate instruction; and its CPU backend flushes subnormal numbers to zero. Both change bits
of a quantized tensor. The functions here work on the bit patterns of *non-negative* floats with integer instructions,
which every device executes exactly:

    value = significand * 2**exponent,   2**23 <= significand < 2**24

They are meant for the handful of scalars and the 128-entry tables that a tensor's scale needs, not for whole tensors;
the exceptions are `lift` and `settle`, which move small numbers out of the subnormal range and back.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .bits import float_of_bits, magnitude_bits

INFINITY_BITS = 0x7F80_0000
MAX_BITS = 0x7F7F_FFFF  # the largest finite float32
LIFT = 64  # small numbers are worked on times 2**64


def _u32(x: int | jax.Array) -> jax.Array:
    return jnp.asarray(x, jnp.uint32)


def _significand(bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(significand in [2**23, 2**24), exponent) of positive finite floats, subnormals included; (0, ...) for zero."""
    field = (bits >> 23).astype(jnp.int32)
    fraction = bits & _u32(0x7F_FFFF)
    whole = jnp.where(field == 0, fraction, fraction | _u32(0x80_0000))
    shift = jnp.maximum(lax.clz(whole).astype(jnp.int32) - 8, 0)
    # The barriers here and below keep XLA from copying this into every one of its uses: ten times the code, and
    # seconds of compilation.
    return lax.optimization_barrier((whole << shift.astype(jnp.uint32), jnp.maximum(field, 1) - 150 - shift))


def _shift_right_even(x: jax.Array, count: jax.Array) -> jax.Array:
    """x >> count, rounded half to even; count in [1, 31]."""
    count = count.astype(jnp.uint32)
    low = x & ((_u32(1) << count) - _u32(1))
    half = _u32(1) << (count - _u32(1))
    quotient = x >> count
    up = (low > half) | ((low == half) & (quotient & _u32(1) == _u32(1)))
    return quotient + up.astype(jnp.uint32)


def _assemble(extended: jax.Array, exponent: jax.Array) -> jax.Array:
    """Bits of extended * 2**exponent, correctly rounded; `extended` in [2**25, 2**27), its last bit sticky.

    Overflow gives infinity.
    """
    extra = (extended >> 26).astype(jnp.int32)  # one more bit to drop
    field = exponent + 25 + 127 + extra  # biased exponent of the leading bit
    subnormal = jnp.maximum(1 - field, 0)
    rounded = _shift_right_even(extended, jnp.minimum(2 + extra + subnormal, 31))
    # A carry out of the rounding moves into the exponent field by itself.
    normal = (jnp.maximum(field, 1) - 1).astype(jnp.uint32) << 23
    bits = normal + jnp.where(field >= 1, rounded, jnp.minimum(rounded, _u32(0x80_0000)))
    return jnp.where(field >= 255, _u32(INFINITY_BITS), jnp.minimum(bits, _u32(INFINITY_BITS)))


def divide_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    """a / b, rounded to nearest even, as bits of non-negative floats. x / 0 and inf / x are infinity, x / inf is 0.

    NaN is not handled.
    """
    (ma, ea), (mb, eb) = _significand(a), _significand(b)
    divisor = jnp.maximum(mb, _u32(1))
    borrow = (ma < divisor).astype(jnp.uint32)
    # The device's quotient is off by a few units at most; the remainder, taken modulo 2**32, tells by how many.
    estimate = ma.astype(jnp.float32) / divisor.astype(jnp.float32)
    scale = jnp.where(borrow == 1, jnp.float32(2.0**24), jnp.float32(2.0**23))
    quotient, rest = lax.optimization_barrier(
        _corrected((estimate * scale).astype(jnp.uint32), ma << (_u32(23) + borrow), divisor)
    )
    twice = rest << 1
    tail = jnp.where(twice >= divisor, _u32(2), _u32(0)) | jnp.where((twice != divisor) & (rest != 0), _u32(1), _u32(0))
    result = _assemble((quotient << 2) | tail, ea - eb - borrow.astype(jnp.int32) - 25)
    result = jnp.where((a == 0) | (b == INFINITY_BITS), _u32(0), result)
    return lax.optimization_barrier(jnp.where((b == 0) | (a == INFINITY_BITS), _u32(INFINITY_BITS), result))


def _corrected(estimate: jax.Array, dividend: jax.Array, divisor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(quotient, remainder) from an estimate that is at most 3 off; `dividend` is known modulo 2**32."""
    signed = divisor.astype(jnp.int32)
    quotient = estimate - _u32(3)
    rest = (dividend - quotient * divisor).astype(jnp.int32)  # 0 <= rest < 7 * divisor
    for step in (4, 2, 1):
        up = rest >= signed * step
        quotient, rest = quotient + jnp.where(up, _u32(step), _u32(0)), rest - jnp.where(up, signed * step, 0)
    return quotient, rest.astype(jnp.uint32)


def multiply_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    """a * b, rounded to nearest even, as bits of non-negative floats. NaN and 0 * inf are not handled."""
    ma, ea = _significand(a)
    mb, eb = _significand(b)
    a1, a0 = ma >> 12, ma & _u32(0xFFF)
    b1, b0 = mb >> 12, mb & _u32(0xFFF)
    # ma * mb = high * 2**24 + low, with the cross terms carried.
    middle = a1 * b0 + a0 * b1 + ((a0 * b0) >> 12)
    high = a1 * b1 + (middle >> 12)
    low = ((middle & _u32(0xFFF)) << 12) | ((a0 * b0) & _u32(0xFFF))
    # 2**22 <= high < 2**24: keep 27 bits (24 from high, 3 from low), the rest sticky.
    extended = (high << 3) | (low >> 21)
    extended = lax.optimization_barrier(extended | (low & _u32(0x1F_FFFF) != 0).astype(jnp.uint32))
    result = _assemble(extended, ea + eb + 21)
    result = jnp.where((a == 0) | (b == 0), _u32(0), result)
    return lax.optimization_barrier(jnp.where((a == INFINITY_BITS) | (b == INFINITY_BITS), _u32(INFINITY_BITS), result))


def divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """The IEEE quotient of non-negative float32 numbers, subnormals included, inside any jit on any device."""
    return float_of_bits(divide_bits(magnitude_bits(a), magnitude_bits(b)))


def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    """The IEEE product of non-negative float32 numbers, subnormals included, inside any jit on any device."""
    return float_of_bits(multiply_bits(magnitude_bits(a), magnitude_bits(b)))


def lift(magnitude: jax.Array) -> jax.Array:
    """magnitude * 2**64 from the bits of a non-negative float32; exact for subnormals, infinity above 2**64."""
    subnormal = magnitude.astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0 ** (LIFT - 149))
    normal = float_of_bits(magnitude) * jnp.float32(2.0**LIFT)
    return jnp.where(magnitude < _u32(0x80_0000), subnormal, normal)


def settle(lifted: jax.Array) -> jax.Array:
    """Bits of lifted * 2**-64 for a non-negative float32 that is a multiple of 2**(64-149).

    Exact, subnormals included.
    """
    subnormal = (lifted * jnp.float32(2.0 ** (149 - LIFT))).astype(jnp.int32).astype(jnp.uint32)
    normal = magnitude_bits(lifted) - _u32(LIFT << 23)
    return jnp.where(lifted < jnp.float32(2.0 ** (LIFT - 126)), subnormal, normal)
