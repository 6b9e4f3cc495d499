"""Bounds of numbers that people give: a value that no program could use is refused where it is written down."""

import math
import re
from typing import Any

WIDEST = 2**31 - 1
"""The largest size or count: what does not fit into 32 bits is a slip of the keyboard."""
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


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


def seconds_of(text: str, field: str) -> float:
    """Returns the seconds in `30m`, `2h` or `90s`."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([smhd])\s*", text)
    seconds = float(match[1]) * SECONDS[match[2]] if match else 0.0
    if not 0 < seconds < 1e9:
        raise ValueError(f"{field} must be a time such as 30m or 2h, got {text!r}")
    return seconds


def _shown(value: Any) -> str:
    """A number as it was written; one of a thousand digits by its length."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"a number of {int(math.log10(abs(value))) + 1} digits"
    return repr(value)
