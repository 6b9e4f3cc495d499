"""A linear and its gradients, run and compared with the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_linear as oracle
from instruments import watched

import halfbyte as hb

# Of the sum of magnitudes: float32 sums of at most 288 products. Measured errors are a hundred times smaller.
TOLERANCE = 1e-5
# Hopper's FP8 units align products to the largest and cut them at 14 bits; 4.0e-4 of the magnitudes was measured.
F8_SUMS = 2.0**-11
KEY = jax.random.key(11)


def tensors(shape, dtype, seed=0):
    """x and dy with a few large features, as activations have, and w."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(*shape.lead, shape.inputs)) * np.exp(rng.normal(size=shape.inputs))
    w = rng.normal(size=(shape.inputs, shape.outputs)) / np.sqrt(shape.inputs)
    dy = rng.normal(size=(*shape.lead, shape.outputs)) * 1e-3
    return jnp.asarray(x, dtype), jnp.asarray(w, jnp.float32), jnp.asarray(dy, dtype)


def linear(recipe, **options):
    """x, w, dy -> y, dx, dw."""

    def run(x, w, dy, key=KEY):
        y, pullback = jax.vjp(functools.partial(hb.qdot, recipe=recipe, key=key, **options), x, w)
        return y, *pullback(dy)

    return run


def matrix(a):
    return np.asarray(a.astype(jnp.float32)).reshape(-1, a.shape[-1])


def rounded(values, dtype):
    """float64 values in `dtype`, to nearest even, as float64."""
    return np.asarray(values).astype(np.float32).astype(jnp.dtype(dtype)).astype(np.float64)


def relative_error(result, want):
    """Of the norms."""
    result, want = (np.asarray(a, np.float64).reshape(want.shape) for a in (result, want))
    return np.linalg.norm(result - want) / np.linalg.norm(want)


def assert_close(result, gemm, tolerance=TOLERANCE):
    """Each number within the tolerance of its sum of magnitudes, and the whole within the tolerance of its norm."""
    error = np.abs(result.astype(np.float64).reshape(gemm.result.shape) - gemm.result)
    assert (error <= tolerance * gemm.bound).all(), (error / gemm.bound).max()
    assert relative_error(result, gemm.result) <= tolerance


def assert_rounded(result, gemm, tolerance=TOLERANCE):
    """`result` is the rounding, to its dtype, of something within the tolerance of the exact sum."""
    slack = tolerance * gemm.bound
    low, high = (rounded(gemm.result + sign * slack, result.dtype) for sign in (-1, 1))
    got = matrix(result).astype(np.float64)
    assert ((low <= got) & (got <= high)).all()


def check_linear(recipe, x, w, dy, *, backend, compiler_options=None, tolerance=TOLERANCE):
    """Under jit, each of the three GEMMs gets the oracle's operands, bit for bit, and gives its sums."""
    expected = oracle.linear(matrix(x), matrix(w), matrix(dy), recipe, KEY)
    run = jax.jit(linear(recipe, backend=backend), compiler_options=compiler_options)
    with watched(backend) as seen:
        results = jax.block_until_ready(run(x, w, dy))
    for gemm, want in expected.items():
        got = seen[gemm]
        for side in ("left", "right"):
            ours, theirs = getattr(got, side), getattr(want, side).carrier
            np.testing.assert_array_equal(ours.reshape(theirs.shape), theirs, err_msg=f"{gemm} {side}")
        left, right = (np.asarray(side.decode, np.float32) for side in (want.left, want.right))
        if gemm == "wgrad" or right.ndim:  # scales of rows: of the sums' rows, and of their columns
            left, right = (left.T if gemm == "wgrad" else left), (right.T if gemm == "dgrad" else right)
        np.testing.assert_array_equal(got.factor.reshape(np.shape(left * right)), left * right)
        assert_close(got.result, want, tolerance)
    for result, want, like in zip(results, expected.values(), (dy, x, w), strict=True):
        assert result.dtype == like.dtype and result.shape == like.shape
        assert_rounded(result, want, tolerance)
