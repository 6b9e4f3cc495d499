"""What a tensor is like for a quantizer: its range, what would be lost of it in each format, and where the noise is.

Each linear has three tensors: x, w and the gradient dy. Each is looked at along the axes that its GEMMs contract,
because blocks lie there: x along features (fprop) and tokens (wgrad), w along inputs and outputs, dy along features
(dgrad) and tokens (wgrad).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from halfbyte.formats import FP8, FP8_E5M2, MXFP4, MXFP8, NVFP4, quantize, transform_runs
from halfbyte.formats.elements import decode
from halfbyte.recipe import OperandPolicy

from . import definition
from .definition import TENSORS, matrix
from .replay import Linear
from .truth import BF16, agreement, run_linear

CODES = 256
TINY = 1e-30
RUNS = (32, 16, 1)  # numbers along the contraction that are laid out in a row: a block of any format, if they fit
# Tensors are padded to 2**12, 2**16, 2**20, ... numbers, and share the programs of that size.
FIRST_SIZE, GROWTH = 12, 4
TILE = 16

WAYS = {
    "nvfp4": OperandPolicy(NVFP4),
    "nvfp4 hadamard": OperandPolicy(NVFP4, hadamard=True),
    "mxfp4": OperandPolicy(MXFP4),
    "mxfp8": OperandPolicy(MXFP8),
    "fp8": OperandPolicy(FP8),
    "fp8 e5m2": OperandPolicy(FP8_E5M2),
}
"""The formats that an operand is tried in: FP8 as E5M2 for gradients."""
TILED = OperandPolicy(NVFP4, block="2d")
"""Another one, for weights."""


def describe(x: jax.Array, policy: OperandPolicy, axis: int, count: jax.Array | None = None) -> dict[str, jax.Array]:
    """Range of x, and what a policy makes of it, rounded to nearest: shares that round to zero and that saturate, how
    often each block-scale code is used, and signal over rounding noise in decibels. All but `count` numbers of x are
    zeros that fill whole blocks, and do not count."""
    wide = x.astype(jnp.float32)
    many = jnp.float32(x.size) if count is None else count.astype(jnp.float32)
    amax = jnp.max(jnp.abs(wide))
    scale = jnp.maximum(amax, jnp.float32(TINY))
    found = {"amax": amax, "crest": 1 / jnp.maximum(jnp.sqrt(jnp.sum((wide / scale) ** 2) / many), TINY)}
    if policy.format.element is None:
        return found
    seen = transform_runs(x, axis=axis, points=policy.hadamard_size) if policy.hadamard else x
    key = jax.random.key(0) if policy.format.scale.stochastic else None
    made = quantize(seen, policy.format, block=policy.block, axis=axis, key=key)
    near, whole = made.dequantize(), seen.astype(jnp.float32)
    top = jnp.abs(decode(policy.format.element, made.codes)) >= policy.format.element.max
    lost = {"zeros": (near == 0) & (whole != 0), "saturated": top & (jnp.abs(whole) > jnp.abs(near))}
    found |= {name: jnp.sum(these.astype(jnp.float32)) / many for name, these in lost.items()}
    if made.scales is not None:
        codes = jnp.bincount(jax.lax.bitcast_convert_type(made.scales, jnp.uint8).reshape(-1), length=CODES)
        unused = 0 if count is None else (x.size - count) // (x.size // made.scales.size)
        found["scale_codes"] = codes.at[0].add(-unused)
    scale = jnp.maximum(jnp.max(jnp.abs(whole)), jnp.float32(TINY))
    power, noise = (jnp.sum((t / scale) ** 2) for t in (whole, near - whole))
    return found | {"snr": 10 * jnp.log10(jnp.maximum(power, TINY) / jnp.maximum(noise, TINY * 1e-6))}


@jax.jit
def own_numbers(given: Linear) -> dict[str, Any]:
    """What is cheap to know of a linear: its operands under their own policies alone."""
    found: dict[str, Any] = {}
    for role, (name, axis) in TENSORS.items():
        policy: OperandPolicy = getattr(given.recipe, role)
        if policy.format.quantized:
            told = describe(matrix(getattr(given, name)).astype(jnp.bfloat16), policy, axis)
            found[role] = told | {"snr": {"own": told["snr"]}}
    return found


def in_rows(x: jax.Array, policy: OperandPolicy, axis: int) -> jax.Array | None:
    """The numbers of a matrix with each block in a row (a tile in 16 rows), and rows of zeros up to one of a few sizes;
    None if it does not fall into this policy's blocks."""
    if policy.block == "2d":
        if any(side % TILE for side in x.shape):
            return None
        tiles = x.reshape(x.shape[0] // TILE, TILE, x.shape[1] // TILE, TILE).transpose(0, 2, 1, 3)
        rows = tiles.reshape(-1, TILE)
    else:
        rows = (x if axis == -1 else x.T).reshape(-1, next(run for run in RUNS if x.shape[axis] % run == 0))
        if rows.shape[1] % policy.run:
            return None
    size = FIRST_SIZE
    while 2**size < x.size:
        size += GROWTH
    return jnp.pad(rows, ((0, 2**size // rows.shape[1] - rows.shape[0]), (0, 0)))


@functools.partial(jax.jit, static_argnums=1)
def _fates(rows: jax.Array, policies: tuple[OperandPolicy, ...], count: jax.Array) -> list[dict[str, jax.Array]]:
    return [describe(rows, policy, -1, count) for policy in policies]


def operand_numbers(given: Linear, role: str) -> dict[str, Any]:
    """One operand: its range, its fate under its own policy, and its signal-to-noise ratio in every format."""
    (name, axis), own = TENSORS[role], getattr(given.recipe, role)
    x = matrix(getattr(given, name)).astype(jnp.bfloat16)
    tried = WAYS | ({"nvfp4 2d": TILED} if name == "w" else {})
    plain = OperandPolicy(own.format, own.block, hadamard=own.hadamard, hadamard_size=own.hadamard_size)
    if own.format.quantized and plain not in tried.values():
        tried = tried | {"own": plain}
    laid = {way: in_rows(x, policy, axis) for way, policy in tried.items()}
    found: dict[str, Any] = {}
    for block in ("1d", "2d"):
        group = [w for w, p in tried.items() if p.block == block and laid[w] is not None]
        if group:
            told = _fates(laid[group[0]], tuple(tried[w] for w in group), jnp.int32(x.size))
            found |= dict(zip(group, jax.device_get(told), strict=True))
    gradient = "fp8 e5m2" if name == "dy" else "fp8"
    snr = {way: found[way]["snr"] if way in found else math.nan for way in tried if not way.startswith("fp8")}
    snr["fp8"] = found[gradient]["snr"]
    fate = {p: w for w, p in tried.items()}.get(plain) if own.format.quantized else None
    if fate is None:
        return {field: found[gradient][field] for field in ("amax", "crest")} | {"snr": snr}
    return {**found[fate], "snr": snr | {"own": found[fate]["snr"]}}


@functools.partial(jax.jit, static_argnames="backend")
def gemm_numbers(given: Linear, *, backend: str) -> dict[str, Any]:
    """GEMM -> how far its result is from bf16."""
    _, results = run_linear(given, backend=backend)
    plain = definition.operands(dataclasses.replace(given, recipe=BF16))
    return {gemm: agreement(q, definition.result(gemm, plain).values) for gemm, q in results.items()}
