"""Linears of one x in somebody else's model: found, quantized once, and bit for bit the separate dots; SwiGLU inside
the passes that hold it. Oracles: the same model with `qdot` written by hand, each dot alone; `mlp`.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import halfbyte as hb
from halfbyte import devices, kernels, ops
from halfbyte.ops.adapters.weight_provenance import sub_jaxprs
from halfbyte.recipes import layer_key, site_key, step_key

KEY, LAYERS, WIDTH, HIDDEN = step_key(0, 3), 2, 32, 64
SHAPES = dict.fromkeys("qkv", (WIDTH, WIDTH)) | {
    "gate": (WIDTH, HIDDEN),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
}
NUMBERS = np.random.default_rng(0)
PARAMS = {n: jnp.asarray(NUMBERS.normal(size=(LAYERS, *s)) * s[0] ** -0.5, jnp.float32) for n, s in SHAPES.items()}
X = jnp.asarray(NUMBERS.normal(size=(2, 16, WIDTH)), jnp.float32)
TOGETHER = {"q": "kv", "k": "qv", "v": "qk", "gate": ["up"], "up": ["gate"], "down": []}
H200 = devices.device_by_name("h200")
# What is made of x twice, and rounded by chance under each dot's own key; the rest is what compiles sooner.
NVFP4, MXFP8 = hb.recipe("nvfp4_no_rht"), hb.recipe("mxfp8")
OF_X = {role: getattr(NVFP4, role) for role in ("fprop_x", "wgrad_x", "dgrad_dy")}
LIGHT = dataclasses.replace(hb.recipe("bf16"), name="light", fprop_w=MXFP8.fprop_w, dgrad_w=MXFP8.dgrad_w, **OF_X)
QUICK = {"xla_backend_optimization_level": 0}  # compiling is most of the time, and no number depends on it


def norm(x):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)


def attend(x, dot):
    """The residual is read besides."""
    y = norm(x)
    q, k, v = (dot(y, name) for name in "qkv")
    return x + jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v


def block(x, dot):
    x = attend(x, dot)
    y = norm(x)
    return x + dot(jax.nn.silu(dot(y, "gate")) * dot(y, "up"), "down")


def model(dot, layer_of=block):
    """`dot(x, w, name, layer)` at each linear, between casts of both: a scan over layers."""

    def loss(params, x):
        def body(x, item):
            layer, p = item
            narrow = lambda t: t.astype(jnp.bfloat16)  # noqa: E731
            return layer_of(x, lambda x, n: dot(narrow(x), narrow(p[n]), n, layer).astype(x.dtype)), None

        return jnp.mean(lax.scan(body, x, (jnp.arange(LAYERS), params))[0] ** 2)

    return loss


def plain(x, w, *_):
    return x @ w


PLAIN = model(plain)


def by_hand(x, w, name, layer):
    return hb.qdot(x, w, recipe=LIGHT, key=site_key(layer_key(KEY, layer), name))


def together(found):
    """By the last part of its name but for what frameworks put there, with what each replaced dot shares its x."""
    last = lambda path: path.replace("/kernel", "").replace("/value", "").rpartition("/")[2]  # noqa: E731
    return {last(site.path): sorted(map(last, site.shares_x)) for site in found.replaced}


@pytest.mark.slow
def test_dots_of_one_x_have_the_bits_of_separate_ones():
    ours = hb.apply_recipe(model(plain, attend), LIGHT, key=KEY, show=None)
    separate = model(by_hand, attend)
    run = jax.jit(lambda *a: [jax.value_and_grad(f, (0, 1))(*a) for f in (ours, separate)], compiler_options=QUICK)
    params = {name: PARAMS[name] for name in "qkv"}
    jax.tree.map(np.testing.assert_array_equal, *run(params, X))
    assert together(ours.report(params, X)) == {name: sorted(TOGETHER[name]) for name in "qkv"}


def count(jaxpr, name):
    return sum((eqn.primitive.name == name) + sum(count(sub, name) for sub in sub_jaxprs(eqn)) for eqn in jaxpr.eqns)


@pytest.mark.slow
def test_x_is_quantized_once_for_all_that_read_it():
    """Each quantized tensor has its maxima: six weights, and three times x, for q, k and v, for gate and up, and for
    down, instead of six times; one more is the softmax's own."""
    ours = hb.apply_recipe(PLAIN, "fp8", key=KEY, show=None)
    separate = model(lambda x, w, *_: hb.qdot(x, w, recipe="fp8"))
    found, alone = (count(jax.make_jaxpr(f)(PARAMS, X).jaxpr, "reduce_max") for f in (ours, separate))
    assert (alone - 1) * 9 == (found - 1) * 12 > 0


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = lambda x, name: nn.Dense(SHAPES[name][1], use_bias=False, dtype=jnp.bfloat16, name=name)(x)  # noqa: E731
        return block(x, lambda x, name: dense(x, name).astype(x.dtype))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        for name, shape in SHAPES.items():
            setattr(self, name, nnx.Linear(*shape, use_bias=False, dtype=jnp.bfloat16, rngs=rngs))

    def __call__(self, x):
        return block(x, lambda x, name: getattr(self, name)(x).astype(x.dtype))


def twins():
    linen = LinenBlock()
    yield lambda p, x: jnp.mean(linen.apply(p, x) ** 2), jax.eval_shape(linen.init, jax.random.key(0), X)
    yield lambda m, x: jnp.mean(m(x) ** 2), NnxBlock(nnx.Rngs(0))


@pytest.mark.slow
@pytest.mark.parametrize("fn, params", list(twins()), ids=["linen", "nnx"])
def test_x_cast_per_layer_is_one_x(fn, params):
    found = hb.apply_recipe(fn, "nvfp4", key=KEY).report(params, X)
    assert together(found) == {name: sorted(others) for name, others in TOGETHER.items()}


def test_weight_that_depends_on_a_dot_is_separate():
    """`b` is scaled by what the first dot gives: it cannot run with it; and the order of the program stays."""

    def fn(w, x):
        first = x @ w["a"]
        return jnp.sum(first + x @ (w["b"] * lax.stop_gradient(first)[0, 0]) + x @ w["c"])

    weights = dict.fromkeys("abc", PARAMS["q"][0])
    found = hb.apply_recipe(fn, "fp8", show=None)
    sites = {site.path: site.shares_x for site in found.report(weights, X[0]).replaced}
    assert sites.get("b", ()) == () and sites["a"] == ("c",)
    np.testing.assert_allclose(found(weights, X[0]), fn(weights, X[0]), rtol=0.2)


MLP = {n: jnp.asarray(NUMBERS.normal(size=s) * 0.1, jnp.float32) for n, s in
       dict.fromkeys(("gate", "up", "down"), (128, 128)).items()}  # fmt: skip


def swiglu(p, x):
    """As `mlp` in bf16; the product is written either way round."""
    narrow = {n: w.astype(jnp.bfloat16) for n, w in p.items()}
    return ((x @ narrow["up"]) * jax.nn.silu(x @ narrow["gate"])) @ narrow["down"]


@pytest.mark.slow(fast_cases=["fp8"])
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8"])
def test_swiglu_is_inside_the_passes_where_kernels_hold_it(recipe):
    x = jnp.asarray(NUMBERS.normal(size=(128, 128)), jnp.bfloat16)
    ours = hb.apply_recipe(swiglu, recipe, key=KEY, show=None)
    assert not any(site.swiglu_of for site in ours.report(MLP, x).replaced)  # no kernels here: its owner's own product

    def whole(p, x):
        return hb.mlp(x, *(p[n].astype(jnp.bfloat16) for n in ("gate", "up", "down")), recipe=recipe, key=KEY)

    with ops.compile_for(H200), kernels.interpret_kernels():
        (down,) = [site for site in ours.report(MLP, x).replaced if site.swiglu_of]
        assert (down.path, down.swiglu_of) == ("down", ("gate", "up"))
        loss = lambda f: lambda p, x: jnp.sum(f(p, x).astype(jnp.float32) ** 2)  # noqa: E731
        both = jax.jit(lambda *a: [jax.grad(loss(f), (0, 1))(*a) for f in (ours, whole)], compiler_options=QUICK)
        jax.tree.map(np.testing.assert_array_equal, *both(MLP, x))


@pytest.mark.slow
def test_product_with_another_reader_is_kept():
    def fn(p, x):
        h = jax.nn.silu(x @ p["gate"]) * (x @ p["up"])
        return jnp.sum(h @ p["down"]) + jnp.sum(h)

    x, narrow = jnp.ones((128, 128), jnp.bfloat16), {n: w.astype(jnp.bfloat16) for n, w in MLP.items()}
    with ops.compile_for(H200):
        found = hb.apply_recipe(fn, "nvfp4", key=KEY).report(narrow, x)
    assert not any(site.swiglu_of for site in found.replaced)
