"""Parameters whose weights are quantized once: for all microbatches of a step, for all tokens that are generated.

A stacked weight [layers, in, out] becomes a stacked `QWeight`, which the model's linears take in place of the matrix;
its gradient goes to the master weight. The codes are those that each use would have made, so nothing changes but the
time it takes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from halfbyte import ops
from halfbyte.models.config import LlamaConfig
from halfbyte.models.params import Params, ParamSpec, param_specs
from halfbyte.recipe import WEIGHTS, Recipe, Resolved
from halfbyte.sharding import DEFAULT_RULES, Rules, weight_sharding


def is_qweight(node: Any) -> bool:
    """True for a weight that is quantized already."""
    return isinstance(node, ops.QWeight)


def quantize_weights(
    cfg: LlamaConfig, params: Params, resolved: Resolved, mesh: Mesh | None = None, rules: Rules = DEFAULT_RULES
) -> Params:
    """`params` with a QWeight wherever a linear has one recipe in all layers and quantizes its weight without noise."""
    specs = param_specs(cfg)

    def visit(path: str, weight: Any, spec: ParamSpec) -> Any:
        recipe = _only_recipe(resolved, path)
        if recipe is None:
            return weight
        sharding = weight_sharding(spec.axes[1:], mesh, rules)

        @jax.jit  # of the codes alone: a master that a program returns would be a copy
        @jax.vmap
        def codes(w: jax.Array) -> ops.QWeight:
            return dataclasses.replace(ops.quantize_weight(w, recipe=recipe, weight_sharding=sharding), anchor=None)

        return dataclasses.replace(codes(weight), anchor=weight)

    layers = {
        group: {
            name: visit(f"layers/{group}/{name}", weight, specs["layers"][group][name])
            for name, weight in inner.items()
        }
        for group, inner in params["layers"].items()
    }
    return {**params, "layers": layers}


def _only_recipe(resolved: Resolved, path: str) -> Recipe | None:
    found = {segment.recipes.get(path) for segment in resolved.segments}
    recipe = found.pop() if len(found) == 1 else None
    if recipe is None or not any(getattr(recipe, role).format.quantized for role in WEIGHTS):
        return None
    return None if any(getattr(recipe, role).stochastic for role in WEIGHTS) else recipe


def with_anchors(ready: Params, params: Params) -> Params:
    """`ready` with the master weights of `params` as anchors: what is differentiated is `params`."""

    def join(kept: Any, weight: Any) -> Any:
        return dataclasses.replace(kept, anchor=weight) if is_qweight(kept) else weight

    joined: Params = jax.tree.map(join, ready, params, is_leaf=is_qweight)
    return joined
