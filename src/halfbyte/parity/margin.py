"""The margin: how large a gap may be and still not matter, said before the first step.

`0.5%` is relative to the baseline's loss of the same seed, `0.02nats` is absolute.
"""

import math
import re
from dataclasses import dataclass

FORM = re.compile(r"\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(%|nats?)\s*")


@dataclass(frozen=True)
class Margin:
    """`value` in percent of the baseline's loss (`relative`) or in nats a token."""

    value: float
    relative: bool

    def __post_init__(self) -> None:
        if not math.isfinite(self.value) or self.value <= 0:
            raise ValueError(
                f"margin must be larger than 0, got {self.value:g}: no finite number of runs can show that two recipes "
                "are exactly equal; give the largest gap that would not matter, such as 0.5% or 0.02nats"
            )

    @property
    def unit(self) -> str:
        return "%" if self.relative else "nats"

    def __str__(self) -> str:
        return f"{self.value:g}{'%' if self.relative else 'nats'}"

    def measure(self, candidate: float, baseline: float) -> float:
        """The gap in the margin's unit; NaN of a baseline that is no loss, in percent."""
        apart = candidate - baseline
        if not self.relative:
            return apart
        return 100 * apart / baseline if baseline > 0 else math.nan

    def show(self, value: float, sign: str = "+") -> str:
        """A gap as text."""
        return f"{value:{sign}.3f}%" if self.relative else f"{value:{sign}.4f} nats"


def parse_margin(text: str) -> Margin:
    """`0.5%`, `0.02nats`; a plain number is refused, because it could be either."""
    found = FORM.fullmatch(text)
    if not found:
        raise ValueError(f"margin must be a number with its unit, such as 0.5% or 0.02nats, got {text!r}")
    return Margin(float(found[1]), found[2] == "%")
