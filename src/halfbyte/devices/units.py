"""The units that tensor cores multiply with, and the compute capabilities that have them.

A unit is what an instruction takes: bfloat16, 8-bit floats with one scale a tensor, or block-scaled operands. A format
names the unit that multiplies it; nothing here knows a format.

Training on a block-scaled unit needs more than its multiplier: the gradients of a 4-bit recipe are rounded
stochastically. The convert instruction that does so exists on SM 10.0 and 10.3 alone; our kernels round with integers
and need none, so SM 12.0 and 12.1 (RTX 50, RTX PRO Blackwell, DGX Spark) train too. Nobody has seen our program run
there: `auto` takes their units after the card itself has agreed (`capability.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Unit:
    """`first` is the least compute capability that has it; None: every device does.

    `training` are the capabilities on which all three GEMMs of a step run on it; None: all that have it.
    """

    name: str
    first: tuple[int, int] | None = None
    training: tuple[tuple[int, int], ...] | None = None


_BLACKWELL = (10, 0)
ASKED = ((12, 0), (12, 1))
"""Capabilities whose cards are asked first."""
_TRAINING = ((10, 0), (10, 3), *ASKED)

# bf16 counts as native everywhere: nothing is emulated.
_TABLE = (
    Unit("bf16"),
    Unit("fp8", first=(8, 9)),
    Unit("mxfp8", first=_BLACKWELL, training=_TRAINING),
    Unit("mxfp4", first=_BLACKWELL, training=_TRAINING),
    Unit("nvfp4", first=_BLACKWELL, training=_TRAINING),
)

UNITS: Mapping[str, Unit] = MappingProxyType({entry.name: entry for entry in _TABLE})


def unit(name: str) -> Unit:
    """The unit called `name`."""
    if name not in UNITS:
        raise ValueError(f"unknown unit {name!r}; known: {', '.join(UNITS)}")
    return UNITS[name]
