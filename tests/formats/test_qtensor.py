"""QTensor: dequantization, packing, swizzled scales. Oracle: `oracle_table`; NumPy's float32 product of the parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_table as table
import pytest
from other_formats import MXFP6

from halfbyte.formats import (
    FP8,
    MXFP4,
    MXFP8_E5M2,
    NVFP4,
    PackedQTensor,
    pack_nibbles,
    quantize,
    swizzle_scales,
    unpack_nibbles,
    unswizzle_scales,
)

pytestmark = pytest.mark.usefixtures("quick_code")

CASES = [(NVFP4, "1d"), (NVFP4, "2d"), (MXFP4, "1d"), (MXFP6, "1d"), (MXFP8_E5M2, "1d"), (FP8, "1d")]


@functools.cache
def compiled(fmt, block):
    def run(x):
        q = quantize(x, fmt, block=block)
        return q, q.dequantize(), PackedQTensor.from_qtensor(q).unpack(), q.packed

    return jax.jit(lambda xs: jax.lax.map(run, xs))


def spread(scales, size, shape, square):
    """One scale an element."""
    tall = size if square else 1
    return np.repeat(np.repeat(scales, tall, 0), size, 1).reshape(shape)


@pytest.mark.slow
@pytest.mark.parametrize("fmt, block", CASES)
def test_dequantize_hard_tensors_equals_float32_product(hard_tensors, fmt, block):
    """element * block scale is exact, times 1/S is rounded once; subnormal results included."""
    made, values, unpacked, _ = compiled(fmt, block)(hard_tensors)
    subnormal = 0
    for i in range(len(hard_tensors)):
        elements = table.decode(np.asarray(made.codes[i]), fmt.element.name)
        expected = elements
        with np.errstate(under="ignore", over="ignore"):  # 1.75 * 2**127 rounds up to 4 * 2**126, which is infinity
            if made.scales is not None:
                scales = np.asarray(made.scales[i]).astype(np.float32)
                expected = elements * spread(scales, fmt.block, elements.shape, block == "2d")
            expected = expected * np.asarray(made.decode_scale[i])
        np.testing.assert_array_equal(np.asarray(values[i]).view(np.uint32), expected.view(np.uint32), err_msg=str(i))
        subnormal += ((expected != 0) & (np.abs(expected) < 2.0**-126)).sum()
    assert subnormal > 100  # the cases do reach them
    for before, after in zip(jax.tree.leaves(made), jax.tree.leaves(unpacked), strict=True):
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(np.asarray(before).view(np.uint8), np.asarray(after).view(np.uint8))


def test_packed_of_hard_tensors_equals_table(hard_tensors):
    made, *_, packed = compiled(NVFP4, "1d")(hard_tensors)
    np.testing.assert_array_equal(packed, table.pack(np.asarray(made.codes)))
    made, *_, packed = compiled(FP8, "1d")(hard_tensors)
    np.testing.assert_array_equal(packed, made.codes)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [-1, -2, 0])
def test_pack_nibbles_any_axis_equals_table(axis):
    codes = np.random.default_rng(0).integers(0, 16, (6, 4, 8)).astype(np.uint8)
    packed = pack_nibbles(jnp.asarray(codes), axis=axis)
    np.testing.assert_array_equal(packed, table.pack(codes, axis))
    np.testing.assert_array_equal(unpack_nibbles(packed, axis=axis), codes)


def test_pack_nibbles_odd_axis_is_refused():
    with pytest.raises(ValueError, match="even axis, got 5"):
        pack_nibbles(jnp.zeros((4, 5), jnp.uint8))


def test_qtensor_is_a_pytree(hard_tensors):
    made, *_ = compiled(NVFP4, "1d")(hard_tensors)
    leaves, structure = jax.tree.flatten(made)
    assert len(leaves) == 4
    again = jax.tree.unflatten(structure, leaves)
    assert again.format is NVFP4 and again.block == "1d" and again.shape == made.shape
    assert jax.eval_shape(lambda q: q.dequantize(), jax.tree.map(lambda leaf: leaf[0], made)).dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("rows, columns", [(128, 4), (1, 1), (200, 6), (130, 3)])
def test_swizzle_scales_partial_tile_is_zero_padded(rows, columns):
    compact = (np.arange(rows * columns) % 251 + 1).astype(np.uint8).reshape(rows, columns)
    tiled = swizzle_scales(jnp.asarray(compact))
    np.testing.assert_array_equal(tiled, table.swizzle(compact))
    np.testing.assert_array_equal(unswizzle_scales(tiled, rows, columns), compact)
