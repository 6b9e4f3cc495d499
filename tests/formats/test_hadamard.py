"""The Hadamard transform inside jit. Oracle: `oracle_table.hadamard`, bit for bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle_table as table
import pytest

from halfbyte.formats import hadamard16, hadamard_transform
from halfbyte.formats.hadamard import FIXED_RHT_SIGNS, random_signs

BF16 = ml_dtypes.bfloat16


def hard_runs():
    """bfloat16 [32, 64]: runs of every size side by side, every exponent in one run (the order of sums shows),
    subnormal numbers, zeros of both signs, an infinity and a NaN in runs of their own."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((32, 64))
    x[:8] *= np.exp2(np.repeat(rng.integers(-150, 90, (8, 4)), 16, 1))
    exponents = rng.integers(0, 0x7F00, (8, 64)) | rng.integers(0, 2, (8, 64)) << 15
    x[16:22] *= 2.0**-130
    x[22], x[23], x[24, 3], x[25, 20] = 0, -0.0, np.inf, np.nan
    x[26, :16] = -0.0 * table.FIXED_SIGNS  # every term of a sum is -0
    x = x.astype(BF16)
    x[8:16] = exponents.astype(np.uint16).view(BF16)
    return x


def same_bits(made, expected):
    made, expected = np.asarray(made), np.asarray(expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(made), ~number)
    integer = f"u{expected.itemsize}"
    np.testing.assert_array_equal(made.view(integer)[number], expected.view(integer)[number])


def test_hadamard16_of_hard_runs_equals_table():
    """Along the last axis and another one; float32 is rounded to bfloat16 first."""
    x = hard_runs()
    expected = table.hadamard(x).astype(BF16)
    wide = x.astype(np.float32) * np.float32(1.001)
    run = jax.jit(lambda x, wide: (hadamard16(x), hadamard_transform(x.T, axis=0).T, hadamard16(wide)))
    rows, columns, narrowed = run(x, wide)
    same_bits(rows, expected)
    same_bits(columns, expected)
    same_bits(narrowed, table.hadamard(wide).astype(BF16))
    assert np.isnan(expected[25, 16:32]).all() and np.isfinite(expected[25, :16]).all()
    np.testing.assert_array_equal(table.FIXED_SIGNS, FIXED_RHT_SIGNS)


def test_hadamard_longer_runs_equal_table():
    x, signs = (
        np.random.default_rng(5).standard_normal((8, 128)).astype(np.float32),
        random_signs(jax.random.key(1), 128),
    )
    drawn, fixed = jax.jit(
        lambda x: (hadamard_transform(x, points=128, signs=signs), hadamard_transform(x, points=64))
    )(x)
    same_bits(drawn, table.hadamard(x, np.asarray(signs)))
    same_bits(fixed, table.hadamard(x, np.tile(FIXED_RHT_SIGNS, 4)))


def test_hadamard_partial_run_is_refused():
    with pytest.raises(ValueError, match="multiple of 16 along its axis, got 24"):
        hadamard16(jnp.zeros((4, 24)))


def test_random_signs_of_long_run_have_no_period():
    """128 signs: a sequence that repeats after 16 or 64 would make the transform of one block that of the next."""
    signs = np.asarray(random_signs(jax.random.key(3), 128))
    assert set(signs.tolist()) == {1.0, -1.0}
    for period in (16, 32, 64):
        assert 0.25 < (signs[period:] == signs[:-period]).mean() < 0.75
