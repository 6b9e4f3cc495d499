"""MXFP8 kernels in interpret mode: every code and scale, plain and tiled, edges included.

Two oracles: Transformer Engine's rule in NumPy, written here, for all shapes, and `formats.quantize` for one.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from instruments import activation

from halfbyte.formats import MXFP8, quantize, swizzle_scales
from halfbyte.kernels import ScaleLayout, mxfp8_quantize
from halfbyte.kernels.mxfp8_quantize import MxOperandSpec

pytestmark = pytest.mark.usefixtures("interpreted", "quick_code")

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def data(shape, dtype=ml_dtypes.bfloat16):
    rng = np.random.default_rng(shape[1])
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-20, 12, (shape[0], 1)))
    x[0], x[1, ::3], x[2, 5] = 0, -0.0, 448 * 2.0**-9
    x[3:7, 0] = 448, 449, 2.0**-126, 2.0**-130
    return x.astype(dtype)


def definition(x, element):
    """amax * float32(1 / largest), rounded, up to a power of two that E8M0 holds; then the nearest elements."""
    largest = np.float32(ml_dtypes.finfo(TYPES[element]).max)
    blocks = x.astype(np.float32).reshape(x.shape[0], -1, 32)
    fraction, power = np.frexp(np.abs(blocks).max(2) * (np.float32(1) / largest))
    code = np.clip(np.where(fraction == 0, -127, power - (fraction == 0.5)) + 127, 0, 254)
    scaled = np.ldexp(blocks.astype(np.float64), (127 - code)[:, :, None])
    codes = np.clip(scaled, -np.float64(largest), np.float64(largest)).astype(np.float32).astype(TYPES[element])
    return codes.view(np.uint8).reshape(x.shape), code.astype(np.uint8)


def want(x, operand):
    """(codes, scales) of x filled up with zeros to whole blocks."""
    turned = x.T if operand.along_tokens else x
    codes, scales = definition(np.pad(turned, ((0, 0), (0, -turned.shape[1] % 32))), operand.element)
    return codes, scales if operand.order is ScaleLayout.PLAIN else swizzle_scales(jnp.asarray(scales))


def same(got, x, operands):
    wanted = [a for tensor, operand in zip(x, operands, strict=True) for a in want(tensor, operand)]
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
@pytest.mark.parametrize("order", ScaleLayout)
@pytest.mark.parametrize("shape", [(128, 128), (96, 160), (32, 43), (160, 62)], ids=str)
def test_rows_and_columns_in_one_read(shape, order):
    x = data(shape)
    operands = MxOperandSpec(False, order), MxOperandSpec(True, order)
    same(mxfp8_quantize.quantize_mxfp8(jnp.asarray(x), operands=operands), [x, x], operands)


@pytest.mark.parametrize("element", TYPES)
def test_weights_and_gradients(element):
    w = data((64, 96), np.float32) * np.float32(1.0001)
    operands = MxOperandSpec(True, element=element), MxOperandSpec(False, element=element)
    same(mxfp8_quantize.quantize_mxfp8(jnp.asarray(w), operands=operands), [w, w], operands)


@pytest.mark.slow
def test_swiglu():
    rng = np.random.default_rng(8)
    g, u, d = (jnp.asarray(rng.standard_normal((64, 96)).astype(ml_dtypes.bfloat16)) for _ in range(3))
    dg, du, h = (np.asarray(a) for a in activation(g, u, d))
    operands = tuple(
        MxOperandSpec(along, tensor=i) for i, along in ((0, False), (0, True), (1, False), (1, True), (2, True))
    )
    same(mxfp8_quantize.quantize_swiglu_backward_mxfp8(g, u, d, operands=operands), [dg, dg, du, du, h], operands)
    operands = mxfp8_quantize.ROW, mxfp8_quantize.COLUMN
    same(mxfp8_quantize.quantize_swiglu_mxfp8(g, u, operands=operands), [h, h], operands)


@pytest.mark.slow
def test_the_definition_is_that_of_formats():
    x = data((64, 64))
    made = quantize(jnp.asarray(x), MXFP8)
    codes, scales = definition(x, "e4m3")
    np.testing.assert_array_equal(made.codes, codes)
    np.testing.assert_array_equal(np.asarray(made.scales).view(np.uint8), scales)


@pytest.mark.slow
def test_a_block_with_an_infinity_or_a_nan():
    x = data((32, 64))
    x[8, 3], x[9, 40] = np.inf, np.nan
    _, scales = mxfp8_quantize.quantize_mxfp8(jnp.asarray(x), operands=(mxfp8_quantize.ROW,))
    np.testing.assert_array_equal(np.asarray(scales)[8:10], [[254, scales[8, 1]], [scales[9, 0], 255]])


def test_unsupported():
    assert "multiple of 32 tokens, got 48" in mxfp8_quantize.unsupported_mxfp8(48, 128)
    assert mxfp8_quantize.unsupported_mxfp8(64, 43, capability=(9, 0)) is None
