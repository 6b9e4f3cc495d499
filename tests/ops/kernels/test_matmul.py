"""The GEMM's contract without a GPU: shapes, reasons, and the XLA stand-in on integers, where every sum is exact."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from halfbyte.kernels import amax_to_bits, compute_tensor_scale
from halfbyte.kernels.hopper_gemm import GEMM_LAYOUTS, gemm_sizes, matmul, unsupported_gemm
from halfbyte.kernels.tensor_scale_kernel import GEMM_ALPHA_INDEX

pytestmark = pytest.mark.usefixtures("interpreted")

PRODUCT = {"nn": lambda a, b: a @ b, "nt": lambda a, b: a @ b.T, "tn": lambda a, b: a.T @ b}


@pytest.mark.slow(fast_cases=["bfloat16-nt"])
@pytest.mark.parametrize("layout", GEMM_LAYOUTS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_alpha_is_applied_before_the_one_rounding(layout, dtype):
    m, n, k = 256, 256, 64
    rng = np.random.default_rng(0)
    a = rng.integers(-6, 7, (k, m) if layout == "tn" else (m, k)).astype(ml_dtypes.bfloat16)
    b = rng.integers(-6, 7, (n, k) if layout == "nt" else (k, n)).astype(ml_dtypes.bfloat16)
    left, right = (compute_tensor_scale(amax_to_bits(jnp.float32(x))) for x in (3.7, 0.31))
    got = matmul(jnp.asarray(a), jnp.asarray(b), left, right, layout=layout, out_dtype=dtype)
    alpha = np.float32(left[GEMM_ALPHA_INDEX]) * np.float32(right[GEMM_ALPHA_INDEX])
    want = PRODUCT[layout](a.astype(np.float32), b.astype(np.float32)) * alpha
    np.testing.assert_array_equal(got, want.astype(dtype))
    scalars = matmul(
        jnp.asarray(a), jnp.asarray(b), left[GEMM_ALPHA_INDEX], right[GEMM_ALPHA_INDEX], layout=layout, out_dtype=dtype
    )
    np.testing.assert_array_equal(scalars, got)


def test_unsupported_says_which_dim():
    assert "n to be a multiple of 16, got 1100" in unsupported_gemm(256, 1100, 64)
    assert "n to be at least 256, got 96" in unsupported_gemm(4096, 96, 4096)
    assert unsupported_gemm(16384, 1376, 512) is None and unsupported_gemm(8192, 4096, 10944) is None
    assert "k to be a multiple of 16, got 2731" in unsupported_gemm(8192, 4096, 2731)
    assert "capability 9.0" in unsupported_gemm(256, 256, 64, capability=(10, 0))
    assert unsupported_gemm(256, 256, 64, capability=(9, 0)) is None
    with pytest.raises(ValueError, match="contracts dims of 64 and 32"):
        gemm_sizes((128, 64), (32, 256), "nn")
