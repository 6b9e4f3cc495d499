"""What a tensor is like for a quantizer: its range, what would be lost of it in each format, and where the noise is.

Each linear has three tensors: x, w and the gradient dy. Each is looked at along the axes that its GEMMs contract,
because blocks lie there: x along features (fprop) and tokens (wgrad), w along inputs and outputs, dy along features
(dgrad) and tokens (wgrad).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from halfbyte.formats import FP8, FP8_E5M2, MXFP4, MXFP8, NVFP4, quantize, transform_runs
from halfbyte.formats.elements import decode
from halfbyte.models.context import Context
from halfbyte.recipe import OperandPolicy, Recipe

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


def look_at_linears() -> Any:
    """A `Look` that brings out what every linear was given: site -> x, w, dy, key."""

    def look(linears: list[Linear], layer: Layer) -> dict[str, Any]:
        return {given.site: (given.x, given.w, given.dy, given.key) for given in linears}

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


@functools.partial(jax.jit, static_argnums=(3, 4))
def operand_numbers(x: jax.Array, w: jax.Array, dy: jax.Array, role: str, own: OperandPolicy) -> dict[str, Any]:
    """One operand: its range, its fate under its own policy, and its signal-to-noise ratio in every format. Jitted
    apart, so that linears of one shape share a program."""
    name, axis = ROLES[role]
    tensor = {"x": flat(x), "w": w, "dy": flat(dy)}[name].astype(jnp.bfloat16)
    snr = {way: snr_db(tensor, policy, axis) for way, policy in ways(role).items()}
    if own.format.quantized:
        snr["own"] = snr_db(tensor, own, axis)
    return {**describe(tensor, own, axis), "snr": snr}


@functools.partial(jax.jit, static_argnums=(4, 5))
def gemm_numbers(
    x: jax.Array, w: jax.Array, dy: jax.Array, key: jax.Array, chosen: Recipe, backend: str
) -> dict[str, Any]:
    """GEMM -> how far its result under `chosen` is from bf16."""
    given, ctx = Linear("", chosen, x, w, dy, key), Context(backend=backend)
    ours, plain = (three_gemms(given, r, ctx) for r in (chosen, BF16))
    return {gemm: agreement(ours[gemm], plain[gemm]) for gemm in ours}
