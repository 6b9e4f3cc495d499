"""Quantization of tensors inside jit. Oracle: `oracle_table`, bit for bit: codes, scales, amax and 1 / S."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle_table as table
import pytest
from other_formats import MXFP6

from halfbyte import formats
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


@functools.cache
def compiled(fmt, block="1d", rounding="rne", axis=-1):
    """One program per policy: tensors [cases, M, N] one after the other -> QTensor, dequantized, finite."""

    def run(x):
        made = quantize(x, fmt, block=block, rounding=rounding, axis=axis, key=jax.random.wrap_key_data(KEY))
        return made, made.dequantize(), made.finite

    return jax.jit(lambda xs: jax.lax.map(run, xs))


def as_bytes(scales):
    return np.asarray(scales).view(np.uint8)


def same(made, expected, what):
    np.testing.assert_array_equal(np.asarray(made), expected, err_msg=what)


CASES = [
    (NVFP4, "1d", "rne"), (NVFP4, "1d", "stochastic"), (NVFP4, "2d", "rne"), (NVFP4, "2d", "stochastic"),
    *((fmt, "1d", "rne") for up in (MXFP4, MXFP6, MXFP8, MXFP8_E5M2) for fmt in (up, floor_scales(up))),
    (MXFP4, "2d", "rne"), (FP8, "1d", "rne"), (FP8_E5M2, "1d", "rne"),
    (formats.NVFP4_46_MSE, "1d", "rne"), (formats.NVFP4_46_MAE, "2d", "rne"), (formats.NVFP4_46_SR, "1d", "midpoint"),
    (formats.NVFP4_1716, "1d", "rne"), (formats.NVFP4_QUARTET, "1d", "away"),
]  # fmt: skip
FAST = ["nvfp4-1d-rne", "nvfp4-1d-stochastic", "nvfp4-2d-rne", "mxfp4-1d-rne", "mxfp8_floor-1d-rne", "fp8-1d-rne"]


@pytest.mark.slow(fast_cases=FAST)
@pytest.mark.parametrize("fmt, block, rounding", CASES, ids=lambda p: str(p))
def test_quantize_hard_tensors_equals_table(hard_tensors, fmt, block, rounding):
    """Of numbers that break quantizers, and of tensors with an infinity or a NaN: the amax keeps it, values too."""
    tensors = np.concatenate([hard_tensors, hard_tensors[:3]])
    for tensor, bad in zip(tensors[-3:], (np.inf, -np.inf, np.nan)):
        tensor[3, 5] = bad
    league = fmt not in FORMATS.values()  # a NaN has any code there
    tensors = hard_tensors if league and fmt is not MXFP6 else tensors
    made, values, finite = compiled(fmt, block, rounding)(tensors)
    noise = table.random_bytes(tensors.shape[1:], table.key_words(*KEY))
    for i, x in enumerate(tensors):
        want = table.quantize(x, fmt.name, square=block == "2d", rounding=rounding, noise=noise)
        if fmt is formats.NVFP4_46_MSE and 0 < want.amax < 2.0**-110:
            continue  # squares of errors are subnormal, which XLA flushes on a CPU
        if want.scales is not None:
            same(as_bytes(made.scales[i]), want.scales, f"scales of case {i}")
        compared = np.isfinite(x) | fmt.tensor_scale  # an MX element cannot hold what its scale says
        same(np.asarray(made.codes[i])[compared], want.codes[compared], f"codes of case {i}")
        same(made.amax[i], want.amax, f"amax of case {i}")
        same(np.asarray(made.decode_scale[i]).view(np.uint32), np.asarray(want.outer).view(np.uint32), f"1/S of {i}")
        assert finite[i] == np.isfinite(x).all()
    if league:
        return
    assert np.isnan(values[-1, 3, 5]) and made.codes[-1, 3, 5] & 7 == 7
    if fmt.tensor_scale:  # a NaN is everywhere; an infinity is in the amax
        assert np.isinf(made.amax[-2]) and np.isnan(values[-1]).all()
    else:
        nan = np.isnan(fmt.scale.decode(as_bytes(made.scales[-1])))
        assert nan.sum() == 1 and nan[0 if block == "2d" else 3, 0] and np.isfinite(values[-1, :, 32:]).all()


@pytest.mark.slow
def test_power_scales_rounded_up_saturate_nothing(hard_tensors):
    def saturated(fmt):
        """Elements larger than 6 of their scale."""
        scales = np.ldexp(1.0, as_bytes(compiled(fmt)(hard_tensors)[0].scales).astype(int) - 127)
        return (np.abs(hard_tensors.astype(np.float64)) > 6 * np.repeat(scales, 32, -1)).sum()

    assert saturated(MXFP4) == 0 and saturated(MXFP4_FLOOR) > 100


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_quantize_narrow_input_is_widened_exactly(hard_tensors, dtype):
    """Subnormals too: a bfloat16 subnormal is one in float32, a float16 subnormal is not."""
    with np.errstate(over="ignore", under="ignore"):
        narrow = np.clip(hard_tensors, -60000, 60000).astype(dtype)
    (wide, *_), (made, *_) = compiled(NVFP4)(narrow.astype(np.float32)), compiled(NVFP4)(narrow)
    same(made.codes, np.asarray(wide.codes), "codes")
    same(as_bytes(made.scales), as_bytes(wide.scales), "scales")


@pytest.mark.slow
@pytest.mark.parametrize("block, axis", [("1d", -2), ("2d", -1)])
def test_quantize_columns_is_transpose_of_rows(hard_tensors, block, axis):
    """Blocks along -2 are those of the transpose, left in place; square ones serve both."""
    down, *_ = compiled(NVFP4, block, axis=axis)(hard_tensors)
    across, *_ = compiled(NVFP4, block)(np.ascontiguousarray(hard_tensors.swapaxes(1, 2)))
    same(down.codes.swapaxes(1, 2), np.asarray(across.codes), "codes")
    same(as_bytes(down.scales).swapaxes(1, 2), as_bytes(across.scales), "scales")
    if block == "1d":
        same(down.packed.swapaxes(1, 2), np.asarray(across.packed), "packed bytes")


@pytest.mark.slow
def test_quantize_leading_dims_share_one_amax():
    """Of [2, 3, 16, 32], and of a vector; dtypes and shapes of the result."""
    x = np.random.default_rng(0).standard_normal((2, 3, 16, 32)).astype(np.float32)
    x[0] *= 3
    for block, scale_shape in (("1d", (2, 3, 16, 2)), ("2d", (2, 3, 1, 2))):
        made = jax.jit(lambda x, block=block: quantize(x, NVFP4, block=block))(x)
        want = table.quantize(x.reshape(96, 32), "nvfp4", square=block == "2d")
        assert made.scales.shape == scale_shape and made.scales.dtype == jnp.float8_e4m3fn
        assert made.codes.dtype == jnp.uint8 and made.amax.dtype == jnp.float32 and made.amax.shape == ()
        same(made.codes.reshape(96, 32), want.codes, block)
        same(as_bytes(made.scales).reshape(want.scales.shape), want.scales, block)
        same(made.amax, want.amax, block)
    vector = quantize(x[0, 0, 0], NVFP4)
    same(vector.codes, table.quantize(x[0, 0, :1], "nvfp4").codes[0], "codes of a vector")


def test_quantize_given_amax_replaces_own():
    """Delayed scaling: elements beyond it saturate."""
    x = np.float32([[1, 2, 448, 449, 900, -1000, 0.5, 0]])
    made = jax.jit(lambda x: quantize(x, FP8, amax=jnp.float32(448)))(x)
    same(made.codes, table.quantize(x, "fp8", amax=448).codes, "codes")
    assert made.amax == 448


@pytest.mark.slow
def test_quantize_to_grid_gives_values_of_codes(hard_tensors):
    values, codes = jax.jit(lambda x: quantize_to_grid(x, MXFP8)[:2])(hard_tensors[0])
    same(values, table.decode(np.asarray(codes), "E4M3"), "values")


@pytest.mark.slow
def test_mxfp8_block_with_infinity_has_largest_scale(hard_tensors):
    """As in Transformer Engine: zeros next to it, a NaN itself."""
    x = hard_tensors.copy()
    x[0, 3, 5] = np.inf
    made = jax.tree.map(lambda leaf: leaf[0], compiled(MXFP8)(x)[0])
    assert as_bytes(made.scales)[3, 0] == 254
    assert made.codes[3, 5] == 0x7F and (made.codes[3, 6:32] & 0x7F == 0).all()


@pytest.mark.slow
def test_finite_checks_see_last_element_of_any_shape():
    check, amax = all_finite, amax_of
    for shape in ((32, 32), (5, 7), (3,), (2, 3, 4)):
        for dtype in (np.float32, ml_dtypes.bfloat16):
            x = np.full(shape, -2, dtype)
            assert check(x) and amax(x) == 2
            for bad in (np.inf, -np.inf, np.nan):
                broken = x.copy()
                broken[(-1,) * len(shape)] = bad
                assert not check(broken)
                assert not np.isfinite(amax(broken))
    assert np.asarray(amax(np.float32([1e-45, -3e-45]))).view(np.uint32) == 2


@pytest.mark.parametrize(
    "shape, fmt, how, message",
    [
        ((16, 24), NVFP4, {}, "nvfp4 needs a multiple of 16.*pad"),
        ((8, 16), NVFP4, {"block": "2d"}, "nvfp4 needs a multiple of 16.*pad"),
        ((2, 48), MXFP4, {}, "mxfp4 needs a multiple of 32.*pad"),
        ((4, 0), NVFP4, {}, "nvfp4 needs a multiple of 16.*pad"),
        ((16,), NVFP4, {"block": "2d"}, '"2d" needs a matrix.*"1d"'),
        ((), NVFP4, {}, "scalar"),
        ((16, 16), NVFP4, {"rounding": "stochastic"}, "needs a key"),
        ((16, 16), FP8, {"rounding": "stochastic", "key": KEY}, "E2M1 formats.*fp8"),
        ((16, 16), NVFP4, {"block": "3d"}, 'block must be "1d" or "2d", got \'3d\''),
        ((16, 16), NVFP4, {"rounding": "up"}, "rounding must be one of .*'up'"),
        ((16, 16), BF16, {}, "bf16 is not a quantized format"),
    ],
)
def test_quantize_unsupported_input_is_refused(shape, fmt, how, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda x: quantize(x, fmt, **how), jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: BlockFormat("odd", NVFP4.element, 16, NVFP4.scale, hardware_unit="fp3"),
         "format odd: unknown unit 'fp3'; known: bf16, fp8"),
        (lambda: BlockFormat("odd", NVFP4.element, 16, FP8.scale), "format odd: block=16 does not fit"),
        (lambda: BlockFormat("odd", FP8.element, 16, NVFP4.scale), "has 8 significant bits"),
        (lambda: floor_scales(NVFP4), "nvfp4"),
    ],
)  # fmt: skip
def test_block_format_unsupported_field_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_quantize_integer_input_is_refused():
    with pytest.raises(TypeError, match="int32.*astype"):
        quantize(jnp.zeros((16, 16), jnp.int32), NVFP4)


def test_formats_bits_per_element():
    assert {f.name: f.bits_per_element for f in FORMATS.values()} == {
        "nvfp4": 4.5, "mxfp4": 4.25, "mxfp8": 8.25, "mxfp8_e5m2": 8.25, "mxfp4_floor": 4.25, "mxfp8_floor": 8.25,
        "fp8": 8, "fp8_e5m2": 8, "bf16": 16,
    }  # fmt: skip
    assert [f.name for f in FORMATS.values() if f.tensor_scale] == ["nvfp4", "fp8", "fp8_e5m2"]
