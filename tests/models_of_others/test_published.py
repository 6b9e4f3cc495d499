"""Models that nobody here wrote (published.py): the sites found are the dots counted in the jaxpr. Three of them are
trained for 100 steps on a mesh of four devices, two in NVFP4 on automatic axes and one on explicit axes: the loss in
NVFP4 is that in bf16 within noise, which is measured, over seeds (plain JAX: test_plain.py). Of the
others the same program is lowered with explicit axes: what JAX refuses about them, it refuses then.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from published import BATCH, MODELS, SEQ

import halfbyte as hb
from halfbyte.recipes import step_key

STEPS, SEEDS = 100, range(3)
MLPS = {"gemma": 2, "llama3": 3, "qwen3": 3, "penzai": 3, "nnx": 2, "haliax": 2, "haiku": 2, "equinox": 2}


def dots(jaxpr):
    """Dot products of a jaxpr and of those inside it: the oracle, which knows nothing of weights."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == "dot_general"
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            count += dots(inner) if hasattr(inner, "eqns") else 0
    return count


@pytest.mark.slow(fast_cases=["nnx"])
@pytest.mark.parametrize("name", MODELS)
def test_sites_are_the_dots_of_the_jaxpr(name):
    loss, params = MODELS[name]()
    tokens = jnp.zeros((BATCH, SEQ + 1), jnp.int32)
    found = hb.apply_recipe(loss, hb.policy("mlp", "nvfp4"), key=step_key(0, 0), show=None).report(params, tokens)
    assert len(found.sites) == dots(jax.make_jaxpr(loss)(params, tokens).jaxpr)
    assert len(found.replaced) == MLPS[name], found
    everything = hb.apply_recipe(loss, "nvfp4", key=step_key(0, 0), show=None).report(params, tokens)
    assert len(everything.replaced) > len(found.replaced)
    linears = hb.apply_recipe(loss, hb.policy("all_linear", "nvfp4"), key=step_key(0, 0), show=None)
    outside = re.compile(r"embed|head|table|^0$|^2/")  # in a tuple of three: the table and the head
    assert not [site.path for site in linears.report(params, tokens).replaced if outside.search(site.path)]


def training(loss, text, made):
    """(params, seed) -> [first loss, mean of the last ten], by one program: a seed is its data and its random bits."""
    optimizer = optax.adam(0.01)

    def whole(params, seed):
        def step(state, number):
            params, moments = state
            quantized = hb.apply_recipe(loss, hb.policy("mlp", made), key=step_key(seed, number), show=None)
            tokens = on_devices(text(jax.random.fold_in(jax.random.key(seed), number))[0])
            value, gradient = jax.value_and_grad(quantized)(params, tokens)
            updates, moments = optimizer.update(gradient, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        losses = jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(STEPS))[1]
        return jnp.stack([losses[0], losses[-10:].mean()])

    return jax.jit(whole)


def on_devices(tokens):
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    place = jax.reshard if explicit else jax.lax.with_sharding_constraint
    return place(tokens, P("d", None))


def four_devices(axes):
    return jax.set_mesh(jax.make_mesh((4,), ("d",), axis_types=(axes,), devices=jax.devices("cpu")[:4]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma", "llama3", "haliax"])
def test_trained_100_steps_on_four_devices(name, text):
    loss, params = MODELS[name]()
    axes, losses = AxisType.Explicit if name == "llama3" else AxisType.Auto, {}
    for made, on in (("bf16", AxisType.Auto), ("nvfp4", axes)):
        with four_devices(on):
            run = training(loss, text, made)
            losses[made] = np.stack([run(params, seed) for seed in SEEDS])
    first, bf16 = losses["bf16"].T
    assert np.all(first > 1.3 * bf16), "the task must be learned, or losing nothing would say nothing"
    noise = np.std(bf16, ddof=1)  # of one run, over seeds
    gap = losses["nvfp4"][:, 1] - bf16
    print(f"{name}, {axes}: bf16 {bf16.mean():.4f} +- {noise:.4f}, nvfp4 {gap.mean():+.4f}")
    assert np.all(gap != 0), "nothing was quantized that matters"
    assert gap.mean() < noise


@pytest.mark.slow(fast_cases=["equinox"])
@pytest.mark.parametrize("name", ["gemma", "haliax", "haiku", "equinox"])
def test_lowered_with_explicit_axes(name, text):
    loss, params = MODELS[name]()
    with four_devices(AxisType.Explicit):
        program = training(loss, text, "nvfp4").lower(params, 0).as_text()
    assert "xui8>" in program  # the bytes of stochastic rounding: it is quantized
