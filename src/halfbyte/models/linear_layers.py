"""Linears and gated MLP of a layer, computed by `ops.qdots` and `ops.mlp`.

Under `compute_dtype=float32` a linear that the policy does not quantize is a plain float32 product. The bf16 recipe
would round its operands, and that mode exists to compare the model with another implementation to the last digits.

On a mesh the input and output of a block are sharded as the residual stream, its positions over `tensor` too. Inside a
block, features are sharded over `tensor` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from halfbyte import ops
from halfbyte.distributed import manual_axes
from halfbyte.models.model_context import (
    EXPERT_PREFIX,
    RESIDUAL_STREAM_AXES,
    Axes,
    LayerContext,
    ModelContext,
    block_activation_axes,
)
from halfbyte.models.param_spec import flatten_specs, unflatten_specs
from halfbyte.models.params import Params
from halfbyte.models.remat import name_linear_output
from halfbyte.ops.linear_sharding import axes_in, dim_axes_of_spec, empty_sharded_stack
from halfbyte.ops.rms_norm_vjp import norm_kernel_refusal
from halfbyte.recipes import LayerSegment, Recipe

MLP_SITES = ("gate", "up", "down")
# Fields of `ResidualStacks`, without `layer_index`.
StackedResiduals = tuple[tuple[jax.Array, jax.Array] | None, dict[str, jax.Array]]


def with_delayed_amaxes(layers: Params, amaxes: jax.Array, segment: LayerSegment, paths: Sequence[str]) -> Params:
    """Adds `amaxes` [layers, paths, 3] to those stacked weights of a segment whose recipe has an amax history."""

    def with_amaxes(path: str, weight: Any) -> Any:
        if path not in segment.recipes or not segment.recipes[path].amax_history_len:
            return weight
        return ops.DelayedScalingWeight(weight, amaxes[:, paths.index(path)])

    return unflatten_specs(
        {path: with_amaxes(f"layers/{path}", weight) for path, weight in flatten_specs(layers).items()}
    )


def prequantize_layers(layers: Params, x: jax.Array, here: LayerContext) -> Params:
    """Prequantizes those stacked weights of a segment that are all-gathered as codes; x is the residual stream."""
    sites = [tuple(path.split("/")[1:]) for path in here.recipes if not path.startswith(f"layers/{EXPERT_PREFIX}")]
    if not (
        here.on_mesh
        and here.ctx.is_scanned
        and here.shards_evenly(x, *(axes for group_and_name in sites for axes in here.io_axes(*group_and_name)))
    ):
        return layers
    flat = flatten_specs(layers)
    loop_linears = {
        path: site
        for path, group_and_name in (("/".join(group_and_name), group_and_name) for group_and_name in sites)
        if (site := _site(here, *group_and_name)).should_prequantize(x.ndim) and not isinstance(flat[path], ops.QWeight)
    }
    if not loop_linears:
        return layers
    stacks = {path: flat[path] for path in loop_linears}
    return unflatten_specs(
        {**flat, **ops.prequantize_stacked_weights(stacks, jax.ShapeDtypeStruct(x.shape, x.dtype), loop_linears)}
    )


def _site(here: LayerContext, group: str, name: str) -> ops.LoopLinear:
    recipe = here.recipe(group, name)
    return ops.LoopLinear(recipe, here.backend(recipe), here.placement(group, name))


def apply_linears(
    x: jax.Array, weights: Params, here: LayerContext, group: str, names: Sequence[str],
    copies: Sequence[jax.Array] = (),
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Multiplies x [..., inputs] by the weights `names` of `group` ("attention" or "mlp"); results in the dtype of x.

    `copies` are values equal to x, one per linear after the first, so that every linear has its own gradient of x.
    """
    recipes, x = [here.recipe(group, name) for name in names], here.observe_input(x, group, names)

    def named_output(name: str, y: jax.Array) -> jax.Array:
        return name_linear_output(here.observe_output(y, group, name))

    if all(is_float32_product(x, recipe) for recipe in recipes):
        return tuple(
            named_output(name, jnp.dot(x, here.constrain_weight(group, name, weights[name]).astype(x.dtype)))
            for name in names
        )
    outputs = ops.qdots(
        x,
        [weights[name] for name in names],
        recipes=recipes,
        keys=[here.keys.get(f"{group}/{name}") for name in names],
        execution=here.execution(x, group, names, weights),
        copies=copies,
    )
    return tuple(named_output(name, y) for name, y in zip(names, outputs, strict=True))


def gated_mlp(
    x: jax.Array, weights: Params, here: LayerContext, activation: ops.Activation, sites: Sequence[str] = MLP_SITES
) -> jax.Array:
    """Returns (a(x gate) * (x up)) down in the dtype of x; `sites` are the names of the three weights."""
    recipes = dict(zip(MLP_SITES, (here.recipe("mlp", name) for name in sites), strict=True))
    if all(is_float32_product(x, recipe) for recipe in recipes.values()):
        gate, up = apply_linears(x, weights, here, "mlp", sites[:2])
        (y,) = apply_linears(activation.fn(gate) * up, weights, here, "mlp", sites[2:])
        return y
    stacks, x = here.stacks, here.observe_input(x, "mlp", sites[:2])
    stack_slices = None if stacks is None or stacks.gate_up is None else (*stacks.gate_up, stacks.layer_index)
    gate, up, down = (weights[name] for name in sites)
    y, residuals = ops.mlp_with_stacked_residuals(
        x,
        (gate, up, down),
        stack_slices,
        recipe=recipes,
        key=tuple(here.keys.get(f"mlp/{name}") for name in sites),
        config=ops.GatedActivationConfig(
            activation, "input" if stack_slices is None and here.ctx.remat == "quantized" else "operands"
        ),
        execution=here.execution(x, "mlp", sites, weights),
    )
    if stacks is not None and residuals is not None:
        stacks.gate_up = residuals[:2]
    return here.observe_output(y, "mlp", sites[2])


def allocate_residual_stacks(
    segment: LayerSegment, x: jax.Array, width: int, ctx: ModelContext
) -> StackedResiduals | None:
    """Allocates the residual stacks of a segment's scanned layers: outputs of gate and up ([..., width]), norm inputs.

    Returns None if each layer saves its own residuals: without a gradient or a scan, under remat, or if no kernel
    would read the stacks.
    """
    if not ctx.uses_stacked_residuals:
        return None
    gate_up, norms = _stacks_of_products(segment, x, width, ctx), _stacks_of_norms(segment, x, ctx)
    return (gate_up, norms) if gate_up or norms else None


def _stacks_of_products(
    segment: LayerSegment, x: jax.Array, width: int, ctx: ModelContext
) -> tuple[jax.Array, jax.Array] | None:
    """Allocates the stacks of gate and up; None without a quantized MLP or if the mesh does not shard them evenly."""
    axes, layers = block_activation_axes("mlp"), segment.stop - segment.start
    mlps = [segment.recipes[path] for path in segment.recipes if path.removeprefix("layers/mlp/") in MLP_SITES]
    quantized = any(recipe.quantized for recipe in mlps) and x.dtype == jnp.bfloat16
    if not quantized or layers < 2 or not _shards_evenly(x, axes, ctx):
        return None
    spec = None if ctx.mesh is None else ctx.rules.spec(axes, ctx.mesh)
    gate, up = (
        empty_sharded_stack(layers, (*x.shape[:-1], width), x.dtype, mesh=ctx.mesh, spec=spec) for _ in range(2)
    )
    return gate, up


def _stacks_of_norms(segment: LayerSegment, x: jax.Array, ctx: ModelContext) -> dict[str, jax.Array]:
    """Allocates the stacks of norm inputs by group; empty if XLA computes the norms."""
    if norm_kernel_refusal(x.shape, x.dtype, looped=False, mesh=ctx.mesh, rules=ctx.rules):
        return {}
    layers, spec = (
        segment.stop - segment.start,
        None if ctx.mesh is None else ctx.rules.spec(RESIDUAL_STREAM_AXES, ctx.mesh),
    )
    return {
        group: empty_sharded_stack(layers, x.shape, x.dtype, mesh=ctx.mesh, spec=spec) for group in ("attention", "mlp")
    }


def _shards_evenly(x: jax.Array, axes: Axes, ctx: ModelContext) -> bool:
    """Returns True if an output with these logical axes, computed from x, is sharded evenly over all mesh axes."""
    if ctx.mesh is None:
        return True
    sharded_axes = axes_in(dim_axes_of_spec(ctx.rules.spec(axes, ctx.mesh), len(axes)))
    covers_mesh = all(axis in (*sharded_axes, *manual_axes()) for axis, size in ctx.mesh.shape.items() if size > 1)
    return covers_mesh and LayerContext(ctx, {}, {}, {}).shards_evenly(x, RESIDUAL_STREAM_AXES, axes)


def is_float32_product(x: jax.Array, recipe: Recipe) -> bool:
    """Returns True if the linear of x is a plain float32 product: float32 input and no quantized operand."""
    return x.dtype == jnp.float32 and not recipe.quantized
