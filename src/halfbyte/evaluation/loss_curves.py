"""Loss curves of training runs: read, smooth and compare them with standard errors, and plot them in a terminal.

Runs are compared at equal numbers of tokens. If two runs saw the same tokens in the same order, most of the noise of
their loss curves comes from the batches and cancels in the difference. The remaining noise is correlated between steps,
so the standard error of the mean difference over the last n points is that of Newey and West: Bartlett weights over
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

# The terminal colours closest to the palette of Okabe and Ito, which colour-blind readers can distinguish.
TERMINAL_COLOURS = ("bright_blue", "bright_red", "bright_green", "bright_magenta", "yellow", "bright_cyan", "white")
# Bits of a braille character, by row and column.
BRAILLE_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
BRAILLE = 0x2800

# MaxText's metric -> ours.
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
    """Metrics of one run, rows ordered by step. A missing value, or one that is not a number, is NaN."""

    name: str
    rows: tuple[Mapping[str, float], ...]

    def column(self, field: str) -> np.ndarray:
        """Returns a metric at every step, float64 [steps]."""
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
        """Returns (tokens, validation loss) of the steps that have one."""
        loss = self.column("validation_loss")
        return self.tokens[~np.isnan(loss)], loss[~np.isnan(loss)]


@dataclass(frozen=True)
class LossGap:
    """Mean of (run - baseline) over the last `points` common points, with its standard error. `relative`: divided by
    the baseline's mean loss. `interpolated`: the runs were not logged at the same tokens."""

    value: float
    error: float | None
    relative: float
    points: int
    first_tokens: float
    last_tokens: float
    interpolated: bool


@dataclass(frozen=True)
class SpeedSummary:
    """Medians over all but the first steps. `input_wait` is a fraction of the step time."""

    step_time_s: float
    tokens_per_s_per_device: float
    tflops_per_device: float
    mfu: float
    tokens_per_joule: float
    input_wait: float


@dataclass(frozen=True)
class PlotLine:
    """A line to plot."""

    name: str
    x: np.ndarray
    y: np.ndarray


def is_maxtext_run(path: Path) -> bool:
    """Returns True for a file, which is MaxText's `metrics_file=`, and for a directory that has TensorBoard events but
    no metrics.jsonl."""
    return path.is_file() or (not (path / "metrics.jsonl").exists() and bool(_event_files(path)))


def _event_files(path: Path) -> list[Path]:
    """Returns the event files of a TensorBoard directory, or of a run's `tensorboard` folder, oldest first."""
    return sorted([*path.glob("events.out.tfevents.*"), *path.glob("tensorboard/events.out.tfevents.*")])


def read_maxtext_curve(path: Path, name: str) -> MetricCurve:
    """Returns the metrics of a MaxText run, from its metrics file or its TensorBoard directory. A later line for the
    same step replaces an earlier one, as after a resume.

    MaxText counts steps from 0. Tokens are the cumulative `total_weights` (targets that are not padding).
    """
    rows: dict[int, dict[str, float]] = {}
    if path.is_file():
        for row in read_rows(path):
            _add_maxtext_values(rows, row.get("step"), row)
    else:
        for file in _event_files(path):
            for step, tag, value in read_scalar_events(file):
                _add_maxtext_values(rows, step, {tag: value})
    train_rows = {step: row for step, row in sorted(rows.items()) if "learning/loss" in row}
    if not train_rows:
        raise ValueError(
            f"{path} holds no metrics of MaxText (learning/loss); give the file of metrics_file= or the directory of "
            "its TensorBoard events"
        )
    curve_rows: list[Mapping[str, float]] = []
    tokens = 0.0
    for step, row in train_rows.items():
        weights = row.get("learning/total_weights", math.nan)
        if not 0 < weights < math.inf:
            raise ValueError(f"{path}: step {step} has no learning/total_weights, so that it has no place in a curve")
        # If the file starts after step 0, the earlier steps are assumed to have had as many tokens as its first one.
        tokens += weights * (1 if curve_rows else step + 1)
        values = {field: row[maxtext_name] for maxtext_name, field in MAXTEXT_FIELDS.items() if maxtext_name in row}
        curve_rows.append({"step": float(step + 1), "tokens": tokens, **values})
    return MetricCurve(name, tuple(curve_rows))


def _add_maxtext_values(rows: dict[int, dict[str, float]], step: object, values: Mapping[str, object]) -> None:
    known_values = {
        name: parse_metric(value) for name, value in values.items()
        if name in MAXTEXT_FIELDS or name == "learning/total_weights"
    }  # fmt: skip
    step_number = parse_metric(step)
    if known_values and step_number >= 0 and math.isfinite(step_number):
        rows.setdefault(int(step_number), {}).update(known_values)


def read_curve(directory: Path, name: str) -> MetricCurve:
    """Returns the curve of a run directory (metrics.jsonl), or of a MaxText run."""
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
    if invalid_rows := [row for row in curve.rows if not (row["step"] > 0 and 0 < row.get("tokens", 0) < math.inf)]:
        raise ValueError(
            f"{path}: the row of step {invalid_rows[0]['step']:g} says {invalid_rows[0].get('tokens')} tokens, so that "
            "it has no place in a curve; take the line out, or restore the file from a copy"
        )
    return curve


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the centered moving average over `width` points, over fewer at the ends, so that the curve does not lag.
    NaNs are skipped."""
    finite = np.isfinite(values)
    before, after = (width - 1) // 2, width // 2
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    indices = np.arange(len(values))
    start, stop = np.maximum(indices - before, 0), np.minimum(indices + after + 1, len(values))
    num_finite = counts[stop] - counts[start]
    return np.where(num_finite > 0, (sums[stop] - sums[start]) / np.maximum(num_finite, 1), np.nan)


def default_smoothing_width(points: int) -> int:
    """Returns the number of points to smooth over: a fiftieth of the run, at least 5 if the run is long enough."""
    return max(1, min(points // 8, max(5, points // 50)))


def default_tail(points: int) -> int:
    """Returns the number of points that count as the end of a run: a tenth, at least 20 if there are as many."""
    return min(points, max(20, points // 10))


def align_curves(run: MetricCurve, baseline: MetricCurve) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """Returns (tokens, run's loss, baseline's loss, interpolated) where both losses are finite. The run is interpolated
    if the two were not logged at the same tokens."""
    common, run_index, baseline_index = np.intersect1d(run.tokens, baseline.tokens, return_indices=True)
    interpolated = len(common) < min(10, len(run.rows), len(baseline.rows))
    if interpolated:
        run_finite = np.isfinite(run.loss)
        inside = (baseline.tokens >= run.tokens[0]) & (baseline.tokens <= run.tokens[-1])
        common, base = baseline.tokens[inside], baseline.loss[inside]
        values = (
            np.interp(common, run.tokens[run_finite], run.loss[run_finite])
            if run_finite.any()
            else np.full(len(common), np.nan)
        )
    else:
        values, base = run.loss[run_index], baseline.loss[baseline_index]
    finite = np.isfinite(values) & np.isfinite(base)
    return common[finite], values[finite], base[finite], interpolated


def final_gap(run: MetricCurve, baseline: MetricCurve, *, last: int | None = None) -> LossGap | None:
    """Returns the gap between run and baseline over their last common points, None if there are none."""
    tokens, values, base, interpolated = align_curves(run, baseline)
    if not len(tokens):
        return None
    points = min(last or default_tail(len(tokens)), len(tokens))
    gaps = (values - base)[-points:]
    mean = float(gaps.mean())
    base_loss = float(base[-points:].mean())
    span = float(tokens[-points]), float(tokens[-1])
    return LossGap(
        mean, correlated_error(gaps), mean / base_loss if base_loss else math.nan, points, *span, interpolated
    )


def correlated_error(values: np.ndarray) -> float | None:
    """Returns the standard error of the mean of autocorrelated values (Newey-West), None for fewer than 3."""
    count = len(values)
    if count < 3:
        return None
    residuals = values - values.mean()
    lags = int(4 * (count / 100) ** (2 / 9))
    variance = float(residuals @ residuals) / count
    for lag in range(1, min(lags, count - 1) + 1):
        variance += 2 * (1 - lag / (lags + 1)) * float(residuals[lag:] @ residuals[:-lag]) / count
    return math.sqrt(max(variance, 0.0) / (count - 1))


def final_loss(curve: MetricCurve, last: int | None = None) -> tuple[float, float | None]:
    """Returns (mean loss over the last points, its standard error)."""
    loss = curve.loss[np.isfinite(curve.loss)]
    if not len(loss):
        return math.nan, None
    tail = loss[-min(last or default_tail(len(loss)), len(loss)) :]
    return float(tail.mean()), correlated_error(tail)


def steady_state_steps(curve: MetricCurve) -> MetricCurve:
    """Returns the curve without its first tenth, at most 10 steps, for measurements of speed."""
    return MetricCurve(curve.name, curve.rows[min(10, len(curve.rows) // 10) :])


def curve_speed(curve: MetricCurve) -> SpeedSummary:
    """Returns the median speed over the steady-state steps."""
    rows = steady_state_steps(curve)
    columns = {field: rows.column(field) for field in SpeedSummary.__annotations__ if field != "input_wait"}
    wait_fraction = rows.column("input_wait_s") / columns["step_time_s"]
    return SpeedSummary(
        **{field: median(values) for field, values in columns.items()}, input_wait=median(wait_fraction)
    )


def median(values: Sequence[float] | np.ndarray) -> float:
    """Returns the median of the finite values, NaN if there are none."""
    array = np.asarray(values, np.float64)
    array = array[np.isfinite(array)]
    return float(np.median(array)) if len(array) else math.nan


def braille_plot(
    lines: Sequence[PlotLine], *, title: str, width: int = 70, height: int = 14, zero: bool = False
) -> Text:
    """Returns a plot of lines in braille characters, with labelled axes and a legend. `zero` draws the line y = 0."""
    title = escape_control_chars(title)
    finite = [np.isfinite(line.x) & np.isfinite(line.y) for line in lines]
    shown = [
        PlotLine(escape_control_chars(line.name), line.x[mask], line.y[mask])
        for line, mask in zip(lines, finite, strict=True)
    ]
    all_y = np.concatenate([line.y for line in shown])
    if not len(all_y):
        return Text(f"{title}: nothing to draw")
    low, high = _limits(all_y, zero)
    left, right = (f(np.concatenate([line.x for line in shown])) for f in (np.min, np.max))
    canvas = np.zeros((height, width), np.int32)
    colour = np.full((height, width), -1)
    if zero:
        _draw_line(canvas, colour, PlotLine("", np.array([left, right]), np.zeros(2)), -1, (left, right, low, high))
    for index, line in enumerate(shown):
        _draw_line(canvas, colour, line, index % len(TERMINAL_COLOURS), (left, right, low, high))
    return _render_canvas(canvas, colour, shown, title=title, limits=(left, right, low, high))


def _limits(values: np.ndarray, zero: bool) -> tuple[float, float]:
    """Returns the y range: from the minimum to the 99th percentile, because the loss of the first steps would compress
    the rest."""
    low, high = float(values.min()), float(np.percentile(values, 99))
    if zero:
        low, high = min(float(np.percentile(values, 1)), 0.0), max(high, 0.0)
    padding = 0.03 * (high - low) or 0.01 * abs(high) or 1.0
    return low - padding, high + padding


def _draw_line(
    canvas: np.ndarray, colour: np.ndarray, line: PlotLine, colour_index: int, limits: tuple[float, float, float, float]
) -> None:
    """Set the dots of a line: in each column of dots, all from the height of the previous point to that of this one."""
    left, right, low, high = limits
    rows, columns = canvas.shape[0] * 4, canvas.shape[1] * 2
    if not len(line.x):
        return
    grid = np.linspace(left, right, columns)
    inside = (grid >= line.x[0]) & (grid <= line.x[-1]) if len(line.x) > 1 else grid >= line.x[0]
    heights = np.interp(grid, line.x, line.y)
    dot_rows = np.clip(np.round((high - heights) / (high - low) * (rows - 1)), 0, rows - 1).astype(int)
    previous = None
    for column in np.flatnonzero(inside):
        start = dot_rows[column] if previous is None else previous
        for row in range(min(start, dot_rows[column]), max(start, dot_rows[column]) + 1):
            canvas[row // 4, column // 2] |= BRAILLE_DOTS[row % 4][column % 2]
            colour[row // 4, column // 2] = colour_index
        previous = dot_rows[column]


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
    left_label, right_label = format_si(left), f"{format_si(right)} tokens"
    text.append(f"{'':>{margin}}  {left_label}{right_label:>{width - len(left_label)}}\n", style="dim")
    for index, line in enumerate(lines):
        text.append("  ── ", style=TERMINAL_COLOURS[index % len(TERMINAL_COLOURS)])
        text.append(line.name)
    return text


def format_si(value: float) -> str:
    """Returns a number with SI suffix: 1.2M for 1,200,000."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
