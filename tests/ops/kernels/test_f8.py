"""FP8 casts in interpret mode, every code in both orders. Oracle: `oracle_table`."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle_table as table
import pytest
from instruments import activation

from halfbyte import kernels
from halfbyte.kernels import fp8_cast
from halfbyte.kernels.mosaic_launch import StackSlice

pytestmark = pytest.mark.usefixtures("interpreted")

TILING = fp8_cast.Fp8Tiling(32, 16, 1)


def codes(x, element):
    return table.quantize(x, {"e4m3": "fp8", "e5m2": "fp8_e5m2"}[element]).codes


def scale(x, element):
    amax = np.abs(x.astype(np.float32)).max()
    bits = kernels.amax_to_bits(jnp.asarray(amax))
    return kernels.compute_tensor_scale(bits, top=fp8_cast.FP8_MAX[element])


@pytest.mark.parametrize("element, dtype", [("e4m3", ml_dtypes.bfloat16), ("e5m2", np.float32)], ids=["e4m3", "e5m2"])
def test_fp8_cast_in_both_orders_equals_table(element, dtype):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((64, 32)) * np.exp2(rng.integers(-20, 2, (64, 32)))).astype(dtype)
    plain, turned = fp8_cast.fp8_cast_transpose(jnp.asarray(x), scale(x, element), element=element, tiling=TILING)
    assert plain.dtype == fp8_cast.FP8_DTYPES[element] and turned.shape == (32, 64)
    np.testing.assert_array_equal(np.asarray(plain).view(np.uint8), codes(x, element))
    np.testing.assert_array_equal(np.asarray(turned).view(np.uint8), codes(x, element).T)


def test_fp8_swiglu_casts_equal_those_of_activation():
    rng = np.random.default_rng(1)
    g, u, d = (jnp.asarray(rng.standard_normal((64, 128)).astype(ml_dtypes.bfloat16)) for _ in range(3))
    made = [np.asarray(a) for a in activation(g, u, d)]
    elements = ("e5m2", "e5m2", "e4m3")
    scales = [scale(x, e) for x, e in zip(made, elements, strict=True)]
    got = fp8_cast.fp8_swiglu_cast_backward(g, u, d, scales, tiling=TILING)
    dg, du, h = (codes(x, e) for x, e in zip(made, elements, strict=True))
    for a, b in zip(got, (dg, dg.T, du, du.T, h.T), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), b)
    (row,) = fp8_cast.fp8_swiglu_cast_forward(g, u, scales[2], tiling=TILING)
    np.testing.assert_array_equal(np.asarray(row).view(np.uint8), h)


@pytest.mark.slow
def test_fp8_layer_of_stack_is_read_in_place():
    rng = np.random.default_rng(1)
    g, u, d = (jnp.asarray(rng.standard_normal((64, 128)).astype(ml_dtypes.bfloat16)) for _ in range(3))
    layers = [StackSlice(jnp.full((2, 64, 128), jnp.nan, jnp.bfloat16).at[1].set(a), jnp.int32(1)) for a in (g, u)]
    scales = [scale(np.asarray(x), "e4m3") for x in (g, u, d)]
    got, want = (fp8_cast.fp8_swiglu_cast_backward(*pair, d, scales, tiling=TILING) for pair in (layers, (g, u)))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_unsupported_fp8_names_the_shape():
    assert "multiple of 128 rows, got 100" in fp8_cast.unsupported_fp8(100, 128)
    assert fp8_cast.unsupported_fp8(256, 128, capability=(9, 0)) is None
