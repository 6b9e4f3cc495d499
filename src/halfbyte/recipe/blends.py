"""A recipe made of two: the forward GEMMs, the backward GEMMs or the weights of one, the rest of another.

`nvfp4+bf16_backward` is nvfp4 with bf16's backward operands: 4 bits forward only.
`bf16+nvfp4_weights` is bf16 with nvfp4's weights: what a server of 4-bit weights computes (W4A16).
"""

import dataclasses

from halfbyte.recipe.operands import AGAIN, WEIGHTS, Recipe

FORWARD = ("fprop_x", "fprop_w")
BACKWARD = ("dgrad_dy", "dgrad_w", "wgrad_x", "wgrad_dy")
PARTS = {"forward": FORWARD, "backward": BACKWARD, "weights": WEIGHTS, "both": FORWARD + BACKWARD}


def blend(base: Recipe, other: Recipe, part: str) -> Recipe:
    """`base` with the operands of one part of training (forward, backward, weights or both) taken from `other`.

    A backward operand made from the forward one takes the tensor itself where that one is not quantized any more.
    """
    if part == "both":
        return other
    if base.history != other.history:
        raise ValueError(
            f"{base.name} with the {part} of {other.name}: a history of maxima (delayed scaling) is that of all three "
            "tensors of a linear; take both parts of one recipe, or fp8"
        )
    taken = base.operands() | {role: getattr(other, role) for role in PARTS[part]}
    for again, forward in AGAIN.items():
        if not taken[forward].format.quantized:
            taken[again] = dataclasses.replace(taken[again], source="as_is")
    remainder = (other if part == "forward" else base).remainder  # it is x's in the forward pass
    return dataclasses.replace(base, name=f"{base.name}+{other.name}_{part}", remainder=remainder, **taken)


def split_blend(name: str) -> tuple[str, str, str] | None:
    """(base, other, part) of a name that `blend` gives; None for any other name."""
    base, plus, rest = name.rpartition("+")
    other, _, part = rest.rpartition("_")
    return (base, other, part) if plus and base and other and part in ("forward", "backward", "weights") else None
