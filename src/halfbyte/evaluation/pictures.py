"""Plots of characters for a terminal: braille, 2 x 4 dots per character, so that 70 characters show 140 points."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from halfbyte.inputs import printable

# The terminal colours nearest to those of Okabe and Ito, which colour-blind readers tell apart.
TERMINAL = ("bright_blue", "bright_red", "bright_green", "bright_magenta", "yellow", "bright_cyan", "white")
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column
BRAILLE = 0x2800


@dataclass(frozen=True)
class Line:
    """Points to draw."""

    name: str
    x: np.ndarray
    y: np.ndarray


def text_plot(lines: Sequence[Line], *, title: str, width: int = 70, height: int = 14, zero: bool = False) -> Text:
    """Lines as braille characters with labelled axes and a legend. `zero` draws the line y = 0."""
    title = printable(title)
    good = [np.isfinite(line.x) & np.isfinite(line.y) for line in lines]
    shown = [Line(printable(line.name), line.x[at], line.y[at]) for line, at in zip(lines, good, strict=True)]
    everything = np.concatenate([line.y for line in shown])
    if not len(everything):
        return Text(f"{title}: nothing to draw")
    low, high = _limits(everything, zero)
    left, right = (f(np.concatenate([line.x for line in shown])) for f in (np.min, np.max))
    canvas = np.zeros((height, width), np.int32)
    colour = np.full((height, width), -1)
    if zero:
        _trace(canvas, colour, Line("", np.array([left, right]), np.zeros(2)), -1, (left, right, low, high))
    for number, line in enumerate(shown):
        _trace(canvas, colour, line, number % len(TERMINAL), (left, right, low, high))
    return _assembled(canvas, colour, shown, title=title, limits=(left, right, low, high))


def _limits(values: np.ndarray, zero: bool) -> tuple[float, float]:
    """From the smallest value to the 99th percentile, so that the first steps do not squeeze all others."""
    low, high = float(values.min()), float(np.percentile(values, 99))
    if zero:
        low, high = min(float(np.percentile(values, 1)), 0.0), max(high, 0.0)
    room = 0.03 * (high - low) or 0.01 * abs(high) or 1.0
    return low - room, high + room


def _trace(
    canvas: np.ndarray, colour: np.ndarray, line: Line, number: int, limits: tuple[float, float, float, float]
) -> None:
    """Set the dots of a line: for each column of dots, all from the last point's height to this one's."""
    left, right, low, high = limits
    rows, columns = canvas.shape[0] * 4, canvas.shape[1] * 2
    if not len(line.x):
        return
    grid = np.linspace(left, right, columns)
    inside = (grid >= line.x[0]) & (grid <= line.x[-1]) if len(line.x) > 1 else grid >= line.x[0]
    heights = np.interp(grid, line.x, line.y)
    places = np.clip(np.round((high - heights) / (high - low) * (rows - 1)), 0, rows - 1).astype(int)
    before = None
    for column in np.flatnonzero(inside):
        first = places[column] if before is None else before
        for row in range(min(first, places[column]), max(first, places[column]) + 1):
            canvas[row // 4, column // 2] |= DOTS[row % 4][column % 2]
            colour[row // 4, column // 2] = number
        before = places[column]


def _assembled(
    canvas: np.ndarray,
    colour: np.ndarray,
    lines: Sequence[Line],
    *,
    title: str,
    limits: tuple[float, float, float, float],
) -> Text:
    left, right, low, high = limits
    height, width = canvas.shape
    digits = max(0, min(6, 2 - math.floor(math.log10(high - low))))
    labels = {0: high, height // 2: (high + low) / 2, height - 1: low}
    margin = max(len(f"{value:.{digits}f}") for value in labels.values())
    text = Text(title + "\n", style="")
    for row in range(height):
        label = f"{labels[row]:.{digits}f}" if row in labels else ""
        text.append(f"{label:>{margin}} {'┤' if label else '│'}", style="dim")
        for column in range(width):
            style = TERMINAL[colour[row, column]] if colour[row, column] >= 0 else "dim"
            text.append(chr(BRAILLE + int(canvas[row, column])), style=style)
        text.append("\n")
    text.append(f"{'':>{margin}} ╰{'─' * width}\n", style="dim")
    first, last = short(left), f"{short(right)} tokens"
    text.append(f"{'':>{margin}}  {first}{last:>{width - len(first)}}\n", style="dim")
    for number, line in enumerate(lines):
        text.append("  ── ", style=TERMINAL[number % len(TERMINAL)])
        text.append(line.name)
    return text


def short(value: float) -> str:
    """1.2M for 1,200,000."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
