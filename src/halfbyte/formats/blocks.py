"""Block formats as values: an element, how many of them share a scale, and the rule by which that scale is found.

Adding a format is one more value here; nothing anywhere compares a format's name. `unit` names the hardware unit that
multiplies such operands as they are (`halfbyte.devices`); a format without one is emulated on every device.
"""

import dataclasses

import jax
import numpy as np

from halfbyte.devices import UNITS

from .elements import E2M1, E4M3, E5M2, Element
from .exact import SHORT_BITS
from .scales import POWER_FLOOR, POWER_UP, TENSOR_ONLY, TWO_LEVEL, ScaleRule, TensorScales
from .views import BlockView, block_view


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """`block` elements along the contraction axis share a scale; None means the whole tensor.

    `element` None is no quantization at all.
    """

    name: str
    element: Element | None
    block: int | None
    scale: ScaleRule
    unit: str | None = None

    def __post_init__(self) -> None:
        if self.unit is not None and self.unit not in UNITS:
            raise ValueError(
                f"format {self.name}: unknown unit {self.unit!r}; known: {', '.join(UNITS)}, or None to emulate it"
            )
        if (self.block is None) != (self.scale.dtype is None):
            raise ValueError(f"format {self.name}: block={self.block} does not fit the scale rule {self.scale}")
        if self.element is not None:
            bits = self.element.mantissa_bits + 1 + self.scale.significant_bits
            if bits > SHORT_BITS:
                raise ValueError(
                    f"format {self.name}: element x block scale has {bits} significant bits, and products are exact "
                    f"to {SHORT_BITS}; take an element or a scale with fewer mantissa bits"
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
        """Whether a float32 scale of the whole tensor takes part."""
        return self.element is not None and self.scale.top(self.element) is not None

    @property
    def scale_dtype(self) -> np.dtype | None:
        return self.scale.dtype

    @property
    def bits_per_element(self) -> float:
        """Storage with its share of the block scale: 4.5 for NVFP4."""
        if self.element is None:
            return 16.0
        return self.element.stored_bits + (8 / self.block if self.block else 0.0)

    def tensor_scales(self, amax: jax.Array) -> TensorScales:
        """S and 1/S of a tensor with this amax."""
        assert self.element is not None
        return self.scale.tensor_scales(amax, self.element)

    def view(self, shape: tuple[int, ...], *, block: str, axis: int = -1) -> BlockView:
        """How a tensor of `shape` falls into blocks."""
        return block_view(shape, self.block, block=block, axis=axis, name=self.name)

    def __repr__(self) -> str:
        return self.name


def floor_scales(fmt: BlockFormat) -> BlockFormat:
    """The same MX format under the rule of the OCP text: scales rounded down, and a block's largest may saturate."""
    if fmt.scale != POWER_UP:
        raise ValueError(
            f"only an MX format has a power-of-two block scale to round down, got {fmt.name}; use MXFP4 or MXFP8"
        )
    return dataclasses.replace(fmt, name=f"{fmt.name}_floor", scale=POWER_FLOOR)


NVFP4 = BlockFormat("nvfp4", E2M1, 16, TWO_LEVEL, unit="nvfp4")
MXFP4 = BlockFormat("mxfp4", E2M1, 32, POWER_UP, unit="mxfp4")
MXFP8 = BlockFormat("mxfp8", E4M3, 32, POWER_UP, unit="mxfp8")
MXFP8_E5M2 = BlockFormat("mxfp8_e5m2", E5M2, 32, POWER_UP, unit="mxfp8")
MXFP4_FLOOR, MXFP8_FLOOR = floor_scales(MXFP4), floor_scales(MXFP8)
FP8 = BlockFormat("fp8", E4M3, None, TENSOR_ONLY, unit="fp8")
FP8_E5M2 = BlockFormat("fp8_e5m2", E5M2, None, TENSOR_ONLY, unit="fp8")
BF16 = BlockFormat("bf16", None, None, TENSOR_ONLY, unit="bf16")

FORMATS = {
    f.name: f for f in (NVFP4, MXFP4, MXFP8, MXFP8_E5M2, MXFP4_FLOOR, MXFP8_FLOOR, FP8, FP8_E5M2, BF16)
}  # fmt: skip
