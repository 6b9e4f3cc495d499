"""Weights quantized once. Oracle: the codes that each layer's weight has by itself."""

import dataclasses

import jax
import numpy as np
from tiny import MODEL, tiny

from halfbyte import ops
from halfbyte.recipe import recipe
from halfbyte.train import abstract_state, create_state, phases, run_mesh
from halfbyte.train.weights import is_qweight, quantize_once, with_anchors


def test_codes_are_those_of_each_layer():
    config = tiny(recipe="nvfp4", accumulate=2)
    mesh = run_mesh(config, jax.devices()[:1])
    params = create_state(config, mesh).params
    resolved = phases(config)[0].resolved(config)
    ready = jax.jit(lambda p: quantize_once(config, resolved, mesh, p))(params)
    quantized = [is_qweight(leaf) for leaf in jax.tree.leaves(ready["layers"], is_leaf=is_qweight)]
    assert sum(quantized) == 3  # gate, up and down under policy mlp
    for layer in range(config.model.layers):
        alone = ops.quantize_weight(params["layers"]["mlp"]["up"][layer], recipe=recipe("nvfp4"))
        stacked = jax.tree.map(lambda leaf, at=layer: leaf[at], ready["layers"]["mlp"]["up"])
        assert np.array_equal(stacked.fprop.packed, alone.fprop.packed)
        assert np.array_equal(stacked.fprop.scales, alone.fprop.scales)
    joined = with_anchors(ready, params)
    assert joined["layers"]["mlp"]["up"].anchor is params["layers"]["mlp"]["up"]


def test_policies_that_differ_by_layer_are_left_to_the_model():
    config = tiny(recipe="nvfp4", policy="paper", accumulate=2, model=dataclasses.replace(MODEL, layers=8))
    resolved = phases(config)[0].resolved(config)
    assert len(resolved.segments) > 1
    mesh = run_mesh(config, jax.devices()[:1])
    ready = jax.eval_shape(lambda p: quantize_once(config, resolved, mesh, p), abstract_state(config, mesh).params)
    assert not any(map(is_qweight, jax.tree.leaves(ready, is_leaf=is_qweight)))
