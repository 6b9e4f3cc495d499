"""IEEE float32 arithmetic that no compiler can spoil.

Two things stand between NumPy's float32 and a jitted program's. XLA may turn a division into a multiplication by a
reciprocal, or into an approximate instruction; and its CPU backend flushes subnormal numbers to zero. Both change bits
of a quantized tensor. The functions here work on the bit patterns of *non-negative* floats with integer instructions,
which every device executes exactly:

    value = significand * 2**exponent,   2**23 <= significand < 2**24

A quotient starts from a few steps of Newton's iteration and is put right by its remainder. The dividends here (1, and
what an amax is mapped to: 448, 2688, 57344) have few significant bits, so that dividend * 2**k is zero modulo 2**32,
and the remainder is minus quotient * divisor, one 32-bit multiplication. Products are of a number with few bits (a
scale, an element) by any other, and fit in 32 bits.

All of it is meant for the handful of scalars and the 128-entry table that a tensor's scale needs; the exceptions are
`times` and `lift`, which whole tensors go through.
"""

import math

import jax
import jax.numpy as jnp

from .bits import float_of_bits, magnitude_bits

INFINITY_BITS = 0x7F80_0000
MAX_BITS = 0x7F7F_FFFF  # the largest finite float32
LIFT = 64  # small numbers are worked on times 2**64
SHORT_BITS = 7  # significant bits of an element times a block scale, at most
USUAL_BITS = 6  # of an E2M1 element times an E4M3 scale
MIN_EXPONENT = -149  # 2**-149 is the smallest subnormal


def _u32(x: int | jax.Array) -> jax.Array:
    return jnp.asarray(x, jnp.uint32)


def _split(bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(significand in [2**23, 2**24), exponent) of positive finite floats, subnormals included."""
    # Read as an integer, a subnormal's bits are its value in units of 2**-149; converting the integer normalizes it.
    subnormal = bits < _u32(0x80_0000)
    normal = jnp.where(subnormal, magnitude_bits(bits.astype(jnp.int32).astype(jnp.float32)), bits)
    exponent = (normal >> 23).astype(jnp.int32) - jnp.where(subnormal, 150 - MIN_EXPONENT, 150)
    return (normal & _u32(0x7F_FFFF)) | _u32(0x80_0000), exponent


def _shift_right_even(x: jax.Array, count: jax.Array) -> jax.Array:
    """x >> count, rounded half to even; x < 2**30, count in [1, 31]."""
    count = count.astype(jnp.uint32)
    quotient = x >> count
    rest, half = x - (quotient << count), _u32(1) << (count - _u32(1))
    return quotient + ((rest > half) | ((rest == half) & (quotient & _u32(1) == _u32(1)))).astype(jnp.uint32)


def _pack(significand: jax.Array, exponent: jax.Array) -> jax.Array:
    """Bits of significand * 2**exponent, for a significand in [2**23, 2**24], or a smaller one at the exponent -149.

    Too large is infinity.
    """
    field = exponent - MIN_EXPONENT
    bits = (field << 23).astype(jnp.uint32) + significand  # the leading bit adds one to the exponent field
    return jnp.where(field >= 254, _u32(INFINITY_BITS), bits)


def _reciprocal(x: jax.Array) -> jax.Array:
    """1 / x within a few units of the last place, for float32 x in [2**23, 2**24): a guess, then Newton's steps."""
    guess = float_of_bits(_u32(0x7EF3_11C7) - magnitude_bits(x))
    for _ in range(3):
        guess = guess * (jnp.float32(2) - x * guess)
    return guess


def _nearest_quotient(dividend: int | jax.Array, divisor: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(quotient in [2**23, 2**24], remainder, shift): the integer nearest to dividend * 2**shift / divisor.

    Both have 24 bits, a constant dividend at least 9 trailing zeros. There are no ties: half an odd number of that size
    would need an odd factor that the dividend does not have. The first estimate may be a hundred units off.
    """
    above = jnp.int32(dividend) if isinstance(dividend, int) else dividend.astype(jnp.int32)
    borrow = above < divisor.astype(jnp.int32)
    signed, wide = divisor.astype(jnp.int32), divisor.astype(jnp.int32).astype(jnp.float32)
    inverse = _reciprocal(wide)
    number = dividend if isinstance(dividend, int) else above.astype(jnp.float32)
    estimate = inverse * jnp.where(borrow, jnp.float32(number * 2.0**24), jnp.float32(number * 2.0**23))
    quotient = estimate.astype(jnp.int32)
    rest = -(quotient * signed)  # modulo 2**32, where a constant dividend * 2**shift is zero; a few divisors at most
    if not isinstance(dividend, int):
        rest = rest + (above << (borrow.astype(jnp.int32) + 23))
    steps = jnp.round(rest.astype(jnp.float32) * inverse).astype(jnp.int32)
    quotient, rest = quotient + steps, rest - steps * signed  # about half a divisor at most
    last = (2 * rest > signed).astype(jnp.int32) - (2 * rest < -signed).astype(jnp.int32)
    return quotient + last, rest - last * signed, borrow.astype(jnp.int32) + 23


def divide_bits(top: float, bits: jax.Array) -> jax.Array:
    """top / x, rounded to nearest even, from and to bits of non-negative floats, subnormals included.

    `top` is a constant of at most 15 significant bits between 2**-20 and 2**20. top / 0 is infinity, top / infinity is
    0; NaN is not handled.
    """
    fraction, power = math.frexp(top)
    dividend = int(fraction * 2**24)
    assert dividend % 2**9 == 0 and dividend == fraction * 2**24 and abs(power) <= 20, top
    divisor, exponent = _split(bits)
    quotient, rest, shift = _nearest_quotient(dividend, divisor)
    exponent = (power - 24) - exponent - shift
    significand, drop = _significand(quotient, rest, exponent)
    result = jnp.where(bits == _u32(0), _u32(INFINITY_BITS), _pack(significand, exponent + drop))
    return jnp.where(bits == _u32(INFINITY_BITS), _u32(0), result)


def divide(dividend: jax.Array, divisor: jax.Array) -> jax.Array:
    """a / b, rounded to nearest even, from and to bits of non-negative finite floats, with subnormals; 0 for b = 0."""
    (a, a_exponent), (b, b_exponent) = _split(dividend), _split(divisor)
    quotient, rest, shift = _nearest_quotient(a, b)
    exponent = a_exponent - b_exponent - shift
    significand, drop = _significand(quotient, rest, exponent)
    result = _pack(significand, exponent + drop)
    return jnp.where((dividend == _u32(0)) | (divisor == _u32(0)), _u32(0), result)


def _significand(quotient: jax.Array, rest: jax.Array, exponent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(what is packed of a quotient with this remainder, how many bits it drops)."""
    # A subnormal result drops bits; the sign of the remainder keeps a tie from being seen where there is none.
    drop = jnp.clip(MIN_EXPONENT - exponent, 0, 25)
    return _shift_right_even((quotient * 4 + jnp.sign(rest)).astype(jnp.uint32), drop + 2), drop


def multiply_short_bits(short: jax.Array, bits: jax.Array, *, width: int = USUAL_BITS) -> jax.Array:
    """The product of non-negative finite floats, rounded to nearest even, from and to bits, subnormals included.

    `short` has at most `width` significant bits: a scale, an element, or an E2M1 element times an E4M3 scale.
    """
    (a, a_exponent), (b, b_exponent) = _split(short), _split(bits)
    spare = 24 - width
    product, exponent = (a >> spare) * b, a_exponent + b_exponent + spare
    if width > USUAL_BITS:  # a bit less, and whether it was set
        product, exponent = (product >> 1) | (product & _u32(1)), exponent + 1
    drop = jnp.where(product >= _u32(1 << 29), 6, 5)  # of 29 or 30 bits, 24 stay; fewer in a subnormal
    drop = jnp.maximum(drop, MIN_EXPONENT - exponent)
    result = _pack(_shift_right_even(product, jnp.minimum(drop, 31)), exponent + drop)
    return jnp.where((short == _u32(0)) | (bits == _u32(0)), _u32(0), result)


def times(bits: jax.Array, factor: jax.Array, reduced: jax.Array) -> jax.Array:
    """|x| * factor from the bits of |x|, with `reduced` = `reduce_factor(factor)`: IEEE wherever the product is normal.

    A subnormal x counts, even on a device that flushes it; a subnormal product may become 0.
    """
    subnormal = bits < _u32(0x80_0000)
    x = jnp.where(subnormal, bits.astype(jnp.int32).astype(jnp.float32), float_of_bits(bits))
    return x * jnp.where(subnormal, reduced, factor)


def reduce_factor(factor: jax.Array) -> jax.Array:
    """factor * 2**-149, for subnormal numbers in units of 2**-149; 0 where their product is below 2**-100 anyway."""
    bits, down = magnitude_bits(factor), _u32(-MIN_EXPONENT << 23)
    return float_of_bits(jnp.where(bits > down + _u32(1 << 23), bits - down, _u32(0)))


def lift(magnitude: jax.Array) -> jax.Array:
    """magnitude * 2**64 from the bits of a non-negative float32; exact for subnormals, infinity above 2**64."""
    subnormal = magnitude.astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0 ** (LIFT - 149))
    normal = float_of_bits(magnitude) * jnp.float32(2.0**LIFT)
    return jnp.where(magnitude < _u32(0x80_0000), subnormal, normal)
