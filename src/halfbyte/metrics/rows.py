"""Files of one JSON object a line, read as far as they can be read.

A kill cuts the last line; a bad disk or another program may leave bytes that are no text in the middle. Such lines are
left out and counted; they never stop a run from going on.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MOST_LINE = 1 << 20
"""Bytes of one line; what is longer is no record."""


@dataclass(frozen=True)
class Rows:
    """Whole lines up to a step, the numbers of lines left out because they are damaged, and whether later ones are."""

    lines: tuple[bytes, ...]
    damaged: tuple[int, ...]
    later: int


def rows_until(path: str | os.PathLike[str], step: int) -> Rows:
    """The lines of a metrics file up to and including `step`, as they are stored."""
    kept, damaged, later = [], [], 0
    for number, line, row in _rows(path):
        if row is None:
            damaged.append(number)
        elif row.get("step", 0) > step:
            later += 1
        else:
            kept.append(line)
    return Rows(tuple(kept), tuple(damaged), later)


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All records of a metrics file; damaged lines are left out."""
    return [row for _, _, row in _rows(path) if row is not None]


def _rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """(line number, line without its end, record or None if it is damaged); blank lines are passed over."""
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(MOST_LINE):
            number += 1
            if line.strip():
                yield number, line.rstrip(b"\n"), _record(line)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step", 0), int | float) else None
