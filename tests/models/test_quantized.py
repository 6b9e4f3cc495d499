"""Weights quantized once. Oracles: the codes that each layer's weight has by itself, and the model without it."""

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte import models, ops
from halfbyte.models.quantized import is_qweight
from halfbyte.recipe import policy, recipe

NVFP4 = recipe("nvfp4")


def resolved(cfg, name="mlp"):
    return policy(name, NVFP4).resolve(models.linear_sites(cfg), cfg.layers)


def test_codes_are_those_of_each_layer(tiny, tiny_params):
    ready = jax.jit(lambda p: models.quantize_weights(tiny, p, resolved(tiny)))(tiny_params)
    quantized = [is_qweight(leaf) for leaf in jax.tree.leaves(ready["layers"], is_leaf=is_qweight)]
    assert sum(quantized) == 3  # gate, up and down under policy mlp
    for layer in range(tiny.layers):
        alone = ops.quantize_weight(tiny_params["layers"]["mlp"]["up"][layer], recipe=NVFP4)
        stacked = jax.tree.map(lambda leaf, at=layer: leaf[at], ready["layers"]["mlp"]["up"])
        assert np.array_equal(stacked.fprop.packed, alone.fprop.packed)
        assert np.array_equal(stacked.fprop.scales, alone.fprop.scales)
    joined = models.with_anchors(ready, tiny_params)
    assert joined["layers"]["mlp"]["up"].anchor is tiny_params["layers"]["mlp"]["up"]


def test_policies_that_differ_by_layer_are_left_to_the_model(tiny):
    cfg = tiny.replace(layers=8)
    assert len(resolved(cfg, "paper").segments) > 1
    ready = jax.eval_shape(
        lambda key: models.quantize_weights(cfg, models.init(cfg, key), resolved(cfg, "paper")), jax.random.key(0)
    )
    assert not any(map(is_qweight, jax.tree.leaves(ready, is_leaf=is_qweight)))


def test_a_decoded_token_is_the_same(tiny, tiny_params):
    ctx = models.Context(policy=resolved(tiny))

    @jax.jit
    def two_tokens(params):
        logits, cache = models.prefill(tiny, params, jnp.arange(16, dtype=jnp.int32)[None], None, ctx, size=32)
        return logits, models.decode_step(tiny, params, cache, jnp.argmax(logits, -1).astype(jnp.int32), ctx)[0]

    once = jax.jit(lambda p: models.quantize_weights(tiny, p, resolved(tiny)))(tiny_params)
    for a, b in zip(two_tokens(once), two_tokens(tiny_params), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)
