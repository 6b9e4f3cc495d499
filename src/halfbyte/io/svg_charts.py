"""Draws charts as inline SVG. Colors are CSS variables of the page, so that a chart fits light and dark mode."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from halfbyte.io.html import STYLE, escape_html

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 540, 58, 12, 10, 34
NUM_COLOURS = 8
# The light palette and the text rules of page.css. In a standalone SVG the values replace the variables: few programs
# except browsers support CSS variables.
PALETTE = dict(re.findall(r"--(\w+):([^;}]+)", STYLE.partition("@media")[0]))
TEXT_STYLE = "".join(re.findall(r"^text[^{]*\{[^}]*\}", STYLE, re.MULTILINE))


@dataclass(frozen=True)
class LineSeries:
    """A line, interrupted at points that are not finite.

    `colour` is an index into the palette of the page. `label` is drawn next to the first point.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int
    faint: bool = False
    dots: bool = False
    label: str = ""


@dataclass(frozen=True)
class ConfidenceBand:
    """A filled interval along x."""

    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    colour: int


@dataclass(frozen=True)
class ForestRow:
    """One row of a forest plot: a dot with label per seed, and the interval over the seeds as a bar."""

    name: str
    dots: Sequence[tuple[float, str]] = ()
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    colour: int = 0
    note: str = ""


@dataclass
class Frame:
    """Drawing area to the right of a margin for names: maps data to pixels and draws the axes."""

    left: float
    right: float
    low: float
    high: float
    height: int
    log: bool = False
    margin: int = LEFT
    parts: list[str] = field(default_factory=list)

    def x(self, value: float) -> float:
        a, b, v = (math.log(t) for t in (self.left, self.right, value)) if self.log else (self.left, self.right, value)
        return self.margin + (v - a) / ((b - a) or 1.0) * (WIDTH - self.margin - RIGHT)

    def y(self, value: float) -> float:
        return TOP + (self.high - value) / ((self.high - self.low) or 1.0) * (self.height - TOP - BOTTOM)

    def add(self, text: str) -> None:
        self.parts.append(text)

    def line(self, x: tuple[float, float], y: tuple[float, float], stroke: str, more: str = "") -> None:
        ends = f'x1="{x[0]:.1f}" x2="{x[1]:.1f}" y1="{y[0]:.1f}" y2="{y[1]:.1f}"'
        self.add(f'<line {ends} stroke="{stroke}"{more}/>')

    def label(self, x: float, y: float, words: str, anchor: str = "middle") -> None:
        self.add(f'<text class="s" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>')

    def y_axis(self) -> None:
        for value in ticks(self.low, self.high):
            y = self.y(value)
            self.line((LEFT, WIDTH - RIGHT), (y, y), "var(--grid)")
            self.label(LEFT - 6, y + 4, format_tick(value), "end")

    def x_axis(self, words: str) -> None:
        for value in log_ticks(self.left, self.right) if self.log else ticks(self.left, self.right):
            self.label(self.x(value), self.height - 18, format_tick(value))
        self.label((self.margin + WIDTH - RIGHT) / 2, self.height - 3, words)

    def svg(self, label: str) -> str:
        inside = "\n".join(self.parts)
        box = f'viewBox="0 0 {WIDTH} {self.height}"'
        return f'<svg {box} role="img" aria-label="{escape(label, quote=True)}">\n{inside}\n</svg>'


def format_tick(value: float) -> str:
    """Formats the number of a tick: 1.2M, 0.005, 3."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.4g}"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Returns about `about` round numbers between two bounds."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    step = 10 ** math.floor(math.log10(span / about))
    step *= next(m for m in (1, 2, 5, 10) if span / (step * m) <= about)
    first = math.ceil(low / step)
    return [round((first + i) * step, 12) for i in range(int((high - first * step) / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Returns 1, 2 and 5 of every decade between two bounds; the bounds if at most one of them is inside."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [m * 10.0**d for d in decades for m in (1, 2, 5) if low <= m * 10.0**d <= high]
    return values if len(values) > 1 else [low, high]


def palette_colour(index: int) -> str:
    return f"var(--c{index % NUM_COLOURS})"


@dataclass(frozen=True)
class Axes:
    """Axes of a line chart.

    zero: the y axis includes 0. clip: percentile of y at which the y axis ends, so that the large values of the first
    steps do not determine its scale. log: logarithmic x axis. x_range: values that the x axis must include; None: only
    the data.
    """

    x_label: str
    zero: bool = False
    clip: float = 99.0
    log: bool = False
    height: int = 270
    x_range: tuple[float, float] | None = None


def line_chart(
    series: Sequence[LineSeries], axes: Axes, *, label: str, bands: Sequence[ConfidenceBand] = (),
    lines: Sequence[tuple[float, str]] = (),
) -> str:  # fmt: skip
    """Returns a line chart with a legend; `lines` are named horizontal lines."""
    frame = line_frame(series, axes, bands, lines)
    return frame.svg(label) + _legend(series) if frame else ""


def line_frame(
    series: Sequence[LineSeries],
    axes: Axes,
    bands: Sequence[ConfidenceBand] = (),
    lines: Sequence[tuple[float, str]] = (),
) -> Frame | None:
    """Draws a line chart; None if no series has a finite point."""
    zero, clip = axes.zero, axes.clip
    xs = [*(x for s in series for x in s.x), *(axes.x_range or ())]
    ys = [y for s in series for y in s.y if y is not None and math.isfinite(y)]
    if not xs or not ys:
        return None
    edges = [value for band in bands for value in (*band.low, *band.high)] + [value for value, _ in lines]
    high = max([float(np.percentile(ys, clip)), *edges, *([0.0] if zero else [])])
    low = min([min(ys) if not zero else float(np.percentile(ys, 100 - clip)), *edges, *([0.0] if zero else [])])
    padding = 0.05 * (high - low) or abs(high) * 0.01 or 1.0
    label_space = 0.15 * (max(xs) - min(xs)) * any(s.label for s in series)
    frame = Frame(min(xs) - label_space, max(xs) + label_space, low - padding, high + padding, axes.height, axes.log)
    frame.y_axis()
    frame.x_axis(axes.x_label)
    for band in bands:
        _area(frame, band)
    for value, name in lines:
        y = frame.y(value)
        frame.line((LEFT, WIDTH - RIGHT), (y, y), "var(--soft)", ' stroke-dasharray="5 4"')
        frame.label(WIDTH - RIGHT - 2, y - 4, name, "end")
    for s in series:
        _line(frame, s)
    return frame


def svg_document(panels: Sequence[tuple[str, Frame | None]], legend: Sequence[tuple[str, int]], *, label: str) -> str:
    """Returns a standalone SVG: one line of the legend per (text, colour), then each chart under its caption."""
    y, parts = 4, []
    for name, index in legend:
        parts.append(f'<rect x="8" y="{y + 6}" width="16" height="4" fill="{palette_colour(index)}"/>')
        parts.append(f'<text x="30" y="{y + 12}">{escape_html(name)}</text>')
        y += 18
    for caption, frame in panels:
        if frame is not None:
            parts.append(f'<text x="8" y="{y + 20}" style="font-weight:600">{escape_html(caption)}</text>')
            parts += [f'<g transform="translate(0 {y + 26})">', *frame.parts, "</g>"]
            y += 26 + frame.height
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 6}" width="{1.5 * WIDTH:.0f}"'
    body = [f'{head} role="img" aria-label="{escape_html(label)}">', f"<style>{TEXT_STYLE}</style>"]
    body += ['<rect width="100%" height="100%" fill="var(--bg)"/>', *parts, "</svg>\n"]
    return re.sub(r"var\(--(\w+)\)", lambda match: PALETTE[match[1]], "\n".join(body))


def _area(frame: Frame, band: ConfidenceBand) -> None:
    over = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(band.x, band.high, strict=True)]
    under = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(band.x, band.low, strict=True)]
    frame.add(f'<polygon points="{" ".join(over + under[::-1])}" fill="{palette_colour(band.colour)}" opacity="0.18"/>')


def _line(frame: Frame, s: LineSeries) -> None:
    pieces: list[list[str]] = [[]]
    for x, y in zip(s.x, s.y, strict=True):
        if y is None or not math.isfinite(y):
            pieces.append([])
            continue
        y_pixel = min(max(frame.y(y), TOP - 4), frame.height - BOTTOM + 4)
        pieces[-1].append(f"{frame.x(x):.1f},{y_pixel:.1f}")
        if s.dots:
            frame.add(f'<circle cx="{frame.x(x):.1f}" cy="{y_pixel:.1f}" r="2.6" fill="{palette_colour(s.colour)}"/>')
    if s.label and pieces[0]:
        right, down = map(float, pieces[0][0].split(","))
        frame.label(right + 6, down + 4, s.label, "start")
    width, opacity = (1, 0.45) if s.faint else (1.8, 1)
    for piece in pieces:
        if len(piece) > 1:
            points = " ".join(piece)
            frame.add(
                f'<polyline points="{points}" fill="none" stroke="{palette_colour(s.colour)}" stroke-width="{width}" '
                f'opacity="{opacity}"/>'
            )


def _legend(series: Sequence[LineSeries]) -> str:
    names: dict[str, int] = {}
    for s in series:
        names.setdefault(s.name, s.colour)
    marks = "".join(
        f'<span style="white-space:nowrap;margin-right:14px"><svg viewBox="0 0 16 8" '
        f'style="width:16px;display:inline-block">'
        f'<rect y="2" width="16" height="4" fill="{palette_colour(colour)}"/></svg> {escape(name)}</span> '
        for name, colour in names.items() if name
    )  # fmt: skip
    return f'<p class="soft">{marks}</p>'


def forest_plot(
    rows: Sequence[ForestRow], *, margin: float | None, x_label: str, label: str, clip: float | None = None
) -> str:
    """Returns a forest plot: dots, mean and interval per row, and the margin as a shaded range.

    `clip` bounds the axis: values outside are drawn at the edge, a mean there with an arrow and its value.
    """
    values = [v for r in rows for v in (*(value for value, _ in r.dots), r.mean, r.low, r.high) if v is not None]
    values = [v for v in values if math.isfinite(v)]
    if not values:
        return ""
    reach = [*values, 0.0, *([margin * 1.3, -margin * 1.3] if margin else [])]
    low, high = min(reach), max(reach)
    if clip is not None:
        low, high = max(low, -clip), min(high, clip)
    padding = 0.06 * (high - low)
    height = 28 * len(rows) + TOP + BOTTOM + 14
    frame = Frame(low - padding, high + padding, 0.0, float(len(rows)), height, margin=150)

    def at(value: float) -> float:
        return frame.x(min(max(value, frame.left), frame.right))

    bottom = height - BOTTOM
    if margin:
        a, b = at(-margin), at(margin)
        frame.add(
            f'<rect x="{a:.1f}" y="{TOP}" width="{b - a:.1f}" height="{bottom - TOP}" fill="var(--good)" '
            f'opacity="0.13"/>'
        )
    frame.line((at(0), at(0)), (TOP, bottom), "var(--soft)")
    frame.x_axis(x_label)
    for index, row in enumerate(rows):
        _forest_row(frame, row, TOP + 20 + 28 * index, at)
    return frame.svg(label)


def _forest_row(frame: Frame, row: ForestRow, y: float, at: Callable[[float], float]) -> None:
    tint = palette_colour(row.colour)
    name = row.name if len(row.name) <= 24 else row.name[:23] + "…"
    frame.add(f'<text x="4" y="{y + 4:.1f}">{escape(name)}</text>')
    if row.low is not None and row.high is not None:
        frame.line((at(row.low), at(row.high)), (y, y), tint, ' stroke-width="3"')
    for value, label in row.dots:
        if math.isfinite(value):
            position = f'cx="{at(value):.1f}" cy="{y:.1f}" r="4"'
            title = f"<title>{escape(label)}</title>"
            frame.add(f'<circle {position} fill="{tint}" opacity="0.55">{title}</circle>')
    if row.mean is not None:
        x = at(row.mean)
        frame.add(f'<path d="M{x:.1f} {y - 6:.1f}l5 6l-5 6l-5 -6z" fill="{tint}"/>')
        if row.mean > frame.right or row.mean < frame.left:
            frame.add(f'<text x="{WIDTH - RIGHT - 8}" y="{y - 7:.1f}" text-anchor="end">{row.mean:+.3g} →</text>')
    if row.note:
        frame.label(WIDTH - RIGHT - 2, y + 4, row.note, "end")


def heat_map(
    rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], *, label: str,
    shade: Sequence[Sequence[float]], alarms: Sequence[Sequence[bool]] | None = None, form: str = "{:.3f}",
) -> str:  # fmt: skip
    """Returns a heat map: one cell per value with tint `shade` (0..1), red with an alarm; its number if it fits."""
    if not rows or not columns:
        return ""
    left = 12 + 7.2 * max(map(len, rows))
    size = max(14.0, min(64.0, (WIDTH * 1.6 - left) / len(columns)))
    width, height = left + size * len(columns) + 4, 22 * len(rows) + 30
    parts = []
    for c, name in enumerate(columns):
        x = left + size * (c + 0.5)
        parts.append(f'<text class="s" x="{x:.1f}" y="14" text-anchor="middle">{escape(name)}</text>')
    for r, name in enumerate(rows):
        y = 20 + 22 * r
        parts.append(f'<text x="{left - 6:.1f}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        for c in range(len(columns)):
            parts.append(
                _heat_cell(left + size * c, y, size, values[r][c], shade[r][c], bool(alarms and alarms[r][c]), form)
            )
    inside = "\n".join(parts)
    box = f'viewBox="0 0 {width:.0f} {height}" style="min-width:{min(width, 640):.0f}px;max-width:{width:.0f}px"'
    return (
        f'<div class="scroll"><svg {box} role="img" aria-label="{escape(label, quote=True)}">\n{inside}\n</svg></div>'
    )


def _heat_cell(x: float, y: float, size: float, value: float | None, shade: float, alarm: bool, form: str) -> str:
    if value is None or not math.isfinite(value):
        return f'<rect x="{x:.1f}" y="{y}" width="{size - 1:.1f}" height="21" fill="none" stroke="var(--grid)"/>'
    strength = min(max(shade, 0.0), 1.0)
    fill = (
        f"rgba(var(--alarm),{0.35 + 0.5 * strength:.2f})" if alarm else f"rgba(var(--heat),{0.06 + 0.5 * strength:.2f})"
    )
    shown = form.format(value)
    position = f'x="{x:.1f}" y="{y}" width="{size - 1:.1f}" height="21"'
    cell = f'<rect {position} fill="{fill}"><title>{escape(shown)}</title></rect>'
    if size >= 6.4 * len(shown):
        cell += f'<text x="{x + size / 2:.1f}" y="{y + 15}" text-anchor="middle">{escape(shown)}</text>'
    return cell


@dataclass(frozen=True)
class TimelineBox:
    """A box of a lane. `tooltip` is shown on hover, `label` inside the box if it fits."""

    start: float
    size: float
    colour: int
    tooltip: str
    label: str = ""
    faint: bool = False


def timeline_chart(
    rows: Mapping[str, Sequence[TimelineBox]], *, end: float, limits: Mapping[str, float] | None = None
) -> str:
    """Returns a timeline: one lane per name, boxes on an axis from 0 to `end`, a vertical line per lane at `limits`."""
    width, left, height = 1000, 150, 26
    scale, parts = (width - left - 20) / end, []
    for lane, (name, boxes) in enumerate(rows.items()):
        y = 8 + lane * (height + 8)
        parts.append(_lane_word(4, y, name, "fg"))
        for box in (box for box in boxes if box.size * scale >= 0.3):
            x, box_width = left + box.start * scale, box.size * scale
            shape = f'x="{x:.2f}" y="{y}" width="{box_width:.2f}" height="{height}"'
            opacity = ' fill-opacity="0.45"' if box.faint else ""
            fill, title = palette_colour(box.colour), escape_html(box.tooltip)
            parts.append(f'<rect {shape} fill="{fill}"{opacity}><title>{title}</title></rect>')
            if box.label and box_width > 7.5 * len(box.label):
                parts.append(_lane_word(x + 4, y, box.label, "bg"))
        if limits:
            limit_x, ends = left + limits[name] * scale, f'y1="{y - 4}" y2="{y + height + 4}"'
            parts.append(f'<line x1="{limit_x:.1f}" x2="{limit_x:.1f}" {ends} stroke="var(--bad)" stroke-width="2"/>')
    return f'<svg viewBox="0 0 {width} {16 + len(rows) * (height + 8)}" role="img">{"".join(parts)}</svg>'


def _lane_word(x: float, y: float, word: str, tint: str) -> str:
    return f'<text x="{x:.1f}" y="{y + 18}" font-size="13" fill="var(--{tint})">{escape_html(word)}</text>'
