"""The MLP op is three qdots around SwiGLU, bit for bit, in every mode, and quantizes nothing that it could share.

Oracle: the composition, whose linears `test_qdot` holds to the oracle of float64, and whose SwiGLU is held to its own
formula here.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import KEY, relative_error
from instruments import equations, quantizations, quick

import halfbyte as hb
from halfbyte import ops
from halfbyte.formats import MXFP4
from halfbyte.ops.activation import ACTIVATIONS, SILU
from halfbyte.ops.backends import BACKENDS
from halfbyte.recipes import OperandPolicy, site_key

NVFP4 = hb.recipe("nvfp4")
# Random bits in fprop, so that gate and up may not share an operand of x, beside a third linear in another format.
ROUGH = OperandPolicy(MXFP4, rounding="stochastic")
UNSHARED = dataclasses.replace(hb.recipe("bf16"), name="unshared", fprop_x=ROUGH, fprop_w=ROUGH)
RECIPES = {
    "nvfp4": NVFP4,
    "mixed": {"gate": UNSHARED, "up": UNSHARED, "down": hb.recipe("fp8")},
    "fp8": hb.recipe("fp8"),
    "bf16": hb.recipe("bf16"),
}


@jax.custom_vjp
def activation(g, u):
    return SILU.forward(g, u)


activation.defvjp(lambda g, u: (SILU.forward(g, u), (g, u)), lambda kept, dh: SILU.backward(*kept, dh))


def composed(recipe):
    recipes = recipe if isinstance(recipe, dict) else dict.fromkeys(("gate", "up", "down"), recipe)

    def run(x, gate, up, down):
        def linear(x, w, site):
            return hb.qdot(x, w, recipe=recipes[site], key=site_key(KEY, site))

        return linear(activation(linear(x, gate, "gate"), linear(x, up, "up")), down, "down")

    return run


def gradients(fn):
    return jax.value_and_grad(lambda *a: jnp.sum(fn(*a).astype(jnp.float32) ** 2), (0, 1, 2, 3))


def inputs(dtype=jnp.bfloat16, lead=(4, 8)):
    rng = np.random.default_rng(2)
    weights = [rng.normal(size=s) / np.sqrt(s[0]) for s in ((32, 64), (32, 64), (64, 32))]
    return jnp.asarray(rng.normal(size=(*lead, 32)), dtype), *(jnp.asarray(w, jnp.float32) for w in weights)


def assert_same_bits(a, b):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@functools.cache
def reference(name):
    return jax.jit(gradients(composed(RECIPES[name])), compiler_options=quick)(*inputs())


@pytest.mark.slow(fast_cases=["bf16-input"])
@pytest.mark.parametrize(
    "name, mode",
    [
        ("nvfp4", "operands"),
        ("mixed", "operands"),
        ("fp8", "operands"),
        ("nvfp4", "input"),
        ("mixed", "input"),
        ("bf16", "input"),
    ],
)
@pytest.mark.usefixtures("on_cpu")
def test_the_mlp_is_three_linears_around_swiglu(name, mode):
    run = gradients(functools.partial(hb.mlp, recipe=RECIPES[name], key=KEY, residuals=mode))
    assert_same_bits(jax.jit(run, compiler_options=quick)(*inputs()), reference(name))


@pytest.mark.slow
def test_quantizations_are_shared():
    """13 tensors: three weights; x, h and dy by two; dg and du by two. The composition quantizes x twice more.

    `input` makes those of x, and fprop's of h, once more in the backward pass.
    """
    fast, again = (
        quantizations(gradients(functools.partial(hb.mlp, recipe=NVFP4, key=KEY, residuals=mode)), *inputs())
        for mode in ("operands", "input")
    )
    assert (fast, again) == (13, 14)
    assert quantizations(gradients(composed(NVFP4)), *inputs()) == 15


@pytest.mark.parametrize("mode, gemms", [("operands", 9), ("input", 11)])
def test_gemms(mode, gemms):
    run = gradients(functools.partial(hb.mlp, recipe=hb.recipe("bf16"), residuals=mode, backend="reference"))
    found = [eqn for eqn, _ in equations(jax.make_jaxpr(run)(*inputs()).jaxpr) if eqn.primitive.name == "dot_general"]
    assert len(found) == gemms


@pytest.mark.slow
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in ("reference", "emulated")])
def test_other_backends(backend):
    """Where the device serves them. The device's exp may round h to its other neighbour, rarely: 2^-8 of one number."""
    x, *weights = (jnp.tile(a, (1,) * (a.ndim - 2) + (4, 4)) for a in inputs(lead=(2, 32)))
    problem = ops.LinearProblem(NVFP4, 256, 128, 256, device=ops.target_device())
    reason = BACKENDS[backend].unsupported_reason(problem)
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")
    got, want = (
        jax.jit(gradients(functools.partial(hb.mlp, recipe=NVFP4, key=KEY, backend=name)))(x, *weights)
        for name in (backend, "emulated")
    )
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(left.astype(jnp.float32), right.astype(jnp.float32)) < 2.0**-8


@pytest.mark.slow
def test_weights_quantized_ahead():
    """As traced: the same program, less the quantization of three weights."""
    x, *weights = inputs()
    quantized = jax.eval_shape(lambda *w: [hb.quantize_weight(m, recipe=NVFP4) for m in w], *weights)

    def run(x, *quantized):
        return hb.mlp(x, *quantized, recipe=NVFP4, key=KEY)

    assert jax.eval_shape(run, x, *quantized).shape == x.shape
    assert quantizations(run, x, *quantized) == 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_swiglu_is_its_formula(dtype):
    """Against float64: to float32's own exp (2e-6) in float32, and to two bfloat16 roundings in bfloat16."""
    rng = np.random.default_rng(0)
    g, u, dh = (jnp.asarray(rng.normal(size=(64, 64)) * 3, dtype) for _ in range(3))
    h = jax.jit(SILU.forward)(g, u)
    dg, du = jax.jit(SILU.backward)(g, u, dh)
    assert h.dtype == dg.dtype == du.dtype == dtype
    wide_g, wide_u, wide_dh = (np.asarray(t.astype(jnp.float32), np.float64) for t in (g, u, dh))
    s = 1 / (1 + np.exp(-wide_g))
    silu, slope = wide_g * s, s * (1 + wide_g * (1 - s))
    tolerance = 2e-6 if dtype == jnp.float32 else 2.01 * 2.0**-8
    for got, want in ((h, silu * wide_u), (du, wide_dh * silu), (dg, wide_dh * wide_u * slope)):
        error = np.abs(np.asarray(got.astype(jnp.float32), np.float64) - want)
        # The slope passes through zero: what is lost there is relative to the terms that cancel.
        assert (error <= tolerance * np.maximum(np.abs(want), np.abs(wide_dh * wide_u) * s)).all()


def test_swiglu_keeps_its_roundings_inside_jit():
    """bfloat16 results are bfloat16 values also where a compiler could carry them on in float32."""
    g, u, _ = (jnp.asarray(np.random.default_rng(1).normal(size=(64, 64)), jnp.bfloat16) for _ in range(3))
    wide = jax.jit(lambda g, u: SILU.forward(g, u).astype(jnp.float32) * jnp.float32(1))(g, u)
    np.testing.assert_array_equal(wide, SILU.forward(g, u).astype(jnp.float32))


@pytest.mark.slow(fast_cases=["relu2"])
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_slopes_are_those_of_the_curves(name):
    """Against JAX's own derivative of the curve, in float32, away from the kink of relu2."""
    chosen, g = ACTIVATIONS[name], jnp.linspace(-6, 6, 241) + jnp.float32(0.01)
    np.testing.assert_allclose(chosen.derivative(g), jax.vmap(jax.grad(chosen.fn))(g), rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_another_activation_is_an_argument():
    """relu2 between the linears: g of one sign leaves nothing of h, and the result is the composition's."""
    x, *weights = inputs()
    relu2 = ACTIVATIONS["relu2"]
    run = functools.partial(hb.mlp, recipe=hb.recipe("bf16"), activation=relu2)
    g, u = (hb.qdot(x, w, recipe=hb.recipe("bf16")) for w in weights[:2])
    want = hb.qdot(relu2.forward(g, u), weights[2], recipe=hb.recipe("bf16"))
    np.testing.assert_array_equal(np.asarray(run(x, *weights)), np.asarray(want))
    with jax.numpy_dtype_promotion("standard"):
        assert not np.array_equal(np.asarray(want), np.asarray(hb.mlp(x, *weights, recipe=hb.recipe("bf16"))))


@pytest.mark.slow
def test_a_recipe_may_be_given_by_its_name():
    """The same program, by its jaxpr; nothing runs."""
    x, w = jnp.ones((16, 32), jnp.bfloat16), jnp.ones((32, 32))

    def program(recipe):
        one = dict.fromkeys(("gate", "up", "down"), recipe)
        return str(jax.make_jaxpr(lambda x, w: (
            hb.mlp(x, w, w, w, recipe=recipe, key=KEY), hb.mlp(x, w, w, w, recipe=one, key=KEY),
            hb.qdot(x, hb.quantize_weight(w, recipe=recipe, key=KEY), recipe=recipe, key=KEY),
        ))(x, w))  # fmt: skip

    addresses = r" at 0x[0-9a-f]+"
    assert re.sub(addresses, "", program("nvfp4")) == re.sub(addresses, "", program(hb.recipe("nvfp4")))
    with pytest.raises(TypeError, match="mlp, up: recipe must be a Recipe or a recipe's name, got 3"):
        hb.mlp(x, w, w, w, recipe={"gate": "nvfp4", "up": 3, "down": "bf16"}, key=KEY)
    with pytest.raises(ValueError, match="no recipe named 'nvfp5'"):
        hb.quantize_weight(w, recipe="nvfp5", key=KEY)
