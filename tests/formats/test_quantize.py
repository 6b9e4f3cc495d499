"""Quantization of tensors. Oracle: the independent NumPy definitions of format_oracle.py, inside jit, bit for bit."""

import functools

import format_oracle as oracle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from other_formats import MXFP6

from halfbyte.formats import (
    BF16,
    FORMATS,
    FP8,
    FP8_E5M2,
    MXFP4,
    MXFP4_FLOOR,
    MXFP8,
    MXFP8_E5M2,
    NVFP4,
    BlockFormat,
    all_finite,
    amax_of,
    floor_scales,
    quantize,
    quantize_to_grid,
)

KEY = np.array([0x0123_4567, 0x89AB_CDEF], np.uint32)
MX = {"mxfp4": "E2M1", "mxfp6": "E3M2", "mxfp8": "E4M3", "mxfp8_e5m2": "E5M2"}


@functools.cache
def compiled(fmt, block="1d", rounding="rne", axis=-1):
    """One program a policy: tensors [cases, M, N] one after the other."""

    def run(x, key):
        return quantize(x, fmt, block=block, rounding=rounding, axis=axis, key=jax.random.wrap_key_data(key))

    return jax.jit(lambda xs: jax.lax.map(lambda x: run(x, KEY), xs))


dequantized = jax.jit(lambda q: q.dequantize())


def as_bytes(scales):
    return np.asarray(scales).view(np.uint8)


def same(found, expected, what):
    np.testing.assert_array_equal(np.asarray(found), expected, err_msg=what)


@pytest.mark.slow(fast_cases=["1d-stochastic", "2d-rne"])
@pytest.mark.parametrize("rounding", ["rne", "stochastic"])
@pytest.mark.parametrize("block", ["1d", "2d"])
def test_nvfp4(hard_tensors, block, rounding):
    made = compiled(NVFP4, block, rounding)(hard_tensors)
    noise = None
    if rounding == "stochastic":
        words = oracle.key_words(*KEY)
        noise = oracle.random_bytes(lambda n: oracle.hash_words(n, *words), hard_tensors.shape[1:])
    for i, x in enumerate(hard_tensors):
        codes, scales, amax, encode = oracle.nvfp4(x, square=block == "2d", noise=noise)
        same(as_bytes(made.scales[i]), scales, f"scales of case {i}")
        same(made.codes[i], codes, f"codes of case {i}")
        same(made.amax[i], amax, f"amax of case {i}")
        with np.errstate(under="ignore"):
            same(
                np.asarray(made.decode_scale[i]).view(np.uint32),
                (np.float32(1) / encode).view(np.uint32),
                f"1/S of {i}",
            )


@pytest.mark.slow(fast_cases=["floor-mxfp8"])
@pytest.mark.parametrize("fmt", [MXFP4, MXFP6, MXFP8, MXFP8_E5M2], ids=repr)
@pytest.mark.parametrize("up", [False, True], ids=["floor", "up"])
def test_mx(hard_tensors, fmt, up):
    made = compiled(fmt if up else floor_scales(fmt))(hard_tensors)
    for i, x in enumerate(hard_tensors):
        codes, scales = oracle.mx(x, MX[fmt.name], scales=oracle.up_scales if up else oracle.floor_scales)
        same(as_bytes(made.scales[i]), scales, f"scales of case {i}")
        same(made.codes[i], codes, f"codes of case {i}")


@pytest.mark.slow
def test_rounded_up_scales_saturate_nothing(hard_tensors):
    up, down = (compiled(f)(hard_tensors) for f in (MXFP4, MXFP4_FLOOR))

    def over(made, i):
        """Elements larger than 6 of their scale."""
        scale = np.ldexp(1.0, as_bytes(made.scales[i]).astype(int) - 127)
        return (np.abs(oracle.blocks_of(hard_tensors[i].astype(np.float64), 32, False)) > 6 * scale[..., None]).sum()

    assert sum(over(up, i) for i in range(len(hard_tensors))) == 0
    assert sum(over(down, i) for i in range(len(hard_tensors))) > 100


@pytest.mark.slow
def test_mx_square_blocks(hard_tensors):
    made = compiled(MXFP4, "2d")(hard_tensors[:4])
    for i, x in enumerate(hard_tensors[:4]):
        codes, scales = oracle.mx(x, "E2M1", square=True)
        same(as_bytes(made.scales[i]), scales, f"scales of case {i}")
        same(made.codes[i], codes, f"codes of case {i}")


@pytest.mark.slow
@pytest.mark.parametrize("fmt, element", [(FP8, "E4M3"), (FP8_E5M2, "E5M2")], ids=["E4M3", "E5M2"])
def test_fp8(hard_tensors, fmt, element):
    made = compiled(fmt)(hard_tensors)
    assert made.scales is None
    for i, x in enumerate(hard_tensors):
        codes, amax, encode = oracle.fp8(x, element)
        same(made.codes[i], codes, f"codes of case {i}")
        same(made.amax[i], amax, f"amax of case {i}")
        with np.errstate(under="ignore"):
            same(
                np.asarray(made.decode_scale[i]).view(np.uint32),
                (np.float32(1) / encode).view(np.uint32),
                f"1/S of {i}",
            )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_narrow_inputs_are_widened_exactly(hard_tensors, dtype):
    """Their subnormals too: a bfloat16 subnormal is one in float32, a float16 subnormal is not."""
    with np.errstate(over="ignore", under="ignore"):
        narrow = np.clip(hard_tensors, -60000, 60000).astype(dtype)
    wide = compiled(NVFP4)(narrow.astype(np.float32))
    made = compiled(NVFP4)(narrow)
    same(made.codes, np.asarray(wide.codes), "codes")
    same(as_bytes(made.scales), as_bytes(wide.scales), "scales")


@pytest.mark.slow
def test_columnwise_is_the_transpose_quantized(hard_tensors):
    down = compiled(NVFP4, axis=-2)(hard_tensors)
    across = compiled(NVFP4)(np.ascontiguousarray(hard_tensors.swapaxes(1, 2)))
    same(down.codes.swapaxes(1, 2), np.asarray(across.codes), "codes")
    same(as_bytes(down.scales).swapaxes(1, 2), as_bytes(across.scales), "scales")
    same(down.packed.swapaxes(1, 2), np.asarray(across.packed), "packed bytes")


@pytest.mark.slow
def test_square_blocks_serve_the_transpose(hard_tensors):
    made = compiled(NVFP4, "2d")(hard_tensors)
    turned = compiled(NVFP4, "2d")(np.ascontiguousarray(hard_tensors.swapaxes(1, 2)))
    same(made.codes.swapaxes(1, 2), np.asarray(turned.codes), "codes")
    same(as_bytes(made.scales).swapaxes(1, 2), as_bytes(turned.scales), "scales")


@pytest.mark.slow
def test_leading_dims_share_one_amax():
    x = np.random.default_rng(0).standard_normal((2, 3, 16, 32)).astype(np.float32)
    for block, scale_shape in (("1d", (2, 3, 16, 2)), ("2d", (2, 3, 1, 2))):
        made = jax.jit(lambda x, block=block: quantize(x, NVFP4, block=block))(x)
        codes, scales, amax, _ = oracle.nvfp4(x, square=block == "2d")
        assert made.scales.shape == scale_shape and made.scales.dtype == jnp.float8_e4m3fn
        assert made.codes.dtype == jnp.uint8 and made.amax.dtype == jnp.float32 and made.amax.shape == ()
        same(made.codes, codes, block)
        same(as_bytes(made.scales), scales, block)
        same(made.amax, amax, block)


@pytest.mark.slow
def test_a_vector():
    x = np.linspace(-3, 5, 64, dtype=np.float32)
    made = jax.jit(lambda x: quantize(x, NVFP4))(x)
    codes, scales, *_ = oracle.nvfp4(x[None])
    same(made.codes, codes[0], "codes")
    same(as_bytes(made.scales), scales[0], "scales")


@pytest.mark.slow
def test_a_given_amax_replaces_the_tensors_own():
    """Delayed scaling: elements beyond it saturate."""
    x = np.float32([[1, 2, 448, 449, 900, -1000, 0.5, 0]])
    made = jax.jit(lambda x: quantize(x, FP8, amax=jnp.float32(448)))(x)
    same(made.codes, oracle.code_of(x, "E4M3"), "codes")
    assert made.amax == 448


@pytest.mark.slow
def test_what_is_on_the_grid_is_what_is_stored(hard_tensors):
    """`to_grid` gives values and codes of the same numbers."""
    values, codes = jax.jit(lambda x: quantize_to_grid(x, MXFP8)[:2])(hard_tensors[0])
    same(values, oracle.value_of(np.asarray(codes), "E4M3"), "values")


@pytest.fixture
def broken(hard_tensors):
    """A function: the tensors with `value` at [0, 3, 5], through the program that the other tests compiled."""

    def run(fmt, value):
        x = hard_tensors.copy()
        x[0, 3, 5] = value
        return x[0], jax.tree.map(lambda leaf: leaf[0], compiled(fmt)(x))

    return run


class TestNonFinite:
    @pytest.mark.parametrize("value", [np.inf, -np.inf])
    def test_infinity_saturates_and_stays_in_the_amax(self, broken, value):
        x, made = broken(NVFP4, value)
        assert made.codes[3, 5] == (7 if value > 0 else 15)
        assert as_bytes(made.scales)[3, 0] == 0x7E  # 448
        assert made.amax == np.inf and made.decode_scale == 1 and not made.finite
        codes, scales, *_ = oracle.nvfp4(x)
        same(made.codes, codes, "codes")
        same(as_bytes(made.scales), scales, "scales")

    @pytest.mark.parametrize("fmt", [NVFP4, FP8, MXFP4, MXFP8], ids=repr)
    def test_nan_is_never_hidden(self, broken, fmt):
        _, made = broken(fmt, np.nan)
        assert np.isnan(made.amax) and not made.finite
        largest = 2 ** (fmt.element.bits - 1) - 1
        assert made.codes[3, 5] & largest == largest
        assert np.isnan(dequantized(made)[3, 5])

    @pytest.mark.parametrize("fmt, value", [(MXFP4, np.nan), (MXFP4_FLOOR, np.nan), (MXFP4_FLOOR, np.inf)])
    def test_an_mx_block_has_the_scale_nan(self, broken, fmt, value):
        _, made = broken(fmt, value)
        assert as_bytes(made.scales)[3, 0] == 255
        assert (as_bytes(made.scales) == 255).sum() == 1
        assert np.isnan(dequantized(made)[3, :32]).all()

    @pytest.mark.slow
    def test_an_infinity_has_the_largest_scale_where_scales_are_rounded_up(self, broken):
        """As in Transformer Engine: zeros beside it, a NaN itself, and the amax says so."""
        _, made = broken(MXFP8, np.inf)
        assert as_bytes(made.scales)[3, 0] == 254 and not made.finite
        assert made.codes[3, 5] == 0x7F and (made.codes[3, 6:32] & 0x7F == 0).all()

    @pytest.mark.slow
    def test_finite_checks(self):
        check, largest = jax.jit(all_finite), jax.jit(amax_of)
        for shape in ((32, 32), (5, 7), (3,), (2, 3, 4)):
            for dtype in (np.float32, ml_dtypes.bfloat16):
                x = np.full(shape, -2, dtype)
                assert check(x) and largest(x) == 2
                for bad in (np.inf, -np.inf, np.nan):
                    broken = x.copy()
                    broken[(-1,) * len(shape)] = bad
                    assert not check(broken)
                    assert not np.isfinite(largest(broken))
        assert largest(np.float32([1e-45, -3e-45])).view(np.uint32) == 2

    def test_a_finite_tensor_says_so(self, hard_tensors):
        made = jax.tree.map(lambda leaf: leaf[0], compiled(NVFP4)(hard_tensors))
        assert made.finite


class TestErrors:
    def test_dtype(self):
        with pytest.raises(TypeError, match="int32.*astype"):
            quantize(jnp.zeros((16, 16), jnp.int32), NVFP4)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "shape, fmt, block",
        [((16, 24), NVFP4, "1d"), ((8, 16), NVFP4, "2d"), ((2, 48), MXFP4, "1d"), ((4, 0), NVFP4, "1d")],
    )
    def test_block_multiple(self, shape, fmt, block):
        with pytest.raises(ValueError, match=f"{fmt.name} needs a multiple of {fmt.block}.*pad"):
            quantize(jnp.zeros(shape), fmt, block=block)

    def test_square_blocks_of_a_vector(self):
        with pytest.raises(ValueError, match='"2d" needs a matrix.*"1d"'):
            quantize(jnp.zeros(16), NVFP4, block="2d")

    def test_scalar(self):
        with pytest.raises(ValueError, match="scalar"):
            quantize(jnp.float32(1), NVFP4)

    def test_stochastic_without_a_key(self):
        with pytest.raises(ValueError, match="needs a key"):
            quantize(jnp.zeros((16, 16)), NVFP4, rounding="stochastic")

    def test_stochastic_eight_bit_formats(self):
        with pytest.raises(ValueError, match="E2M1 formats.*fp8"):
            quantize(jnp.zeros((16, 16)), FP8, rounding="stochastic", key=jax.random.key(0))

    def test_names(self):
        with pytest.raises(ValueError, match='block must be "1d" or "2d", got \'3d\''):
            quantize(jnp.zeros((16, 16)), NVFP4, block="3d")
        with pytest.raises(ValueError, match="rounding must be one of .*'up'"):
            quantize(jnp.zeros((16, 16)), NVFP4, rounding="up")

    def test_not_a_quantized_format(self):
        with pytest.raises(ValueError, match="bf16 is not a quantized format"):
            quantize(jnp.zeros((16, 16)), BF16)

    def test_an_unknown_unit(self):
        with pytest.raises(ValueError, match="format odd: unknown unit 'fp3'; known: bf16, fp8"):
            BlockFormat("odd", NVFP4.element, 16, NVFP4.scale, hardware_unit="fp3")

    def test_a_block_without_a_scale(self):
        with pytest.raises(ValueError, match="format odd: block=16 does not fit"):
            BlockFormat("odd", NVFP4.element, 16, FP8.scale)

    def test_products_that_are_not_exact(self):
        with pytest.raises(ValueError, match="has 8 significant bits"):
            BlockFormat("odd", FP8.element, 16, NVFP4.scale)

    def test_rounding_down_a_scale_that_is_no_power_of_two(self):
        with pytest.raises(ValueError, match="nvfp4"):
            floor_scales(NVFP4)


def test_the_catalogue():
    assert {f.name: f.bits_per_element for f in FORMATS.values()} == {
        "nvfp4": 4.5, "mxfp4": 4.25, "mxfp8": 8.25, "mxfp8_e5m2": 8.25, "mxfp4_floor": 4.25, "mxfp8_floor": 8.25,
        "fp8": 8, "fp8_e5m2": 8, "bf16": 16,
    }  # fmt: skip
    assert [f.name for f in FORMATS.values() if f.tensor_scale] == ["nvfp4", "fp8", "fp8_e5m2"]
