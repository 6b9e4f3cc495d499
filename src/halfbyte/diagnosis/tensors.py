"""What a tensor is like for a quantizer: its range, what would be lost of it in each format, and where the noise is.

Each linear has three tensors: x, w and the gradient dy. Each is looked at along the axes that its GEMMs contract,
because blocks lie there: x along features (fprop) and tokens (wgrad), w along inputs and outputs, dy along features
(dgrad) and tokens (wgrad).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from halfbyte.formats import FP8, FP8_E5M2, MXFP4, MXFP8, NVFP4, quantize, transform_runs
from halfbyte.formats.elements import decode
from halfbyte.models.context import Context
from halfbyte.recipe import OperandPolicy, recipe

from .replay import Layer, Linear
from .truth import BF16, agreement, three_gemms

ROLES = {"fprop_x": ("x", -1), "fprop_w": ("w", -2), "dgrad_dy": ("dy", -1), "dgrad_w": ("w", -1),
         "wgrad_x": ("x", -2), "wgrad_dy": ("dy", -2)}  # fmt: skip
CODES = 256
TINY = 1e-30


def ways(role: str) -> dict[str, OperandPolicy]:
    """The formats that an operand is tried in."""
    found = {
        "nvfp4": OperandPolicy(NVFP4),
        "nvfp4 hadamard": OperandPolicy(NVFP4, hadamard=True),
        "mxfp4": OperandPolicy(MXFP4),
        "mxfp8": OperandPolicy(MXFP8),
        "fp8": OperandPolicy(FP8_E5M2 if ROLES[role][0] == "dy" else FP8),
    }
    if ROLES[role][0] == "w":
        found["nvfp4 2d"] = OperandPolicy(NVFP4, block="2d")
    return found


def flat(x: jax.Array) -> jax.Array:
    """[..., features] as a matrix [tokens, features]."""
    return x.reshape(-1, x.shape[-1])


def snr_db(x: jax.Array, policy: OperandPolicy, axis: int) -> jax.Array:
    """Signal over rounding noise of x, rounded to nearest, in decibels; NaN where its shape has no blocks."""
    block = max(policy.format.block or 1, 16 if policy.hadamard else 1)
    if x.shape[axis] % block or (policy.block == "2d" and any(side % block for side in x.shape)):
        return jnp.float32(jnp.nan)
    seen = transform_runs(x, axis=axis) if policy.hadamard else x
    wide = seen.astype(jnp.float32)
    near = quantize(seen, policy.format, block=policy.block, axis=axis).dequantize()
    scale = jnp.maximum(jnp.max(jnp.abs(wide)), jnp.float32(TINY))
    power, noise = (jnp.sum((t / scale) ** 2) for t in (wide, near - wide))
    return 10 * jnp.log10(jnp.maximum(power, TINY) / jnp.maximum(noise, TINY * 1e-6))


def describe(x: jax.Array, policy: OperandPolicy, axis: int) -> dict[str, jax.Array]:
    """Range of x, and what the run's own policy makes of it: shares that round to zero and that saturate, and how often
    each block-scale code is used."""
    wide = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(wide))
    scale = jnp.maximum(amax, jnp.float32(TINY))
    found = {"amax": amax, "crest": 1 / jnp.maximum(jnp.sqrt(jnp.mean((wide / scale) ** 2)), TINY)}
    if policy.format.element is None:
        return found
    seen = transform_runs(x, axis=axis) if policy.hadamard else x
    made = quantize(seen, policy.format, block=policy.block, axis=axis)
    near, whole = made.dequantize(), seen.astype(jnp.float32)
    found["zeros"] = jnp.mean(((near == 0) & (whole != 0)).astype(jnp.float32))
    top = jnp.abs(decode(policy.format.element, made.codes)) >= policy.format.element.max
    found["saturated"] = jnp.mean((top & (jnp.abs(whole) > jnp.abs(near))).astype(jnp.float32))
    if made.scales is not None:
        codes = jax.lax.bitcast_convert_type(made.scales, jnp.uint8).reshape(-1)
        found["scale_codes"] = jnp.bincount(codes, length=CODES)
    return found


def look_at_tensors(ctx: Context) -> Any:
    """A `Look`: for every linear, quantized or not, the numbers of its operands by role, and under `gemms` how far its
    GEMMs are from bf16 in its own recipe, or in nvfp4 if it has none."""

    def look(linears: list[Linear], layer: Layer) -> dict[str, dict[str, Any]]:
        return {given.site: {**_roles(given), "gemms": _gemms(given, ctx)} for given in linears}

    return look


def look_at_range() -> Any:
    """A `Look` that is cheap: the operands of quantized linears under their own policies alone."""

    def look(linears: list[Linear], layer: Layer) -> dict[str, dict[str, Any]]:
        return {given.site: _own(given) for given in linears if given.recipe.quantized}

    return look


def _own(given: Linear) -> dict[str, Any]:
    tensors = {"x": flat(given.x), "w": given.w, "dy": flat(given.dy)}
    found: dict[str, Any] = {}
    for role, (name, axis) in ROLES.items():
        policy: OperandPolicy = getattr(given.recipe, role)
        if policy.format.quantized:
            x = tensors[name].astype(jnp.bfloat16)
            found[role] = {**describe(x, policy, axis), "snr": {"own": snr_db(x, policy, axis)}}
    return found


def _gemms(given: Linear, ctx: Context) -> dict[str, Any]:
    chosen = given.recipe if given.recipe.quantized else recipe("nvfp4")
    key = given.key if given.key is not None else jax.random.key(0)
    ours, plain = (three_gemms(dataclasses.replace(given, key=key), r, ctx) for r in (chosen, BF16))
    return {gemm: agreement(ours[gemm], plain[gemm]) for gemm in ours}


def _roles(given: Linear) -> dict[str, Any]:
    tensors = {"x": flat(given.x), "w": given.w, "dy": flat(given.dy)}
    found: dict[str, Any] = {}
    for role, (name, axis) in ROLES.items():
        x = tensors[name].astype(jnp.bfloat16)
        own: OperandPolicy = getattr(given.recipe, role)
        snr = {way: snr_db(x, policy, axis) for way, policy in ways(role).items()}
        if own.format.quantized:
            snr["own"] = snr_db(x, own, axis)
        found[role] = {**describe(x, own, axis), "snr": snr}
    return found
