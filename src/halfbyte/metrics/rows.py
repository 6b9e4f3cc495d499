"""Files of one JSON object a line, appended to, and read as far as they can be read.

A kill cuts the last line; a bad disk or another program may leave bytes that are no text in the middle. Such lines are
left out and counted; they never stop a run from going on.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from halfbyte.inputs import UnreadableFile, no_follow, regular

MOST_LINE = 1 << 20
"""Bytes of one line; what is longer is no record."""
MOST_FILE, MOST_LINES = 4 << 30, 10_000_000
"""Bytes and lines of one file: seven million steps have as many."""


@dataclass(frozen=True)
class Rows:
    """Whole lines up to a step, the numbers of lines left out because they are damaged, and lines after the step."""

    lines: tuple[bytes, ...]
    damaged: tuple[int, ...]
    later: tuple[bytes, ...]


def rows_until(path: str | os.PathLike[str], step: int) -> Rows:
    """The lines of a metrics file up to and including `step`, as they are stored."""
    kept, damaged, later = [], [], []
    for number, line, row in _rows(path):
        if row is None:
            damaged.append(number)
        elif row.get("step", 0) > step:
            later.append(line)
        else:
            kept.append(line)
    return Rows(tuple(kept), tuple(damaged), tuple(later))


def append_row(path: str | os.PathLike[str], row: Mapping[str, Any]) -> None:
    """Add one record, `finite`, to a file that is no symbolic link."""
    with open(path, "a", encoding="utf-8", opener=no_follow) as file:
        file.write(json.dumps(finite(row), allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """`value` with None for every number that is not finite: JSON has no word for those."""
    if isinstance(value, Mapping):
        return {str(name): finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All records of a metrics file; damaged lines are left out."""
    return [row for _, _, row in _rows(path) if row is not None]


def number(value: Any) -> float:
    """A logged value as a float; NaN where it is none. Diverged runs log "nan" and "inf" as strings."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def missing_steps(rows: Iterable[Mapping[str, Any]], last: int) -> tuple[int, int, int]:
    """(how many steps from 1 to `last` have no row, the first, the last of them); the time is that of the rows, however
    far `last` is."""
    there = {row["step"] for row in rows if 1 <= row.get("step", 0) <= last}
    first = next((step for step in range(1, last + 1) if step not in there), 0)
    final = next((step for step in range(last, 0, -1) if step not in there), 0)
    return last - len(there), first, final


def _rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """(line number, line without its end, record or None if it is damaged); blank lines are passed over."""
    with open(path, "rb", opener=regular) as file:
        number = 0
        if (size := os.fstat(file.fileno()).st_size) > MOST_FILE:
            raise UnreadableFile(f"{path} has {size:,} bytes, and {MOST_FILE:,} are read of such a file; remove it")
        while line := file.readline(MOST_LINE):
            number += 1
            if number > MOST_LINES:
                raise UnreadableFile(f"{path} has more than {MOST_LINES:,} lines, the most that are read; remove it")
            if line.strip():
                yield number, line.rstrip(b"\n"), _record(line)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step", 0)) is int else None
