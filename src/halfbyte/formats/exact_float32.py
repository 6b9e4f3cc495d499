"""IEEE float32 arithmetic and bit casts whose bits no compiler changes.

XLA may turn a division into a multiplication by a reciprocal, or into an approximate instruction; its CPU backend
flushes subnormal numbers to zero; and it may remove a cast to a narrower type and back. Each changes bits of a
quantized tensor. The functions here work on the bit patterns of *non-negative* floats with integer instructions, which
every device executes exactly:

    value = significand * 2**exponent,   2**23 <= significand < 2**24

Divisions are for the few scalars and the 128-entry table that a tensor's scale needs. The bit casts, `multiply_rne` and
`scale_out_of_subnormals` also run over whole tensors.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

MAGNITUDE_MASK = 0x7FFF_FFFF
EXPONENT_MASK = 0x7F80_0000
SIGN_MASK = 0x8000_0000
INFINITY_BITS = 0x7F80_0000
MAX_BITS = 0x7F7F_FFFF  # the largest finite float32
SUBNORMAL_LIFT_EXPONENT = 64  # small values are multiplied by 2**64
MAX_SHORT_SIGNIFICAND_BITS = 7  # at most, of an element times a block scale
DEFAULT_SHORT_SIGNIFICAND_BITS = 6  # of an E2M1 element times an E4M3 scale
MIN_EXPONENT = -149  # 2**-149 is the smallest subnormal


def bitcast_to_uint32(x: jax.Array) -> jax.Array:
    """Returns the uint32 bits of x as float32; bfloat16 is widened by a shift, so that subnormals survive."""
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def magnitude_bits(x: jax.Array) -> jax.Array:
    """Returns the uint32 bits of |x|. Their integer order is that of the magnitudes, with NaN above infinity."""
    return bitcast_to_uint32(x) & jnp.uint32(MAGNITUDE_MASK)


def bitcast_to_float32(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def copy_sign(magnitude: jax.Array, bits: jax.Array) -> jax.Array:
    """Returns `magnitude` (non-negative float32) with the sign of the float32 `bits`; -0.0 keeps its sign."""
    return bitcast_to_float32(lax.bitcast_convert_type(magnitude, jnp.uint32) | (bits & jnp.uint32(SIGN_MASK)))


def round_bfloat16(x: jax.Array) -> jax.Array:
    """Rounds float32 x half to even to a bfloat16 value, still float32.

    XLA keeps `reduce_precision`, where it may remove a cast there and back.
    """
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def divide_constant_rne(top: float, bits: jax.Array) -> jax.Array:
    """Returns top / x, rounded to nearest even, from and to bits of non-negative floats, subnormals included.

    `top` is a constant of at most 15 significant bits between 2**-20 and 2**20. top / 0 is infinity, top / infinity is
    0; NaN is not handled.
    """
    fraction, power = math.frexp(top)
    dividend = int(fraction * 2**24)
    assert dividend % 2**9 == 0 and dividend == fraction * 2**24 and abs(power) <= 20, top
    divisor, exponent = _split(bits)
    quotient, remainder, shift = _nearest_quotient(dividend, divisor)
    exponent = (power - 24) - exponent - shift
    significand, drop = _significand(quotient, remainder, exponent)
    result = jnp.where(bits == _u32(0), _u32(INFINITY_BITS), _pack(significand, exponent + drop))
    return jnp.where(bits == _u32(INFINITY_BITS), _u32(0), result)


def divide_rne(dividend: jax.Array, divisor: jax.Array) -> jax.Array:
    """Returns a / b, rounded to nearest even, from and to bits of non-negative finite floats; 0 for b = 0."""
    (a, a_exponent), (b, b_exponent) = _split(dividend), _split(divisor)
    quotient, remainder, shift = _nearest_quotient(a, b)
    exponent = a_exponent - b_exponent - shift
    significand, drop = _significand(quotient, remainder, exponent)
    # Below 2**-151 `drop` ends at 25 bits: the significand is 0, and the exponent must not wrap.
    result = _pack(significand, jnp.maximum(exponent + drop, MIN_EXPONENT))
    return jnp.where((dividend == _u32(0)) | (divisor == _u32(0)), _u32(0), result)


def multiply_short_significand_rne(
    short: jax.Array, bits: jax.Array, *, width: int = DEFAULT_SHORT_SIGNIFICAND_BITS
) -> jax.Array:
    """Returns the product of non-negative finite floats, rounded to nearest even, from and to bits, with subnormals.

    `short` has at most `width` significant bits (a scale, an element, or an E2M1 element times an E4M3 scale), so that
    the product of significands fits in 32 bits.
    """
    (a, a_exponent), (b, b_exponent) = _split(short), _split(bits)
    spare = 24 - width
    product, exponent = (a >> spare) * b, a_exponent + b_exponent + spare
    if width > DEFAULT_SHORT_SIGNIFICAND_BITS:  # drop one bit, kept as a sticky bit
        product, exponent = (product >> 1) | (product & _u32(1)), exponent + 1
    drop = jnp.where(product >= _u32(1 << 29), 6, 5)  # of 29 or 30 bits 24 are kept; fewer in a subnormal result
    drop = jnp.maximum(drop, MIN_EXPONENT - exponent)
    result = _pack(_shift_right_even(product, jnp.minimum(drop, 31)), exponent + drop)
    return jnp.where((short == _u32(0)) | (bits == _u32(0)), _u32(0), result)


def multiply_rne(bits: jax.Array, factor: jax.Array, reduced: jax.Array) -> jax.Array:
    """Returns |x| * factor from the bits of |x|; `reduced` is `subnormal_unit_factor(factor)`.

    IEEE wherever the product is normal. A subnormal x counts, even on a device that flushes it; a subnormal product may
    become 0.
    """
    subnormal = bits < _u32(0x80_0000)
    x = jnp.where(subnormal, bits.astype(jnp.int32).astype(jnp.float32), bitcast_to_float32(bits))
    return x * jnp.where(subnormal, reduced, factor)


def subnormal_unit_factor(factor: jax.Array) -> jax.Array:
    """Returns factor * 2**-149, for subnormals in units of 2**-149; 0 where their product is below 2**-100 anyway."""
    bits, down = magnitude_bits(factor), _u32(-MIN_EXPONENT << 23)
    return bitcast_to_float32(jnp.where(bits > down + _u32(1 << 23), bits - down, _u32(0)))


def scale_out_of_subnormals(magnitude: jax.Array) -> jax.Array:
    """Returns magnitude * 2**64 from the bits of a non-negative float32; exact for subnormals, infinity above 2**64."""
    subnormal = magnitude.astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0 ** (SUBNORMAL_LIFT_EXPONENT - 149))
    normal = bitcast_to_float32(magnitude) * jnp.float32(2.0**SUBNORMAL_LIFT_EXPONENT)
    return jnp.where(magnitude < _u32(0x80_0000), subnormal, normal)


def _split(bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (significand in [2**23, 2**24), exponent) of positive finite floats, subnormals included."""
    # Read as an integer, a subnormal's bits are its value in units of 2**-149; converting the integer normalizes it.
    subnormal = bits < _u32(0x80_0000)
    normal = jnp.where(subnormal, magnitude_bits(bits.astype(jnp.int32).astype(jnp.float32)), bits)
    exponent = (normal >> 23).astype(jnp.int32) - jnp.where(subnormal, 150 - MIN_EXPONENT, 150)
    return (normal & _u32(0x7F_FFFF)) | _u32(0x80_0000), exponent


def _nearest_quotient(dividend: int | jax.Array, divisor: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (quotient in [2**23, 2**24], remainder, shift): the integer nearest to dividend * 2**shift / divisor.

    Both have 24 bits, a constant dividend at least 9 trailing zeros: those of callers (1, and amax targets as 448, 2688
    and 57344) have few significant bits, so that dividend * 2**shift is zero modulo 2**32 and the remainder is minus
    quotient * divisor, one 32-bit multiplication. There are no ties: half an odd number of that size would need an odd
    factor that the dividend does not have. The first estimate, by Newton's iteration, may be a hundred units off.
    """
    numerator = jnp.int32(dividend) if isinstance(dividend, int) else dividend.astype(jnp.int32)
    borrow = numerator < divisor.astype(jnp.int32)
    divisor_i32, divisor_f32 = divisor.astype(jnp.int32), divisor.astype(jnp.int32).astype(jnp.float32)
    inverse = _reciprocal(divisor_f32)
    numerator_f32 = dividend if isinstance(dividend, int) else numerator.astype(jnp.float32)
    estimate = inverse * jnp.where(borrow, jnp.float32(numerator_f32 * 2.0**24), jnp.float32(numerator_f32 * 2.0**23))
    quotient = estimate.astype(jnp.int32)
    # Modulo 2**32, where a constant dividend * 2**shift is zero; at most a few divisors.
    remainder = -(quotient * divisor_i32)
    if not isinstance(dividend, int):
        remainder = remainder + (numerator << (borrow.astype(jnp.int32) + 23))
    correction = jnp.round(remainder.astype(jnp.float32) * inverse).astype(jnp.int32)
    quotient, remainder = quotient + correction, remainder - correction * divisor_i32  # at most about half a divisor
    final = (2 * remainder > divisor_i32).astype(jnp.int32) - (2 * remainder < -divisor_i32).astype(jnp.int32)
    return quotient + final, remainder - final * divisor_i32, borrow.astype(jnp.int32) + 23


def _reciprocal(x: jax.Array) -> jax.Array:
    """Returns 1 / x within a few units in the last place, for float32 x in [2**23, 2**24), by Newton's iteration."""
    estimate = bitcast_to_float32(_u32(0x7EF3_11C7) - magnitude_bits(x))
    for _ in range(3):
        estimate = estimate * (jnp.float32(2) - x * estimate)
    return estimate


def _significand(quotient: jax.Array, remainder: jax.Array, exponent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (significand to pack of a quotient with this remainder, number of bits dropped)."""
    # A subnormal result drops bits. The sign of the remainder is a sticky bit: it prevents a false tie.
    drop = jnp.clip(MIN_EXPONENT - exponent, 0, 25)
    return _shift_right_even((quotient * 4 + jnp.sign(remainder)).astype(jnp.uint32), drop + 2), drop


def _pack(significand: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns the bits of significand * 2**exponent; infinity if too large.

    The significand is in [2**23, 2**24], or smaller at the exponent -149.
    """
    field = exponent - MIN_EXPONENT
    bits = (field << 23).astype(jnp.uint32) + significand  # the leading bit adds one to the exponent field
    return jnp.where(field >= 254, _u32(INFINITY_BITS), bits)


def _shift_right_even(x: jax.Array, count: jax.Array) -> jax.Array:
    """Returns x >> count, rounded half to even; x < 2**30, count in [1, 31]."""
    count = count.astype(jnp.uint32)
    quotient = x >> count
    remainder, half = x - (quotient << count), _u32(1) << (count - _u32(1))
    return quotient + ((remainder > half) | ((remainder == half) & (quotient & _u32(1) == _u32(1)))).astype(jnp.uint32)


def _u32(x: int | jax.Array) -> jax.Array:
    return jnp.asarray(x, jnp.uint32)
