"""MXFP8 kernels in interpret mode, plain and tiled, edges included. Oracle: `oracle_table`, every code and scale."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle_table as table
import pytest
from instruments import activation

from halfbyte.kernels import ScaleLayout, mxfp8_quantize
from halfbyte.kernels.mxfp8_quantize import MxOperandSpec

pytestmark = pytest.mark.usefixtures("interpreted", "quick_code")


def data(shape, dtype=ml_dtypes.bfloat16):
    rng = np.random.default_rng(shape[1])
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-20, 12, (shape[0], 1)))
    x[0], x[1, ::3], x[2, 5] = 0, -0.0, 448 * 2.0**-9
    x[3:7, 0] = 448, 449, 2.0**-126, 2.0**-130
    return x.astype(dtype)


def want(x, operand):
    """(codes, scales) of x filled up with zeros to whole blocks."""
    turned = x.T if operand.along_tokens else x
    filled = np.pad(turned, ((0, 0), (0, -turned.shape[1] % 32)))
    made = table.quantize(filled, {"e4m3": "mxfp8", "e5m2": "mxfp8_e5m2"}[operand.element])
    return made.codes, made.scales if operand.order is ScaleLayout.PLAIN else table.swizzle(made.scales)


def same(got, x, operands):
    wanted = [a for tensor, operand in zip(x, operands, strict=True) for a in want(tensor, operand)]
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("shape, order", [((64, 128), ScaleLayout.PLAIN), ((160, 62), ScaleLayout.TILED)], ids=str)
def test_mxfp8_rows_and_columns_equal_table(shape, order):
    x = data(shape)
    operands = MxOperandSpec(False, order), MxOperandSpec(True, order)
    same(mxfp8_quantize.quantize_mxfp8(jnp.asarray(x), operands=operands), [x, x], operands)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_mxfp8_float32_weight_equals_table(element):
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


def test_mxfp8_block_with_inf_or_nan_has_its_scale():
    x = data((32, 64))
    x[8, 3], x[9, 40] = np.inf, np.nan
    _, scales = mxfp8_quantize.quantize_mxfp8(jnp.asarray(x), operands=(mxfp8_quantize.ROW,))
    np.testing.assert_array_equal(np.asarray(scales)[8:10], [[254, scales[8, 1]], [scales[9, 0], 255]])


def test_unsupported_mxfp8_names_the_shape():
    assert "multiple of 32 tokens, got 48" in mxfp8_quantize.unsupported_mxfp8(48, 128)
    assert mxfp8_quantize.unsupported_mxfp8(64, 43, capability=(9, 0)) is None
