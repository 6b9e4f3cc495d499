"""Accuracy of each quantized GEMM against its recipe and against bf16.

`judge_linear` compares with the recipe (`reference_operands`). `wrong` is the fraction of an operand's elements, as
quantized by the run's own passes, that differ from the reference. `error` is the maximum deviation of a result, as
computed by the run's own backend, relative to its tolerance: only the order of summation is unspecified. For `dw` of
the whole layer, fused passes included, x and dy depend on other GEMMs, whose last bits are unspecified and change 1% of
the 4-bit codes. Its error is therefore that of the whole matrix, relative to 5% (PATH_ERROR) of the norm of a product
of unrelated elements.
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
PATH_ERROR = 0.05  # of the norm of a product of unrelated elements: tolerance of dw
TINY = 1e-30  # floor of denominators
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
    q, b = q / scale, b / scale  # without scaling, gradients of 1e-8 underflow when squared
    power, cross, q_power = jnp.sum(b * b), jnp.sum(q * b), jnp.sum(q * q)
    noise = jnp.sum((q - b) ** 2)
    return {
        "gain": cross / jnp.maximum(power, TINY),
        "bias": jnp.mean(q - b) / jnp.maximum(jnp.sqrt(power / q.size), TINY),
        "cosine": cross / jnp.maximum(jnp.sqrt(q_power * power), TINY),
        "snr_db": 10 * jnp.log10(jnp.maximum(power, TINY) / jnp.maximum(noise, TINY * 1e-6)),
    }


def gain_against_reference(q: jax.Array, expected: jax.Array) -> dict[str, jax.Array]:
    """Returns the slope of q against the recipe's result r, and the standard deviation that rounding gives it.

    The error of an element is relative to it. Its standard deviation is that of two roundings to bfloat16, or that of q
    - gain r if it is larger. Errors need not be independent within a row or a column (equal tokens, a differing code).
    The number of independent samples is therefore that of rows or of columns, weighted by their power, whichever is
    smaller.
    """
    scale = jnp.maximum(jnp.max(jnp.abs(expected)), jnp.float32(TINY))
    q, r = q.astype(jnp.float32) / scale, expected / scale
    power = jnp.maximum(jnp.sum(r * r), jnp.float32(TINY))
    gain = 1 + jnp.sum((q - r) * r) / power
    noise = jnp.maximum(BFLOAT16_ROUNDING, jnp.sqrt(jnp.sum((q - gain * r) ** 2) / power))
    inverse_sqrt_samples = functools.reduce(
        jnp.maximum, [jnp.linalg.norm(jnp.sum(r * r, axis)) / power for axis in (0, 1)]
    )
    return {"reference_gain": gain, "reference_gain_sd": noise * inverse_sqrt_samples}


def run_linear_gemms(
    capture: LinearCapture, *, backend: str, partitioned_by_xla: bool = False
) -> tuple[dict[str, Operand], dict[str, jax.Array]]:
    """Run the quantize passes and GEMMs of the run for one linear. Returns (operands by role; y, dx and dw as matrices
    by GEMM)."""
    recipe, dtype = capture.recipe, capture.x.dtype
    dy = as_token_blocks(capture.dy.astype(dtype), (recipe,))

    def run_gemms(
        x: jax.Array, linears: tuple[QuantizedLinear, ...]
    ) -> tuple[dict[str, Operand], dict[str, jax.Array]]:
        forward, backward = linears[0], linears[0].to_residuals().rematerialize(depends_on=dy)
        x_rowwise, x_residual = forward.quantize(x, "fprop_x", "wgrad_x", kept=("wgrad_x",))
        dy_rowwise, dy_columnwise = backward.quantize(dy, "dgrad_dy", "wgrad_dy")
        operands = {
            "fprop_x": x_rowwise, "fprop_w": weight_operand(forward.weight, "fprop_w", passes=forward.passes),
            "dgrad_dy": dy_rowwise, "dgrad_w": weight_operand(backward.weight, "dgrad_w", passes=backward.passes),
            "wgrad_x": backward.operand_from_residual(x_residual, "wgrad_x"), "wgrad_dy": dy_columnwise,
        }  # fmt: skip
        if isinstance(x_rowwise, TwoTermOperand):
            operands |= {"fprop_x": x_rowwise.first, reference_operands.REMAINDER_ROLE: x_rowwise.remainder}
        wgrad_operands = operands["wgrad_x"], dy_columnwise
        dw = backward.weight_gradient(backward.wgrad(*wgrad_operands), *wgrad_operands).weight.master
        return operands, {
            "fprop": as_matrix(forward.fprop(x_rowwise, dtype)),
            "dgrad": as_matrix(backward.dgrad(dy_rowwise, dtype)),
            "wgrad": dw,
        }

    execution = ExecutionConfig(backend, partitioned_by_xla=partitioned_by_xla)
    return apply_with_linears(
        run_gemms, (capture.x,), (capture.weight,), (capture.key,), recipes=(recipe,), execution=execution
    )


def reference_weight_operands(capture: LinearCapture) -> dict[str, Operand]:
    """Returns the weight operands that the reference passes in `ops` compute before packing: the block-dequantized
    array must equal the packed codes. Empty for a QWeight; without the roles that are not quantized or are requantized.
    """
    if isinstance(capture.weight, QWeight):
        return {}
    policies = {role: getattr(capture.recipe, role) for role in WEIGHT_ROLES}
    specs = {
        role: dataclasses.replace(operand_spec(capture.recipe, role, capture.key), axis=ROLE_TENSOR_AXIS[role][1])
        for role, policy in policies.items()
        if policy.format.quantized and policy.source != "requantize_forward"
    }
    return dict(zip(specs, XLA_PASSES.quantize(capture.w, list(specs.values())), strict=True))


def mismatch_fraction(operand: Operand, reference: reference_operands.ReferenceOperand) -> jax.Array:
    """Returns the fraction of an operand's elements that differ from the reference, 1 if its decode scale differs."""
    fraction = jnp.mean((as_matrix(operand.values()).astype(jnp.float32) != reference.values).astype(jnp.float32))
    decode_scale = jnp.float32(1) if operand.decode_scale is None else operand.decode_scale
    return jnp.where(jnp.all(decode_scale.reshape(-1) == reference.decode_scale.reshape(-1)), fraction, 1.0)


def judge_linear(
    capture: LinearCapture, *, backend: str, partitioned_by_xla: bool = False
) -> dict[str, dict[str, jax.Array]]:
    """Returns GEMM -> the statistics of `gain_and_snr` against bf16, gain and SNR of the recipe itself (`recipe_gain`,
    `recipe_snr_db`), and `error` and `wrong`. With experts, `error` and `wrong` are the maximum over all experts, the
    others the mean over experts with rows."""
    if capture.tiles is None:
        outputs = run_linear_gemms(capture, backend=backend, partitioned_by_xla=partitioned_by_xla)
        return _judge(capture, *outputs, reference_weight_operands(capture))
    grouped, results = run_expert_gemms(capture, backend=backend)
    operands = {
        role: (operand.values(role, getattr(capture.recipe, role)), operand.decode_scale)
        for role, operand in grouped.items()
    }
    stats = jax.lax.map(
        lambda expert: _judge_expert(capture, operands, results, expert), jnp.arange(capture.w.shape[0])
    )
    has_rows = capture.tiles.counts > 0

    def over_experts(name: str, values: jax.Array) -> jax.Array:
        is_worst_case = name in ("error", "wrong")
        return jnp.max(values) if is_worst_case else jnp.mean(values, where=has_rows)

    return {
        gemm: {name: over_experts(name, values) for name, values in by_name.items()} for gemm, by_name in stats.items()
    }


def run_expert_gemms(capture: LinearCapture, *, backend: str) -> tuple[dict[str, GroupedOperand], dict[str, jax.Array]]:
    """Run the quantize passes and grouped GEMMs of all experts. Returns as `run_linear_gemms`."""
    assert capture.tiles is not None
    tiles, dtype = dataclasses.replace(capture.tiles, backend=backend), capture.x.dtype
    options: dict[str, Any] = {"recipe": capture.recipe, "key": capture.key, "amax": capture.amax}
    operands = grouped_operands(capture.x, capture.w, capture.dy.astype(dtype), tiles, **options)
    return operands, {
        "fprop": grouped_fprop(operands["fprop_x"], operands["fprop_w"], tiles, dtype),
        "dgrad": grouped_dgrad(operands["dgrad_dy"], operands["dgrad_w"], tiles, dtype),
        "wgrad": grouped_wgrad(operands["wgrad_x"], operands["wgrad_dy"], tiles, capture.w.dtype),
    }


def _judge_expert(
    capture: LinearCapture, operands: dict[str, tuple[jax.Array, jax.Array | None]], results: dict[str, jax.Array],
    expert: jax.Array,
) -> dict[str, dict[str, jax.Array]]:  # fmt: skip
    """Returns the statistics of one expert against its own reference; its rows are padded to whole tiles. `operands`:
    role -> (values, decode scales) of all experts."""
    assert capture.tiles is not None
    tile, count = capture.tiles.tile, capture.tiles.counts[expert]

    def of_expert(array: jax.Array) -> jax.Array:
        return array[expert] if array.ndim == 3 else capture.expert_rows(array, expert, -(-count // tile) * tile)

    def operand(role: str) -> BlockDequantized:
        values, decode_scales = operands[role]
        return BlockDequantized(
            of_expert(values), None if decode_scales is None else decode_scales[expert], getattr(capture.recipe, role)
        )

    expert_results = {name: of_expert(result) for name, result in results.items()}
    return _judge(
        capture.for_expert(expert), {role: operand(role) for role in operands}, expert_results, {}, rows=count
    )


def _judge(
    capture: LinearCapture, operands: Mapping[str, Operand], results: Mapping[str, jax.Array],
    extra_operands: Mapping[str, Operand], *, rows: jax.Array | None = None,
) -> dict[str, dict[str, jax.Array]]:  # fmt: skip
    """Returns `judge_linear` of operands and results. `extra_operands` must match the reference as well; `rows` is the
    number of rows that are not padding."""
    reference = reference_operands.compute_reference_operands(capture)
    plain = reference_operands.compute_reference_operands(dataclasses.replace(capture, recipe=BF16_RECIPE))
    wrong = {role: mismatch_fraction(operands[role], reference[role]) for role in reference}
    for role, operand in extra_operands.items():
        wrong[role] = jnp.maximum(wrong[role], mismatch_fraction(operand, reference[role]))
    stats = {}
    for gemm, q in results.items():
        expected = reference_operands.reference_result(gemm, reference)
        bf16_result = reference_operands.reference_result(gemm, plain).values
        by_recipe = gain_and_snr(expected.values, bf16_result)
        recipe_stats = {"recipe_gain": by_recipe["gain"], "recipe_snr_db": by_recipe["snr_db"]}
        error = jnp.max(_absolute_error(q, expected) / jnp.maximum(expected.tolerance, 1e-37))
        roles = [term for role in GEMM_ROLES[gemm] for term in reference_operands.operand_terms(role, reference)]
        max_wrong = functools.reduce(jnp.maximum, [wrong[role] for role in roles])
        stats[gemm] = gain_and_snr(q, bf16_result) | recipe_stats | gain_against_reference(q, expected.values)
        stats[gemm] |= {"error": error, "wrong": max_wrong}
        if gemm == "wgrad":
            error = _accumulation_path_error(_absolute_error(capture.dw, expected), reference, rows)
            dw_stats = gain_and_snr(capture.dw, bf16_result)
            stats[WEIGHT_GRADIENT] = dw_stats | recipe_stats | {"error": error, "wrong": jnp.float32(0)}
            stats[WEIGHT_GRADIENT] |= gain_against_reference(capture.dw, expected.values)
    return stats


def _absolute_error(q: jax.Array, expected: reference_operands.ReferenceResult) -> jax.Array:
    return jnp.abs(q.astype(jnp.float32) - expected.values)


def _accumulation_path_error(
    deviation: jax.Array, reference: dict[str, reference_operands.ReferenceOperand], rows: jax.Array | None
) -> jax.Array:
    """Returns the norm of `deviation` from the reference dw over PATH_ERROR times the norm that the product of
    unrelated x and dy would have."""
    x, dy = (reference[role] for role in GEMM_ROLES["wgrad"])
    num_rows = jnp.float32(x.values.shape[0]) if rows is None else jnp.maximum(rows, 1).astype(jnp.float32)
    norms = [jnp.sqrt(jnp.sum((reference_operands.l2_norm(t.values, 0) * t.decode_scale) ** 2)) for t in (x, dy)]
    expected_norm = jnp.maximum(norms[0] * norms[1] / jnp.sqrt(num_rows), 1e-37)
    return jnp.sqrt(jnp.sum((deviation / expected_norm) ** 2)) / PATH_ERROR


@functools.partial(jax.jit, static_argnames="backend")
def gemm_error_stats(capture: LinearCapture, *, backend: str) -> dict[str, Any]:
    """Returns GEMM -> `gain_and_snr` of its result against bf16."""
    _, results = run_linear_gemms(capture, backend=backend)
    bf16_operands = reference_operands.compute_reference_operands(dataclasses.replace(capture, recipe=BF16_RECIPE))
    return {
        gemm: gain_and_snr(q, reference_operands.reference_result(gemm, bf16_operands).values)
        for gemm, q in results.items()
    }
