"""Stochastic rounding over all 256 bytes: its mean is exactly what docs/numerics.md says."""

import format_oracle as oracle
import jax
import numpy as np
import pytest

from halfbyte.formats.elements import round_stochastic_e2m1

BYTES = np.arange(256, dtype=np.uint8)
rounded = jax.jit(round_stochastic_e2m1)


def means(a):
    """Mean over all bytes of every magnitude, exact: at most 256 values that are multiples of 1/2, below 2**11."""
    shape = (a.size, 256)
    value, code = rounded(np.broadcast_to(a[:, None], shape), np.broadcast_to(BYTES, shape))
    np.testing.assert_array_equal(value, oracle.grid("E2M1")[np.asarray(code)])
    return np.asarray(value, np.float64).mean(1)


def step_of(a):
    return np.where(a < 2, 0.5, np.where(a < 4, 1.0, 2.0))


@pytest.mark.slow
def test_the_bias_is_what_is_left_below_a_256th_of_a_step():
    """mean = a - step * frac(256 a / step) / 256: never up, by less than step/256."""
    a = np.arange(0, 6 * 2**9 + 1).astype(np.float32) / np.float32(2**9)
    finer = np.concatenate([a, a[:-1] + np.float32(2.0**-11), a[:-1] + np.float32(3 * 2.0**-11)]).astype(np.float64)
    step = step_of(finer)
    expected = finer - step / 256 * np.mod(finer / step * 256, 1)
    np.testing.assert_array_equal(means(finer.astype(np.float32)), expected)


@pytest.mark.parametrize("low, step", [(0.5, 0.5), (2.0, 1.0), (4.0, 2.0)])
def test_the_average_bias_is_half_of_that(low, step):
    """Over evenly spaced a, n of them to a 256th of a step: -step/512 * (1 - 1/n)."""
    n = 16
    a = (low + step * np.arange(256 * n) / (256 * n)).astype(np.float32)
    bias = (means(a) - a).mean()
    assert bias == -step / 512 * (1 - 1 / n)


def test_values_on_the_grid_stay():
    grid = oracle.grid("E2M1").astype(np.float32)
    np.testing.assert_array_equal(means(grid), grid)


def test_small_numbers_become_zero():
    """Below 1/512, less the rounding of the float32 sum, no byte is enough."""
    a = np.float32([0, 1e-45, 1e-10, 1 / 1024, 1 / 512 - 2.0**-25])
    np.testing.assert_array_equal(means(a), 0)
    np.testing.assert_array_equal(means(np.float32([1 / 512])), 0.5 / 256)
    # The sum with byte 255 rounds to 0.5.
    np.testing.assert_array_equal(means(np.float32([1 / 512 - 2.0**-28])), 0.5 / 256)


@pytest.mark.slow
def test_everything_else_matches_the_definition():
    rng = np.random.default_rng(2)
    a = np.abs(rng.standard_normal(2000) * 3).astype(np.float32)
    a[:8] = [6, 7, 1e30, 3.4e38, np.inf, np.nextafter(np.float32(2), 0), np.nextafter(np.float32(4), 0), 5.999]
    shape = (a.size, 256)
    x, noise = np.broadcast_to(a[:, None], shape), np.broadcast_to(BYTES, shape)
    np.testing.assert_array_equal(rounded(x, noise).code, oracle.stochastic_code(x, noise))
