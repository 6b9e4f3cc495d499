"""QTensor: what it stands for, how it is packed. Oracle: NumPy's float32 product of the stored parts."""

import functools

import format_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
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
def test_dequantize(hard_tensors, fmt, block):
    """element * block scale is exact, times 1/S is rounded once; subnormal results included."""
    made, values, unpacked, _ = compiled(fmt, block)(hard_tensors)
    subnormal = 0
    for i in range(len(hard_tensors)):
        elements = oracle.value_of(np.asarray(made.codes[i]), fmt.element.name)
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


def test_packed_bytes(hard_tensors):
    made, *_, packed = compiled(NVFP4, "1d")(hard_tensors)
    codes = np.asarray(made.codes)
    np.testing.assert_array_equal(packed, codes[..., ::2] | codes[..., 1::2] << 4)
    made, *_, packed = compiled(FP8, "1d")(hard_tensors)
    np.testing.assert_array_equal(packed, made.codes)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [-1, -2, 0])
def test_packing_and_back(axis):
    codes = np.random.default_rng(0).integers(0, 16, (6, 4, 8)).astype(np.uint8)
    packed = pack_nibbles(jnp.asarray(codes), axis=axis)
    assert packed.size == codes.size // 2
    np.testing.assert_array_equal(unpack_nibbles(packed, axis=axis), codes)


def test_packing_an_odd_axis():
    with pytest.raises(ValueError, match="even axis, got 5"):
        pack_nibbles(jnp.zeros((4, 5), jnp.uint8))


def test_a_pytree_that_jit_takes_and_gives(hard_tensors):
    made, *_ = compiled(NVFP4, "1d")(hard_tensors)
    leaves, structure = jax.tree.flatten(made)
    assert len(leaves) == 4
    again = jax.tree.unflatten(structure, leaves)
    assert again.format is NVFP4 and again.block == "1d" and again.shape == made.shape
    assert jax.eval_shape(lambda q: q.dequantize(), jax.tree.map(lambda leaf: leaf[0], made)).dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("rows, columns", [(128, 4), (1, 1), (200, 6), (130, 3)])
def test_scale_tiles_are_padded_with_zeros(rows, columns):
    """Where scale (r, c) lies, from the layout's definition, byte by byte."""
    compact = (np.arange(rows * columns) % 251 + 1).astype(np.uint8).reshape(rows, columns)
    column_tiles = -(-columns // 4)
    expected = np.zeros(-(-rows // 128) * column_tiles * 512, np.uint8)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * column_tiles + c // 4
            expected[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] = compact[r, c]
    tiled = swizzle_scales(jnp.asarray(compact))
    np.testing.assert_array_equal(tiled, expected)
    np.testing.assert_array_equal(unswizzle_scales(tiled, rows, columns), compact)
