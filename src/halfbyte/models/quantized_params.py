"""Quantizes weights once for several uses: for all microbatches of a step, or for all generated tokens.

A stacked weight [layers, in, out] becomes a stacked `QWeight`, which the linears of the model accept instead of the
matrix. Its gradient goes to the master weight. The codes are those that quantization at each use would give, so no
result changes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from halfbyte import ops
from halfbyte.distributed import DEFAULT_RULES, LogicalAxisRules, named_sharding
from halfbyte.formats import amax_of
from halfbyte.models.config import EXPERT_SITES, SHARED_SITES, LlamaConfig, param_specs
from halfbyte.models.model_context import LayerContext
from halfbyte.models.param_spec import flatten_specs, unflatten_specs
from halfbyte.models.params import Params
from halfbyte.recipes import WEIGHT_ROLES, Recipe, ResolvedPolicy

FUSED_GROUPS = {
    "attention": (("q", "k", "v"),),
    "mlp": (("gate", "up"), EXPERT_SITES[:2], SHARED_SITES[:2]),
}
"""Linears with the same input by group: serving engines fuse them into one linear, for experts one per expert."""


def fused_group(group: str, name: str) -> tuple[str, ...]:
    """Returns the linears that are fused with `name` of `group`, including itself; empty if it is not fused."""
    return next((names for names in FUSED_GROUPS[group] if name in names), ())


def is_qweight(node: Any) -> bool:
    """Returns True if the weight is already quantized."""
    return isinstance(node, ops.QWeight)


def quantize_weights(
    cfg: LlamaConfig,
    params: Params,
    resolved: ResolvedPolicy,
    mesh: Mesh | None = None,
    rules: LogicalAxisRules = DEFAULT_RULES,
) -> Params:
    """Quantizes the weight of each linear that has one recipe in all layers and no stochastic weight operand."""
    specs = flatten_specs(param_specs(cfg))

    def visit(path: str, weight: Any) -> Any:
        recipe, spec = _only_recipe(resolved, path), specs[path]
        if recipe is None or spec.kind == "experts":  # the grouped linear quantizes experts
            return weight
        sharding = None if mesh is None else named_sharding(spec.axes[1:], mesh, rules)

        @jax.jit  # returns only codes: a master that a jitted program returns would be a copy
        @jax.vmap
        def codes(w: jax.Array, amax: jax.Array | None) -> ops.QWeight:
            qweight = ops.quantize_weight(w, recipe=recipe, sharding=sharding, amax=amax)
            return dataclasses.replace(qweight, master=None)

        shared_amax = group_amaxes(params["layers"], resolved, *path.split("/")[1:])
        return dataclasses.replace(codes(weight, shared_amax), master=weight)

    return {
        **params,
        **unflatten_specs({path: visit(path, w) for path, w in flatten_specs({"layers": params["layers"]}).items()}),
    }


def quantize_with_shared_scale(weights: Params, here: LayerContext, group: str) -> Params:
    """Quantizes those weights of a layer's group whose recipes share one per-tensor scale (`shared_scales`).

    Experts are not quantized here: the grouped linear shares their scales.
    """
    for names in FUSED_GROUPS[group]:
        if names[0] in weights and names[0] not in EXPERT_SITES:
            weights = weights | _sharing(weights, here, group, names)
    return weights


def _sharing(weights: Params, here: LayerContext, group: str, joined: Sequence[str]) -> dict[str, ops.QWeight]:
    """Quantizes those of the `joined` weights that share a scale and have no codes yet."""
    shared = (name for name in joined if has_shared_scale(here.recipe(group, name)))
    names = [name for name in shared if not is_qweight(weights[name])]
    if not names:
        return {}
    amax = functools.reduce(jnp.maximum, (amax_of(lax.stop_gradient(weights[name])) for name in names))

    def codes(name: str) -> ops.QWeight:
        spec, ctx = here.specs["layers"][group][name], here.ctx
        sharding = named_sharding(spec.axes[1:], ctx.mesh, ctx.rules) if ctx.mesh is not None else None
        return ops.quantize_weight(weights[name], recipe=here.recipe(group, name), sharding=sharding, amax=amax)

    return {name: codes(name) for name in names}


def has_shared_scale(recipe: Recipe) -> bool:
    """Returns True if the weight has the per-tensor scale of its fused group."""
    return recipe.shared_scales and recipe.fprop_w.format.tensor_scale


def group_amaxes(stacks: Params, resolved: ResolvedPolicy, group: str, name: str) -> jax.Array | None:
    """Returns the amax that scales weight `name`, float32 [layers] or [layers, experts].

    Returns None if the weight is scaled by its own amax in all layers.
    """
    path, layers = f"layers/{group}/{name}", next(iter(stacks[group].values())).shape[0]
    fused = fused_group(group, name)
    shared = [name in fused and has_shared_scale(resolved.recipe_at(path, layer)) for layer in range(layers)]
    if not any(shared):
        return None
    amaxes = {other: matrix_amaxes(_master_of(stacks[group][other])) for other in fused}
    rows = []
    for layer in range(layers):
        joined = [other for other in fused if has_shared_scale(resolved.recipe_at(f"layers/{group}/{other}", layer))]
        sources = joined if shared[layer] else [name]
        rows.append(functools.reduce(jnp.maximum, (amaxes[other][layer] for other in sources)))
    return jnp.stack(rows)


def matrix_amaxes(stack: jax.Array) -> jax.Array:
    """Returns the amax, float32 [...], of each matrix of a stack [..., in, out]."""
    amax = amax_of
    for _ in stack.shape[:-2]:
        amax = jax.vmap(amax)
    return amax(stack)


def _master_of(weight: Any) -> jax.Array:
    return weight.master if is_qweight(weight) else weight


def _only_recipe(resolved: ResolvedPolicy, path: str) -> Recipe | None:
    recipes = {segment.recipes.get(path) for segment in resolved.segments}
    recipe = recipes.pop() if len(recipes) == 1 else None
    if (
        recipe is None
        or recipe.amax_history_len
        or not any(getattr(recipe, role).format.quantized for role in WEIGHT_ROLES)
    ):
        return None
    return None if any(getattr(recipe, role).stochastic for role in WEIGHT_ROLES) else recipe


def with_master_weights(ready: Params, params: Params) -> Params:
    """Returns `ready` with the master weights of `params`, so that gradients flow to `params`."""

    def join(kept: Any, weight: Any) -> Any:
        return dataclasses.replace(kept, master=weight) if is_qweight(kept) else weight

    joined: Params = jax.tree.map(join, ready, params, is_leaf=is_qweight)
    return joined
