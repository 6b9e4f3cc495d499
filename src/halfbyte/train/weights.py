"""Weights quantized once a step, for all of its microbatches.

Weights do not change between the microbatches of a step, so their 4-bit codes need not be made again. A stacked
weight [layers, in, out] becomes a
stacked `QWeight`, which the model's linears take in place of the matrix; its gradient goes to the master weight. The
codes are those that each
microbatch would have made, so nothing changes but the time it takes.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from halfbyte import models, ops
from halfbyte.recipe import WEIGHTS, Recipe, Resolved
from halfbyte.sharding import weight_sharding

from .config import TrainConfig


def is_qweight(node: Any) -> bool:
    """True for a weight that is quantized already."""
    return isinstance(node, ops.QWeight)


def quantize_once(config: TrainConfig, resolved: Resolved, mesh: Mesh, params: Any) -> Any:
    """`params` with a QWeight wherever a linear has one recipe in all layers and quantizes its weight without noise."""
    specs = models.param_specs(config.model)

    def visit(path: str, weight: Any, spec: models.ParamSpec) -> Any:
        recipe = _only_recipe(resolved, path)
        if recipe is None:
            return weight
        sharding = weight_sharding(spec.axes[1:], mesh)
        return jax.vmap(lambda w: ops.quantize_weight(w, recipe=recipe, weight_sharding=sharding))(weight)

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


def with_anchors(ready: Any, params: Any) -> Any:
    """`ready` with the master weights of `params` as anchors: what is differentiated is `params`."""

    def join(kept: Any, weight: Any) -> Any:
        return dataclasses.replace(kept, anchor=weight) if is_qweight(kept) else weight

    return jax.tree.map(join, ready, params, is_leaf=is_qweight)
