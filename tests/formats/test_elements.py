"""Elements inside jit: decoding, and every rounding. Oracle: `oracle_table`, for all codes, every bfloat16 and edge."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle_table as table
import pytest
from other_formats import E2M3, E3M2

from halfbyte.formats import E2M1, E4M3, E5M2
from halfbyte.formats.elements import (
    E8M0_DTYPE,
    UE5M3,
    decode,
    decode_e8m0,
    encode,
    round_half_away,
    round_nearest,
    round_stochastic_e2m1,
    round_stochastic_midpoint,
)

ELEMENTS = [E2M1, E2M3, E3M2, E4M3, E5M2, UE5M3]
EVERY_BYTE = np.arange(256, dtype=np.uint8)


def bits(x):
    """float32 as integers, all NaN alike, signs of zero apart."""
    x = np.asarray(x, np.float32)
    return np.where(np.isnan(x), np.uint32(0x7FC0_0000), x.view(np.uint32))


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_element_every_code_and_edge_equals_table(element):
    """Codes of both signs, values on the grid, NaN (the largest code of its sign), and the tables of values."""
    name, x = element.name, table.edges(element.name)
    codes = np.arange(min(2 * element.sign_bit, 256), dtype=np.uint8)
    made = jax.jit(lambda x, c: (*round_nearest(element, jnp.abs(x)), encode(element, x), decode(element, c)))
    value, magnitude, signed, decoded = made(x, codes)
    expected = table.round_magnitude(np.abs(x), name)
    np.testing.assert_array_equal(magnitude, expected)
    np.testing.assert_array_equal(bits(value), bits(table.decode(expected, name)))
    np.testing.assert_array_equal(bits(decoded), bits(table.decode(codes, name)))
    np.testing.assert_array_equal(bits(element.magnitudes()), bits(table.decode(np.arange(element.sign_bit), name)))
    if element is UE5M3:  # of scales alone, which have no sign
        return
    np.testing.assert_array_equal(signed, table.encode(x, name))
    assert element.max == float(ml_dtypes.finfo(element.dtype).max) == table.grid(name)[-1]
    assert element.min_normal == float(ml_dtypes.finfo(element.dtype).smallest_normal)
    assert 2.0**element.max_exponent <= element.max < 2.0 ** (element.max_exponent + 1)


@pytest.mark.parametrize("rounding", ["stochastic", "midpoint", "away"])
def test_e2m1_with_every_byte_equals_table(rounding):
    a = np.abs(table.edges("E2M1")[2**16 :: 2])
    a = np.concatenate([a[~np.isnan(a)], np.abs(np.random.default_rng(2).standard_normal(400) * 3)]).astype(np.float32)
    a, byte = np.broadcast_arrays(a[:, None], EVERY_BYTE)
    rounded = {
        "stochastic": round_stochastic_e2m1,
        "midpoint": lambda a, byte: round_stochastic_midpoint(E2M1, a, byte),
        "away": lambda a, byte: round_half_away(E2M1, a),
    }[rounding]
    value, code = jax.jit(rounded)(a, byte)
    expected = table.round_magnitude(a, "E2M1", rounding, byte)
    np.testing.assert_array_equal(code, expected)
    np.testing.assert_array_equal(value, table.decode(expected, "E2M1"))


def test_stochastic_mean_is_below_by_part_of_a_256th_step():
    """mean = a - step * frac(256 a / step) / 256 over all bytes: never up, on the grid exactly a. Below 1/512 it is 0,
    where the float32 sum with byte 255 does not round up."""
    a = np.concatenate([np.arange(6 * 2**7 + 1) / 2**7, np.arange(6 * 2**5) / 2**5 + 3 * 2.0**-11]).astype(np.float32)
    small = np.float32([0, 1e-45, 1e-10, 1 / 1024, 1 / 512 - 2.0**-25, 1 / 512, 1 / 512 - 2.0**-28])
    noise = np.broadcast_to(EVERY_BYTE, (a.size + small.size, 256))
    value, _ = jax.jit(round_stochastic_e2m1)(np.concatenate([a, small])[:, None], noise)
    means = np.asarray(value, np.float64).mean(1)
    step = np.where(a < 2, 0.5, np.where(a < 4, 1.0, 2.0))
    exact = a.astype(np.float64)
    np.testing.assert_array_equal(means[: a.size], exact - step / 256 * np.mod(exact / step * 256, 1))
    np.testing.assert_array_equal(means[a.size :], [0] * 5 + [0.5 / 256] * 2)


def test_e8m0_every_code_equals_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)  # code 0 is a subnormal float32
    np.testing.assert_array_equal(bits(jax.jit(decode_e8m0)(codes)), bits(codes.view(E8M0_DTYPE).astype(np.float32)))


def test_encode_and_decode_keep_strict_dtypes():
    codes = jax.eval_shape(lambda x: encode(E4M3, x), jax.ShapeDtypeStruct((2, 3), jnp.float32))
    assert codes.dtype == jnp.uint8
    assert jax.eval_shape(lambda c: decode(E4M3, c), codes).dtype == jnp.float32
