"""Block formats as values: an element, the block size, and the rule that computes the block scale.

A new format is one more value here; no code compares a format's name. `hardware_unit` names the tensor-core format
(`halfbyte.devices`) that multiplies such operands natively; a format without one is emulated on every device.

The formats after `FORMATS` are those of recipes that followed NVFP4: each changes only the scale rule (equations and
sources: docs/league.md). They have a `hardware_unit` if NVFP4 tensor cores multiply them natively: E2M1 under E4M3
scales of 16 and one per-tensor scale.
"""

import dataclasses

import jax
import numpy as np

from halfbyte.devices import TENSOR_CORE_FORMATS
from halfbyte.formats.block_view import BlockView, block_view
from halfbyte.formats.division_scale_rules import FourOverSixScale, MsEdenScale, QuartetScale, TetraJetScale
from halfbyte.formats.elements import E2M1, E4M3, E5M2, UE5M3, Element
from halfbyte.formats.exact_float32 import MAX_SHORT_SIGNIFICAND_BITS
from halfbyte.formats.scale_rules import (
    POWER_FLOOR,
    POWER_UP,
    TENSOR_ONLY,
    TWO_LEVEL,
    ScaleRule,
    TensorScales,
    TwoLevelScale,
)
from halfbyte.renamed import renamed_members

SIX_FOUR = (6.0, 4.0)
SCALE_HEADROOM = 17 / 16  # E4M3 rounds down by 1/17 at most, so no element clips


@renamed_members(unit="hardware_unit")
@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """A format in which `block` elements along the contraction axis share a scale.

    `block` None is one scale per tensor; `element` None is no quantization (bf16).
    """

    name: str
    element: Element | None
    block: int | None
    scale: ScaleRule
    hardware_unit: str | None = None

    def __post_init__(self) -> None:
        if self.hardware_unit is not None and self.hardware_unit not in TENSOR_CORE_FORMATS:
            raise ValueError(
                f"format {self.name}: unknown unit {self.hardware_unit!r}; known: {', '.join(TENSOR_CORE_FORMATS)}, "
                "or None to emulate it"
            )
        if (self.block is None) != (self.scale.dtype is None):
            raise ValueError(f"format {self.name}: block={self.block} does not fit the scale rule {self.scale}")
        if self.element is not None:
            bits = self.element.mantissa_bits + 1 + self.scale.significant_bits
            if bits > MAX_SHORT_SIGNIFICAND_BITS:
                raise ValueError(
                    f"format {self.name}: element x block scale has {bits} significant bits, and products are exact "
                    f"to {MAX_SHORT_SIGNIFICAND_BITS}; take an element or a scale with fewer mantissa bits"
                )
            try:
                self.scale.check(self.element)
            except ValueError as error:
                raise ValueError(f"format {self.name}: {error}") from None

    @property
    def quantized(self) -> bool:
        return self.element is not None

    @property
    def tensor_scale(self) -> bool:
        """True if the format has a float32 outer scale."""
        return self.element is not None and self.scale.tensor_amax_target(self.element) is not None

    @property
    def scale_dtype(self) -> np.dtype | None:
        return self.scale.dtype

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element, with its share of the block scale: 4.5 for NVFP4."""
        if self.element is None:
            return 16.0
        return self.element.stored_bits + (8 / self.block if self.block else 0.0)

    def tensor_scales(self, amax: jax.Array) -> TensorScales:
        """Returns S and 1/S for an amax."""
        assert self.element is not None
        return self.scale.tensor_scales(amax, self.element)

    def view(self, shape: tuple[int, ...], *, block: str, axis: int = -1) -> BlockView:
        """Returns the blocks of a tensor of `shape`."""
        return block_view(shape, self.block, block=block, axis=axis, name=self.name)

    def __repr__(self) -> str:
        return self.name


def floor_scales(fmt: BlockFormat) -> BlockFormat:
    """Returns the MX format under the OCP rule: scales are rounded down, and a block's largest element may saturate."""
    if fmt.scale != POWER_UP:
        raise ValueError(
            f"only an MX format has a power-of-two block scale to round down, got {fmt.name}; use MXFP4 or MXFP8"
        )
    return dataclasses.replace(fmt, name=f"{fmt.name}_floor", scale=POWER_FLOOR)


NVFP4 = BlockFormat("nvfp4", E2M1, 16, TWO_LEVEL, hardware_unit="nvfp4")
MXFP4 = BlockFormat("mxfp4", E2M1, 32, POWER_UP, hardware_unit="mxfp4")
MXFP8 = BlockFormat("mxfp8", E4M3, 32, POWER_UP, hardware_unit="mxfp8")
MXFP8_E5M2 = BlockFormat("mxfp8_e5m2", E5M2, 32, POWER_UP, hardware_unit="mxfp8")
MXFP4_FLOOR, MXFP8_FLOOR = floor_scales(MXFP4), floor_scales(MXFP8)
FP8 = BlockFormat("fp8", E4M3, None, TENSOR_ONLY, hardware_unit="fp8")
FP8_E5M2 = BlockFormat("fp8_e5m2", E5M2, None, TENSOR_ONLY, hardware_unit="fp8")
BF16 = BlockFormat("bf16", None, None, TENSOR_ONLY, hardware_unit="bf16")

FORMATS = {
    f.name: f for f in (NVFP4, MXFP4, MXFP8, MXFP8_E5M2, MXFP4_FLOOR, MXFP8_FLOOR, FP8, FP8_E5M2, BF16)
}  # fmt: skip


def _nvfp4(name: str, rule: ScaleRule, *, unit: str | None = NVFP4.hardware_unit) -> BlockFormat:
    return dataclasses.replace(NVFP4, name=f"nvfp4_{name}", scale=rule, hardware_unit=unit)


NVFP4_46_MSE = _nvfp4("46_mse", FourOverSixScale(scale_top=256.0, candidate_targets=SIX_FOUR))
NVFP4_46_MAE = _nvfp4("46_mae", FourOverSixScale(scale_top=256.0, candidate_targets=SIX_FOUR, error_metric="absolute"))
NVFP4_46_SR = _nvfp4(
    "46_sr",
    TwoLevelScale(scale_top=256.0, candidate_targets=SIX_FOUR, error_metric="expected", headroom=SCALE_HEADROOM),
)
NVFP4_1716 = _nvfp4("1716", TwoLevelScale(headroom=SCALE_HEADROOM))
NVFP4_ROW = _nvfp4("row", TwoLevelScale(outer_granularity="row"), unit=None)
NVFP4_UE5M3 = _nvfp4("ue5m3", TwoLevelScale(scale=UE5M3, floor=1.0), unit=None)
NVFP4_QUARTET = _nvfp4("quartet", QuartetScale(scale_top=256.0, candidate_targets=SIX_FOUR, floor=1.0))
NVFP4_EDEN = _nvfp4("eden", MsEdenScale(scale_top=255.99, headroom=SCALE_HEADROOM * 0.93, floor=1.0))
NVFP4_TETRA = _nvfp4("tetra", TetraJetScale(outer_granularity="128"), unit=None)
NVFP4_TETRA_SR = _nvfp4("tetra_sr", TetraJetScale(outer_granularity="128", floor=2.0**-9), unit=None)
