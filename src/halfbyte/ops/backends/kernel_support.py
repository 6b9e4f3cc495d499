"""What the kernels of `fused` serve: operand policies, and what each says to a kernel.

NVFP4 blocks of 16 under E4M3 scales, plain or by four over six, the Hadamard transform of 16 tokens for wgrad only; or
Quartet II's operands, of which those of the backward pass are transformed in runs of 128.
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
)  # E2M1 under E4M3 scales of 16, one S a tensor
WEIGHT_2D = OperandPolicy(formats.NVFP4, block="2d")  # of a tile, one carrier or packed codes for both GEMMs
QUARTET = OperandPolicy(formats.NVFP4_QUARTET, rounding="away")
EDEN = OperandPolicy(formats.NVFP4_EDEN, rounding="away", hadamard=True, hadamard_size=ms_eden.POINTS, signs="fresh")
EDEN_REQUANTIZED = dataclasses.replace(EDEN, source="requantize_forward")
KERNEL_WEIGHT_POLICIES = {  # what its weight kernels make
    WEIGHT_2D,
    QUARTET,
    EDEN_REQUANTIZED,
    *(OperandPolicy(fmt, source=source) for fmt in KERNEL_FORMATS for source in ("as_is", "requantize_forward")),
}
OF_ROWS, OF_TOKENS = ("fprop_x", "dgrad_dy"), ("wgrad_x", "wgrad_dy")
# Every operand policy that its kernels serve, of rows and of tokens.
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
# The transform reads bfloat16, to which a kernel rounds the forward operand's numbers; without it they are float32.
KERNEL_POLICIES["wgrad_x"] |= {
    dataclasses.replace(p, source="requantize_forward") for p in KERNEL_POLICIES["wgrad_x"] if p.hadamard
}
for _role, _policy in (("fprop_x", QUARTET), ("dgrad_dy", EDEN), ("wgrad_dy", EDEN), ("wgrad_x", EDEN_REQUANTIZED)):
    KERNEL_POLICIES[_role].add(_policy)


def rule_of(policy: OperandPolicy) -> formats.TwoLevelScale:
    """The scale rule of a format that is served."""
    assert isinstance(policy.format.scale, formats.TwoLevelScale)
    return policy.format.scale


class KernelScaling(TypedDict):
    """What a policy says to a kernel about scales and rounding."""

    rule: formats.TwoLevelScale
    rounding: str


def kernel_scaling(policy: OperandPolicy) -> KernelScaling:
    return {"rule": rule_of(policy), "rounding": policy.rounding}


def uses_hadamard128(policy: OperandPolicy) -> bool:
    """Whether an operand is transformed in runs of 128: a pass of its own."""
    return policy.hadamard and policy.hadamard_size == ms_eden.POINTS


def separate_pass_reason(recipes: Sequence[Recipe]) -> str | None:
    """Why operands of these recipes are not made beside others, or None."""
    runs = any(uses_hadamard128(policy) for recipe in recipes for policy in recipe.operands().values())
    return f"transforms of {ms_eden.POINTS} points are passes of their own" if runs else None


def nvfp4_format_mismatch(recipe: Recipe) -> str | None:
    """Needs x and dy in NVFP4, the Hadamard transform for wgrad only; or Quartet II's operands."""
    for again, forward in FORWARD_ROLE_OF.items():
        policy, source = getattr(recipe, again), getattr(recipe, forward)
        if (
            policy.source == "requantize_forward"
            and policy.format.scale.uses_effective_step != source.format.scale.uses_effective_step
        ):
            return f"{again} is {policy}, and its kernels do not make that of {source}"
    of_quartet = [getattr(recipe, role) in (QUARTET, EDEN, EDEN_REQUANTIZED) for role in KERNEL_POLICIES]
    if any(of_quartet) and not all(of_quartet):
        return "its kernels make Quartet II's operands of x and of dy, or of neither"
    for role, served in KERNEL_POLICIES.items():
        policy = getattr(recipe, role)
        if policy not in served:
            return (
                f"{role} is {policy}; its kernels make NVFP4 blocks of 16, plain or by four over six, with the "
                "Hadamard transform for wgrad only, and of a forward operand with it; or Quartet II's operands"
            )
    return None
