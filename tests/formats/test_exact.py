"""Arithmetic on bits. Oracle: NumPy's float32, which is IEEE with subnormals; the comparison is of bits, inside jit.

Not handled, and not tried: NaN anywhere; in `multiply_short_bits` infinity and a first factor of more than 6 bits; in
`divide_bits` dividends of more than 15 bits; negative numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte.formats.elements import E4M3
from halfbyte.formats.exact_float32 import (
    divide_constant_rne,
    divide_rne,
    multiply_rne,
    multiply_short_significand_rne,
    scale_out_of_subnormals,
    subnormal_unit_factor,
)

INFINITY = 0x7F80_0000
divided = jax.jit(divide_constant_rne, static_argnums=0)


def adversarial_bits():
    """Non-negative float32: random ones, every exponent with telling mantissas, subnormals, the ends of each range."""
    rng = np.random.default_rng(5)
    mantissas = [0, 1, 2, 3, 0x7F_FFFF, 0x7F_FFFE, 0x40_0000, 0x3F_FFFF, 0x55_5555, 0x2A_AAAA, 0x28_0000, 0x60_0000]
    return np.concatenate([
        rng.integers(0, INFINITY, 60_000),
        rng.integers(0, 0x100_0000, 20_000),  # subnormal, and just above
        (np.arange(255)[:, None] * 2**23 + np.array(mantissas)).ravel(),
        np.arange(300),
        0x80_0000 + np.arange(-300, 300),
        INFINITY - np.arange(300),
    ]).astype(np.uint32)  # fmt: skip


BITS = adversarial_bits()


@pytest.mark.slow
@pytest.mark.parametrize("top", [1.0, 448.0, 2688.0, 57344.0])
def test_quotients(top):
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        expected = (np.float32(top) / BITS.view(np.float32)).view(np.uint32)
    np.testing.assert_array_equal(divided(top, BITS), expected)


def test_a_dividend_with_too_many_bits_is_refused():
    with pytest.raises(AssertionError):
        divide_constant_rne(1 / 3, jnp.uint32(1))


@pytest.mark.slow
def test_products_with_a_short_factor():
    rng = np.random.default_rng(6)
    finite = BITS[BITS < INFINITY]
    short = (rng.integers(0, 64, finite.size) * np.exp2(rng.integers(-150, 100, finite.size))).astype(np.float32)
    short[~np.isfinite(short)] = 1
    with np.errstate(over="ignore", under="ignore"):
        expected = (short * finite.view(np.float32)).view(np.uint32)
    np.testing.assert_array_equal(jax.jit(multiply_short_significand_rne)(short.view(np.uint32), finite), expected)


@pytest.mark.slow
def test_every_scale_times_a_subnormal_decode_scale():
    """The products that the table of encode scales is made of, where they underflow."""
    scales = np.arange(127, dtype=np.uint8).view(E4M3.dtype).astype(np.float32)
    decode = np.uint32([1, 2, 3, 0x20_0000, 0x2F_FFFF, 0x3F_FFFF, 0x40_0001, 0x7F_FFFF, 0x80_0000, 0x80_0001])
    a, b = (x.ravel() for x in np.meshgrid(scales, decode.view(np.float32)))
    with np.errstate(under="ignore"):
        expected = (a * b).view(np.uint32)
    np.testing.assert_array_equal(
        jax.jit(multiply_short_significand_rne)(a.view(np.uint32), b.view(np.uint32)), expected
    )


def test_times_sees_subnormals():
    """Bits of the product wherever it is a normal number; where it is not, it is far below any grid's half step."""
    rng = np.random.default_rng(7)
    finite = BITS[BITS < INFINITY]
    factor = np.exp2(rng.uniform(-125, 127.99, finite.size)).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        expected = finite.view(np.float32) * factor
    found = np.asarray(jax.jit(lambda b, f: multiply_rne(b, f, subnormal_unit_factor(f)))(finite, factor))
    seen = expected >= np.float32(2.0**-100)
    assert (finite[seen] < 0x80_0000).sum() > 1000
    np.testing.assert_array_equal(found[seen].view(np.uint32), expected[seen].view(np.uint32))
    assert (np.abs(found[~seen]) <= 2.0**-100).all()


def test_lift():
    x = BITS[np.float32(2.0**60).view(np.uint32) > BITS]
    np.testing.assert_array_equal(jax.jit(scale_out_of_subnormals)(x), x.view(np.float32) * np.float32(2.0**64))


def test_divide_rne_below_half_of_the_smallest_subnormal_is_zero():
    """Quotients from 2^-253 to 2^-147: half of the smallest subnormal decides, a tie goes to zero."""
    dividends = (np.arange(0x80_0000, 0x180_0000, 99_991) | np.uint32(1)).astype(np.uint32).view(np.float32)
    divisors = np.exp2(np.float32([23, 24, 25, 26, 60, 127]))
    dividend, divisor = (grid.ravel() for grid in np.meshgrid(dividends, divisors))
    with np.errstate(under="ignore"):
        expected = dividend / divisor
    assert 0 < (expected == 0).mean() < 1 and expected.max() <= 2.0**-147
    quotients = divide_rne(jnp.asarray(dividend.view(np.uint32)), jnp.asarray(divisor.view(np.uint32)))
    np.testing.assert_array_equal(quotients, expected.view(np.uint32))
