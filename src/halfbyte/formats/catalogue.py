"""Formats of recipes that followed NVFP4, each a change of its scale rule. Equations and sources: docs/league.md.

`unit` stays where the hardware's own multiplication serves: E2M1 under E4M3 scales of 16, and one scale of the tensor.
"""

import dataclasses

from .blocks import NVFP4, BlockFormat
from .divided import ByDivision, DividedFirst, Eden, OuterFirst
from .elements import UE5M3
from .scales import ScaleRule, TwoLevel

SIX_FOUR = (6.0, 4.0)
HEADROOM = 17 / 16  # E4M3 rounds down by 1/17 at most: nothing is left to clip


def _nvfp4(name: str, rule: ScaleRule, *, unit: str | None = NVFP4.unit) -> BlockFormat:
    return dataclasses.replace(NVFP4, name=f"nvfp4_{name}", scale=rule, unit=unit)


NVFP4_46_MSE = _nvfp4("46_mse", DividedFirst(scale_top=256.0, among=SIX_FOUR))
NVFP4_46_MAE = _nvfp4("46_mae", DividedFirst(scale_top=256.0, among=SIX_FOUR, measure="absolute"))
NVFP4_46_SR = _nvfp4("46_sr", TwoLevel(scale_top=256.0, among=SIX_FOUR, measure="expected", headroom=HEADROOM))
NVFP4_1716 = _nvfp4("1716", TwoLevel(headroom=HEADROOM))
NVFP4_ROW = _nvfp4("row", TwoLevel(outer="row"), unit=None)
NVFP4_UE5M3 = _nvfp4("ue5m3", TwoLevel(scale=UE5M3, floor=1.0), unit=None)
NVFP4_QUARTET = _nvfp4("quartet", ByDivision(scale_top=256.0, among=SIX_FOUR, floor=1.0))
NVFP4_EDEN = _nvfp4("eden", Eden(scale_top=255.99, headroom=HEADROOM * 0.93, floor=1.0))
NVFP4_TETRA = _nvfp4("tetra", OuterFirst(outer="128"), unit=None)
NVFP4_TETRA_SR = _nvfp4("tetra_sr", OuterFirst(outer="128", floor=2.0**-9), unit=None)
