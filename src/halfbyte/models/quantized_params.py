"""Parameters whose weights are quantized once: for all microbatches of a step, for all tokens that are generated.

A stacked weight [layers, in, out] becomes a stacked `QWeight`, which the model's linears take in place of the matrix;
its gradient goes to the master weight. The codes are those that each use would have made, so nothing changes but the
time it takes.
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
"""Linears of one input, which serving engines join into one, by group; of each expert its own."""


def fused_group(group: str, name: str) -> tuple[str, ...]:
    """The linears that `name` of `group` is joined with, itself among them; none if it stands alone."""
    return next((names for names in FUSED_GROUPS[group] if name in names), ())


def is_qweight(node: Any) -> bool:
    """True for a weight that is quantized already."""
    return isinstance(node, ops.QWeight)


def quantize_weights(
    cfg: LlamaConfig,
    params: Params,
    resolved: ResolvedPolicy,
    mesh: Mesh | None = None,
    rules: LogicalAxisRules = DEFAULT_RULES,
) -> Params:
    """`params` with a QWeight wherever a linear has one recipe in all layers and quantizes its weight without noise."""
    declared = flatten_specs(param_specs(cfg))

    def visit(path: str, weight: Any) -> Any:
        recipe, spec = _only_recipe(resolved, path), declared[path]
        if recipe is None or spec.kind == "experts":  # experts are quantized where they are multiplied
            return weight
        sharding = None if mesh is None else named_sharding(spec.axes[1:], mesh, rules)

        @jax.jit  # of the codes alone: a master that a program returns would be a copy
        @jax.vmap
        def codes(w: jax.Array, amax: jax.Array | None) -> ops.QWeight:
            made = ops.quantize_weight(w, recipe=recipe, sharding=sharding, amax=amax)
            return dataclasses.replace(made, master=None)

        shared = group_amaxes(params["layers"], resolved, *path.split("/")[1:])
        return dataclasses.replace(codes(weight, shared), master=weight)

    return {
        **params,
        **unflatten_specs({path: visit(path, w) for path, w in flatten_specs({"layers": params["layers"]}).items()}),
    }


def quantize_with_shared_scale(weights: Params, here: LayerContext, group: str) -> Params:
    """A layer's `weights` of one group, quantized with one tensor scale where its recipes say so (`shared_scales`);
    experts share theirs where they are multiplied."""
    for names in FUSED_GROUPS[group]:
        if names[0] in weights and names[0] not in EXPERT_SITES:
            weights = weights | _sharing(weights, here, group, names)
    return weights


def _sharing(weights: Params, here: LayerContext, group: str, joined: Sequence[str]) -> dict[str, ops.QWeight]:
    """Those of the `joined` weights that share a scale and have no codes yet, quantized."""
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
    """Whether this weight's tensor scale is its group's."""
    return recipe.shared_scales and recipe.fprop_w.format.tensor_scale


def group_amaxes(stacks: Params, resolved: ResolvedPolicy, group: str, name: str) -> jax.Array | None:
    """float32 [layers], or [layers, experts]: the amax that stands for weight `name`'s own; None if all have their
    own."""
    path, layers = f"layers/{group}/{name}", next(iter(stacks[group].values())).shape[0]
    together = fused_group(group, name)
    shared = [name in together and has_shared_scale(resolved.recipe_at(path, layer)) for layer in range(layers)]
    if not any(shared):
        return None
    own = {other: matrix_amaxes(_master_of(stacks[group][other])) for other in together}
    rows = []
    for layer in range(layers):
        joined = [other for other in together if has_shared_scale(resolved.recipe_at(f"layers/{group}/{other}", layer))]
        read = joined if shared[layer] else [name]
        rows.append(functools.reduce(jnp.maximum, (own[other][layer] for other in read)))
    return jnp.stack(rows)


def matrix_amaxes(stack: jax.Array) -> jax.Array:
    """float32: the amax of each matrix of a stack [..., in, out]."""
    each = amax_of
    for _ in stack.shape[:-2]:
        each = jax.vmap(each)
    return each(stack)


def _master_of(weight: Any) -> jax.Array:
    return weight.master if is_qweight(weight) else weight


def _only_recipe(resolved: ResolvedPolicy, path: str) -> Recipe | None:
    found = {segment.recipes.get(path) for segment in resolved.segments}
    recipe = found.pop() if len(found) == 1 else None
    if (
        recipe is None
        or recipe.amax_history_len
        or not any(getattr(recipe, role).format.quantized for role in WEIGHT_ROLES)
    ):
        return None
    return None if any(getattr(recipe, role).stochastic for role in WEIGHT_ROLES) else recipe


def with_master_weights(ready: Params, params: Params) -> Params:
    """`ready` with the master weights of `params` as anchors: what is differentiated is `params`."""

    def join(kept: Any, weight: Any) -> Any:
        return dataclasses.replace(kept, master=weight) if is_qweight(kept) else weight

    joined: Params = jax.tree.map(join, ready, params, is_leaf=is_qweight)
    return joined
