"""The Pallas plumbing in interpret mode: block specs, program numbers, scalars. `test_arithmetic` has the bits."""

import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import ml_dtypes
import numpy as np
import pytest

from halfbyte.ops import kernels

T, N = 32, 256
KEY = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
TILING = kernels.Tiling(4, 1)


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(3).standard_normal((T, N)).astype(ml_dtypes.bfloat16)


def scale(amax):
    return kernels.tensor_scale(kernels.amax_bits(jnp.float32(amax)), interpret=True)


@pytest.mark.parametrize("amax", [0.0, 3.0, 1e-20, 7e30, np.inf])
def test_tensor_scale(amax):
    s, dec, mult = oracle.tensor_scales(amax)
    gemm = dec if np.isfinite(amax) else np.nan
    np.testing.assert_array_equal(scale(amax), np.array([amax, s, dec, mult, gemm, 0, 0, 0], np.float32))


def test_maxima_and_nan(x):
    run = jax.jit(lambda a: kernels.maxima(a, tiling=TILING, interpret=True))
    plain, transformed = run(jnp.asarray(x))
    want = np.abs(x.astype(np.float32)).max(), np.abs(oracle.hadamard_tokens(x)).max()
    assert [np.asarray(p).max().view(np.float32) for p in (plain, transformed)] == list(want)
    broken = x.copy()
    broken[3, 5] = np.nan
    assert all(np.isnan(np.asarray(p).max().view(np.float32)) for p in run(jnp.asarray(broken)))


def test_stochastic_columns_take_the_bytes_of_their_element(x):
    amax = np.abs(x.astype(np.float32)).max()
    noise = oracle.random_bytes(T, N, KEY)
    operand = kernels.Columnwise(scale(amax), jnp.asarray(KEY), hadamard=False)
    (got,) = kernels.quantize(jnp.asarray(x), columns=operand, tiling=TILING, interpret=True)
    want = oracle.quantize(x, amax, axis=0, noise=noise)[2]
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), want.view(np.uint16))


def test_unsupported_names_the_shape():
    assert "tokens" in kernels.unsupported(40, 256)
    assert "columns" in kernels.unsupported(32, 200)
    assert "capability" in kernels.unsupported(32, 256, capability=(8, 0))
    assert kernels.unsupported(32, 256) is None
    with pytest.raises(ValueError, match="multiple of 128 columns"):
        kernels.maxima(jnp.zeros((32, 64), jnp.bfloat16), interpret=True)
