"""Codecs of one element. Oracle: *exhaustive* against ml_dtypes, every code and every rounding boundary."""

import format_oracle as oracle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from other_formats import E2M3, E3M2

from halfbyte.formats import E2M1, E4M3, E5M2
from halfbyte.formats.elements import E8M0_DTYPE, decode, decode_e8m0, encode, round_nearest
from halfbyte.formats.exact_float32 import bitcast_to_uint32, copy_sign

ELEMENTS = [E2M1, E2M3, E3M2, E4M3, E5M2]


def round_to(element, x):
    """x on the element's grid: the value that `encode` gives the code of."""
    return copy_sign(round_nearest(element, jnp.abs(x)).value, bitcast_to_uint32(x))


decoded, encoded, rounded = (jax.jit(f, static_argnums=0) for f in (decode, encode, round_to))


def bits(x):
    """float32 as integers, all NaN alike, signs of zero apart."""
    x = np.asarray(x, np.float32)
    return np.where(np.isnan(x), np.uint32(0x7FC0_0000), x.view(np.uint32))


def every_code(element):
    return np.arange(2**element.bits, dtype=np.uint8)


def saturated(element, codes):
    """ml_dtypes' codes with its infinities and NaN made the largest finite code, as saturation does."""
    magnitude, sign = codes & (element.sign_bit - 1), codes & element.sign_bit
    return np.minimum(magnitude, len(oracle.grid(element.name)) - 1) | sign


def boundaries(element):
    """Every value, every midpoint, their neighbours among the float32, and what lies outside; both signs."""
    grid = oracle.grid(element.name).astype(np.float32)
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, grid[-1] * np.float32([1.01, 1.2, 2, 1e9, 1e30])])
    near = [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-1))]
    x = np.abs(np.concatenate([*near, np.float32([np.inf, 1e-45, 1.1754944e-38, 3.4028235e38])]))
    return np.concatenate([x, -x])


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
class TestSignedElements:
    @pytest.mark.slow(fast_cases=["E2M1"])
    def test_every_code_decodes_as_in_ml_dtypes(self, element):
        codes = every_code(element)
        np.testing.assert_array_equal(bits(decoded(element, codes)), bits(codes.view(element.dtype).astype(np.float32)))

    def test_the_table_of_magnitudes(self, element):
        values = every_code(element)[: element.sign_bit].view(element.dtype).astype(np.float32)
        np.testing.assert_array_equal(bits(element.magnitudes()), bits(values))

    @pytest.mark.slow(fast_cases=["E2M1"])
    def test_every_value_encodes_to_its_code(self, element):
        codes = every_code(element)
        values = codes.view(element.dtype).astype(np.float32)
        made = np.asarray(encoded(element, values))
        number = np.isfinite(values)
        np.testing.assert_array_equal(made[number], codes[number])
        # An infinity saturates; a NaN is the largest code of its sign.
        np.testing.assert_array_equal(made[np.isinf(values)], saturated(element, codes[np.isinf(values)]))
        np.testing.assert_array_equal(made[np.isnan(values)] & (element.sign_bit - 1), element.sign_bit - 1)

    @pytest.mark.slow(fast_cases=["E2M1"])
    def test_boundaries_round_as_in_ml_dtypes(self, element):
        x = boundaries(element)
        inside = np.clip(x, -element.max, element.max)
        expected = inside.astype(element.dtype)
        np.testing.assert_array_equal(encoded(element, x), expected.view(np.uint8))
        np.testing.assert_array_equal(bits(rounded(element, x)), bits(expected.astype(np.float32)))

    def test_boundaries_round_as_a_search_in_the_table(self, element):
        x = boundaries(element)
        np.testing.assert_array_equal(encoded(element, x), oracle.code_of(x, element.name))

    @pytest.mark.slow
    def test_random_numbers_round_as_in_ml_dtypes(self, element):
        rng = np.random.default_rng(3)
        exponents = rng.uniform(np.log2(element.min_normal) - 6, np.log2(element.max) + 3, 50_000)
        x = (np.exp2(exponents) * rng.choice([-1, 1], exponents.size)).astype(np.float32)
        expected = np.clip(x, -element.max, element.max).astype(element.dtype)
        np.testing.assert_array_equal(encoded(element, x), expected.view(np.uint8))
        np.testing.assert_array_equal(bits(rounded(element, x)), bits(expected.astype(np.float32)))

    @pytest.mark.slow(fast_cases=["E2M1"])
    def test_nan(self, element):
        x = np.float32([np.nan, -np.nan])
        codes, values = np.asarray(encoded(element, x)), np.asarray(rounded(element, x))
        np.testing.assert_array_equal(codes, [element.sign_bit - 1, 2 * element.sign_bit - 1])
        if element.has_nan:
            assert np.isnan(values).all()
        else:
            np.testing.assert_array_equal(values, [element.max, -element.max])

    def test_facts(self, element):
        assert element.max == float(ml_dtypes.finfo(element.dtype).max)
        assert element.min_normal == float(ml_dtypes.finfo(element.dtype).smallest_normal)
        assert 2.0**element.max_exponent <= element.max < 2.0 ** (element.max_exponent + 1)


class TestE8M0:
    def test_every_code_decodes_as_in_ml_dtypes(self):
        codes = np.arange(256, dtype=np.uint8)
        found = np.asarray(jax.jit(decode_e8m0)(codes))  # code 0 is a subnormal float32
        np.testing.assert_array_equal(bits(found), bits(codes.view(E8M0_DTYPE).astype(np.float32)))


def test_strict_dtypes_of_results():
    x = jnp.ones((2, 3), jnp.float32)
    assert encode(E4M3, x).dtype == jnp.uint8
    assert decode(E4M3, encode(E4M3, x)).dtype == jnp.float32
