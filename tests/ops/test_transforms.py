"""qdot under JAX's own transforms: scan, checkpoint, vmap, and a weight quantized once for many microbatches.

The bits never change; how often a program quantizes is counted in its jaxpr. A linear under NVFP4 has five tensors to
quantize: W, x twice, dy twice.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import KEY
from instruments import quantizations, quick

import halfbyte as hb
from halfbyte.ops.operand import SAVED_NAME
from halfbyte.recipes import layer_key

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_cpu")]

NVFP4 = hb.recipe("nvfp4")
LAYERS, WIDTH, TOKENS = 3, 32, 32
LINEAR = 5  # quantizations of one linear, forward and backward

save_quantized = jax.checkpoint_policies.save_only_these_names(SAVED_NAME)
REMATS = {
    "none": lambda layer: layer,
    "full": jax.checkpoint,
    "quantized": functools.partial(jax.checkpoint, policy=save_quantized),
}


def inputs():
    rng = np.random.default_rng(5)
    weights = jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)) / np.sqrt(WIDTH), jnp.float32)
    return jnp.asarray(rng.normal(size=(2, TOKENS, WIDTH)), jnp.bfloat16), weights


def layer(x, w, index):
    return jnp.tanh(hb.qdot(x, w, recipe=NVFP4, key=layer_key(KEY, index)))


def mean_square(y):
    return jnp.mean(y.astype(jnp.float32) ** 2)


def scanned(remat):
    def loss(x, weights):
        def body(x, this):
            return REMATS[remat](layer)(x, *this), None

        return mean_square(jax.lax.scan(body, x, (weights, jnp.arange(LAYERS)))[0])

    return jax.grad(loss, (0, 1))


def looped(x, weights):
    """The same network layer by layer, forward and backward by hand; a layer's two programs are compiled once."""
    forward = jax.jit(lambda x, w, i: jax.vjp(lambda x, w: layer(x, w, i), x, w), compiler_options=quick)
    backward = jax.jit(lambda pullback, dy: pullback(dy), compiler_options=quick)
    pullbacks = []
    for index in range(LAYERS):
        x, pullback = forward(x, weights[index], index)
        pullbacks.append(pullback)
    dy, gradients = jax.jit(jax.grad(mean_square), compiler_options=quick)(x), []
    for pullback in reversed(pullbacks):
        dy, dw = backward(pullback, dy)
        gradients.append(dw)
    return dy, jnp.stack(gradients[::-1])


def assert_same_bits(a, b):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@functools.cache
def plain():
    return jax.jit(scanned("none"), compiler_options=quick)(*inputs())


def test_a_scan_gives_the_bits_of_a_loop():
    assert_same_bits(plain(), looped(*inputs()))


@pytest.mark.parametrize("remat", ["full", "quantized"])
def test_recomputation_gives_the_same_bits(remat):
    assert_same_bits(plain(), jax.jit(scanned(remat), compiler_options=quick)(*inputs()))


def test_nothing_is_quantized_twice_that_need_not_be():
    """Full recomputation quantizes again what the backward pass reads (x for wgrad, W), and what it needs to find the
    layer's output again (x for fprop), and skips wgrad's operand on the way forward. Saving what is quantized, by its
    name, leaves only fprop's operand to be made again; where the output is not needed, not even that.
    """
    counts = {remat: quantizations(scanned(remat), *inputs()) for remat in REMATS}
    assert counts["none"] == LINEAR * LAYERS
    assert counts["full"] == (2 + 5) * LAYERS
    assert counts["quantized"] == (LINEAR + 1) * LAYERS

    def lone(remat):
        linear = functools.partial(hb.qdot, recipe=NVFP4, key=KEY)
        return jax.grad(lambda x, w: jnp.sum(REMATS[remat](linear)(x, w).astype(jnp.float32)), (0, 1))

    x, weights = inputs()
    assert quantizations(lone("quantized"), x, weights[0]) == LINEAR


def microbatches(prepare):
    def loss(w, batches):
        weight = prepare(w)

        def body(total, numbered):
            x, number = numbered
            y = hb.qdot(x, weight, recipe=NVFP4, key=layer_key(KEY, number))
            return total + mean_square(jnp.tanh(y)), None

        return jax.lax.scan(body, jnp.float32(0), (batches, jnp.arange(len(batches))))[0]

    return jax.value_and_grad(loss, (0, 1))


def test_a_weight_quantized_once_serves_every_microbatch():
    """Equal losses and gradients, bit for bit; W is quantized once, not once a microbatch."""
    x, weights = inputs()
    batches = jnp.stack([x, x * jnp.bfloat16(2), -x, x[:, ::-1]])
    once = microbatches(functools.partial(hb.quantize_weight, recipe=NVFP4))
    each = microbatches(lambda w: w)
    arguments = weights[0], batches
    got, want = (jax.jit(f, compiler_options=quick)(*arguments) for f in (once, each))
    assert_same_bits(got, want)
    assert float(jnp.abs(want[1][0]).max()) > 0
    assert quantizations(once, *arguments) == 1 + (LINEAR - 1) * 4


def test_vmap_is_a_loop():
    """Experts side by side: each has its own amax, scales and random bits."""
    x, weights = inputs()
    experts = x * jnp.array([1, 100], jnp.bfloat16).reshape(2, 1, 1)
    keys = jax.random.split(KEY, 2)

    def grads(x, w, key):
        return jax.value_and_grad(lambda x, w: mean_square(hb.qdot(x, w, recipe=NVFP4, key=key)), (0, 1))(x, w)

    one = jax.jit(grads, compiler_options=quick)
    together = jax.jit(jax.vmap(grads), compiler_options=quick)(experts, weights[:2], keys)
    loss, (dx, dw) = together
    for i in range(2):
        want_loss, want = one(experts[i], weights[i], keys[i])
        assert_same_bits((dx[i], dw[i]), want)
        np.testing.assert_allclose(loss[i], want_loss, rtol=1e-6)  # a mean over another layout
