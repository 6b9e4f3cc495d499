"""RMSNorm's kernels, interpreted: against the definition in float64 and bit for bit against arithmetic that is the
same but for its order, and compiled for every GPU they serve.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_programs import compiled, shapes, topology_of

from halfbyte import kernels as K
from halfbyte.kernels import rms_norm
from halfbyte.kernels.mosaic_launch import StackSlice

EPS = 1e-5
SHAPES = [(32, 1024), (64, 3072), (32, 4096), (32, 5120), (32, 8192)]


def data(shape, seed=0):
    rng = np.random.default_rng(seed)
    x, *others = (jnp.asarray(size * rng.normal(size=shape), jnp.bfloat16) for size in (3, 1, 1, 1, 1))
    return x, jnp.asarray(1 + 0.1 * rng.normal(size=shape[1]), jnp.float32), others


def wide(x):
    return np.asarray(x, np.float32)


def bf16(x):
    return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16), np.float32)


def summed(gradients):
    """After each addition rounded, as a linear's gradients of x are."""
    total = wide(gradients[0])
    for each in gradients[1:]:
        total = bf16(total + wide(each))
    return total


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(shape):
    x, scale, _ = data(shape)
    with K.interpret_kernels():
        h, inverse = rms_norm.rms_norm_forward(x, scale, eps=EPS)
    exact = 1 / np.sqrt((np.asarray(x, np.float64) ** 2).mean(-1) + EPS)
    np.testing.assert_allclose(inverse, exact, rtol=3e-7)  # float32 sums: a few units in the last place, 6e-8 each
    np.testing.assert_array_equal(wide(h), bf16(wide(x) * np.asarray(inverse)[:, None] * np.asarray(scale)))


@pytest.mark.slow(fast_cases=["(32, 1024)-3"])
@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward(shape, readers):
    """In float64 from the rounded sum of the readers' gradients: off by the last rounding of dx and of the sum."""
    x, scale, (carry, *others) = data(shape)
    gradients = others[:readers]
    with K.interpret_kernels():
        _, inverse = rms_norm.rms_norm_forward(x, scale, eps=EPS)
        dx, parts = rms_norm.rms_norm_backward(x, inverse, scale, carry, tuple(gradients))
    g, r, s = summed(gradients).astype(np.float64), np.asarray(inverse, np.float64)[:, None], np.asarray(scale)
    n = wide(x) * r
    through = r * (g * s - n * (g * s * n).mean(-1, keepdims=True))
    error = 2.0**-8 * (np.abs(wide(dx)) + np.abs(through))  # half a unit in the last place of bf16 each
    assert (np.abs(wide(dx) - (wide(carry) + through)) <= 1.001 * error).all()
    assert parts.shape == (shape[0] // 32, shape[1])
    np.testing.assert_allclose(parts.sum(0), (g * n).sum(0), atol=2e-6 * np.abs(g * n).sum(0).max())


@pytest.mark.slow
def test_rows_do_not_know_their_place():
    """A row's bits are the same wherever it lies: in another program, beside other rows, on another device."""
    x, scale, (carry, g, *_) = data((64, 2048))
    with K.interpret_kernels():
        h, inverse = rms_norm.rms_norm_forward(x, scale, eps=EPS)
        dx, _ = rms_norm.rms_norm_backward(x, inverse, scale, carry, (g,))
        turned = rms_norm.rms_norm_forward(x[::-1], scale, eps=EPS)
        back, _ = rms_norm.rms_norm_backward(x[::-1], inverse[::-1], scale, carry[::-1], (g[::-1],))
    np.testing.assert_array_equal(wide(turned[0][::-1]), wide(h))
    np.testing.assert_array_equal(turned[1][::-1], inverse)
    np.testing.assert_array_equal(wide(back[::-1]), wide(dx))


@pytest.mark.parametrize(
    "shape, words", [((32, 1000), "multiple of 1024"), ((40, 2048), "32 tokens"), ((32, 16384), "8192")]
)
def test_what_it_cannot_take_is_said(shape, words):
    assert rms_norm.unsupported_norm(2**20, 4096) is None and "32 bits" in (
        rms_norm.unsupported_norm(2**20 + 32, 4096) or ""
    )
    assert words in (rms_norm.unsupported_norm(*shape) or "")
    with pytest.raises(ValueError, match=words):
        rms_norm.rms_norm_forward(jnp.zeros(shape, jnp.bfloat16), jnp.ones(shape[1]), eps=EPS)


@pytest.mark.slow
@pytest.mark.cuda_compiler
def test_it_compiles():
    check_program("h200")


def check_program(name):
    """Compiles the kernels for the device `name`: over x itself, and over a layer of a stack, which is not copied."""
    like = shapes(topology_of(name))

    def both(x, stack, number, scale, carry, *gradients):
        made = []
        for each in (x, StackSlice(stack, number)):
            h, inverse = rms_norm.rms_norm_forward(each, scale, eps=EPS)
            made.append((h, rms_norm.rms_norm_backward(each, inverse, scale, carry, gradients)))
        return made

    x, scale = like(256, 4096), like(4096, dtype=jnp.float32)
    text = compiled(both, name, x, like(3, 256, 4096), like(dtype=jnp.int32), scale, x, x, x, x)
    assert "rms_norm_backward" in text and text.count('custom_call_target="mosaic_gpu') >= 4
    assert "dynamic-slice" not in text
