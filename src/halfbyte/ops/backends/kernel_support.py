"""Operand policies that the kernels of `fused` support, and their kernel arguments.

NVFP4 blocks of 16 under E4M3 scales, standard or four over six, with the 16-point Hadamard transform for wgrad only; or
Quartet II's operands, those of the backward pass with 128-point transforms.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypedDict

from halfbyte import formats
from halfbyte.kernels import ms_eden
from halfbyte.recipes import FORWARD_ROLE_OF, OperandPolicy, Recipe

KERNEL_FORMATS = (
    formats.NVFP4,
    formats.NVFP4_1716,
    formats.NVFP4_46_MSE,
    formats.NVFP4_46_MAE,
    formats.NVFP4_46_SR,
)  # E2M1 in blocks of 16 under E4M3 scales, one float32 scale per tensor
WEIGHT_2D = OperandPolicy(formats.NVFP4, block="2d")  # one operand, or its packed codes, for fprop and dgrad
QUARTET = OperandPolicy(formats.NVFP4_QUARTET, rounding="away")
EDEN = OperandPolicy(formats.NVFP4_EDEN, rounding="away", hadamard=True, hadamard_size=ms_eden.POINTS, signs="fresh")
EDEN_REQUANTIZED = dataclasses.replace(EDEN, source="requantize_forward")
KERNEL_WEIGHT_POLICIES = {  # what the weight kernels write
    WEIGHT_2D,
    QUARTET,
    EDEN_REQUANTIZED,
    *(OperandPolicy(fmt, source=source) for fmt in KERNEL_FORMATS for source in ("as_is", "requantize_forward")),
}
OF_ROWS, OF_TOKENS = ("fprop_x", "dgrad_dy"), ("wgrad_x", "wgrad_dy")
# The operand policies of x and dy that the kernels support, rowwise and columnwise.
KERNEL_POLICIES = {
    role: {
        OperandPolicy(fmt, rounding=rounding, hadamard=hadamard, source=source)
        for fmt in KERNEL_FORMATS
        for rounding in ("rne", "stochastic", "midpoint")
        for hadamard in ((False,) if role in OF_ROWS else (False, True))
        for source in ("as_is", "bfloat16")
    }
    for role in OF_ROWS + OF_TOKENS
}
# With a transform a kernel rounds the forward operand's values to bfloat16; without one they stay float32.
KERNEL_POLICIES["wgrad_x"] |= {
    dataclasses.replace(p, source="requantize_forward") for p in KERNEL_POLICIES["wgrad_x"] if p.hadamard
}
for _role, _policy in (("fprop_x", QUARTET), ("dgrad_dy", EDEN), ("wgrad_dy", EDEN), ("wgrad_x", EDEN_REQUANTIZED)):
    KERNEL_POLICIES[_role].add(_policy)


def rule_of(policy: OperandPolicy) -> formats.TwoLevelScale:
    """Returns the scale rule of a supported format."""
    assert isinstance(policy.format.scale, formats.TwoLevelScale)
    return policy.format.scale


class KernelScaling(TypedDict):
    """Keyword arguments of a kernel: scale rule and rounding of a policy."""

    rule: formats.TwoLevelScale
    rounding: str


def kernel_scaling(policy: OperandPolicy) -> KernelScaling:
    return {"rule": rule_of(policy), "rounding": policy.rounding}


def uses_hadamard128(policy: OperandPolicy) -> bool:
    """Returns True if an operand has 128-point transforms, which need a separate pass."""
    return policy.hadamard and policy.hadamard_size == ms_eden.POINTS


def separate_pass_reason(recipes: Sequence[Recipe]) -> str | None:
    """Returns why operands of these recipes cannot share a pass with others, or None."""
    hadamard128 = any(uses_hadamard128(policy) for recipe in recipes for policy in recipe.operands().values())
    return f"transforms of {ms_eden.POINTS} points are passes of their own" if hadamard128 else None


def nvfp4_format_mismatch(recipe: Recipe) -> str | None:
    """Returns why x and dy are unsupported; None for NVFP4 with a transform for wgrad only, and for Quartet II."""
    for requantized, forward in FORWARD_ROLE_OF.items():
        policy, source = getattr(recipe, requantized), getattr(recipe, forward)
        if (
            policy.source == "requantize_forward"
            and policy.format.scale.uses_effective_step != source.format.scale.uses_effective_step
        ):
            return f"{requantized} is {policy}, and its kernels do not make that of {source}"
    is_quartet = [getattr(recipe, role) in (QUARTET, EDEN, EDEN_REQUANTIZED) for role in KERNEL_POLICIES]
    if any(is_quartet) and not all(is_quartet):
        return "its kernels make Quartet II's operands of x and of dy, or of neither"
    for role, supported in KERNEL_POLICIES.items():
        policy = getattr(recipe, role)
        if policy not in supported:
            return (
                f"{role} is {policy}; its kernels make NVFP4 blocks of 16, plain or by four over six, with the "
                "Hadamard transform for wgrad only, and of a forward operand with it; or Quartet II's operands"
            )
    return None
