"""What a tensor is like for a quantizer: its range, what would be lost of it in each format, and where the noise is.

Each linear has three tensors: x, w and the gradient dy. Each is looked at along the axes that its GEMMs contract,
because blocks lie there: x along features (fprop) and tokens (wgrad), w along inputs and outputs, dy along features
(dgrad) and tokens (wgrad).
"""

import dataclasses
import functools
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


def ways(role: str) -> dict[str, OperandPolicy]:
    """The formats that an operand is tried in."""
    found = {
        "nvfp4": OperandPolicy(NVFP4),
        "nvfp4 hadamard": OperandPolicy(NVFP4, hadamard=True),
        "mxfp4": OperandPolicy(MXFP4),
        "mxfp8": OperandPolicy(MXFP8),
        "fp8": OperandPolicy(FP8_E5M2 if TENSORS[role][0] == "dy" else FP8),
    }
    if TENSORS[role][0] == "w":
        found["nvfp4 2d"] = OperandPolicy(NVFP4, block="2d")
    return found


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


@jax.jit
def own_numbers(given: Linear) -> dict[str, Any]:
    """What is cheap to know of a linear: its operands under their own policies alone."""
    found: dict[str, Any] = {}
    for role, (name, axis) in TENSORS.items():
        policy: OperandPolicy = getattr(given.recipe, role)
        if policy.format.quantized:
            x = matrix(getattr(given, name)).astype(jnp.bfloat16)
            found[role] = {**describe(x, policy, axis), "snr": {"own": snr_db(x, policy, axis)}}
    return found


@functools.partial(jax.jit, static_argnums=(3, 4))
def operand_numbers(x: jax.Array, w: jax.Array, dy: jax.Array, role: str, own: OperandPolicy) -> dict[str, Any]:
    """One operand: its range, its fate under its own policy, and its signal-to-noise ratio in every format. Jitted
    apart, so that linears of one shape share a program."""
    name, axis = TENSORS[role]
    tensor = {"x": matrix(x), "w": w, "dy": matrix(dy)}[name].astype(jnp.bfloat16)
    snr = {way: snr_db(tensor, policy, axis) for way, policy in ways(role).items()}
    if own.format.quantized:
        snr["own"] = snr_db(tensor, own, axis)
    return {**describe(tensor, own, axis), "snr": snr}


@functools.partial(jax.jit, static_argnames="backend")
def gemm_numbers(given: Linear, *, backend: str) -> dict[str, Any]:
    """GEMM -> how far its result is from bf16."""
    _, results = run_linear(given, backend=backend)
    plain = definition.operands(dataclasses.replace(given, recipe=BF16))
    return {gemm: agreement(q, definition.result(gemm, plain).values) for gemm, q in results.items()}
