"""A block with its norms in the passes that quantize. Oracle: the block with norms of their own, every bit."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte import models
from halfbyte.kernels import norm, normed
from halfbyte.models import LlamaConfig, llama
from halfbyte.models.context import LayerContext
from halfbyte.models.linear import norm_outside
from halfbyte.recipe import policy, recipe

CFG = LlamaConfig("wide", vocab_size=64, embed=1024, mlp=128, layers=1, heads=2, kv_heads=1, head_dim=128, max_seq=64)
TOKENS = (1, 32)


def context(policy_name="all_linear", recipe_name="nvfp4", **changes):
    resolved = policy(policy_name, recipe(recipe_name)).resolve(models.linear_sites(CFG), CFG.layers)
    given = {"policy": resolved, "key": jax.random.key(3), "unroll": 0, "attention": "xla"} | changes
    return models.Context(**given)


def step(ctx, run=jax.jit):
    """Loss and gradients, and whether norms were kernels of their own, and parts of passes."""
    params = jax.jit(lambda key: models.init(CFG, key))(jax.random.key(0))
    rows = np.random.default_rng(0).integers(0, CFG.vocab_size, (2, *TOKENS))
    batch = {name: jnp.asarray(each, jnp.int32) for name, each in zip(("tokens", "targets"), rows, strict=True)}
    found = jax.value_and_grad(lambda p: models.loss(CFG, p, batch, ctx)[0])
    with (
        mock.patch.object(norm, "forward", wraps=norm.forward) as alone,
        mock.patch.object(normed, "statistics", wraps=normed.statistics) as inside,
    ):
        return run(found)(params), (alone.called, inside.called)


@pytest.mark.slow
@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("name", ["attention/[qkv]", "mlp"])
def test_no_bit_of_a_step_changes(name, monkeypatch):
    """One of the two norms is in passes, the other, whose linears are bf16, a kernel of its own."""
    made, who = step(context(name))
    monkeypatch.setattr(llama, "norm_outside", lambda *_: "as before")
    before, who_before = step(context(name))
    assert who == (True, True) and who_before == (True, False)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("h200")
def test_both_norms_are_in_passes_where_all_linears_are_quantized():
    assert step(context("all_linear"), lambda f: functools.partial(jax.eval_shape, f))[1] == (False, True)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, None),
        ({"recipe_name": "bf16"}, "passes read"),
        ({"recipe_name": "fp8"}, "passes read"),
        ({"recipe_name": "halfbyte"}, "leaves over"),
        ({"remat": "quantized"}, "kept"),
    ],
)
def test_who_norms_is_known_before(changes, words):
    ctx = context(**changes)
    here = LayerContext(ctx, models.param_specs(CFG), ctx.policy.segments[0].recipes, {})
    weights = {name: jax.ShapeDtypeStruct((CFG.embed, 256), jnp.float32) for name in llama.QKV}
    x = jax.ShapeDtypeStruct((*TOKENS, CFG.embed), jnp.bfloat16)
    reason = norm_outside(x, weights, here, "attention", llama.QKV)
    assert reason is None if words is None else words in reason
