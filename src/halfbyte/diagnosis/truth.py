"""Gradient truth: each quantized GEMM beside what its recipe gives on the very same operands, and beside bf16.

The judgement is against the recipe (`definition`). Of each of a GEMM's operands, made by the run's own passes, every
number and the tensor's scale must be the definition's: `wrong` is the share that is not. Its result, from the run's own
backend, must be the definition's but for the order of sums: `error` is the largest deviation over what is allowed. And
so must `dw`, a weight's gradient through the run's own program of the whole layer, fused passes included; there x and
dy pass through other GEMMs first, whose last bits are free, and noise of 4 bits makes 1% of them: the error is that of
the whole matrix, over 5% of what sums of unrelated numbers would have.

What is told beside it, of results q (quantized, and what the recipe gives) and b (bf16):

    gain    <q, b> / <b, b>       the slope of q against b: 1 for an unbiased quantizer
    bias    mean(q - b) / rms(b)
    cosine  <q, b> / |q| |b|
    snr     10 log10(|b|^2 / |q - b|^2)
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from halfbyte.ops.execution import Execution
from halfbyte.ops.grouped_linear import TileOperand, dgrad, fprop, grouped_operands, wgrad
from halfbyte.ops.linear import Linear as Traced
from halfbyte.ops.linear import token_view, weight_operand, with_linears
from halfbyte.ops.operand import Carrier, InTwo, Operand
from halfbyte.ops.passes import XLA, request
from halfbyte.ops.weight import QWeight
from halfbyte.recipe import GEMMS, WEIGHTS, recipe

from . import definition
from .definition import TENSORS, matrix
from .replay import Linear

BF16 = recipe("bf16")
PATH = "dw"
PATH_ERROR = 0.05


def agreement(q: jax.Array, b: jax.Array) -> dict[str, jax.Array]:
    """float32 scalars."""
    q, b = (t.astype(jnp.float32).reshape(-1) for t in (q, b))
    scale = jnp.maximum(jnp.max(jnp.abs(b)), jnp.float32(1e-30))
    q, b = q / scale, b / scale  # gradients of 1e-8 would underflow when squared
    power, cross, own = jnp.sum(b * b), jnp.sum(q * b), jnp.sum(q * q)
    noise = jnp.sum((q - b) ** 2)
    tiny = jnp.float32(1e-30)
    return {
        "gain": cross / jnp.maximum(power, tiny),
        "bias": jnp.mean(q - b) / jnp.maximum(jnp.sqrt(power / q.size), tiny),
        "cosine": cross / jnp.maximum(jnp.sqrt(own * power), tiny),
        "snr_db": 10 * jnp.log10(jnp.maximum(power, tiny) / jnp.maximum(noise, tiny * 1e-6)),
    }


def run_linear(
    given: Linear, *, backend: str, sharded: bool = False
) -> tuple[dict[str, Operand], dict[str, jax.Array]]:
    """(the operands, by role; y, dx and dw, as matrices) of a linear, by the passes and the GEMMs of the run."""
    recipe, dtype = given.recipe, given.x.dtype
    dy = token_view(given.dy.astype(dtype), (recipe,))

    def measured(x: jax.Array, linears: tuple[Traced, ...]) -> tuple[dict[str, Operand], dict[str, jax.Array]]:
        ahead, back = linears[0], linears[0].kept().restored(after=dy)
        row, kept = ahead.quantize(x, "fprop_x", "wgrad_x", kept=("wgrad_x",))
        dy_row, dy_column = back.quantize(dy, "dgrad_dy", "wgrad_dy")
        made = {
            "fprop_x": row, "fprop_w": weight_operand(ahead.weight, "fprop_w", passes=ahead.passes),
            "dgrad_dy": dy_row, "dgrad_w": weight_operand(back.weight, "dgrad_w", passes=back.passes),
            "wgrad_x": back.load(kept, "wgrad_x"), "wgrad_dy": dy_column,
        }  # fmt: skip
        if isinstance(row, InTwo):
            made |= {"fprop_x": row.first, definition.REST: row.rest}
        pair = made["wgrad_x"], dy_column
        dw = back.gradient(back.wgrad(*pair), *pair).weight.anchor
        return made, {"fprop": matrix(ahead.fprop(row, dtype)), "dgrad": matrix(back.dgrad(dy_row, dtype)), "wgrad": dw}

    execution = Execution(backend, sharded=sharded)
    return with_linears(measured, (given.x,), (given.weight,), (given.key,), recipes=(recipe,), execution=execution)


def unpacked_weights(given: Linear) -> dict[str, Operand]:
    """The weight's operands as the definition in `ops` makes them, before they are packed: a carrier must be what its
    codes stand for. Nothing of a weight that was quantized before, or of one in bf16."""
    policies = {role: getattr(given.recipe, role) for role in WEIGHTS}
    roles = [role for role, policy in policies.items() if policy.format.quantized and policy.source != "forward"]
    if isinstance(given.weight, QWeight):
        return {}
    asked = [request(given.recipe, role, given.key) for role in roles]
    axes = [TENSORS[role][1] for role in roles]
    made = XLA.quantize(given.w, [dataclasses.replace(a, axis=axis) for a, axis in zip(asked, axes, strict=True)])
    return dict(zip(roles, made, strict=True))


def differing(found: Operand, right: definition.Operand) -> jax.Array:
    """The share of an operand's numbers that are not the definition's; all of them under another tensor scale."""
    share = jnp.mean((matrix(found.values()).astype(jnp.float32) != right.values).astype(jnp.float32))
    factor = jnp.float32(1) if found.factor is None else found.factor
    return jnp.where(jnp.all(factor.reshape(-1) == right.factor.reshape(-1)), share, 1.0)


def judge(given: Linear, *, backend: str, sharded: bool = False) -> dict[str, dict[str, jax.Array]]:
    """GEMM -> the numbers of `agreement` with bf16, those that the recipe gives (`recipe_gain`, `recipe_snr_db`), and
    `error` and `wrong`.
    """
    if given.tiles is None:
        return _judged(given, *run_linear(given, backend=backend, sharded=sharded), unpacked_weights(given))
    found, results = run_experts(given, backend=backend)
    operands = {role: (made.values(role, getattr(given.recipe, role)), made.factor) for role, made in found.items()}
    numbers = jax.lax.map(lambda expert: _judged_expert(given, operands, results, expert), jnp.arange(given.w.shape[0]))
    some = given.tiles.counts > 0

    def over_experts(name: str, each: jax.Array) -> jax.Array:
        """The worst of all, or the mean of those that have rows."""
        worst = name in ("error", "wrong")
        return jnp.max(each) if worst else jnp.mean(each, where=some)

    return {gemm: {name: over_experts(name, each) for name, each in told.items()} for gemm, told in numbers.items()}


def run_experts(given: Linear, *, backend: str) -> tuple[dict[str, TileOperand], dict[str, jax.Array]]:
    """`run_linear` of all experts."""
    assert given.tiles is not None
    tiles, dtype = dataclasses.replace(given.tiles, backend=backend), given.x.dtype
    how: dict[str, Any] = {"recipe": given.recipe, "key": given.key, "amax": given.amax}
    made = grouped_operands(given.x, given.w, given.dy.astype(dtype), tiles, **how)
    return made, {
        "fprop": fprop(made["fprop_x"], made["fprop_w"], tiles, dtype),
        "dgrad": dgrad(made["dgrad_dy"], made["dgrad_w"], tiles, dtype),
        "wgrad": wgrad(made["wgrad_x"], made["wgrad_dy"], tiles, given.w.dtype),
    }


def _judged_expert(
    given: Linear, found: dict[str, tuple[jax.Array, jax.Array | None]], results: dict[str, jax.Array],
    expert: jax.Array,
) -> dict[str, dict[str, jax.Array]]:  # fmt: skip
    """One expert of them beside its own definition; its rows are filled up to whole tiles. `found`: the numbers and
    factors of each operand."""
    assert given.tiles is not None
    tile, count = given.tiles.tile, given.tiles.counts[expert]

    def own(array: jax.Array) -> jax.Array:
        return array[expert] if array.ndim == 3 else given.own_rows(array, expert, -(-count // tile) * tile)

    def operand(role: str) -> Carrier:
        values, factor = found[role]
        return Carrier(own(values), None if factor is None else factor[expert], getattr(given.recipe, role))

    mine = {name: own(result) for name, result in results.items()}
    return _judged(given.of_expert(expert), {role: operand(role) for role in found}, mine, {}, rows=count)


def _judged(
    given: Linear, found: Mapping[str, Operand], results: Mapping[str, jax.Array], also: Mapping[str, Operand], *,
    rows: jax.Array | None = None,
) -> dict[str, dict[str, jax.Array]]:  # fmt: skip
    """`judge` of operands and results that are there; `also` are further operands, `rows` those that are not zeros."""
    right, plain = definition.operands(given), definition.operands(dataclasses.replace(given, recipe=BF16))
    wrong = {role: differing(found[role], right[role]) for role in right}
    for role, made in also.items():
        wrong[role] = jnp.maximum(wrong[role], differing(made, right[role]))
    told = {}
    for gemm, q in results.items():
        expected, b = definition.result(gemm, right), definition.result(gemm, plain).values
        by_recipe = agreement(expected.values, b)
        same = {"recipe_gain": by_recipe["gain"], "recipe_snr_db": by_recipe["snr_db"]}
        error = jnp.max(_away(q, expected) / jnp.maximum(expected.allowed, 1e-37))
        roles = [part for role in GEMMS[gemm] for part in definition.parts(role, right)]
        worse = functools.reduce(jnp.maximum, [wrong[role] for role in roles])
        told[gemm] = agreement(q, b) | same | {"error": error, "wrong": worse}
        if gemm == "wgrad":
            error, none = _path_error(_away(given.dw, expected), right, rows), jnp.float32(0)
            told[PATH] = agreement(given.dw, b) | same | {"error": error, "wrong": none}
    return told


def _away(q: jax.Array, expected: definition.Result) -> jax.Array:
    return jnp.abs(q.astype(jnp.float32) - expected.values)


def _path_error(away: jax.Array, right: dict[str, definition.Operand], rows: jax.Array | None) -> jax.Array:
    x, dy = (right[role] for role in GEMMS["wgrad"])
    many = jnp.float32(x.values.shape[0]) if rows is None else jnp.maximum(rows, 1).astype(jnp.float32)
    whole = [jnp.sqrt(jnp.sum((definition.length(t.values, 0) * t.factor) ** 2)) for t in (x, dy)]
    size = jnp.maximum(whole[0] * whole[1] / jnp.sqrt(many), 1e-37)
    return jnp.sqrt(jnp.sum((away / size) ** 2)) / PATH_ERROR
