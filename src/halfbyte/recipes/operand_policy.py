"""A recipe is six operand policies: two operands for each of the three GEMMs of a linear y = x W.

| GEMM  | equation      | left operand | right operand | contracted over |
|-------|---------------|--------------|---------------|-----------------|
| fprop | y  = x W      | fprop_x      | fprop_w       | inputs          |
| dgrad | dx = dy W^T   | dgrad_dy     | dgrad_w       | outputs         |
| wgrad | dw = x^T dy   | wgrad_x      | wgrad_dy      | tokens          |

An operand policy defines how an operand is quantized: format, block shape, rounding, and whether a Hadamard transform
is applied along the contracting axis first. A Hadamard transform cancels only if both operands of a GEMM have it, with
the same size and the same signs: (a H)(H^T b) = a b. A recipe that violates this, or that no quantizer supports, is
refused at construction.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from halfbyte.formats import BF16, NVFP4, ROUNDINGS, STOCHASTIC_ROUNDINGS, BlockFormat, unsupported_rounding
from halfbyte.formats.hadamard import SIZES
from halfbyte.renamed import renamed_members, renamed_value

ROLES = ("fprop_x", "fprop_w", "dgrad_dy", "dgrad_w", "wgrad_x", "wgrad_dy")
GEMM_ROLES = {"fprop": ("fprop_x", "fprop_w"), "dgrad": ("dgrad_dy", "dgrad_w"), "wgrad": ("wgrad_x", "wgrad_dy")}
WEIGHT_ROLES = ("fprop_w", "dgrad_w")
GRADIENT_ROLES = ("dgrad_dy", "wgrad_dy")
# Backward operand -> forward operand of the same tensor.
FORWARD_ROLE_OF = {
    "dgrad_w": "fprop_w",
    "wgrad_x": "fprop_x",
}
ROLES_OF_SAME_TENSOR = (("fprop_x", "wgrad_x"), ("fprop_w", "dgrad_w"), ("dgrad_dy", "wgrad_dy"))
BLOCK_SHAPES = ("1d", "2d")
SIGN_CHOICES = ("fixed", "fresh")
SOURCES = ("as_is", "bfloat16", "requantize_forward")


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"OperandPolicy.{field} must be one of {', '.join(choices)}, got {value!r}")


@renamed_members(run="quantization_group_size", draws_bytes="uses_random_bits", draws_signs="uses_random_signs")
@dataclass(frozen=True)
class OperandPolicy:
    """How one operand of one GEMM is quantized. The default is bfloat16, untouched."""

    format: BlockFormat = BF16
    block: str = "1d"
    rounding: str = "rne"
    hadamard: bool = False
    source: str = "as_is"
    """`bfloat16`: round to bfloat16 before quantizing, as Transformer Engine does with master weights.
    `requantize_forward`: quantize the dequantized forward operand of the same tensor."""
    hadamard_size: int = 16
    signs: str = "fixed"
    """Signs of the Hadamard transform; "fresh" signs are drawn in every step, per GEMM and linear."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", renamed_value("source", self.source))
        if not isinstance(self.format, BlockFormat):
            raise TypeError(
                f"OperandPolicy.format must be a BlockFormat, got {self.format!r}; take one from halfbyte.formats"
            )
        _check_choice("block", self.block, BLOCK_SHAPES)
        _check_choice("rounding", self.rounding, ROUNDINGS)
        _check_choice("source", self.source, SOURCES)
        _check_choice("signs", self.signs, SIGN_CHOICES)
        if self.hadamard_size not in SIZES:
            raise ValueError(
                f"OperandPolicy.hadamard_size must be one of {', '.join(map(str, SIZES))}, got {self.hadamard_size!r}"
            )
        if reason := unsupported_rounding(self.format, self.rounding):
            raise ValueError(
                f"OperandPolicy.rounding={self.rounding!r} exists for {reason}; use rounding='rne', or a 4-bit format "
                "(NVFP4, MXFP4)"
            )
        if self.block == "2d" and self.format.block != NVFP4.block:
            raise ValueError(
                f"OperandPolicy.block='2d' exists for blocks of 16 (NVFP4) only, got format {self.format.name}; "
                "use block='1d'"
            )
        if self.block == "2d" and (
            self.format.scale.outer_granularity != "tensor" or self.format.scale.scale_group_size > 1
        ):
            raise ValueError(
                f"OperandPolicy.block='2d' with format {self.format.name}, whose outer scale is one of a "
                f"{self.format.scale.outer_granularity}: of the two GEMMs that read a tile one sums across "
                "its rows, and cannot apply a scale of theirs to its sums; use block='1d'"
            )

    @property
    def quantization_group_size(self) -> int:
        """Returns the number of neighbours along the contracting axis that are quantized together: whole blocks and
        whole transforms."""
        return max(
            self.hadamard_size if self.hadamard else 1, self.format.block or 1, self.format.scale.scale_group_size
        )

    @property
    def uses_random_signs(self) -> bool:
        """Returns True if its Hadamard transform has fresh signs."""
        return self.hadamard and self.signs == "fresh"

    @property
    def stochastic(self) -> bool:
        """Returns True if this operand needs a random key."""
        return self.uses_random_bits or self.uses_random_signs

    @property
    def uses_random_bits(self) -> bool:
        """Returns True if elements or block scales are rounded stochastically."""
        return self.rounding in STOCHASTIC_ROUNDINGS or self.format.scale.stochastic

    def __str__(self) -> str:
        words = [self.format.name]
        if self.format.quantized:
            words += [self.block, self.rounding]
        if self.hadamard:
            words += ["hadamard"] + [str(self.hadamard_size)] * (self.hadamard_size != SIZES[0])
            words += ["fresh"] * self.uses_random_signs
        of_source = {
            "as_is": [],
            "bfloat16": ["of", "bfloat16"],
            "requantize_forward": ["of", "the", "forward", "operand"],
        }
        return " ".join(words + of_source[self.source])


def _needs_more_than_weight(policy: OperandPolicy) -> bool:
    """Returns True if the codes of a weight depend on more than the weight and its amax."""
    return (
        policy.hadamard
        or policy.stochastic
        or policy.source == "requantize_forward"
        or policy.format.scale.outer_granularity != "tensor"
    )


@renamed_members(history="amax_history_len", refuse_foreign="check_supported_outside_trainer")
@dataclass(frozen=True)
class Recipe:
    """Six operand policies and a name. Two recipes with equal fields compute the same numbers.

    `shared_scales`: the weights of q, k and v share a per-tensor scale, and those of gate and up another one, as
    serving engines that fuse them expect.
    `remainder`: x is a two-term operand of fprop, in one format: y = Q(x) Q(W) + Q(r) Q(W) with r = x - Q(x), summed in
    float32.
    `amax_history_len`: x, W and dy are scaled by the maximum of their amaxes in so many earlier steps (delayed
    scaling), which the trainer stores. With 0, and without a trainer, they are scaled by the current amax.
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
    remainder: bool = False
    amax_history_len: int = 0

    def __post_init__(self) -> None:
        x = self.fprop_x
        if self.remainder and (not x.format.quantized or x.hadamard or x.stochastic):
            raise ValueError(
                f"recipe {self.name!r}: remainder=True multiplies what the rounding of x has left over, but fprop_x is "
                f"{x}; give fprop_x a format that rounds, to nearest and without a Hadamard transform"
            )
        if self.shared_scales and any(_needs_more_than_weight(getattr(self, r)) for r in WEIGHT_ROLES):
            raise ValueError(
                f"recipe {self.name!r}: shared_scales are those of weights as they are; it goes with neither hadamard "
                f"nor stochastic rounding of {' or '.join(WEIGHT_ROLES)}, nor with scales of rows or a forward source"
            )
        for role, operand in self.operands().items():
            if not isinstance(operand, OperandPolicy):
                raise TypeError(f"recipe {self.name!r}: {role} must be an OperandPolicy, got {operand!r}")
            if operand.block == "2d" and role not in WEIGHT_ROLES:
                raise ValueError(
                    f"recipe {self.name!r}: {role}.block='2d', but 2D blocks are for weights "
                    f"({', '.join(WEIGHT_ROLES)}), which are read along both axes; use block='1d'"
                )
            self._check_source(role, operand)
        for gemm, (lhs, rhs) in GEMM_ROLES.items():
            self._check_hadamard(gemm, lhs, rhs)
        self._check_history()

    def _check_history(self) -> None:
        if type(self.amax_history_len) is not int or self.amax_history_len < 0:
            raise ValueError(
                f"recipe {self.name!r}: history is a number of steps, got {self.amax_history_len!r}; "
                "0 scales by the present one"
            )
        if not self.amax_history_len:
            return
        pairs = [(getattr(self, first), getattr(self, second)) for first, second in ROLES_OF_SAME_TENSOR]
        is_plain = all(a == OperandPolicy(a.format, source=a.source) == b for a, b in pairs)
        is_per_tensor = all(a.format.quantized and a.format.block is None for a, _ in pairs)
        if not is_plain or not is_per_tensor or self.remainder or self.shared_scales:
            raise ValueError(
                f"recipe {self.name!r}: history={self.amax_history_len} is of one scale each for x, W and dy, so all "
                "six operands need a format with one scale a tensor (FP8), both of a tensor alike, to nearest, without "
                "hadamard, remainder or shared_scales; use history=0"
            )

    def check_supported_outside_trainer(self, where: str) -> None:
        """Raise ValueError, which starts with `where`, if the recipe needs the trainer for its amax history."""
        if self.amax_history_len:
            raise ValueError(
                f"{where}: recipe {self.name!r} scales by what {self.amax_history_len:,} steps before have seen, which "
                "`halfbyte train` alone keeps; use fp8, which scales by a tensor's own maximum"
            )

    def _check_source(self, role: str, operand: OperandPolicy) -> None:
        if operand.source != "requantize_forward":
            return
        if (
            role not in FORWARD_ROLE_OF
            or not getattr(self, FORWARD_ROLE_OF[role]).format.quantized
            or not operand.format.quantized
        ):
            raise ValueError(
                f"recipe {self.name!r}: {role}.source='requantize_forward' quantizes a forward operand once more; that "
                f"is for {' and '.join(FORWARD_ROLE_OF)}, both of them and "
                f"{' and '.join(FORWARD_ROLE_OF.values())} quantized; use source='as_is'"
            )
        if getattr(self, FORWARD_ROLE_OF[role]).hadamard:
            raise ValueError(
                f"recipe {self.name!r}: {role}.source='requantize_forward', but {FORWARD_ROLE_OF[role]} is "
                "Hadamard-transformed, and the transform of one GEMM means nothing to another; use source='as_is'"
            )

    def _check_hadamard(self, gemm: str, lhs: str, rhs: str) -> None:
        policies = {role: getattr(self, role) for role in (lhs, rhs)}
        if policies[lhs].hadamard != policies[rhs].hadamard:
            raise ValueError(
                f"recipe {self.name!r}: the Hadamard transform of {gemm} cancels only if both operands take it, got "
                f"{lhs}.hadamard={policies[lhs].hadamard} and {rhs}.hadamard={policies[rhs].hadamard}; "
                "set both or neither"
            )
        transforms = {(p.hadamard_size, p.signs) for p in policies.values() if p.hadamard}
        if len(transforms) > 1:
            raise ValueError(
                f"recipe {self.name!r}: the Hadamard transform of {gemm} cancels only if both operands take the same, "
                f"got {lhs} ({policies[lhs]}) and {rhs} ({policies[rhs]}); give both one hadamard_size and signs"
            )

    def operands(self) -> dict[str, OperandPolicy]:
        """Returns the six policies by role, in the order of ROLES."""
        return {role: getattr(self, role) for role in ROLES}

    @property
    def quantized(self) -> bool:
        """Returns True if any operand is not bfloat16."""
        return any(operand.format.quantized for operand in self.operands().values())

    @property
    def stochastic(self) -> bool:
        """Returns True if any operand is stochastic, so that a key is needed."""
        return any(operand.stochastic for operand in self.operands().values())

    def with_operands(self, roles: tuple[str, ...] = ROLES, **fields: object) -> dict[str, OperandPolicy]:
        """Returns the policies of `roles` with changed fields, for `dataclasses.replace(recipe, ...)`."""
        return {role: dataclasses.replace(getattr(self, role), **fields) for role in roles}

    def __str__(self) -> str:
        """Returns the name, the description and a line per operand."""
        lines = [f"recipe {self.name}" + (f": {self.description}" if self.description else "")]
        lines += [f"  {role:<9} {operand}" for role, operand in self.operands().items()]
        lines += ["  one tensor scale for the weights of q, k and v, one for gate and up"] * self.shared_scales
        lines += ["  fprop also multiplies the remainder of x"] * self.remainder
        lines += [f"  scales from the amax of {self.amax_history_len} steps before"] * bool(self.amax_history_len)
        return "\n".join(lines)


def recipe_diff(a: Recipe, b: Recipe) -> list[tuple[str, str, object, object]]:
    """Returns (operand, field, value in a, value in b) for every difference between the operands of two recipes, and
    for the fields that concern several operands. Recipes without a difference compute the same numbers."""
    operands = [
        (role, field.name, getattr(policy_a, field.name), getattr(policy_b, field.name))
        for role, policy_a, policy_b in zip(ROLES, a.operands().values(), b.operands().values(), strict=True)
        for field in dataclasses.fields(OperandPolicy)
        if getattr(policy_a, field.name) != getattr(policy_b, field.name)
    ]
    recipe_fields = ("weights", "shared_scales"), ("fprop_x", "remainder"), ("all", "amax_history_len")
    values = [(operand, field, getattr(a, field), getattr(b, field)) for operand, field in recipe_fields]
    return operands + [change for change in values if change[2] != change[3]]
