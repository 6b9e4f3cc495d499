"""Block formats as values: an element type, how many elements share a scale, and the types of the scales.

Adding a format is one more value here; nothing anywhere compares a format's name.
"""

import dataclasses
import enum

import numpy as np

from .elements import E2M1, E4M3, E5M2, E8M0_DTYPE, Element


class ScaleRule(enum.Enum):
    """How a block's scale is found from its largest magnitude."""

    NONE = "none"  # no block scale: the whole tensor shares one
    TWO_LEVEL = "two-level"  # E4M3 under a float32 tensor scale (NVFP4)
    POWER_FLOOR = "power-floor"  # E8M0, floor(log2 amax) - emax: the OCP MX rule; the largest element may saturate
    POWER_UP = "power-up"  # E8M0, rounded up so that nothing saturates


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """`block` elements along the contraction axis share a scale; None means the whole tensor.

    `element` None is no quantization at all.
    """

    name: str
    element: Element | None
    block: int | None
    scale: ScaleRule

    @property
    def quantized(self) -> bool:
        return self.element is not None

    @property
    def tensor_scale(self) -> bool:
        """Whether a float32 scale of the whole tensor takes part."""
        return self.quantized and self.scale in (ScaleRule.NONE, ScaleRule.TWO_LEVEL)

    @property
    def scale_dtype(self) -> np.dtype | None:
        return {ScaleRule.NONE: None, ScaleRule.TWO_LEVEL: E4M3.dtype}.get(self.scale, E8M0_DTYPE)

    @property
    def bits_per_element(self) -> float:
        """Storage with its share of the block scale: 4.5 for NVFP4."""
        if self.element is None:
            return 16.0
        return self.element.bits + (8 / self.block if self.block else 0.0)

    def __repr__(self) -> str:
        return self.name


NVFP4 = BlockFormat("nvfp4", E2M1, 16, ScaleRule.TWO_LEVEL)
MXFP4 = BlockFormat("mxfp4", E2M1, 32, ScaleRule.POWER_FLOOR)
MXFP8 = BlockFormat("mxfp8", E4M3, 32, ScaleRule.POWER_FLOOR)
MXFP8_E5M2 = BlockFormat("mxfp8_e5m2", E5M2, 32, ScaleRule.POWER_FLOOR)
FP8 = BlockFormat("fp8", E4M3, None, ScaleRule.NONE)
FP8_E5M2 = BlockFormat("fp8_e5m2", E5M2, None, ScaleRule.NONE)
BF16 = BlockFormat("bf16", None, None, ScaleRule.NONE)

FORMATS = {f.name: f for f in (NVFP4, MXFP4, MXFP8, MXFP8_E5M2, FP8, FP8_E5M2, BF16)}


def round_up_scales(fmt: BlockFormat) -> BlockFormat:
    """The same MX format with scales rounded up, so that no element saturates."""
    if fmt.scale is not ScaleRule.POWER_FLOOR:
        raise ValueError(
            f"only an MX format has a power-of-two block scale to round up, got {fmt.name}; use MXFP4 or MXFP8"
        )
    return dataclasses.replace(fmt, name=f"{fmt.name}_up", scale=ScaleRule.POWER_UP)
