"""Bounds of numbers that people give: a value that no program could use is refused where it is written down."""

import math
from typing import Any

WIDEST = 2**31 - 1
"""The largest size or count: what does not fit into 32 bits is a slip of the keyboard."""


def check_whole(field: str, value: Any, *, least: int = 0, most: int = WIDEST, zero: str = "") -> None:
    """ValueError unless `value` is an int between `least` and `most`. `zero` says what 0 means."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field} must be a whole number, got {value!r}")
    if value > most:
        raise ValueError(f"{field} must be at most {most:,}, got {_shown(value)}")
    if value < least:
        raise ValueError(f"{field} must be {least}{f' ({zero})' if zero else ''} or more, got {_shown(value)}")


def check_real(field: str, value: Any, *, holds: bool, wanted: str) -> None:
    """ValueError unless `value` is a finite number for which `holds`, said as `wanted`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not holds:
        raise ValueError(f"{field} must be {wanted}, got {_shown(value)}")


def _shown(value: Any) -> str:
    """A number as it was written; one of a thousand digits by its length."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"a number of {int(math.log10(abs(value))) + 1} digits"
    return repr(value)
