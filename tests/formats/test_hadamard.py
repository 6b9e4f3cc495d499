"""The Hadamard transform. Oracle: butterflies one at a time in NumPy's float32, and the matrix in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from halfbyte.formats import hadamard16, hadamard_transform
from halfbyte.formats.hadamard import FIXED_RHT_SIGNS, random_signs

transformed = jax.jit(hadamard16)
BF16 = ml_dtypes.bfloat16


def sylvester():
    h = np.ones((1, 1))
    for _ in range(4):
        h = np.block([[h, h], [h, -h]])
    return h


MATRIX = np.diag(FIXED_RHT_SIGNS) @ sylvester() / 4


def in_order(x):
    """bfloat16 x [..., 16 n]: signs and 1/4 first, then pairs at distance 1, 2, 4, 8, float32; a zero sum is +0."""
    v = x.astype(np.float32).reshape(-1, 16) * (np.float32(FIXED_RHT_SIGNS) * np.float32(0.25))
    for distance in (1, 2, 4, 8):
        made = v.copy()
        for i in range(16):
            if not i & distance:
                made[:, i], made[:, i + distance] = v[:, i] + v[:, i + distance], v[:, i] - v[:, i + distance]
        v = made
    return np.where(v == 0, np.float32(0), v).astype(BF16).reshape(x.shape)


def bits(x):
    return np.asarray(x).view(np.uint16)


def cases():
    rng = np.random.default_rng(4)
    normal = rng.standard_normal((32, 64))
    exponents = rng.integers(0, 0x7F00, (32, 64)).astype(np.uint16) | (rng.integers(0, 2, (32, 64)) << 15).astype(
        np.uint16
    )
    runs = np.repeat(rng.integers(-150, 90, (32, 4)), 16, 1)
    return np.stack([
        normal.astype(BF16),
        (normal * np.exp2(runs)).astype(BF16),  # runs from subnormal to huge, side by side
        exponents.view(BF16),  # every exponent in one run: the order of the sums shows
        (normal * 2.0**-130).astype(BF16),
        np.zeros((32, 64), BF16),
        np.full((32, 64), -0.0, BF16),
    ])  # fmt: skip


@pytest.mark.slow
def test_the_matrix():
    """Rows of H from unit vectors; orthogonal; the mask of the negative signs."""
    h = np.asarray(transformed(np.eye(16).astype(BF16))).astype(np.float64)
    np.testing.assert_array_equal(h, MATRIX)
    np.testing.assert_array_equal(h @ h.T, np.eye(16))
    assert sum(1 << i for i, s in enumerate(FIXED_RHT_SIGNS) if s < 0) == 0xD7E8


@pytest.mark.slow
def test_the_order_of_the_sums():
    x = cases()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        expected = in_order(x)
    np.testing.assert_array_equal(bits(transformed(x)), bits(expected))


def test_one_rounding():
    """Where sums are exact in float32, the result is the exact product rounded once to bfloat16."""
    x = (np.random.default_rng(0).integers(-255, 256, (16, 64)) * 2.0**-7).astype(BF16)
    exact = x.astype(np.float64).reshape(-1, 16) @ MATRIX
    np.testing.assert_array_equal(np.asarray(transformed(x)), exact.astype(BF16).reshape(x.shape))


@pytest.mark.slow
def test_other_dtypes_are_rounded_to_bfloat16_first():
    x = np.random.default_rng(1).standard_normal((32, 64)).astype(np.float32)
    np.testing.assert_array_equal(bits(transformed(x)), bits(transformed(x.astype(BF16))))


@pytest.mark.slow
def test_along_another_axis():
    x = cases()[:3]
    down = jax.jit(lambda x: hadamard_transform(x, axis=-2))(np.ascontiguousarray(x.swapaxes(1, 2)))
    np.testing.assert_array_equal(bits(down.swapaxes(1, 2)), bits(transformed(x)))


@pytest.mark.slow
def test_it_cancels_in_a_product():
    """(x^T H)(H^T y) = x^T y, up to the rounding of both sides to bfloat16 (2^-9 each of the norms' product)."""
    rng = np.random.default_rng(2)
    x, y = (rng.standard_normal((8, 64)).astype(BF16) for _ in range(2))
    a, b = (np.asarray(jax.jit(hadamard16)(t)).astype(np.float64) for t in (x, y))
    plain = x.astype(np.float64) @ y.astype(np.float64).T
    bound = (
        2
        * 2.0**-9
        * np.linalg.norm(x.astype(np.float64), axis=1)[:, None]
        * np.linalg.norm(y.astype(np.float64), axis=1)
    )
    assert (np.abs(a @ b.T - plain) <= bound).all()


@pytest.mark.slow
def test_non_finite_numbers_spread_over_their_run():
    x = np.ones((1, 32), BF16)
    x[0, 3] = np.nan
    made = np.asarray(transformed(x)).astype(np.float32)
    assert np.isnan(made[0, :16]).all() and np.isfinite(made[0, 16:]).all()
    x[0, 3] = np.inf
    assert np.isinf(np.asarray(transformed(x)).astype(np.float32)[0, :16]).all()


def test_size():
    with pytest.raises(ValueError, match="multiple of 16 along its axis, got 24"):
        hadamard16(jnp.zeros((4, 24)))


def test_random_signs_of_a_long_run_have_no_period():
    """128 signs: a sequence that repeats after 16 or 64 would make the transform of one block that of the next."""
    signs = np.asarray(random_signs(jax.random.key(3), 128))
    assert set(signs.tolist()) == {1.0, -1.0}
    for period in (16, 32, 64):
        assert 0.25 < (signs[period:] == signs[:-period]).mean() < 0.75
