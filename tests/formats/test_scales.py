"""Scale rules. Oracle: Transformer Engine's conversion as its kernels write it, in NumPy (format_oracle.up_scales)."""

import format_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte import formats
from halfbyte.formats import E1M2, E2M1, E4M3, E5M2
from halfbyte.formats.quantize import to_grid
from halfbyte.formats.scales import POWER_FLOOR, POWER_UP, TENSOR_ONLY, TWO_LEVEL, Blocks, PowerUp, TwoLevel, _two_level
from halfbyte.formats.views import BlockView


def scale_codes(rule, element, amax):
    """Codes of blocks with these largest magnitudes."""
    view = BlockView((amax.size, 1), (1,))

    def find(bits):
        return rule.find(Blocks(bits[:, None], bits, jnp.max(bits), view), element).codes

    return np.asarray(jax.jit(find)(amax.view(np.uint32)))


def magnitudes(element):
    """Every bfloat16, and the float32 around every power of two times the largest element."""
    narrow = (np.arange(0x8000, dtype=np.uint32) << 16).view(np.float32)
    near = np.float32(oracle.TOP[element.name] / 2.0 ** oracle.EMAX[element.name]).view(np.uint32) & 0x7F_FFFF
    exponents = np.arange(255, dtype=np.uint32)[:, None] << 23
    edges = exponents + np.arange(near - 8, near + 9, dtype=np.uint32)
    return np.concatenate([narrow, edges.ravel().view(np.float32)])


@pytest.mark.slow
@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2], ids=lambda e: e.name)
def test_powers_rounded_up_are_transformer_engines(element):
    """Zero, subnormal, infinite and NaN maxima among them."""
    amax = magnitudes(element)
    assert np.isnan(amax).any() and np.isinf(amax).any() and (amax == 0).any()
    np.testing.assert_array_equal(scale_codes(POWER_UP, element, amax), oracle.up_scales(amax, element.name))


@pytest.mark.slow
def test_scales_that_are_subnormal():
    """S of the largest numbers where they are mapped to less than 4; factors of block scales that are mapped to less
    than four times the largest of them (four over six).
    """
    amax = np.float32([3e38, 3.2e38, 3.4e38, 1.0])
    for rule, element in ((TENSOR_ONLY, E1M2), (TwoLevel(scale_top=256.0), E2M1)):
        encode = np.minimum(np.float32(rule.top(element)) / amax, np.finfo(np.float32).max)
        found = jax.jit(jax.vmap(lambda a, rule=rule, element=element: rule.tensor_scales(a, element)))(amax)
        np.testing.assert_array_equal(np.asarray(found.encode).view(np.uint32), encode.view(np.uint32))
        np.testing.assert_array_equal(found.decode, np.float32(1) / encode)
    bits = jnp.asarray(amax[:3].view(np.uint32))
    decode, _, table = jax.jit(jax.vmap(lambda b: _two_level(b, TwoLevel(scale_top=256.0), E2M1)))(bits)
    values = np.nan_to_num(E4M3.magnitudes(), nan=0.0)
    with np.errstate(divide="ignore"):
        expected = np.minimum(np.float32(1) / (values * np.asarray(decode)[:, None]), np.finfo(np.float32).max)
    assert (expected[expected > 0] < 2.0**-126).any()
    np.testing.assert_array_equal(np.asarray(table).view(np.uint32), expected.view(np.uint32))


@pytest.mark.slow(fast_cases=["nvfp4_46_sr"])
@pytest.mark.parametrize("fmt", [formats.NVFP4, formats.NVFP4_46_MSE, formats.NVFP4_46_SR], ids=lambda fmt: fmt.name)
def test_the_largest_numbers_have_the_codes_of_the_same_a_million_times_smaller(fmt):
    """Four over six with headroom has encode scales there that are subnormal, which a CPU flushes."""
    x = np.random.default_rng(0).uniform(-1, 1, (16, 64)).astype(np.float32) * np.finfo(np.float32).max
    x[:, ::16] = np.finfo(np.float32).max
    noise = np.random.default_rng(1).integers(0, 256, x.shape, np.uint8)
    rounding = "midpoint" if fmt is formats.NVFP4_46_SR else "rne"

    @jax.jit
    def codes(x):
        grid = to_grid(x, fmt, noise=noise, rounding=rounding)
        return grid.codes, grid.scales.codes

    large, small = codes(x), codes(x * np.float32(2.0**-20))
    np.testing.assert_array_equal(large[0], small[0])
    np.testing.assert_array_equal(large[1], small[1])


def test_rules_are_values():
    assert PowerUp() == POWER_UP != POWER_FLOOR and TwoLevel() == TWO_LEVEL
    assert len({POWER_UP, PowerUp(), POWER_FLOOR, TWO_LEVEL, TwoLevel(), TENSOR_ONLY}) == 4


def test_what_an_amax_is_mapped_to():
    assert TWO_LEVEL.top(E2M1) == 2688 and TENSOR_ONLY.top(E5M2) == 57344 and POWER_UP.top(E4M3) is None
    assert TWO_LEVEL.candidates(E2M1) == (6.0,)
