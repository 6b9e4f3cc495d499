"""Statistics of the operands of a linear: range, what rounding loses in each format, SNR.

`tensor_stats` describes a tensor for a quantizer. Each of the tensors x, w and dy of a linear is blocked along the axes
that its GEMMs contract: x along features (fprop) and tokens (wgrad), w along inputs and outputs, dy along features
(dgrad) and tokens (wgrad). `operand_stats` lays operands out in rows, so that all shapes share a few programs.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from halfbyte.evaluation.gemm_accuracy import TINY
from halfbyte.evaluation.reference_operands import ROLE_TENSOR_AXIS, as_matrix
from halfbyte.evaluation.step_replay import LinearCapture
from halfbyte.formats import FP8, FP8_E5M2, MXFP4, MXFP8, NVFP4, amax_of, hadamard_transform, quantize
from halfbyte.formats.elements import decode
from halfbyte.recipes import OperandPolicy, Recipe

CODES = 256
# Elements along the contracted axis per row: a block of any format, if the size is a multiple.
BLOCK_SIZES = (32, 16, 1)
# Tensors are padded to 2**20, 2**24, ... elements, and share the programs of that size.
FIRST_SIZE, GROWTH = 20, 4
CHUNK = 2**16  # elements that a program looks at in one iteration
# Of the one program that computes for longer than it is compiled, also where `inspect` compiles without optimizations.
OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
TILE_ROWS = 16
POLICIES_COMPARED = {
    "nvfp4": OperandPolicy(NVFP4),
    "nvfp4 hadamard": OperandPolicy(NVFP4, hadamard=True),
    "mxfp4": OperandPolicy(MXFP4),
    "mxfp8": OperandPolicy(MXFP8),
    "fp8": OperandPolicy(FP8),
    "fp8 e5m2": OperandPolicy(FP8_E5M2),
}
"""The formats that an operand is tried in: FP8 as E5M2 for gradients."""
NVFP4_2D = OperandPolicy(NVFP4, block="2d")
"""Another one, for weights."""


def tensor_stats(x: jax.Array, policy: OperandPolicy, axis: int) -> dict[str, jax.Array]:
    """Range of x, and what a policy makes of it, rounded to nearest: shares that round to zero and that saturate, how
    often each block-scale code is used, and signal over rounding noise in decibels."""
    many, amax = jnp.float32(x.size), amax_of(x)
    square = jnp.sum((x.astype(jnp.float32) / jnp.maximum(amax, TINY)) ** 2)
    if policy.format.element is None:
        return _range_stats(amax, square, many)
    whole = _transformed(x, policy, axis)
    return _range_stats(amax, square, many) | _rounding_stats(rounding_sums(whole, policy, axis, amax_of(whole)), many)


def _transformed(x: jax.Array, policy: OperandPolicy, axis: int) -> jax.Array:
    return hadamard_transform(x, axis=axis, points=policy.hadamard_size) if policy.hadamard else x


def rounding_sums(x: jax.Array, policy: OperandPolicy, axis: int, amax: jax.Array) -> dict[str, jax.Array]:
    """Returns sums over x, or over whole blocks of a tensor with this `amax`: elements that round to zero and that
    saturate, power and noise over amax^2, and how often each block-scale code is used."""
    fmt = policy.format
    assert fmt.element is not None
    key = jax.random.key(0) if fmt.scale.stochastic else None
    outer = amax if fmt.scale.outer_granularity == "tensor" else None
    q = quantize(x, fmt, block=policy.block, axis=axis, key=key, amax=outer)
    near, whole, scale = q.dequantize(), x.astype(jnp.float32), jnp.maximum(amax, TINY)
    top = jnp.abs(decode(fmt.element, q.codes)) >= fmt.element.max
    lost = {"zeros": (near == 0) & (whole != 0), "saturated": top & (jnp.abs(whole) > jnp.abs(near))}
    sums = {name: jnp.sum(these.astype(jnp.float32)) for name, these in lost.items()}
    sums |= {"power": jnp.sum((whole / scale) ** 2), "noise": jnp.sum(((near - whole) / scale) ** 2)}
    if q.scales is not None:
        codes = jax.lax.bitcast_convert_type(q.scales, jnp.uint8).reshape(-1)
        sums["scale_codes"] = jnp.bincount(codes, length=CODES)
    return sums


def _range_stats(amax: jax.Array, square: jax.Array, many: jax.Array) -> dict[str, jax.Array]:
    return {"amax": amax, "crest": 1 / jnp.maximum(jnp.sqrt(square / many), TINY)}


def _rounding_stats(sums: Mapping[str, jax.Array], many: jax.Array) -> dict[str, jax.Array]:
    """Returns the statistics of `many` elements from their `rounding_sums`."""
    stats = {name: sums[name] / many for name in ("zeros", "saturated")}
    ratio = jnp.maximum(sums["power"], TINY) / jnp.maximum(sums["noise"], TINY * 1e-6)
    codes = {"scale_codes": sums["scale_codes"]} if "scale_codes" in sums else {}
    return stats | codes | {"snr": 10 * jnp.log10(ratio)}


@jax.jit
def operand_stats_of_linear(given: LinearCapture) -> dict[str, Any]:
    """Returns the statistics of a linear's operands under their own policies, without the comparison of formats."""
    stats_by_role: dict[str, Any] = {}
    for role, (name, axis) in ROLE_TENSOR_AXIS.items():
        policy: OperandPolicy = getattr(given.recipe, role)
        if policy.format.quantized:
            stats = tensor_stats(as_matrix(getattr(given, name)).astype(jnp.bfloat16), policy, axis)
            stats_by_role[role] = stats | {"snr": {"own": stats["snr"]}}
    return stats_by_role


def blocks_as_rows(x: jax.Array, block: str, axis: int) -> jax.Array | None:
    """Returns a matrix with each block in a row (a tile in 16 rows), and rows of zeros up to one of a few sizes; None
    if it has no whole tiles."""
    if block == "2d":
        if any(side % TILE_ROWS for side in x.shape):
            return None
        tiles = x.reshape(x.shape[0] // TILE_ROWS, TILE_ROWS, x.shape[1] // TILE_ROWS, TILE_ROWS).transpose(0, 2, 1, 3)
        rows = tiles.reshape(-1, TILE_ROWS)
    else:
        rows = (x if axis == -1 else x.T).reshape(-1, next(run for run in BLOCK_SIZES if x.shape[axis] % run == 0))
    size = FIRST_SIZE
    while 2**size < x.size:
        size += GROWTH
    return jnp.pad(rows, ((0, 2**size // rows.shape[1] - rows.shape[0]), (0, 0)))


@functools.partial(jax.jit, static_argnums=1)
def _lay_out(tensors: dict[str, jax.Array], wanted: tuple[tuple[str, str], ...]) -> dict[str, jax.Array | None]:
    """Returns "role block" -> `blocks_as_rows` of an operand in bfloat16."""
    rows: dict[str, jax.Array | None] = {}
    for role, block in wanted:
        name, axis = ROLE_TENSOR_AXIS[role]
        rows[f"{role} {block}"] = blocks_as_rows(as_matrix(tensors[name]).astype(jnp.bfloat16), block, axis)
    return rows


@functools.partial(jax.jit, static_argnums=1, compiler_options=OPTIMIZED)
def rounding_outcomes(
    rows: jax.Array, policies: tuple[OperandPolicy, ...], count: jax.Array
) -> list[dict[str, jax.Array]]:
    """Returns `tensor_stats` of a matrix of `count` elements in rows, by policy. Rows beyond are zeros, and the loop
    does not get to them: one program serves tensors of many sizes, each for the time of its own."""
    height = CHUNK // rows.shape[1]
    transformed = [_transformed(rows, policy, -1) for policy in policies]
    amax, amaxes = amax_of(rows), [amax_of(whole) for whole in transformed]

    def chunk_sums(index: jax.Array) -> Any:
        def cut(whole: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(whole, index * height, height)

        square = jnp.sum((cut(rows).astype(jnp.float32) / jnp.maximum(amax, TINY)) ** 2)
        lost = zip(transformed, policies, amaxes, strict=True)
        return square, [rounding_sums(cut(whole), policy, -1, top) for whole, policy, top in lost]

    chunks = -(-count // CHUNK)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(chunk_sums, chunks))
    add = lambda index, sums: jax.tree.map(jnp.add, sums, chunk_sums(index))  # noqa: E731
    square, sums = jax.lax.fori_loop(0, chunks, add, zeros)
    many = count.astype(jnp.float32)
    for policy, each in zip(policies, sums, strict=True):
        if "scale_codes" in each:
            block = (policy.format.block or 1) ** (2 if policy.block == "2d" else 1)
            each["scale_codes"] = each["scale_codes"].at[0].add(-(chunks * CHUNK - count) // block)
    return [_range_stats(amax, square, many) | _rounding_stats(each, many) for each in sums]


def operand_stats(given: LinearCapture, roles: Sequence[str] = tuple(ROLE_TENSOR_AXIS)) -> dict[str, dict[str, Any]]:
    """Returns role -> range of the operand, what its own policy loses of it, and its SNR in every format."""
    tried = {role: _policies_tried(given.recipe, role) for role in roles}
    wanted = {(role, policy.block): None for role in roles for policy in tried[role].values()}
    laid = _lay_out({"x": given.x, "w": given.w, "dy": given.dy}, tuple(wanted))
    return {role: _stats_of_operand(given, role, tried[role], laid) for role in roles}


def _own_policy(recipe: Recipe, role: str) -> OperandPolicy:
    """Returns what the statistics show of a role's policy: it without random bits."""
    own = getattr(recipe, role)
    return OperandPolicy(own.format, own.block, hadamard=own.hadamard, hadamard_size=own.hadamard_size)


def _policies_tried(recipe: Recipe, role: str) -> dict[str, OperandPolicy]:
    tried = POLICIES_COMPARED | ({"nvfp4 2d": NVFP4_2D} if ROLE_TENSOR_AXIS[role][0] == "w" else {})
    own = _own_policy(recipe, role)
    return tried | ({"own": own} if own.format.quantized and own not in tried.values() else {})


def _stats_of_operand(
    given: LinearCapture, role: str, tried: Mapping[str, OperandPolicy], laid: Mapping[str, jax.Array | None]
) -> dict[str, Any]:
    name, found = ROLE_TENSOR_AXIS[role][0], dict[str, Any]()
    for block in ("1d", "2d"):
        rows = laid.get(f"{role} {block}")
        fits = {
            way: policy
            for way, policy in tried.items()
            if rows is not None and policy.block == block and rows.shape[1] % policy.quantization_group_size == 0
        }
        if rows is not None and fits:
            stats = rounding_outcomes(rows, tuple(fits.values()), jnp.int32(getattr(given, name).size))
            found |= dict(zip(fits, jax.device_get(stats), strict=True))
    gradient = "fp8 e5m2" if name == "dy" else "fp8"
    snr = {way: found[way]["snr"] if way in found else math.nan for way in tried if not way.startswith("fp8")}
    snr["fp8"] = found[gradient]["snr"]
    own = _own_policy(given.recipe, role)
    fate = {p: w for w, p in tried.items()}.get(own) if own.format.quantized else None
    if fate is None:
        return {field: found[gradient][field] for field in ("amax", "crest")} | {"snr": snr}
    return {**found[fate], "snr": snr | {"own": found[fate]["snr"]}}
