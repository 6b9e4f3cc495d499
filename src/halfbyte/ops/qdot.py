"""`qdot`: y = x W with its three GEMMs quantized, for any model; `qdots`: several linears of one x.

    fprop  y  = Q(x)  Q(W)          contracts the inputs
    dgrad  dx = Q(dy) Q(W)^T        contracts the outputs
    wgrad  dw = Q(x)^T Q(dy)        contracts the tokens

Each Q is an operand policy of the recipe, with its own per-tensor scale and random bits. Gradients pass straight
through the rounding. The residual of x is wgrad's operand, packed (4.5 bits per element under NVFP4), that of W its
codes. Linears of one x share the operands that are equal.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from halfbyte.ops.gemm_problem import check_input_dtype, check_weight_dtype
from halfbyte.ops.linear import QuantizedLinear, apply_with_linears
from halfbyte.ops.linear_plan import DEFAULT_EXECUTION, ExecutionConfig
from halfbyte.ops.linear_sharding import Placement, all_gather_dims, gather_linear_input
from halfbyte.ops.operand import add_and_round
from halfbyte.ops.quantized_weight import QWeight, Weight
from halfbyte.ops.shared_input import dedupe_operands, first_with_same_operand, quantize_shared_x
from halfbyte.ops.trace_context import mesh_aware, warn_if_key_shared
from halfbyte.recipes import LinearKey, Recipe
from halfbyte.renamed import renamed_parameters


@renamed_parameters(weights_kept="weight_residual", sharded="partitioned_by_xla")
@mesh_aware
def qdot(
    x: jax.Array, w: Weight, *, recipe: Recipe, key: jax.Array | None = None, backend: str = "auto",
    placement: Placement | None = None, out_sharding: NamedSharding | None = None,
    out_dtype: jnp.dtype | None = None, weight_residual: str = "master", partitioned_by_xla: bool = False,
) -> jax.Array:  # fmt: skip
    """Multiplies x [..., inputs] by w [inputs, outputs] with the recipe's GEMMs, forward and backward; in x's dtype.

    The GEMM applies alpha to its float32 sums and rounds once to the result's dtype. The weight gradient has w's dtype.
    `key` is a typed key, folded by the caller with step, layer and site. A recipe that rounds stochastically needs it;
    one key for several tensors (in a loop, under vmap or shard_map) is a SharedBitsWarning. `w` may be a `QWeight`;
    `weight_residual` as for `mlp`. NaN or infinity in an operand makes the whole result NaN. With a
    `placement` each device of its mesh computes its shard with the kernels of one device. `partitioned_by_xla`: XLA
    partitions the program over several devices, so kernels that read the arrays of one device are not used.
    """
    execution = ExecutionConfig(
        backend, None if placement is None else (placement,), weight_residual, partitioned_by_xla
    )
    key = warn_if_key_shared(key, (recipe,), (x, w))
    (y,) = qdots(x, (w,), recipes=(recipe,), keys=(key,), execution=execution, out_dtype=out_dtype)
    return y if out_sharding is None else lax.with_sharding_constraint(y, out_sharding)


def qdots(
    x: jax.Array, weights: Sequence[Weight], *, recipes: Sequence[Recipe], keys: Sequence[LinearKey | None],
    execution: ExecutionConfig = DEFAULT_EXECUTION, out_dtype: jnp.dtype | None = None,
    copies: Sequence[jax.Array] = (),
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Returns `qdot` of one x with each of `weights`. The gradient of x is rounded after each addition.

    `copies` holds x once more per further linear. Then each copy has its own gradient, and JAX adds them up as it does
    those of separate dots.
    """
    dtype = jnp.dtype(out_dtype or x.dtype)
    placements = execution.placements or ()
    for w, recipe in zip(weights, recipes, strict=True):
        _check(x, w, recipe)
    if any((p.mesh, p.x) != (placements[0].mesh, placements[0].x) for p in placements):
        raise ValueError("placements: linears of one x have one mesh and one x, got " + "; ".join(map(str, placements)))
    specs = tuple(p.x for p in placements[:1]) * (1 + len(copies)), tuple(p.y for p in placements)

    def products(tokens: jax.Array, linears: tuple[QuantizedLinear, ...], *others: jax.Array) -> tuple[jax.Array, ...]:
        xs = (tokens, *(t.reshape(tokens.shape) for t in others)) if others else _fan_out(tokens, len(linears))
        results = _qdots(dtype, xs, linears)
        # [tokens..., outputs] -> [..., outputs]
        return tuple(y if y.ndim == x.ndim else y.reshape(*x.shape[:-1], y.shape[-1]) for y in results)

    ys = apply_with_linears(products, (x, *copies), weights, keys, recipes=recipes, execution=execution, specs=specs)
    return tuple(y.astype(dtype) for y in ys) if placements else ys


def _check(x: jax.Array, weight: Weight, recipe: Recipe) -> None:
    check_input_dtype(x, "qdot")
    check_weight_dtype(weight, "qdot")
    if len(weight.shape) != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"qdot contracts the last axis of x with the first of w, got x {x.shape} and w {weight.shape}")
    if isinstance(weight, QWeight) and weight.recipe != recipe:
        raise ValueError(
            f"this QWeight was made under recipe {weight.recipe.name}, qdot was asked for {recipe.name}; "
            f"quantize the weight again"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _fan_out(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """Returns x `count` times; its gradients are added up and rounded one by one."""
    return (x,) * count


_fan_out.defvjp(
    lambda x, count: ((x,) * count, None), lambda _, __, gradients: (functools.reduce(add_and_round, gradients),)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _qdots(dtype: jnp.dtype, xs: tuple[jax.Array, ...], linears: tuple[QuantizedLinear, ...]) -> tuple[jax.Array, ...]:
    """Returns y = Q(x) Q(W) per linear; `xs` are all the same x."""
    operands = quantize_shared_x(gather_linear_input(xs[0], linears[0].plan.sharding), linears, ("fprop_x",))
    return tuple(linear.fprop(row, dtype) for linear, (row,) in zip(linears, operands, strict=True))


def _qdots_fwd(dtype, xs, linears):
    saved_linears = tuple(linear.to_residuals() for linear in linears)
    gathered_x = gather_linear_input(xs[0], linears[0].plan.sharding)
    operands = quantize_shared_x(gathered_x, linears, ("fprop_x", "wgrad_x"), kept=("wgrad_x",))
    results = tuple(linear.fprop(row, dtype) for linear, (row, _) in zip(linears, operands, strict=True))
    columns = dedupe_operands(linears, "wgrad_x", [column for _, column in operands])
    return results, (columns, saved_linears)


def _qdots_bwd(dtype, residuals, gradients):
    """Returns dx = Q(dy) Q(W)^T and dw = Q(x)^T Q(dy) per linear."""
    columns, saved_linears = residuals
    linears = [linear.rematerialize(depends_on=dy) for linear, dy in zip(saved_linears, gradients, strict=True)]
    gathered_dys = [
        all_gather_dims(dy, linear.plan.sharding.y_lead) for linear, dy in zip(linears, gradients, strict=True)
    ]
    operands = [linear.quantize(dy, "dgrad_dy", "wgrad_dy") for linear, dy in zip(linears, gathered_dys, strict=True)]
    dtype_of_x = jnp.dtype(linears[0].plan.problem.dtype)
    x_columns = [columns[index] for index in first_with_same_operand(linears, "wgrad_x")]
    pairs, dw = [], []
    for linear, x_column, (_, column) in zip(linears, x_columns, operands, strict=True):
        pairs.append((linear.operand_from_residual(x_column, "wgrad_x"), column))
        dw.append(linear.wgrad(*pairs[-1]))
    dx = [linear.dgrad(row, dtype_of_x, overlap_with=dw) for linear, (row, _) in zip(linears, operands, strict=True)]
    gradients = (
        linear.weight_gradient(weight_grad, *pair) for linear, weight_grad, pair in zip(linears, dw, pairs, strict=True)
    )
    return tuple(dx), tuple(gradients)


_qdots.defvjp(_qdots_fwd, _qdots_bwd)
