"""One linear y = x W during tracing: its weight, its random bits, its quantize passes and its GEMM backends.

`qdot` is one of these or several of one x; `mlp` is three and an activation. A `QuantizedLinear` is a pytree, so that
it can be an argument of a custom VJP. Its three GEMMs are methods from the operands to the result:

    fprop  y  = x W         dgrad  dx = dy W^T         wgrad  dw = x^T dy

`to_residuals` is what the VJP saves, and `rematerialize` rebuilds the linear from it. On a mesh a linear sees local
arrays. Its `LinearSharding` determines the collectives, which the methods run.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from halfbyte.distributed import shard_map_over
from halfbyte.formats import PackedQTensor, quantize
from halfbyte.kernels.mosaic_launch import StackSlice, materialize_slice
from halfbyte.ops.backends import check_token_blocks
from halfbyte.ops.gemm_problem import (
    DGRAD,
    FPROP,
    WGRAD,
    GemmKind,
    apply_epilogue,
    check_weight_dtype,
    reduce_partial_sums,
)
from halfbyte.ops.linear_plan import ExecutionConfig, LinearPlan, plan_linear
from halfbyte.ops.linear_sharding import (
    UNSHARDED,
    DimAxes,
    LinearSharding,
    all_gather_dims,
    axes_in,
    dim_axes_of_spec,
    gathered_input_shape,
    gradient_reduce_dtype,
    mask_to_first_shard,
    reduce_scatter_gradient,
    run_in_shard_map,
)
from halfbyte.ops.operand import (
    DeferredAlpha,
    Fp8Operand,
    Operand,
    QuantizedOperand,
    TwoTermOperand,
    WeightScalesResidual,
    quantize_operand,
    tag_residual,
)
from halfbyte.ops.quantize_passes import (
    XLA_PASSES,
    ArrayOrDeferred,
    OperandOrResidual,
    OperandSpec,
    QuantizePasses,
    WeightOperand,
    WeightResidual,
    operand_spec,
    quantize_weight_reference,
)
from halfbyte.ops.quantized_weight import (
    CONTRACTED_WEIGHT_AXIS,
    DelayedScalingWeight,
    QWeight,
    Weight,
    all_gather_codes,
    gather_kernel_weight,
    shares_fprop_dgrad_codes,
    weight_specs,
)
from halfbyte.recipes import LinearKey, Recipe, as_recipe

FLOAT32_DTYPE = jnp.dtype(jnp.float32)
LINEAR_TENSORS = ("x", "w", "dy")  # the tensors of a linear, in the order of its amax history
_Result = TypeVar("_Result")


def apply_with_linears(
    op: Callable[..., _Result], inputs: Sequence[Any], weights: Sequence[Weight], keys: Sequence[LinearKey | None], *,
    recipes: Sequence[Recipe], execution: ExecutionConfig, specs: tuple[Any, Any] = ((), ()),
) -> _Result:  # fmt: skip
    """Returns op(x, linears, ...) of `inputs` = (x, ...), with x as token blocks and each weight quantized.

    With placements it runs in shard_map over their mesh; `specs` are those of `inputs` and of the results. The first
    linear must read x. All linears have the same number of tokens.
    """
    shardings, slices = execution.shards(len(recipes), inputs[0].ndim), execution.stack_slices or (None,) * len(recipes)

    def local(inputs: Sequence[Any], weights: Sequence[Weight], keys: Sequence[LinearKey | None]) -> _Result:
        x, *rest = inputs
        tokens = as_token_blocks(x, recipes) if shardings[0] == UNSHARDED else x
        x_shape, linears = gathered_input_shape(tokens, shardings[0]), []
        for w, key, recipe, shards, layer in zip(weights, keys, recipes, shardings, slices, strict=True):
            amaxes = w.amaxes if isinstance(w, DelayedScalingWeight) and recipe.amax_history_len else None
            w = w.weight if isinstance(w, DelayedScalingWeight) else w
            plan = plan_linear(x_shape, w, recipe, execution, shards)
            if not isinstance(w, QWeight):
                passes, packed = plan.choice.weight_quantize_passes, plan.problem.gathered
                amax = None if amaxes is None else amaxes[LINEAR_TENSORS.index("w")]
                layer = layer if passes.reads_stacks else None
                source = w if layer is None else layer
                quantized = quantize_weight_shard(
                    source, recipe, key, cut=shards.w, passes=passes, packed=packed, amax=amax
                )
                w = dataclasses.replace(quantized, master=w)
            else:
                layer = None
            linears.append(QuantizedLinear(plan, w, key, amaxes, layer))
        return op(tokens, tuple(linears), *rest)

    if execution.placements is None:
        return local(inputs, weights, keys)
    w_specs = [weight_specs(w, p.w) for w, p in zip(weights, execution.placements, strict=True)]
    arrays = (tuple(inputs), tuple(weights), tuple(keys))
    return run_in_shard_map(local, arrays, (specs[0], tuple(w_specs)), specs[1], mesh=execution.placements[0].mesh)


def as_token_blocks(x: jax.Array, recipes: Sequence[Recipe]) -> jax.Array:
    """Returns x as [tokens..., inputs] with the recipes' token blocks along the next to last axis.

    x is unchanged if that axis is divisible by the blocks. Otherwise all leading dims are merged: [tokens, inputs].
    """
    if x.ndim == 1:
        return x[None]
    block = math.lcm(
        *(max(recipe.wgrad_x.quantization_group_size, recipe.wgrad_dy.quantization_group_size) for recipe in recipes)
    )
    return x if x.shape[-2] % block == 0 else x.reshape(-1, x.shape[-1])  # [..., inputs] -> [tokens, inputs]


def quantize_weight(
    w: jax.Array, *, recipe: Recipe | str, key: jax.Array | None = None, sharding: NamedSharding | None = None,
    amax: jax.Array | None = None,
) -> QWeight:  # fmt: skip
    """Quantizes `w` [inputs, outputs] under the recipe's weight policies. Its gradients pass straight through to `w`.

    With a `sharding` each device of its mesh quantizes its shard of w. `amax`, at least that of `w`, replaces the
    amax of w where several weights share a per-tensor scale.
    """
    if w.ndim != 2:
        raise ValueError(
            f"a weight is a matrix [inputs, outputs], got shape {w.shape}; reshape it, or vmap over the leading dims"
        )
    check_weight_dtype(w, "quantize_weight")
    checked_recipe = as_recipe(recipe, "quantize_weight")
    if sharding is None or sharding.mesh.size == 1:
        return quantize_weight_shard(w, checked_recipe, key, amax=amax)
    cut = dim_axes_of_spec(sharding.spec, 2)

    def codes(w: jax.Array, amax: jax.Array | None, cut: DimAxes = ((), ())) -> QWeight:
        return dataclasses.replace(quantize_weight_shard(w, checked_recipe, key, cut=cut, amax=amax), master=None)

    specs = weight_specs(jax.eval_shape(codes, w, amax), sharding.spec)
    in_specs = (sharding.spec, None if amax is None else PartitionSpec())
    quantize_shard = functools.partial(codes, cut=cut)
    quantized: QWeight = shard_map_over(quantize_shard, sharding.mesh, in_specs, specs)(w, amax)
    return dataclasses.replace(quantized, master=w)


def quantize_weight_shard(
    w: jax.Array | StackSlice, recipe: Recipe, key: LinearKey | None, *, cut: DimAxes = ((), ()),
    passes: QuantizePasses = XLA_PASSES, amax: jax.Array | None = None, packed: bool = True,
) -> QWeight:  # fmt: skip
    """Quantizes a weight, or one device's shard of it under `cut` (the mesh axes of its dims).

    `passes` quantize it and may read it in its stack; `packed` is for a weight that is all-gathered. Under an `amax`
    the reference quantizes it: the `amax` of earlier steps, if the recipe has a history.
    """
    constant_w = lax.stop_gradient(w)
    array = materialize_slice(constant_w)

    def codes(role: str, forward: WeightOperand | None = None) -> WeightOperand | None:
        spec = operand_spec(recipe, role, key, cut=cut)
        policy = spec.policy
        if not policy.format.quantized:
            return None
        operand: WeightOperand
        if amax is not None and recipe.amax_history_len:
            operand = quantize_weight_reference(array, dataclasses.replace(spec, amax=amax))
        elif amax is not None:  # kernels compute the amax themselves and accept none
            operand = PackedQTensor.from_qtensor(
                quantize(array, policy.format, block=policy.block, axis=spec.axis, amax=amax)
            )
        elif forward is not None:
            operand = passes.requantize_weight(constant_w, forward, spec, packed=packed)
        elif spec.signs_key is not None:  # no kernel quantizes a master under random signs
            operand = quantize_weight_reference(array, spec)
        else:
            operand = passes.quantize_weight(constant_w, spec, packed=packed)
        return tag_residual(operand) if isinstance(operand, PackedQTensor) else operand

    fprop = codes("fprop_w")
    source = fprop if recipe.dgrad_w.source == "requantize_forward" else None
    return QWeight(w, fprop, None if shares_fprop_dgrad_codes(recipe) else codes("dgrad_w", source), recipe)


def weight_operand(
    weight: QWeight,
    role: str,
    shards: LinearSharding = UNSHARDED,
    passes: QuantizePasses = XLA_PASSES,
    *,
    made: dict[str, Any] | None = None,
) -> Operand:
    """Returns the weight as the right operand of fprop or dgrad, all-gathered if its storage is sharded.

    `passes` read packed codes. `made` caches operands and gathered codes by role: both GEMMs may read the same ones, a
    backward pass that recomputes y reads them twice, and XLA does not merge two equal all-gathers.
    """
    made = {} if made is None else made
    shared, codes = shares_fprop_dgrad_codes(weight.recipe), weight.codes(role)
    shares_operand = (
        shared
        and not isinstance(codes, Fp8Operand)
        and (passes.single_operand_weight or not isinstance(codes, PackedQTensor))
    )
    role = "fprop_w" if shares_operand else role
    if role in made:
        return made[role]
    policy, axis = getattr(weight.recipe, role), CONTRACTED_WEIGHT_AXIS[role]
    if codes is None:
        operand = quantize_operand(lax.stop_gradient(weight.master), policy, axis=axis, key=None)
        made[role] = dataclasses.replace(operand, array=all_gather_dims(operand.array, shards.weight_storage_axes))
    elif not isinstance(codes, PackedQTensor):
        made[role] = gather_kernel_weight(codes, role, shards) if axes_in(shards.weight_storage_axes) else codes
    else:
        made[role] = passes.all_gather_weight(codes, policy, axis=axis, shards=shards)
    if made[role] is None:
        gathered_key = "shared codes" if shared else f"codes of {role}"
        made[gathered_key] = made[gathered_key] if gathered_key in made else all_gather_codes(codes, shards)
        made[role] = passes.load_packed_weight(made[gathered_key], policy, axis=axis)
    return made[role]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weight", "key", "amaxes", "layer"], meta_fields=["plan"]
)
@dataclasses.dataclass(frozen=True)
class QuantizedLinear:
    """One linear of a traced program: its static plan, its weight, its random key and its amax history."""

    plan: LinearPlan
    weight: QWeight
    key: LinearKey | None
    amaxes: jax.Array | None = None  # as in `DelayedScalingWeight`
    layer: StackSlice | None = None  # the weight's slice of a stack of layers, for passes that read it there

    @property
    def passes(self) -> QuantizePasses:
        """Returns the passes that quantize x and dy."""
        return self.plan.choice.passes

    def operand_spec(self, role: str, *, kept: bool = False) -> OperandSpec:
        """Returns what to quantize for the operand `role`; `kept`: as a residual."""
        shards = self.plan.sharding
        dim_axes = shards.dy if role.endswith("dy") else shards.x
        spec = operand_spec(self.plan.recipe, role, self.key, kept=kept, cut=dim_axes)
        if self.amaxes is None:
            return spec
        return dataclasses.replace(spec, amax=self.amaxes[LINEAR_TENSORS.index(role.partition("_")[2])])

    def quantize(self, x: jax.Array, *roles: str, kept: tuple[str, ...] = ()) -> list[OperandOrResidual]:
        """Returns the operands `roles` of x (or dy), quantized in one pass; those in `kept` as residuals."""
        return self.passes.quantize_operands(x, [self.operand_spec(role, kept=role in kept) for role in roles])

    def operand_from_residual(self, kept: Any, role: str) -> Operand:
        """Returns a saved residual as the operand `role`."""
        return self.passes.operand_from_residual(kept, getattr(self.plan.recipe, role))

    def fprop(self, x: Operand | TwoTermOperand, dtype: jnp.dtype, *, defer_alpha: bool = False) -> ArrayOrDeferred:
        """Returns y = x W, sharded as y. `defer_alpha` is for consumers that apply alpha themselves."""
        shards = self.plan.sharding
        w = weight_operand(self.weight, "fprop_w", shards, self.passes, made=self._gathered_weight_cache)
        gemm_dtype = FLOAT32_DTYPE if shards.input_axes else dtype
        multiply = self._gemm_fn(
            FPROP, defer_alpha=defer_alpha and not shards.input_axes and not isinstance(x, TwoTermOperand)
        )
        if isinstance(x, TwoTermOperand):
            y = apply_epilogue(
                multiply(FPROP, x.first, w, FLOAT32_DTYPE) + multiply(FPROP, x.remainder, w, FLOAT32_DTYPE),
                None,
                gemm_dtype,
            )
        else:
            y = multiply(FPROP, x, w, gemm_dtype)
        return reduce_partial_sums(y, shards.input_axes, shards.y_lead, dtype) if shards.input_axes else y

    def dgrad(
        self, dy: Operand, dtype: jnp.dtype, *, defer_alpha: bool = False, overlap_with: Sequence[ArrayOrDeferred] = ()
    ) -> ArrayOrDeferred:
        """Returns dx = dy W^T, sharded as x. `defer_alpha` as for fprop. The collective overlaps `overlap_with`."""
        shards = self.plan.sharding
        w = weight_operand(self.weight, "dgrad_w", shards, self.passes, made=self._gathered_weight_cache)
        multiply = self._gemm_fn(DGRAD, defer_alpha=defer_alpha and not shards.output_axes)
        dx = multiply(DGRAD, dy, w, FLOAT32_DTYPE if shards.output_axes else dtype)
        return (
            reduce_partial_sums(dx, shards.output_axes, shards.x_lead, dtype, overlap_with=overlap_with)
            if shards.output_axes
            else dx
        )

    def wgrad(self, x: Operand, dy: Operand) -> ArrayOrDeferred:
        """Returns dw = x^T dy of local tokens in the reduce dtype; [outputs, inputs] under `transpose_wgrad`."""
        operands = (dy, x) if self.plan.problem.transpose_wgrad else (x, dy)
        reduce_dtype = self._grad_reduce_dtype
        return self._gemm_fn(WGRAD, defer_alpha=reduce_dtype != self.plan.weight_dtype)(WGRAD, *operands, reduce_dtype)

    def weight_gradient(self, dw: ArrayOrDeferred, x: Operand, dy: Operand) -> "QuantizedLinear":
        """Returns the cotangent of this linear: `dw`, its `wgrad` of x and dy, in the weight's dtype and sharding.

        dw is reduce-scattered over the axes that the weight is all-gathered over.
        """
        shards, dtype = self.plan.sharding, self.plan.weight_dtype
        alpha = dw.alpha if isinstance(dw, DeferredAlpha) else None  # of global tensors: the same on all devices
        dw = mask_to_first_shard(dw.array if isinstance(dw, DeferredAlpha) else dw, shards.replicated_axes)
        dw = reduce_scatter_gradient(dw, self._grad_scatter_axes, shards.reduce_dtype)
        dw = dw.astype(dtype) if alpha is None else dw.astype(dtype) * alpha
        transposed = self.plan.problem.transpose_wgrad
        weight = QWeight(dw.T if transposed else dw, None, None, self.plan.recipe)
        return QuantizedLinear(self.plan, weight, None, None if self.amaxes is None else self._observed_amaxes(x, dy))

    def _observed_amaxes(self, x: Operand, dy: Operand) -> jax.Array:
        """Returns the amaxes of global x, W and dy, float32 [3]; zeros on all shards but one, as they are summed."""
        assert isinstance(x, QuantizedOperand) and isinstance(dy, QuantizedOperand), (
            "by the definition, which takes a given amax"
        )
        amaxes, shards = (x.codes.amax, self.weight.fprop.amax, dy.codes.amax), self.plan.sharding
        return mask_to_first_shard(
            jnp.stack(amaxes),
            (*axes_in(shards.token_axes), *shards.input_axes, *shards.output_axes, *shards.replicated_axes),
        )

    @property
    def _grad_scatter_axes(self) -> DimAxes:
        """Returns the axes that dw is reduce-scattered over, in the order of the dims that wgrad returns."""
        return self.plan.sharding.weight_storage_axes[:: -1 if self.plan.problem.transpose_wgrad else 1]

    @property
    def _grad_reduce_dtype(self) -> jnp.dtype:
        return gradient_reduce_dtype(self.plan.weight_dtype, self._grad_scatter_axes, self.plan.sharding.reduce_dtype)

    def _gemm_fn(self, gemm: GemmKind, *, defer_alpha: bool = False) -> Callable[..., Any]:
        backend = self.plan.choice.gemm_backend(gemm)
        return backend.gemm_deferred_alpha if defer_alpha and backend.gemm_deferred_alpha is not None else backend.gemm

    @functools.cached_property
    def _gathered_weight_cache(self) -> dict[str, Any]:
        """Operands of the all-gathered weight, by role, so that several GEMMs gather it once."""
        return {}

    def to_residuals(self, *, recompute_fprop: bool = False) -> "QuantizedLinear":
        """Returns the linear as the VJP saves it, for dgrad and, with `recompute_fprop`, for fprop.

        The master is saved only if it is read again: by a bf16 GEMM, or to rematerialize codes that are not saved.
        """
        check_token_blocks(self.plan.problem)
        recipe, weight = self.plan.recipe, self.weight
        passes = self.plan.choice.weight_quantize_passes if self.plan.weight_residual == "master" else XLA_PASSES
        fprop, dgrad = (
            None if codes is None else passes.weight_residual(codes) for codes in (weight.fprop, weight.dgrad)
        )
        reads = not recipe.dgrad_w.format.quantized or (recompute_fprop and not recipe.fprop_w.format.quantized)
        master = weight.master if reads or self.layer is None else self.layer
        reads = reads or any(isinstance(c, WeightScalesResidual) for c in (fprop, dgrad))
        return dataclasses.replace(self, weight=QWeight(master if reads else None, fprop, dgrad, recipe), layer=None)

    def rematerialize(self, *, depends_on: jax.Array) -> "QuantizedLinear":
        """Rebuilds the linear from its residuals, bit for bit.

        The barrier on `depends_on` keeps XLA from rematerializing the weights of all layers at once.
        """
        saved = self.weight

        def restore(
            role: str, codes: WeightResidual | None, forward: WeightOperand | None = None
        ) -> WeightOperand | None:
            if not isinstance(codes, WeightScalesResidual):
                return codes
            scales, _ = lax.optimization_barrier((codes, depends_on))
            spec = operand_spec(self.plan.recipe, role, self.key, cut=self.plan.sharding.w)
            return self.plan.choice.weight_quantize_passes.rematerialize_weight(saved.master, scales, spec, forward)

        fprop = restore("fprop_w", saved.fprop)
        weight = dataclasses.replace(saved, fprop=fprop, dgrad=restore("dgrad_w", saved.dgrad, fprop))
        return dataclasses.replace(self, weight=weight)
