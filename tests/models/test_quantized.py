"""Weights quantized once. Oracles: the codes that each layer's weight has by itself, and the model without it."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte import models, ops
from halfbyte.distributed import make_mesh
from halfbyte.models.linear_layers import prequantize_layers
from halfbyte.models.model_context import LayerContext
from halfbyte.models.quantized_params import is_qweight
from halfbyte.recipes import policy, recipe

NVFP4 = recipe("nvfp4")
by_itself = jax.jit(functools.partial(ops.quantize_weight, recipe=NVFP4))


def resolved(cfg, name="mlp"):
    return policy(name, NVFP4).resolve(models.linear_sites(cfg), cfg.layers)


@pytest.mark.slow
def test_codes_are_those_of_each_layer(tiny, tiny_params):
    ready = jax.jit(lambda p: models.quantize_weights(tiny, p, resolved(tiny)))(tiny_params)
    quantized = [is_qweight(leaf) for leaf in jax.tree.leaves(ready["layers"], is_leaf=is_qweight)]
    assert sum(quantized) == 3  # gate, up and down under policy mlp
    for layer in range(tiny.layers):
        alone = by_itself(tiny_params["layers"]["mlp"]["up"][layer])
        stacked = jax.tree.map(lambda leaf, at=layer: leaf[at], ready["layers"]["mlp"]["up"])
        assert np.array_equal(stacked.fprop.packed, alone.fprop.packed)
        assert np.array_equal(stacked.fprop.scales, alone.fprop.scales)
    joined = models.with_master_weights(ready, tiny_params)
    assert joined["layers"]["mlp"]["up"].anchor is tiny_params["layers"]["mlp"]["up"]


def ahead(cfg, params, mesh):
    ctx = models.ModelContext(policy=resolved(cfg), mesh=mesh)
    here = LayerContext(ctx, models.param_specs(cfg), resolved(cfg).segments[0].recipes, {})
    x = jnp.zeros((4, 32, cfg.embed), jnp.bfloat16)
    return jax.jit(lambda layers: prequantize_layers(layers, x, here))(params["layers"])


@pytest.mark.slow
def test_codes_made_ahead_of_the_loop_are_those_of_each_layer(tiny, tiny_params):
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices("cpu")[:4])
    made = ahead(tiny, jax.device_put(tiny_params, models.param_shardings(tiny, mesh)), mesh)
    assert not any(is_qweight(weight) for weight in made["attention"].values())  # policy mlp
    for name in ("up", "down"):
        weight = made["mlp"][name]
        packed = weight.fprop.packed
        assert 4 * math.prod(packed.sharding.shard_shape(packed.shape)) == packed.size
        for layer in range(tiny.layers):
            alone = by_itself(tiny_params["layers"]["mlp"][name][layer])
            for a, b in zip(jax.tree.leaves(weight.fprop), jax.tree.leaves(alone.fprop), strict=True):
                assert np.array_equal(a[layer], b)


@pytest.mark.parametrize("axes", [{"fsdp": 1}, {"data": 2}])
def test_nothing_is_made_ahead_where_nothing_is_gathered(tiny, tiny_params, axes):
    made = ahead(tiny, tiny_params, make_mesh(axes, jax.devices("cpu")[: math.prod(axes.values())]))
    assert not any(map(is_qweight, jax.tree.leaves(made, is_leaf=is_qweight)))


def test_policies_that_differ_by_layer_are_left_to_the_model(tiny):
    cfg = tiny.replace(layers=8)
    assert len(resolved(cfg, "paper").segments) > 1
    ready = jax.eval_shape(
        lambda key: models.quantize_weights(cfg, models.init(cfg, key), resolved(cfg, "paper")), jax.random.key(0)
    )
    assert not any(map(is_qweight, jax.tree.leaves(ready, is_leaf=is_qweight)))


@pytest.mark.slow
def test_decoded_token_of_prequantized_weights_is_equal(tiny, tiny_params):
    ctx = models.ModelContext(policy=resolved(tiny))

    @jax.jit
    def two_tokens(params):
        logits, cache = models.prefill(tiny, params, jnp.arange(16, dtype=jnp.int32)[None], None, ctx, size=32)
        return logits, models.decode_step(tiny, params, cache, jnp.argmax(logits, -1).astype(jnp.int32), ctx)[0]

    once = jax.jit(lambda p: models.quantize_weights(tiny, p, resolved(tiny)))(tiny_params)
    for a, b in zip(two_tokens(once), two_tokens(tiny_params), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)
