"""The MLP as one op: y = (a(x Wg) * (x Wu)) Wd, with its nine GEMMs quantized and its own VJP.

It equals three `qdot`s around the activation, bit for bit. As one op it quantizes x once for gate and up, fuses the
activation into the passes, and decides what the VJP saves:

| residuals  | saved of the activations            | computed again in the backward pass |
|------------|-------------------------------------|-------------------------------------|
| `operands` | wgrad's operand of x (packed), g, u | h                                   |
| `input`    | x, its amaxes                       | the operands of x, g, u, h          |

`input` is for a caller whose remat policy rematerializes x, so nothing is saved. In a loop over layers `operands` can
save g and u in stacks of the caller (`mlp_with_stacked_residuals`), from which kernels read them without a copy.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from halfbyte.kernels.mosaic_launch import StackSlice, materialize_slice
from halfbyte.ops.activation import SILU, Activation
from halfbyte.ops.gemm_problem import check_input_dtype, check_weight_dtype
from halfbyte.ops.linear import QuantizedLinear, apply_with_linears
from halfbyte.ops.linear_plan import DEFAULT_EXECUTION, ExecutionConfig
from halfbyte.ops.linear_sharding import Placement, all_gather_dims, axes_in, gather_linear_input
from halfbyte.ops.operand import DeferredAlpha, add_and_round, tag_residual
from halfbyte.ops.quantize_passes import ArrayOrDeferred, GatedQuantizePasses, OperandOrResidual, QuantizePasses
from halfbyte.ops.quantized_weight import QWeight, Weight
from halfbyte.ops.shared_input import dedupe_operands, first_with_same_operand, quantize_shared_x, shared_x_amax
from halfbyte.ops.trace_context import warn_if_key_shared
from halfbyte.recipes import LinearKey, Recipe, as_recipe, site_key
from halfbyte.renamed import renamed_parameters

MLP_LINEARS = ("gate", "up", "down")
RESIDUALS = ("operands", "input")
X_ROLES = ("fprop_x", "wgrad_x")  # the operands of x
ActivationStacks = tuple[jax.Array, jax.Array, jax.Array]  # the stacks of g and of u, and the layer's index
Recipes = Recipe | str | Mapping[str, Recipe | str]


@dataclasses.dataclass(frozen=True)
class GatedActivationConfig:
    """Configures the op between the linears: the activation, and which residuals the VJP saves (`RESIDUALS`)."""

    activation: Activation = SILU
    residuals: str = "operands"

    def __post_init__(self) -> None:
        if self.residuals not in RESIDUALS:
            raise ValueError(f"residuals must be one of {', '.join(RESIDUALS)}, got {self.residuals!r}")

    def fused_passes_of(self, linears: Sequence[QuantizedLinear]) -> GatedQuantizePasses | None:
        """Returns the passes that fuse the activation, None if the three linears do not share such passes."""
        recipes = [linear.plan.recipe for linear in linears]
        return shared_gated_passes([linear.passes for linear in linears], self.activation, recipes)

    def uses_stacked_residuals(self, linears: Sequence[QuantizedLinear], place: ActivationStacks | None) -> bool:
        """Returns True if kernels write g and u into the stacks of `place` and read them there."""
        fused = self.fused_passes_of(linears)
        return place is not None and fused is not None and fused.supports_stacked_residuals


SWIGLU_CONFIG = GatedActivationConfig()


def shared_gated_passes(
    passes: Sequence[QuantizePasses], activation: Activation, recipes: Sequence[Recipe]
) -> GatedQuantizePasses | None:
    """Returns the passes of the linears if all are equal and fuse the activation under these recipes, else None."""
    first = passes[0]
    several = any(other != first for other in passes) or any(recipe.remainder for recipe in recipes)
    if not isinstance(first, GatedQuantizePasses) or several:
        return None
    return first if first.unsupported_activation_fusion(activation, recipes) is None else None


@renamed_parameters(mode="residuals", weights_kept="weight_residual", sharded="partitioned_by_xla")
def mlp(
    x: jax.Array, gate: Weight, up: Weight, down: Weight, *, recipe: Recipes, key: jax.Array | None = None,
    residuals: str = "operands", backend: str = "auto", activation: Activation = SILU,
    placements: Mapping[str, Placement] | None = None, weight_residual: str = "master",
    partitioned_by_xla: bool = False,
) -> jax.Array:  # fmt: skip
    """Gated MLP of x [..., embed] with gate, up [embed, hidden] and down [hidden, embed], in x's dtype.

    `recipe`: a recipe or its name, for all three linears or by the names gate, up and down; `key` is folded by those
    names. `residuals` selects what is saved for the backward pass: the `operands`, or only the `input`, from which the
    backward pass rematerializes them. Weights are saved as packed codes. A backend whose GEMM reads bf16 operands
    rematerializes the weight from the `master`; `weight_residual="codes"` saves its codes, for a master that is
    itself a copy. With `placements` each device of their mesh computes its shard with the kernels of one device;
    `partitioned_by_xla` as for `qdot`.
    """
    linear_placements = None if placements is None else tuple(placements[site] for site in MLP_LINEARS)
    execution = ExecutionConfig(backend, linear_placements, weight_residual, partitioned_by_xla)
    config = GatedActivationConfig(activation, residuals)
    return mlp_with_stacked_residuals(
        x, (gate, up, down), None, recipe=recipe, key=key, config=config, execution=execution
    )[0]


def mlp_with_stacked_residuals(
    x: jax.Array, weights: tuple[Weight, Weight, Weight], place: ActivationStacks | None, *, recipe: Recipes,
    key: jax.Array | tuple[LinearKey | None, ...] | None = None, config: GatedActivationConfig = SWIGLU_CONFIG,
    execution: ExecutionConfig = DEFAULT_EXECUTION,
) -> tuple[jax.Array, ActivationStacks | None]:  # fmt: skip
    """Returns (`mlp` with weights gate, up and down, `place` with g and u written into its stacks).

    `key`: one for all three linears, or a tuple of three. The backward pass reads g and u from the cotangent of
    `place`: that of the stacks [layers, *x.shape[:-1], hidden] must be the stacks, as
    `mosaic_launch.return_as_cotangent` returns them. On a mesh both are sharded as gate's result, which must be
    sharded over all axes. If no kernel reads them in the stack, or `place` is None, `place` is returned unchanged and
    g and u are ordinary residuals.
    """
    recipes = _recipes(recipe)
    _check(x, weights, recipes)
    if not isinstance(key, tuple):
        checked_key = warn_if_key_shared(key, recipes, (x, *weights))
        key = tuple(None if checked_key is None else site_key(checked_key, site) for site in MLP_LINEARS)
    specs: tuple[Any, Any] = (), ()
    if execution.placements is not None:
        first, _, last = placed = execution.placements
        _check_placements(placed, x.ndim)
        stacks_spec = None if place is None else (*[PartitionSpec(None, *first.y)] * 2, PartitionSpec())
        specs = (first.x, stacks_spec), (last.y, stacks_spec)

    def products(
        tokens: jax.Array, linears: tuple[QuantizedLinear, ...], place: ActivationStacks | None
    ) -> tuple[jax.Array, ActivationStacks | None]:
        y, place = _mlp(config, tokens, linears, place)
        return y if y.ndim == x.ndim else y.reshape(x.shape), place  # [tokens..., embed] -> [..., embed]

    inputs = (x, place)
    y, place = apply_with_linears(products, inputs, weights, key, recipes=recipes, execution=execution, specs=specs)
    return y.astype(x.dtype), place


def _check_placements(placements: Sequence[Placement], ndim: int) -> None:
    """Raises ValueError unless gate and up read one x, and down reads h as they return it, without a collective."""
    gate, up, down = (p.shards(ndim) for p in placements)
    if (gate.x, gate.x_lead) != (up.x, up.x_lead) or len({p.mesh for p in placements}) > 1:
        raise ValueError(f"placements: gate and up have one mesh and one x, got {placements[0]} and {placements[1]}")
    if not gate.dy == up.dy == down.x or any(axes_in(dim_axes) for dim_axes in (gate.y_lead, up.y_lead, down.x_lead)):
        raise ValueError(
            f"placements: gate's and up's y must be cut as down's x, their tokens as x's, "
            f"got {placements[0].y}, {placements[1].y} and {placements[2].x}"
        )


def _recipes(recipe: Recipe | str | Mapping[str, Recipe | str]) -> tuple[Recipe, ...]:
    if not isinstance(recipe, Mapping):
        return (as_recipe(recipe, "mlp"),) * 3
    if set(recipe) != set(MLP_LINEARS):
        raise ValueError(f"mlp takes one recipe, or one each for {', '.join(MLP_LINEARS)}; got {', '.join(recipe)}")
    return tuple(as_recipe(recipe[site], f"mlp, {site}") for site in MLP_LINEARS)


def _check(x: jax.Array, weights: Sequence[Weight], recipes: tuple[Recipe, ...]) -> None:
    check_input_dtype(x, "mlp")
    gate, up, down = (w.shape for w in weights)
    if x.ndim == 0 or x.shape[-1:] != gate[:1] or gate != up or down != gate[::-1]:
        raise ValueError(
            f"mlp needs x [..., embed], gate and up [embed, hidden], down [hidden, embed]; "
            f"got x {x.shape}, gate {gate}, up {up}, down {down}"
        )
    for site, weight, recipe in zip(MLP_LINEARS, weights, recipes, strict=True):
        check_weight_dtype(weight, "mlp", site)
        if isinstance(weight, QWeight) and weight.recipe != recipe:
            raise ValueError(
                f"mlp: the QWeight of {site} was made under recipe {weight.recipe.name}, and the op was asked for "
                f"{recipe.name}; quantize the weight again"
            )


def _quantize_h(
    config: GatedActivationConfig,
    g: ArrayOrDeferred,
    u: ArrayOrDeferred,
    linears: Sequence[QuantizedLinear],
    place: ActivationStacks | None,
) -> tuple[OperandOrResidual, ActivationStacks | None]:
    """Returns (down's operand of h for fprop, `place`; with g and u written if it holds the residuals)."""
    fused, down = config.fused_passes_of(linears), linears[2]
    requests = [down.operand_spec("fprop_x")]
    if place is None or not config.uses_stacked_residuals(linears, place):
        operands = (
            fused.activate(g, u, requests) if fused else down.quantize(config.activation.forward(g, u), "fprop_x")
        )
        return operands[0], place
    slices = _stack_slices(place, g.shape[:-1])
    if fused:
        operands, stacks = fused.activate_to_stacks(g, u, requests, slices)
    else:
        operands = down.quantize(config.activation.forward(g, u), "fprop_x")
        stacks = tuple(stack_slice.write_to_stack(product) for stack_slice, product in zip(slices, (g, u), strict=True))
    g_stack, u_stack = (new_stack.reshape(stack.shape) for new_stack, stack in zip(stacks, place[:2], strict=True))
    return operands[0], (g_stack, u_stack, place[2])


def _quantize_backward_operands(
    config: GatedActivationConfig,
    g: ArrayOrDeferred,
    u: ArrayOrDeferred,
    dh: ArrayOrDeferred,
    linears: Sequence[QuantizedLinear],
):
    """Returns the operands of dg and du for dgrad and wgrad, and of h for wgrad."""
    gate, up, down = linears
    dg_specs, du_specs = ([site.operand_spec(role) for role in ("dgrad_dy", "wgrad_dy")] for site in (gate, up))
    h_specs, fused = [down.operand_spec("wgrad_x")], config.fused_passes_of(linears)
    if fused:
        return fused.activate_backward(g, u, dh, dg_specs, du_specs, h_specs)
    g, u = materialize_slice(g), materialize_slice(u)
    dg, du = config.activation.backward(g, u, dh)
    h = config.activation.forward(g, u)
    gradient_operands = gate.passes.quantize(dg, dg_specs), up.passes.quantize(du, du_specs)
    return *gradient_operands, down.passes.quantize(h, h_specs)


def _defers_alpha(config: GatedActivationConfig, linears: Sequence[QuantizedLinear]) -> bool:
    """Returns True if the fused activation passes apply the deferred alpha of g, u and dh."""
    fused = config.fused_passes_of(linears)
    return fused is not None and fused.accepts_deferred_alpha


def _stack_slices(place: ActivationStacks, lead: tuple[int, ...]) -> list[StackSlice]:
    """Returns the stack slices of g and u [*lead, hidden] of one layer."""
    return [StackSlice(stack, place[2]).reshape(*lead, stack.shape[-1]) for stack in place[:2]]


def _stacked_residual_extras(
    products: tuple[ArrayOrDeferred, ArrayOrDeferred], place: ActivationStacks
) -> tuple[Any, ...]:
    """Returns what the backward pass needs besides the stacks: the deferred alpha of g and u, and the layer index."""
    return *(p.alpha if isinstance(p, DeferredAlpha) else None for p in products), place[2]


def _load_stacked_residuals(
    extras: tuple[Any, ...], stacks: tuple[jax.Array, jax.Array], lead: tuple[int, ...]
) -> list[ArrayOrDeferred]:
    """Returns g and u [*lead, hidden] of a layer as slices of the stacks."""
    *alphas, layer_index = extras
    slices: list[ArrayOrDeferred] = list(_stack_slices((*stacks, layer_index), lead))
    return [
        product if alpha is None else DeferredAlpha(product, alpha)
        for product, alpha in zip(slices, alphas, strict=True)
    ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(
    config: GatedActivationConfig, x: jax.Array, linears: tuple[QuantizedLinear, ...], place: ActivationStacks | None
):
    """y = h Wd with h = a(g) u, g = x Wg, u = x Wu."""
    (gate, up, down), defer_alpha = linears, _defers_alpha(config, linears)
    gathered_x = gather_linear_input(x, gate.plan.sharding)
    (x_gate,), (x_up,) = quantize_shared_x(gathered_x, (gate, up), ("fprop_x",))
    g, u = gate.fprop(x_gate, x.dtype, defer_alpha=defer_alpha), up.fprop(x_up, x.dtype, defer_alpha=defer_alpha)
    h, place = _quantize_h(config, g, u, linears, place)
    return down.fprop(h, x.dtype), place


def _mlp_fwd(config, x, linears, place):
    (gate, up, down), defer_alpha = linears, _defers_alpha(config, linears)
    saved_linears = tuple(site.to_residuals(recompute_fprop=config.residuals == "input") for site in linears)
    gathered_x, recompute = gather_linear_input(x, gate.plan.sharding), config.residuals == "input"
    amaxes = shared_x_amax(gathered_x, (gate, up), X_ROLES) if recompute else []
    (x_gate, *gate_column), (x_up, *up_column) = quantize_shared_x(
        gathered_x, (gate, up), X_ROLES[:1] if recompute else X_ROLES, kept=("wgrad_x",), maxima=amaxes
    )
    g, u = gate.fprop(x_gate, x.dtype, defer_alpha=defer_alpha), up.fprop(x_up, x.dtype, defer_alpha=defer_alpha)
    h, place = _quantize_h(config, g, u, linears, place)
    y = down.fprop(h, x.dtype)
    if recompute:
        return (y, place), ((x, amaxes), saved_linears)
    columns = dedupe_operands((gate, up), "wgrad_x", [*gate_column, *up_column])
    products = (
        _stacked_residual_extras((g, u), place)
        if config.uses_stacked_residuals(linears, place)
        else tag_residual((g, u))
    )
    return (y, place), ((columns, products), saved_linears)


def _rematerialize_products(config, saved, linears, dtype):
    """Returns ((wgrad's operands of x for gate and for up), g and u as saved), loaded or rematerialized from x."""
    (gate, up, _), defer_alpha = linears, _defers_alpha(config, linears)
    if config.residuals == "operands":
        columns, products = saved
        saved_columns = [columns[index] for index in first_with_same_operand((gate, up), "wgrad_x")]
        return [
            site.operand_from_residual(column, "wgrad_x")
            for site, column in zip((gate, up), saved_columns, strict=True)
        ], products
    x, amaxes = saved
    gathered_x = gather_linear_input(x, gate.plan.sharding)
    (x_gate, gate_column), (x_up, up_column) = quantize_shared_x(gathered_x, (gate, up), X_ROLES, maxima=amaxes)
    return (gate_column, up_column), (
        gate.fprop(x_gate, dtype, defer_alpha=defer_alpha),
        up.fprop(x_up, dtype, defer_alpha=defer_alpha),
    )


def _mlp_bwd(config, residuals, gradients):
    saved, saved_linears = residuals
    dy, place = gradients  # the cotangents of stacks are stacks
    gate, up, down = linears = [site.rematerialize(depends_on=dy) for site in saved_linears]
    (x_gate, x_up), products = _rematerialize_products(config, saved, linears, dy.dtype)
    gathered_dy = all_gather_dims(dy, down.plan.sharding.y_lead)
    g, u = (
        _load_stacked_residuals(products, place[:2], gathered_dy.shape[:-1])
        if config.uses_stacked_residuals(linears, place)
        else products
    )
    dy_row, dy_column = down.quantize(gathered_dy, "dgrad_dy", "wgrad_dy")
    dh = down.dgrad(dy_row, dy.dtype, defer_alpha=_defers_alpha(config, linears))
    backward_operands = _quantize_backward_operands(config, g, u, dh, linears)
    (dg_row, dg_column), (du_row, du_column), (h_column,) = backward_operands
    pairs = (x_gate, dg_column), (x_up, du_column), (h_column, dy_column)
    dw = tuple(site.wgrad(*pair) for site, pair in zip(linears, pairs, strict=True))
    dx = add_and_round(gate.dgrad(dg_row, dy.dtype, overlap_with=dw), up.dgrad(du_row, dy.dtype, overlap_with=dw))
    gradients = (
        site.weight_gradient(weight_grad, *pair) for site, weight_grad, pair in zip(linears, dw, pairs, strict=True)
    )
    return dx, tuple(gradients), place


_mlp.defvjp(_mlp_fwd, _mlp_bwd)
