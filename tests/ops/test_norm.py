"""Oracle: RMSNorm in float64 NumPy, its gradient by the textbook formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte.nn.norm import rms_norm

EPS = 1e-5


def oracle(x, scale, g):
    x, scale, g = (np.asarray(a, np.float64) for a in (x, scale, g))
    inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    n = x * inverse
    dx = inverse * (g * scale - n * (g * scale * n).mean(-1, keepdims=True))
    return n * scale, dx, (g * n).reshape(-1, x.shape[-1]).sum(0)


@pytest.mark.parametrize(
    "dtype, tolerance", [(jnp.float32, 2e-6), (jnp.bfloat16, 2**-8)]
)  # one rounding to bf16 is 2^-9
def test_forward_and_gradients(dtype, tolerance):
    random = np.random.default_rng(0)
    x, g = (jnp.asarray(size * random.normal(size=(2, 5, 64)), dtype) for size in (3, 1))
    scale = jnp.asarray(1 + 0.1 * random.normal(size=64), jnp.float32)

    @jax.jit
    def run(x, scale, g):
        y, vjp = jax.vjp(lambda x, s: rms_norm(x, s, EPS), x, scale)
        return y, *vjp(g)

    y, dx, dscale = run(x, scale, g)
    assert (y.dtype, dx.dtype, dscale.dtype) == (dtype, dtype, jnp.float32)
    for ours, exact in zip((y, dx, dscale), oracle(x, scale, g), strict=True):
        error = np.abs(np.asarray(ours, np.float64) - exact).max()
        assert error <= tolerance * np.abs(exact).max()


def test_backward_keeps_no_wide_copy_of_x():
    x, scale = jnp.ones((4, 8, 64), jnp.bfloat16), jnp.ones((64,))
    vjp = jax.eval_shape(lambda x, s: jax.vjp(lambda x, s: rms_norm(x, s, EPS), x, s)[1], x, scale)
    kept = jax.tree.leaves(vjp)
    assert kept and not [leaf.shape for leaf in kept if leaf.dtype == jnp.float32 and leaf.size >= x.size]
