"""Scale rules. Oracle: `oracle_table.power_codes` (Transformer Engine's conversion), NumPy's float32 for the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle_table as table
import pytest

from halfbyte import formats
from halfbyte.formats import E1M2, E2M1, E4M3, E5M2
from halfbyte.formats.block_view import BlockView
from halfbyte.formats.exact_float32 import magnitude_bits
from halfbyte.formats.outer_scales import scales_from_amax_bits
from halfbyte.formats.qtensor import quantize_to_grid
from halfbyte.formats.scale_rules import (
    POWER_FLOOR,
    POWER_UP,
    TENSOR_ONLY,
    TWO_LEVEL,
    BlockMagnitudes,
    E8M0CeilScale,
    TwoLevelScale,
    _two_level,
)


def scale_codes(rule, element, amax):
    """Codes of blocks with these largest magnitudes."""
    view = BlockView((amax.size, 1), (1,))

    def find(bits):
        return rule.compute_scales(BlockMagnitudes(bits[:, None], bits, jnp.max(bits), view), element).codes

    return np.asarray(jax.jit(find)(amax.view(np.uint32)))


def magnitudes(element):
    """Every bfloat16, and the float32 around every power of two times the largest element."""
    narrow = (np.arange(0x8000, dtype=np.uint32) << 16).view(np.float32)
    near = np.float32(element.max).view(np.uint32) & 0x7F_FFFF
    exponents = np.arange(255, dtype=np.uint32)[:, None] << 23
    edges = exponents + np.arange(near - 8, near + 9, dtype=np.uint32)
    return np.concatenate([narrow, edges.ravel().view(np.float32)])


@pytest.mark.parametrize("rule", [POWER_UP, POWER_FLOOR], ids=["up", "floor"])
@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2], ids=lambda e: e.name)
def test_power_scales_of_every_amax_equal_table(element, rule):
    """Zero, subnormal, infinite and NaN amaxes among them."""
    amax = magnitudes(element)
    assert np.isnan(amax).any() and np.isinf(amax).any() and (amax == 0).any()
    expected = table.power_codes(amax, element.name, "up" if rule is POWER_UP else "floor")
    np.testing.assert_array_equal(scale_codes(rule, element, amax), expected)


@pytest.mark.slow
def test_outer_scales_subnormal_equal_float32():
    """S of the largest numbers where they are mapped to less than 4; factors of block scales that are mapped to less
    than four times the largest of them (four over six).
    """
    amax = np.float32([3e38, 3.2e38, 3.4e38, 1.0])
    for rule, element in ((TENSOR_ONLY, E1M2), (TwoLevelScale(scale_top=256.0), E2M1)):
        encode = np.minimum(np.float32(rule.tensor_amax_target(element)) / amax, np.finfo(np.float32).max)
        found = jax.jit(jax.vmap(lambda a, rule=rule, element=element: rule.tensor_scales(a, element)))(amax)
        np.testing.assert_array_equal(np.asarray(found.encode).view(np.uint32), encode.view(np.uint32))
        np.testing.assert_array_equal(found.decode, np.float32(1) / encode)
    bits = jnp.asarray(amax[:3].view(np.uint32))
    decode, _, table = jax.jit(jax.vmap(lambda b: _two_level(b, TwoLevelScale(scale_top=256.0), E2M1)))(bits)
    values = np.nan_to_num(E4M3.magnitudes(), nan=0.0)
    with np.errstate(divide="ignore"):
        expected = np.minimum(np.float32(1) / (values * np.asarray(decode)[:, None]), np.finfo(np.float32).max)
    assert (expected[expected > 0] < 2.0**-126).any()
    np.testing.assert_array_equal(np.asarray(table).view(np.uint32), expected.view(np.uint32))


@pytest.mark.slow(fast_cases=["nvfp4_46_mse", "nvfp4_46_sr"])
@pytest.mark.parametrize("fmt", [formats.NVFP4, formats.NVFP4_46_MSE, formats.NVFP4_46_SR], ids=lambda fmt: fmt.name)
def test_quantize_largest_numbers_scaled_down_keep_codes(fmt):
    """Four over six with headroom has encode scales there that are subnormal, which a CPU flushes."""
    x = np.random.default_rng(0).uniform(-1, 1, (16, 64)).astype(np.float32) * np.finfo(np.float32).max
    x[:, ::16] = np.finfo(np.float32).max
    noise = np.random.default_rng(1).integers(0, 256, x.shape, np.uint8)
    rounding = "midpoint" if fmt is formats.NVFP4_46_SR else "rne"

    @jax.jit
    def codes(x):
        grid = quantize_to_grid(x, fmt, noise=noise, rounding=rounding)
        return grid.codes, grid.scales.codes

    large, small = codes(x), codes(x * np.float32(2.0**-100))  # where errors are not lifted
    np.testing.assert_array_equal(large[0], small[0])
    np.testing.assert_array_equal(large[1], small[1])


def test_scale_rules_with_equal_fields_are_equal():
    assert E8M0CeilScale() == POWER_UP != POWER_FLOOR and TwoLevelScale() == TWO_LEVEL
    assert len({POWER_UP, E8M0CeilScale(), POWER_FLOOR, TWO_LEVEL, TwoLevelScale(), TENSOR_ONLY}) == 4


def test_scale_rules_amax_target():
    assert (
        TWO_LEVEL.tensor_amax_target(E2M1) == 2688
        and TENSOR_ONLY.tensor_amax_target(E5M2) == 57344
        and POWER_UP.tensor_amax_target(E4M3) is None
    )
    assert TWO_LEVEL.candidates(E2M1) == (6.0,)


def test_outer_scales_of_zero_inf_or_nan_amax_are_one():
    amax = jnp.float32([0.0, 6.0, jnp.inf, jnp.nan])
    encode, decode = scales_from_amax_bits(magnitude_bits(amax), 448.0 * 6.0)
    np.testing.assert_array_equal(encode, np.float32([1, 448, 1, 1]))
    np.testing.assert_array_equal(decode, np.float32([1, 1, 1, 1]) / np.float32([1, 448, 1, 1]))


@pytest.mark.parametrize(
    "fmt, rounding",
    [(formats.NVFP4_QUARTET, "away"), (formats.NVFP4_TETRA, "midpoint"), (formats.NVFP4_EDEN, "away")],
    ids=lambda p: str(p),
)
def test_division_rules_equal_table(fmt, rounding):
    """Of normal numbers and a block of zeros, and of 1e-35 next to 3e38, where a block scale is far below the smallest
    subnormal: its codes are zero."""
    x = np.random.default_rng(7).standard_normal((2, 8, 128)).astype(np.float32)
    x[0, 3, 16:32], x[1] = 0, 0
    x[1, 0, 0], x[1, 0, 32:48] = 3e38, 1e-35
    # Where (b / d) / 6 and (b / 6) / d round to different scales.
    x[1, 2, 0], x[1, 2, 16:112:16] = (
        float.fromhex("0x1.a30fecp0"),
        float.fromhex("0x1.94187ep-13") * 2.0 ** np.arange(6),
    )
    noise = np.random.default_rng(8).integers(0, 256, x.shape[1:], np.uint8)

    @jax.jit
    @jax.vmap
    def run(x):
        grid = quantize_to_grid(x, fmt, noise=noise, rounding=rounding)
        return grid.codes, grid.scales.codes

    codes, scales = run(x)
    for i, tensor in enumerate(x):
        want = table.quantize(tensor, fmt.name, rounding=rounding, noise=noise)
        np.testing.assert_array_equal(codes[i], want.codes)
        np.testing.assert_array_equal(scales[i].reshape(want.scales.shape), want.scales)
    assert not codes[1, 0, 16:].any()
