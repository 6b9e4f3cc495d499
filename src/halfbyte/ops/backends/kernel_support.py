"""What the kernels of `fused` serve: operand policies, and what each says to a kernel.

NVFP4 blocks of 16 under E4M3 scales, plain or by four over six, the Hadamard transform of 16 tokens for wgrad only; or
Quartet II's operands, of which those of the backward pass are transformed in runs of 128.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypedDict

from halfbyte import formats
from halfbyte.kernels import eden
from halfbyte.recipe import AGAIN, OperandPolicy, Recipe

FORMATS = (
    formats.NVFP4,
    formats.NVFP4_1716,
    formats.NVFP4_46_MSE,
    formats.NVFP4_46_MAE,
    formats.NVFP4_46_SR,
)  # E2M1 under E4M3 scales of 16, one S a tensor
WEIGHT = OperandPolicy(formats.NVFP4, block="2d")  # of a tile, one carrier or packed codes for both GEMMs
QUARTET = OperandPolicy(formats.NVFP4_QUARTET, rounding="away")
EDEN = OperandPolicy(formats.NVFP4_EDEN, rounding="away", hadamard=True, hadamard_size=eden.POINTS, signs="fresh")
EDEN_AGAIN = dataclasses.replace(EDEN, source="forward")
WEIGHTS = {  # what its weight kernels make
    WEIGHT,
    QUARTET,
    EDEN_AGAIN,
    *(OperandPolicy(fmt, source=source) for fmt in FORMATS for source in ("as_is", "forward")),
}
OF_ROWS, OF_TOKENS = ("fprop_x", "dgrad_dy"), ("wgrad_x", "wgrad_dy")
# Every operand policy that its kernels serve, of rows and of tokens.
SERVED = {
    role: {
        OperandPolicy(fmt, rounding=rounding, hadamard=hadamard, source=source)
        for fmt in FORMATS
        for rounding in ("rne", "stochastic", "midpoint")
        for hadamard in ((False,) if role in OF_ROWS else (False, True))
        for source in ("as_is", "bfloat16")
    }
    for role in OF_ROWS + OF_TOKENS
}
# The transform reads bfloat16, to which a kernel rounds the forward operand's numbers; without it they are float32.
SERVED["wgrad_x"] |= {dataclasses.replace(p, source="forward") for p in SERVED["wgrad_x"] if p.hadamard}
for _role, _policy in (("fprop_x", QUARTET), ("dgrad_dy", EDEN), ("wgrad_dy", EDEN), ("wgrad_x", EDEN_AGAIN)):
    SERVED[_role].add(_policy)


def rule_of(policy: OperandPolicy) -> formats.TwoLevel:
    """The scale rule of a format that is served."""
    assert isinstance(policy.format.scale, formats.TwoLevel)
    return policy.format.scale


class Scaling(TypedDict):
    """What a policy says to a kernel about scales and rounding."""

    rule: formats.TwoLevel
    rounding: str


def scaling(policy: OperandPolicy) -> Scaling:
    return {"rule": rule_of(policy), "rounding": policy.rounding}


def in_runs(policy: OperandPolicy) -> bool:
    """Whether an operand is transformed in runs of 128: a pass of its own."""
    return policy.hadamard and policy.hadamard_size == eden.POINTS


def apart(recipes: Sequence[Recipe]) -> str | None:
    """Why operands of these recipes are not made beside others, or None."""
    runs = any(in_runs(policy) for recipe in recipes for policy in recipe.operands().values())
    return f"transforms of {eden.POINTS} points are passes of their own" if runs else None


def foreign(recipe: Recipe) -> str | None:
    """Needs x and dy in NVFP4, the Hadamard transform for wgrad only; or Quartet II's operands."""
    for again, forward in AGAIN.items():
        policy, source = getattr(recipe, again), getattr(recipe, forward)
        if policy.source == "forward" and policy.format.scale.by_step != source.format.scale.by_step:
            return f"{again} is {policy}, and its kernels do not make that of {source}"
    of_quartet = [getattr(recipe, role) in (QUARTET, EDEN, EDEN_AGAIN) for role in SERVED]
    if any(of_quartet) and not all(of_quartet):
        return "its kernels make Quartet II's operands of x and of dy, or of neither"
    for role, served in SERVED.items():
        policy = getattr(recipe, role)
        if policy not in served:
            return (
                f"{role} is {policy}; its kernels make NVFP4 blocks of 16, plain or by four over six, with the "
                "Hadamard transform for wgrad only, and of a forward operand with it; or Quartet II's operands"
            )
    return None
