"""Oracle: RMSNorm in float64 NumPy, its gradient by the textbook formula; for the kernels of `forked_norm` also
`rms_norm`. Their own bits: kernels/test_norm_kernels.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte.devices import device_by_name
from halfbyte.distributed import make_mesh
from halfbyte.kernels.mosaic_launch import StackSlice, materialize_slice
from halfbyte.ops import rms_norm_vjp
from halfbyte.ops.operand import add_and_round
from halfbyte.ops.rms_norm_vjp import NormFanout, norm_kernel_refusal, rms_norm, rms_norm_fanout

pytestmark = pytest.mark.usefixtures("quick_code")
EPS = 1e-5
on_cpus = pytest.mark.skipif(jax.default_backend() != "cpu", reason="of what a CPU does, and of several of them")


def oracle(x, scale, g):
    x, scale, g = (np.asarray(a, np.float64) for a in (x, scale, g))
    inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    n = x * inverse
    dx = inverse * (g * scale - n * (g * scale * n).mean(-1, keepdims=True))
    return n * scale, dx, (g * n).reshape(-1, x.shape[-1]).sum(0)


@pytest.mark.slow
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


READERS = 3
SHAPE = (4, 32, 1024)


def arrays():
    random = np.random.default_rng(1)
    x, *others = (jnp.asarray(random.normal(size=SHAPE), jnp.bfloat16) for _ in range(2 + READERS))
    return x, jnp.asarray(1 + 0.1 * random.normal(size=SHAPE[-1]), jnp.float32), others


def by_kernels(mesh=None, place=None):
    """x as it goes on, h, dx and ds, as a function of x, the weight and all gradients."""
    fork = NormFanout(EPS, READERS, mesh)

    def run(x, scale, carry, *gradients):
        (through, h, stack), pull = jax.vjp(lambda x, s: rms_norm_fanout(fork, x, s, place), x, scale)
        return through, h[0], *pull((carry, gradients, stack))

    return jax.jit(run)


def a_place():
    """The second of three layers, of NaN before it is written."""
    return StackSlice(jnp.full((3, *SHAPE), jnp.nan, jnp.bfloat16), jnp.int32(1))


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_a_fork_is_the_norm_and_the_sum_of_its_gradients():
    """As XLA's norm beside a stream, but for the order of float32 sums: a bf16 number in thousands is a neighbour."""
    x, scale, (carry, *gradients) = arrays()
    through, h, dx, ds = by_kernels()(x, scale, carry, *gradients)
    y, pull = jax.vjp(lambda x, s: rms_norm(x, s, EPS), x, scale)
    dx_norm, ds_norm = pull(add_and_round(add_and_round(*gradients[:2]), gradients[2]))
    np.testing.assert_array_equal(through, x)
    for ours, theirs in ((h, y), (dx, add_and_round(carry, dx_norm))):
        assert np.mean(np.asarray(ours) != np.asarray(theirs)) < 1e-3
        np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=2**-6, atol=1e-6)
    np.testing.assert_allclose(ds, ds_norm, rtol=1e-4, atol=1e-4)


def plain_forward(x, scale, *, eps):
    x = materialize_slice(x)
    wide = x.astype(jnp.float32)
    inverse = 1 / jnp.sqrt(jnp.mean(wide * wide, axis=1) + eps)
    return (wide * inverse[:, None] * scale[None]).astype(x.dtype), inverse


def plain_backward(x, inverse, scale, carry, gradients):
    """Parts of ds as the kernel has them, one for 32 rows."""
    x = materialize_slice(x)
    g, n = sum(each.astype(jnp.float32) for each in gradients), x.astype(jnp.float32) * inverse[:, None]
    through = inverse[:, None] * (g * scale[None] - n * jnp.mean(g * scale[None] * n, axis=1, keepdims=True))
    return (carry.astype(jnp.float32) + through).astype(x.dtype), jnp.sum((g * n).reshape(-1, 32, x.shape[1]), axis=1)


@pytest.mark.slow(fast_cases=["in a stack-{'data': 2, 'context': 2}"])
@on_cpus
@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"data": 2, "context": 2}], ids=str)
@pytest.mark.parametrize("place", [None, a_place()], ids=["alone", "in a stack"])
def test_on_a_mesh_each_device_norms_its_rows(sizes, place, monkeypatch):
    """Kernels that stand in for ours, on the CPU: what they are handed, and what becomes of what they return. (Host
    callbacks, as which ours are interpreted, wait for each other on several devices.)
    """
    monkeypatch.setattr(rms_norm_vjp.kernels, "rms_norm_forward", plain_forward)
    monkeypatch.setattr(rms_norm_vjp.kernels, "rms_norm_backward", plain_backward)
    x, scale, others = arrays()
    mesh = make_mesh(sizes, jax.devices()[:4])
    alone, together = by_kernels()(x, scale, *others), by_kernels(mesh, place)(x, scale, *others)
    for one, all_of_them in zip(alone[:3], together[:3], strict=True):
        np.testing.assert_array_equal(one, all_of_them)
    np.testing.assert_allclose(alone[3], together[3], rtol=1e-5, atol=1e-5)


@on_cpus
def test_who_computes_it_is_known_before():
    h200, shape = device_by_name("h200"), (2, 64, 2048)
    assert norm_kernel_refusal(shape, "bfloat16", looped=False, device=h200) is None
    assert "NVIDIA" in norm_kernel_refusal(shape, "bfloat16", looped=False)
    assert "stacks" in norm_kernel_refusal(shape, "bfloat16", looped=True, device=h200)
    assert "float32" in norm_kernel_refusal(shape, "float32", looped=False, device=h200)
    assert "1024" in norm_kernel_refusal((2, 64, 1000), "bfloat16", looped=False, device=h200)
    assert "evenly" in norm_kernel_refusal(
        (2, 63, 2048), "bfloat16", looped=False, device=h200, mesh=make_mesh({"tensor": 2}, jax.devices()[:2])
    )


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_a_fork_in_a_stack_is_the_fork():
    """Bit for bit; the oracle keeps x itself."""
    x, scale, others = arrays()
    for ours, theirs in zip(
        by_kernels(place=a_place())(x, scale, *others), by_kernels()(x, scale, *others), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
