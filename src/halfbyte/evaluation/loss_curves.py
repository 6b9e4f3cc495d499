"""Loss curves of training runs: read, smooth and compare them with standard errors, and plot them in a terminal.

Runs are compared at equal numbers of tokens. Where two runs saw the same tokens in the same order, most of the noise of
a loss curve is that of its batches and cancels in the difference. The remaining noise is correlated between steps, so
the standard error of the mean difference over the last n points is Newey and West's: Bartlett weights over
4 (n / 100)^(2/9) lags.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.text import Text

from halfbyte.io import escape_control_chars
from halfbyte.train import parse_metric, read_rows
from halfbyte.train.metric_writers import read_scalar_events

# The terminal colours nearest to those of Okabe and Ito, which colour-blind readers tell apart.
TERMINAL_COLOURS = ("bright_blue", "bright_red", "bright_green", "bright_magenta", "yellow", "bright_cyan", "white")
BRAILLE_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column
BRAILLE = 0x2800


# MaxText's metrics by our names.
MAXTEXT_FIELDS = {
    "learning/loss": "loss",
    "learning/grad_norm": "grad_norm",
    "perf/step_time_seconds": "step_time_s",
    "perf/per_device_tokens_per_sec": "tokens_per_s_per_device",
    "perf/per_device_tflops_per_sec": "tflops_per_device",
    "eval/avg_loss": "validation_loss",
}


@dataclass(frozen=True)
class MetricCurve:
    """One run's rows of metrics, in order of step; what is missing or no number is NaN."""

    name: str
    rows: tuple[Mapping[str, float], ...]

    def column(self, field: str) -> np.ndarray:
        """A metric at every step, float64."""
        return np.array([parse_metric(row.get(field)) for row in self.rows], np.float64)

    @property
    def steps(self) -> np.ndarray:
        return self.column("step")

    @property
    def tokens(self) -> np.ndarray:
        return self.column("tokens")

    @property
    def loss(self) -> np.ndarray:
        return self.column("loss")

    def validation(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, validation loss) where there is one."""
        loss = self.column("validation_loss")
        return self.tokens[~np.isnan(loss)], loss[~np.isnan(loss)]


@dataclass(frozen=True)
class LossGap:
    """Mean of (run - baseline) over the last `points` common points, with its standard error; `relative` is of the
    baseline's mean loss. `interpolated`: the runs were not logged at the same tokens."""

    value: float
    error: float | None
    relative: float
    points: int
    first_tokens: float
    last_tokens: float
    interpolated: bool


@dataclass(frozen=True)
class SpeedSummary:
    """Medians over steps after the first few; `input_wait` is a share of step time."""

    step_time_s: float
    tokens_per_s_per_device: float
    tflops_per_device: float
    mfu: float
    tokens_per_joule: float
    input_wait: float


@dataclass(frozen=True)
class PlotLine:
    """Points to draw."""

    name: str
    x: np.ndarray
    y: np.ndarray


def is_maxtext_run(path: Path) -> bool:
    """Returns True for a file, as of MaxText's `metrics_file=`, and for a directory with TensorBoard's events only."""
    return path.is_file() or (not (path / "metrics.jsonl").exists() and bool(_event_files(path)))


def _event_files(path: Path) -> list[Path]:
    """Returns the event files of a TensorBoard directory, or of a run's `tensorboard` folder, oldest first."""
    return sorted([*path.glob("events.out.tfevents.*"), *path.glob("tensorboard/events.out.tfevents.*")])


def read_maxtext_curve(path: Path, name: str) -> MetricCurve:
    """The metrics of a MaxText run: its metrics file, or its TensorBoard directory. A later line of a step replaces an
    earlier one, as after a resume.

    MaxText counts steps from 0. Tokens are the sum of its `total_weights` (targets that are not padding).
    """
    rows: dict[int, dict[str, float]] = {}
    if path.is_file():
        for row in read_rows(path):
            _add_maxtext_values(rows, row.get("step"), row)
    else:
        for file in _event_files(path):
            for step, tag, value in read_scalar_events(file):
                _add_maxtext_values(rows, step, {tag: value})
    trained = {step: row for step, row in sorted(rows.items()) if "learning/loss" in row}
    if not trained:
        raise ValueError(
            f"{path} holds no metrics of MaxText (learning/loss); give the file of metrics_file= or the directory of "
            "its TensorBoard events"
        )
    found: list[Mapping[str, float]] = []
    tokens = 0.0
    for step, row in trained.items():
        weights = row.get("learning/total_weights", math.nan)
        if not 0 < weights < math.inf:
            raise ValueError(f"{path}: step {step} has no learning/total_weights, so that it has no place in a curve")
        tokens += weights * (1 if found else step + 1)  # a file that begins later: the steps before it were alike
        values = {ours: row[theirs] for theirs, ours in MAXTEXT_FIELDS.items() if theirs in row}
        found.append({"step": float(step + 1), "tokens": tokens, **values})
    return MetricCurve(name, tuple(found))


def _add_maxtext_values(rows: dict[int, dict[str, float]], step: object, values: Mapping[str, object]) -> None:
    kept = {
        name: parse_metric(value) for name, value in values.items()
        if name in MAXTEXT_FIELDS or name == "learning/total_weights"
    }  # fmt: skip
    number = parse_metric(step)
    if kept and number >= 0 and math.isfinite(number):
        rows.setdefault(int(number), {}).update(kept)


def read_curve(directory: Path, name: str) -> MetricCurve:
    """metrics.jsonl of a run directory, or the metrics of a MaxText run."""
    if is_maxtext_run(directory):
        return read_maxtext_curve(directory, name)
    path = directory / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{directory} is not a run, or has not taken a step: it holds no metrics.jsonl")
    rows = {row["step"]: row for row in read_rows(path) if "step" in row and "loss" in row}
    if not rows:
        raise ValueError(f"{path} holds no step yet; wait for the first one")
    curve = MetricCurve(
        name, tuple({field: parse_metric(value) for field, value in rows[step].items()} for step in sorted(rows))
    )
    if unplaced := [row for row in curve.rows if not (row["step"] > 0 and 0 < row.get("tokens", 0) < math.inf)]:
        raise ValueError(
            f"{path}: the row of step {unplaced[0]['step']:g} says {unplaced[0].get('tokens')} tokens, so that it has "
            "no place in a curve; take the line out, or restore the file from a copy"
        )
    return curve


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """The mean over the `width` points around each (fewer at the ends, so that the curve does not lag); NaNs are passed
    over."""
    finite = np.isfinite(values)
    before, after = (width - 1) // 2, width // 2
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    places = np.arange(len(values))
    first, last = np.maximum(places - before, 0), np.minimum(places + after + 1, len(values))
    many = counts[last] - counts[first]
    return np.where(many > 0, (sums[last] - sums[first]) / np.maximum(many, 1), np.nan)


def default_smoothing_width(points: int) -> int:
    """Points to smooth over: a fiftieth of the run, 5 at least where there are enough."""
    return max(1, min(points // 8, max(5, points // 50)))


def default_tail(points: int) -> int:
    """Points that count as the end of a run: a tenth of them, 20 at least where there are as many."""
    return min(points, max(20, points // 10))


def align_curves(run: MetricCurve, baseline: MetricCurve) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """(tokens, run's loss, baseline's loss, interpolated) where both have a finite loss; the run is interpolated where
    the two were not logged at the same tokens."""
    common, mine, theirs = np.intersect1d(run.tokens, baseline.tokens, return_indices=True)
    interpolated = len(common) < min(10, len(run.rows), len(baseline.rows))
    if interpolated:
        good = np.isfinite(run.loss)
        inside = (baseline.tokens >= run.tokens[0]) & (baseline.tokens <= run.tokens[-1])
        common, base = baseline.tokens[inside], baseline.loss[inside]
        values = np.interp(common, run.tokens[good], run.loss[good]) if good.any() else np.full(len(common), np.nan)
    else:
        values, base = run.loss[mine], baseline.loss[theirs]
    finite = np.isfinite(values) & np.isfinite(base)
    return common[finite], values[finite], base[finite], interpolated


def final_gap(run: MetricCurve, baseline: MetricCurve, *, last: int | None = None) -> LossGap | None:
    """How far the run ends from the baseline; None if they have no point in common."""
    tokens, values, base, interpolated = align_curves(run, baseline)
    if not len(tokens):
        return None
    points = min(last or default_tail(len(tokens)), len(tokens))
    apart = (values - base)[-points:]
    mean = float(apart.mean())
    level = float(base[-points:].mean())
    span = float(tokens[-points]), float(tokens[-1])
    return LossGap(mean, correlated_error(apart), mean / level if level else math.nan, points, *span, interpolated)


def correlated_error(values: np.ndarray) -> float | None:
    """Standard error of the mean of values that depend on their neighbours (Newey-West); None for fewer than 3."""
    many = len(values)
    if many < 3:
        return None
    spread = values - values.mean()
    lags = int(4 * (many / 100) ** (2 / 9))
    variance = float(spread @ spread) / many
    for lag in range(1, min(lags, many - 1) + 1):
        variance += 2 * (1 - lag / (lags + 1)) * float(spread[lag:] @ spread[:-lag]) / many
    return math.sqrt(max(variance, 0.0) / (many - 1))


def final_loss(curve: MetricCurve, last: int | None = None) -> tuple[float, float | None]:
    """(mean loss over the last points, its standard error)."""
    loss = curve.loss[np.isfinite(curve.loss)]
    if not len(loss):
        return math.nan, None
    tail = loss[-min(last or default_tail(len(loss)), len(loss)) :]
    return float(tail.mean()), correlated_error(tail)


def steady_state_steps(curve: MetricCurve) -> MetricCurve:
    """The steps whose time counts: without the first tenth, at most 10."""
    return MetricCurve(curve.name, curve.rows[min(10, len(curve.rows) // 10) :])


def curve_speed(curve: MetricCurve) -> SpeedSummary:
    """Medians of speed, of the steps that count."""
    rows = steady_state_steps(curve)
    columns = {field: rows.column(field) for field in SpeedSummary.__annotations__ if field != "input_wait"}
    waited = rows.column("input_wait_s") / columns["step_time_s"]
    return SpeedSummary(**{field: median(values) for field, values in columns.items()}, input_wait=median(waited))


def median(values: Sequence[float] | np.ndarray) -> float:
    """The median of what is finite; NaN if nothing is."""
    array = np.asarray(values, np.float64)
    array = array[np.isfinite(array)]
    return float(np.median(array)) if len(array) else math.nan


def braille_plot(
    lines: Sequence[PlotLine], *, title: str, width: int = 70, height: int = 14, zero: bool = False
) -> Text:
    """Lines as braille characters with labelled axes and a legend. `zero` draws the line y = 0."""
    title = escape_control_chars(title)
    good = [np.isfinite(line.x) & np.isfinite(line.y) for line in lines]
    shown = [
        PlotLine(escape_control_chars(line.name), line.x[at], line.y[at]) for line, at in zip(lines, good, strict=True)
    ]
    everything = np.concatenate([line.y for line in shown])
    if not len(everything):
        return Text(f"{title}: nothing to draw")
    low, high = _limits(everything, zero)
    left, right = (f(np.concatenate([line.x for line in shown])) for f in (np.min, np.max))
    canvas = np.zeros((height, width), np.int32)
    colour = np.full((height, width), -1)
    if zero:
        _draw_line(canvas, colour, PlotLine("", np.array([left, right]), np.zeros(2)), -1, (left, right, low, high))
    for number, line in enumerate(shown):
        _draw_line(canvas, colour, line, number % len(TERMINAL_COLOURS), (left, right, low, high))
    return _render_canvas(canvas, colour, shown, title=title, limits=(left, right, low, high))


def _limits(values: np.ndarray, zero: bool) -> tuple[float, float]:
    """From the smallest value to the 99th percentile, so that the first steps do not squeeze all others."""
    low, high = float(values.min()), float(np.percentile(values, 99))
    if zero:
        low, high = min(float(np.percentile(values, 1)), 0.0), max(high, 0.0)
    room = 0.03 * (high - low) or 0.01 * abs(high) or 1.0
    return low - room, high + room


def _draw_line(
    canvas: np.ndarray, colour: np.ndarray, line: PlotLine, number: int, limits: tuple[float, float, float, float]
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
            canvas[row // 4, column // 2] |= BRAILLE_DOTS[row % 4][column % 2]
            colour[row // 4, column // 2] = number
        before = places[column]


def _render_canvas(
    canvas: np.ndarray,
    colour: np.ndarray,
    lines: Sequence[PlotLine],
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
            style = TERMINAL_COLOURS[colour[row, column]] if colour[row, column] >= 0 else "dim"
            text.append(chr(BRAILLE + int(canvas[row, column])), style=style)
        text.append("\n")
    text.append(f"{'':>{margin}} ╰{'─' * width}\n", style="dim")
    first, last = format_si(left), f"{format_si(right)} tokens"
    text.append(f"{'':>{margin}}  {first}{last:>{width - len(first)}}\n", style="dim")
    for number, line in enumerate(lines):
        text.append("  ── ", style=TERMINAL_COLOURS[number % len(TERMINAL_COLOURS)])
        text.append(line.name)
    return text


def format_si(value: float) -> str:
    """1.2M for 1,200,000."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
