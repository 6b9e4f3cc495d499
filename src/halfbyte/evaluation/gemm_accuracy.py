"""Accuracy of each quantized GEMM against its recipe and against bf16.

`judge_linear` compares with the recipe (`reference_operands`). `wrong` is the share of elements of an operand, made by
the run's own passes, that differ from the reference. `error` is the largest deviation of a result, from the run's own
backend, over its tolerance: only the order of sums is free. For `dw` of the whole layer, fused passes included, x and
dy pass through other GEMMs first, whose last bits are free and change 1% of 4-bit codes: its error is that of the
whole matrix, over 5% (PATH_ERROR) of what sums of unrelated elements would have.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from halfbyte.evaluation import reference_operands
from halfbyte.evaluation.reference_operands import ROLE_TENSOR_AXIS, as_matrix
from halfbyte.evaluation.step_replay import LinearCapture
from halfbyte.ops.grouped_linear import GroupedOperand, grouped_dgrad, grouped_fprop, grouped_operands, grouped_wgrad
from halfbyte.ops.linear import QuantizedLinear, apply_with_linears, as_token_blocks, weight_operand
from halfbyte.ops.linear_plan import ExecutionConfig
from halfbyte.ops.operand import BlockDequantized, Operand, TwoTermOperand
from halfbyte.ops.quantize_passes import XLA_PASSES, operand_spec
from halfbyte.ops.quantized_weight import QWeight
from halfbyte.recipes import GEMM_ROLES, WEIGHT_ROLES, recipe

BF16_RECIPE = recipe("bf16")
WEIGHT_GRADIENT = "dw"
PATH_ERROR = 0.05
TINY = 1e-30
BFLOAT16_ROUNDING = 2.0**-8 * math.sqrt(2 / 3)  # relative, of two roundings, each uniform within half an ulp


def gain_and_snr(q: jax.Array, b: jax.Array) -> dict[str, jax.Array]:
    """Returns float32 scalars that compare q (quantized) with b (bf16).

    gain    <q, b> / <b, b>       the slope of q against b: 1 for an unbiased quantizer
    bias    mean(q - b) / rms(b)
    cosine  <q, b> / |q| |b|
    snr_db  10 log10(|b|^2 / |q - b|^2)
    """
    q, b = (t.astype(jnp.float32).reshape(-1) for t in (q, b))
    scale = jnp.maximum(jnp.max(jnp.abs(b)), jnp.float32(TINY))
    q, b = q / scale, b / scale  # gradients of 1e-8 would underflow when squared
    power, cross, own = jnp.sum(b * b), jnp.sum(q * b), jnp.sum(q * q)
    noise = jnp.sum((q - b) ** 2)
    return {
        "gain": cross / jnp.maximum(power, TINY),
        "bias": jnp.mean(q - b) / jnp.maximum(jnp.sqrt(power / q.size), TINY),
        "cosine": cross / jnp.maximum(jnp.sqrt(own * power), TINY),
        "snr_db": 10 * jnp.log10(jnp.maximum(power, TINY) / jnp.maximum(noise, TINY * 1e-6)),
    }


def gain_against_reference(q: jax.Array, expected: jax.Array) -> dict[str, jax.Array]:
    """Returns the slope of q against the recipe's result r, and the standard deviation that rounding gives it.

    Errors of elements are relative, with the standard deviation of two roundings to bfloat16 or that of q - gain r if
    it is larger. They need not be independent within a row or within a column (equal tokens, a code that differs): what
    counts as independent are rows or columns, weighted by their power, whichever are fewer.
    """
    scale = jnp.maximum(jnp.max(jnp.abs(expected)), jnp.float32(TINY))
    q, r = q.astype(jnp.float32) / scale, expected / scale
    power = jnp.maximum(jnp.sum(r * r), jnp.float32(TINY))
    gain = 1 + jnp.sum((q - r) * r) / power
    noise = jnp.maximum(BFLOAT16_ROUNDING, jnp.sqrt(jnp.sum((q - gain * r) ** 2) / power))
    fewest = functools.reduce(jnp.maximum, [jnp.linalg.norm(jnp.sum(r * r, axis)) / power for axis in (0, 1)])
    return {"reference_gain": gain, "reference_gain_sd": noise * fewest}


def run_linear_gemms(
    given: LinearCapture, *, backend: str, partitioned_by_xla: bool = False
) -> tuple[dict[str, Operand], dict[str, jax.Array]]:
    """(the operands, by role; y, dx and dw, as matrices) of a linear, by the passes and the GEMMs of the run."""
    recipe, dtype = given.recipe, given.x.dtype
    dy = as_token_blocks(given.dy.astype(dtype), (recipe,))

    def measured(x: jax.Array, linears: tuple[QuantizedLinear, ...]) -> tuple[dict[str, Operand], dict[str, jax.Array]]:
        ahead, back = linears[0], linears[0].to_residuals().rematerialize(depends_on=dy)
        row, kept = ahead.quantize(x, "fprop_x", "wgrad_x", kept=("wgrad_x",))
        dy_row, dy_column = back.quantize(dy, "dgrad_dy", "wgrad_dy")
        made = {
            "fprop_x": row, "fprop_w": weight_operand(ahead.weight, "fprop_w", passes=ahead.passes),
            "dgrad_dy": dy_row, "dgrad_w": weight_operand(back.weight, "dgrad_w", passes=back.passes),
            "wgrad_x": back.operand_from_residual(kept, "wgrad_x"), "wgrad_dy": dy_column,
        }  # fmt: skip
        if isinstance(row, TwoTermOperand):
            made |= {"fprop_x": row.first, reference_operands.REMAINDER_ROLE: row.remainder}
        pair = made["wgrad_x"], dy_column
        dw = back.weight_gradient(back.wgrad(*pair), *pair).weight.master
        return made, {
            "fprop": as_matrix(ahead.fprop(row, dtype)),
            "dgrad": as_matrix(back.dgrad(dy_row, dtype)),
            "wgrad": dw,
        }

    execution = ExecutionConfig(backend, partitioned_by_xla=partitioned_by_xla)
    return apply_with_linears(
        measured, (given.x,), (given.weight,), (given.key,), recipes=(recipe,), execution=execution
    )


def reference_weight_operands(given: LinearCapture) -> dict[str, Operand]:
    """The weight's operands as the definition in `ops` makes them, before they are packed: the block-dequantized
    array must equal its codes. Nothing of a weight that was quantized before, or of one in bf16."""
    policies = {role: getattr(given.recipe, role) for role in WEIGHT_ROLES}
    roles = [
        role for role, policy in policies.items() if policy.format.quantized and policy.source != "requantize_forward"
    ]
    if isinstance(given.weight, QWeight):
        return {}
    asked = [operand_spec(given.recipe, role, given.key) for role in roles]
    axes = [ROLE_TENSOR_AXIS[role][1] for role in roles]
    made = XLA_PASSES.quantize(
        given.w, [dataclasses.replace(a, axis=axis) for a, axis in zip(asked, axes, strict=True)]
    )
    return dict(zip(roles, made, strict=True))


def mismatch_fraction(found: Operand, right: reference_operands.ReferenceOperand) -> jax.Array:
    """The share of an operand's numbers that are not the definition's; all of them under another tensor scale."""
    share = jnp.mean((as_matrix(found.values()).astype(jnp.float32) != right.values).astype(jnp.float32))
    factor = jnp.float32(1) if found.decode_scale is None else found.decode_scale
    return jnp.where(jnp.all(factor.reshape(-1) == right.decode_scale.reshape(-1)), share, 1.0)


def judge_linear(
    given: LinearCapture, *, backend: str, partitioned_by_xla: bool = False
) -> dict[str, dict[str, jax.Array]]:
    """Returns GEMM -> the numbers of `gain_and_snr` against bf16, those that the recipe gives (`recipe_gain`,
    `recipe_snr_db`), and `error` and `wrong`.
    """
    if given.tiles is None:
        made = run_linear_gemms(given, backend=backend, partitioned_by_xla=partitioned_by_xla)
        return _judged(given, *made, reference_weight_operands(given))
    found, results = run_expert_gemms(given, backend=backend)
    operands = {
        role: (made.values(role, getattr(given.recipe, role)), made.decode_scale) for role, made in found.items()
    }
    numbers = jax.lax.map(lambda expert: _judged_expert(given, operands, results, expert), jnp.arange(given.w.shape[0]))
    some = given.tiles.counts > 0

    def over_experts(name: str, each: jax.Array) -> jax.Array:
        """The worst of all, or the mean of those that have rows."""
        worst = name in ("error", "wrong")
        return jnp.max(each) if worst else jnp.mean(each, where=some)

    return {gemm: {name: over_experts(name, each) for name, each in told.items()} for gemm, told in numbers.items()}


def run_expert_gemms(given: LinearCapture, *, backend: str) -> tuple[dict[str, GroupedOperand], dict[str, jax.Array]]:
    """Runs `run_linear_gemms` for all experts."""
    assert given.tiles is not None
    tiles, dtype = dataclasses.replace(given.tiles, backend=backend), given.x.dtype
    how: dict[str, Any] = {"recipe": given.recipe, "key": given.key, "amax": given.amax}
    made = grouped_operands(given.x, given.w, given.dy.astype(dtype), tiles, **how)
    return made, {
        "fprop": grouped_fprop(made["fprop_x"], made["fprop_w"], tiles, dtype),
        "dgrad": grouped_dgrad(made["dgrad_dy"], made["dgrad_w"], tiles, dtype),
        "wgrad": grouped_wgrad(made["wgrad_x"], made["wgrad_dy"], tiles, given.w.dtype),
    }


def _judged_expert(
    given: LinearCapture, found: dict[str, tuple[jax.Array, jax.Array | None]], results: dict[str, jax.Array],
    expert: jax.Array,
) -> dict[str, dict[str, jax.Array]]:  # fmt: skip
    """One expert of them beside its own definition; its rows are filled up to whole tiles. `found`: the numbers and
    factors of each operand."""
    assert given.tiles is not None
    tile, count = given.tiles.tile, given.tiles.counts[expert]

    def own(array: jax.Array) -> jax.Array:
        return array[expert] if array.ndim == 3 else given.expert_rows(array, expert, -(-count // tile) * tile)

    def operand(role: str) -> BlockDequantized:
        values, factor = found[role]
        return BlockDequantized(own(values), None if factor is None else factor[expert], getattr(given.recipe, role))

    mine = {name: own(result) for name, result in results.items()}
    return _judged(given.for_expert(expert), {role: operand(role) for role in found}, mine, {}, rows=count)


def _judged(
    given: LinearCapture, found: Mapping[str, Operand], results: Mapping[str, jax.Array],
    also: Mapping[str, Operand], *, rows: jax.Array | None = None,
) -> dict[str, dict[str, jax.Array]]:  # fmt: skip
    """`judge_linear` of given operands and results; `also` are further operands, `rows` those that are not zeros."""
    right, plain = (
        reference_operands.compute_reference_operands(given),
        reference_operands.compute_reference_operands(dataclasses.replace(given, recipe=BF16_RECIPE)),
    )
    wrong = {role: mismatch_fraction(found[role], right[role]) for role in right}
    for role, made in also.items():
        wrong[role] = jnp.maximum(wrong[role], mismatch_fraction(made, right[role]))
    told = {}
    for gemm, q in results.items():
        expected, b = (
            reference_operands.reference_result(gemm, right),
            reference_operands.reference_result(gemm, plain).values,
        )
        by_recipe = gain_and_snr(expected.values, b)
        same = {"recipe_gain": by_recipe["gain"], "recipe_snr_db": by_recipe["snr_db"]}
        error = jnp.max(_absolute_error(q, expected) / jnp.maximum(expected.tolerance, 1e-37))
        roles = [part for role in GEMM_ROLES[gemm] for part in reference_operands.operand_terms(role, right)]
        worse = functools.reduce(jnp.maximum, [wrong[role] for role in roles])
        told[gemm] = gain_and_snr(q, b) | same | gain_against_reference(q, expected.values)
        told[gemm] |= {"error": error, "wrong": worse}
        if gemm == "wgrad":
            error, none = _accumulation_path_error(_absolute_error(given.dw, expected), right, rows), jnp.float32(0)
            told[WEIGHT_GRADIENT] = gain_and_snr(given.dw, b) | same | {"error": error, "wrong": none}
            told[WEIGHT_GRADIENT] |= gain_against_reference(given.dw, expected.values)
    return told


def _absolute_error(q: jax.Array, expected: reference_operands.ReferenceResult) -> jax.Array:
    return jnp.abs(q.astype(jnp.float32) - expected.values)


def _accumulation_path_error(
    away: jax.Array, right: dict[str, reference_operands.ReferenceOperand], rows: jax.Array | None
) -> jax.Array:
    x, dy = (right[role] for role in GEMM_ROLES["wgrad"])
    many = jnp.float32(x.values.shape[0]) if rows is None else jnp.maximum(rows, 1).astype(jnp.float32)
    whole = [jnp.sqrt(jnp.sum((reference_operands.l2_norm(t.values, 0) * t.decode_scale) ** 2)) for t in (x, dy)]
    size = jnp.maximum(whole[0] * whole[1] / jnp.sqrt(many), 1e-37)
    return jnp.sqrt(jnp.sum((away / size) ** 2)) / PATH_ERROR


@functools.partial(jax.jit, static_argnames="backend")
def gemm_error_stats(given: LinearCapture, *, backend: str) -> dict[str, Any]:
    """GEMM -> how far its result is from bf16."""
    _, results = run_linear_gemms(given, backend=backend)
    plain = reference_operands.compute_reference_operands(dataclasses.replace(given, recipe=BF16_RECIPE))
    return {
        gemm: gain_and_snr(q, reference_operands.reference_result(gemm, plain).values) for gemm, q in results.items()
    }
