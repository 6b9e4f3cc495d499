"""A recipe is six operand policies: two operands for each of the three GEMMs of a linear y = x W.

| GEMM  | equation      | left operand | right operand | contracted over |
|-------|---------------|--------------|---------------|-----------------|
| fprop | y  = x W      | fprop_x      | fprop_w       | inputs          |
| dgrad | dx = dy W^T   | dgrad_dy     | dgrad_w       | outputs         |
| wgrad | dw = x^T dy   | wgrad_x      | wgrad_dy      | tokens          |

An operand policy says how that operand becomes codes: format, block shape, rounding, and whether the 16-point
Hadamard transform is applied along the contraction first. A Hadamard transform cancels only if both operands of a
GEMM take it: (a H)(H^T b) = a b. A recipe that breaks that, or that asks for something no quantizer can do, is
refused here, at construction.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from halfbyte.formats import BF16, E2M1, NVFP4, BlockFormat

ROLES = ("fprop_x", "fprop_w", "dgrad_dy", "dgrad_w", "wgrad_x", "wgrad_dy")
GEMMS = {"fprop": ("fprop_x", "fprop_w"), "dgrad": ("dgrad_dy", "dgrad_w"), "wgrad": ("wgrad_x", "wgrad_dy")}
WEIGHTS = ("fprop_w", "dgrad_w")
GRADIENTS = ("dgrad_dy", "wgrad_dy")
HADAMARD_SIZE = 16
BLOCKS = ("1d", "2d")
ROUNDINGS = ("rne", "stochastic")
SOURCES = ("as_is", "bfloat16")


def _one_of(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"OperandPolicy.{field} must be one of {', '.join(choices)}, got {value!r}")


def _is_e2m1(format: BlockFormat) -> bool:
    return format.element == E2M1


def _has_tiles(format: BlockFormat) -> bool:
    return format.block == NVFP4.block


@dataclass(frozen=True)
class OperandPolicy:
    """How one operand of one GEMM is quantized. The default is bfloat16, untouched."""

    format: BlockFormat = BF16
    block: str = "1d"
    rounding: str = "rne"
    hadamard: bool = False
    source: str = "as_is"
    """`bfloat16`: what is quantized is rounded to bfloat16 first, as Transformer Engine does with master weights."""

    def __post_init__(self) -> None:
        if not isinstance(self.format, BlockFormat):
            raise TypeError(
                f"OperandPolicy.format must be a BlockFormat, got {self.format!r}; take one from halfbyte.formats"
            )
        _one_of("block", self.block, BLOCKS)
        _one_of("rounding", self.rounding, ROUNDINGS)
        _one_of("source", self.source, SOURCES)
        if self.rounding == "stochastic" and not _is_e2m1(self.format):
            raise ValueError(
                f"OperandPolicy.rounding='stochastic' exists for E2M1 elements only, got format {self.format.name}; "
                "use rounding='rne', or a 4-bit format (NVFP4, MXFP4)"
            )
        if self.block == "2d" and not _has_tiles(self.format):
            raise ValueError(
                f"OperandPolicy.block='2d' exists for blocks of 16 (NVFP4) only, got format {self.format.name}; "
                "use block='1d'"
            )

    @property
    def run(self) -> int:
        """How many neighbours along the contraction are quantized together: whole blocks, whole transforms."""
        return max(HADAMARD_SIZE if self.hadamard else 1, self.format.block or 1)

    @property
    def stochastic(self) -> bool:
        """True if this operand needs a random key."""
        return self.rounding == "stochastic"

    def __str__(self) -> str:
        words = [self.format.name]
        if self.format.quantized:
            words += [self.block, self.rounding]
        return " ".join(words + ["hadamard"] * self.hadamard + ["of bfloat16"] * (self.source == "bfloat16"))


@dataclass(frozen=True)
class Recipe:
    """Six operand policies and a name. Two recipes of equal policies compute the same numbers.

    `shared_scales`: the weights of q, k and v share one tensor scale, and those of gate and up another, as engines that
    fuse them when they serve expect it.
    """

    name: str
    fprop_x: OperandPolicy = OperandPolicy()
    fprop_w: OperandPolicy = OperandPolicy()
    dgrad_dy: OperandPolicy = OperandPolicy()
    dgrad_w: OperandPolicy = OperandPolicy()
    wgrad_x: OperandPolicy = OperandPolicy()
    wgrad_dy: OperandPolicy = OperandPolicy()
    description: str = ""
    shared_scales: bool = False

    def __post_init__(self) -> None:
        if self.shared_scales and any(getattr(self, r).hadamard or getattr(self, r).stochastic for r in WEIGHTS):
            raise ValueError(
                f"recipe {self.name!r}: shared_scales are those of weights as they are; it goes with neither hadamard "
                f"nor stochastic rounding of {' or '.join(WEIGHTS)}"
            )
        for role, operand in self.operands().items():
            if not isinstance(operand, OperandPolicy):
                raise TypeError(f"recipe {self.name!r}: {role} must be an OperandPolicy, got {operand!r}")
            if operand.block == "2d" and role not in WEIGHTS:
                raise ValueError(
                    f"recipe {self.name!r}: {role}.block='2d', but 2D blocks are for weights "
                    f"({', '.join(WEIGHTS)}), which are "
                    "read along both axes; use block='1d'"
                )
        for gemm, (left, right) in GEMMS.items():
            self._check_hadamard(gemm, left, right)

    def _check_hadamard(self, gemm: str, left: str, right: str) -> None:
        on = {role: getattr(self, role).hadamard for role in (left, right)}
        if on[left] != on[right]:
            raise ValueError(
                f"recipe {self.name!r}: the Hadamard transform of {gemm} cancels only if both operands take it, got "
                f"{left}.hadamard={on[left]} and {right}.hadamard={on[right]}; set both or neither"
            )

    def operands(self) -> dict[str, OperandPolicy]:
        """The six policies by role, in the order of ROLES."""
        return {role: getattr(self, role) for role in ROLES}

    @property
    def quantized(self) -> bool:
        """True if any operand leaves bfloat16."""
        return any(operand.format.quantized for operand in self.operands().values())

    @property
    def stochastic(self) -> bool:
        """True if any operand is rounded stochastically, so that a key is needed."""
        return any(operand.stochastic for operand in self.operands().values())

    def with_operands(self, roles: tuple[str, ...] = ROLES, **fields: object) -> dict[str, OperandPolicy]:
        """The policies of `roles` with some fields changed, ready for `dataclasses.replace(recipe, ...)`."""
        return {role: dataclasses.replace(getattr(self, role), **fields) for role in roles}

    def __str__(self) -> str:
        return self.name


def difference(a: Recipe, b: Recipe) -> list[tuple[str, str, object, object]]:
    """(operand, field, value in a, value in b) for every field of every operand in which two recipes differ, and for
    what a recipe says of the weights together: two without a difference compute the same numbers.
    """
    operands = [
        (role, field.name, getattr(left, field.name), getattr(right, field.name))
        for role, left, right in zip(ROLES, a.operands().values(), b.operands().values(), strict=True)
        for field in dataclasses.fields(OperandPolicy)
        if getattr(left, field.name) != getattr(right, field.name)
    ]
    shared = a.shared_scales, b.shared_scales
    return operands + ([("weights", "shared_scales", *shared)] if shared[0] != shared[1] else [])
