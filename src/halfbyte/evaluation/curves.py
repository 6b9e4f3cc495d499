"""Curves of training runs: read, smoothed, and compared with standard errors.

Runs are compared at equal numbers of tokens. Where two runs saw the same tokens in the same order, most of the noise of
a loss curve is the noise of its batches, and falls out of the difference; what is left of it still lasts from step to
step, so the standard error of the mean difference over the last n points is Newey and West's: Bartlett weights over
4 (n / 100)^(2/9) lags.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from halfbyte.metrics import number, read_rows


@dataclass(frozen=True)
class Curve:
    """One run's rows of metrics, in order of step; what is missing or no number is NaN."""

    name: str
    rows: tuple[Mapping[str, float], ...]

    def column(self, field: str) -> np.ndarray:
        """A metric at every step, float64."""
        return np.array([number(row.get(field)) for row in self.rows], np.float64)

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
class Gap:
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
class Speed:
    """Medians over steps after the first few; `input_wait` is a share of step time."""

    step_time_s: float
    tokens_per_s_per_device: float
    tflops_per_device: float
    mfu: float
    tokens_per_joule: float
    input_wait: float


def read_curve(directory: Path, name: str) -> Curve:
    """metrics.jsonl of a run directory."""
    path = directory / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{directory} is not a run, or has not taken a step: it holds no metrics.jsonl")
    rows = {row["step"]: row for row in read_rows(path) if "step" in row and "loss" in row}
    if not rows:
        raise ValueError(f"{path} holds no step yet; wait for the first one")
    curve = Curve(name, tuple({field: number(value) for field, value in rows[step].items()} for step in sorted(rows)))
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


def default_width(points: int) -> int:
    """Points to smooth over: a fiftieth of the run, 5 at least where there are enough."""
    return max(1, min(points // 8, max(5, points // 50)))


def default_last(points: int) -> int:
    """Points that count as the end of a run: a tenth of them, 20 at least where there are as many."""
    return min(points, max(20, points // 10))


def aligned(run: Curve, baseline: Curve) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
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


def differences(run: Curve, baseline: Curve) -> np.ndarray:
    """The run's loss minus the baseline's wherever both were logged at the same tokens and are finite."""
    _, mine, theirs = np.intersect1d(run.tokens, baseline.tokens, return_indices=True)
    apart = run.loss[mine] - baseline.loss[theirs]
    return apart[np.isfinite(apart)]


def gap(run: Curve, baseline: Curve, *, last: int | None = None) -> Gap | None:
    """How far the run ends from the baseline; None if they have no point in common."""
    tokens, values, base, interpolated = aligned(run, baseline)
    if not len(tokens):
        return None
    points = min(last or default_last(len(tokens)), len(tokens))
    apart = (values - base)[-points:]
    mean = float(apart.mean())
    level = float(base[-points:].mean())
    span = float(tokens[-points]), float(tokens[-1])
    return Gap(mean, correlated_error(apart), mean / level if level else math.nan, points, *span, interpolated)


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


def end_of(curve: Curve, last: int | None = None) -> tuple[float, float | None]:
    """(mean loss over the last points, its standard error)."""
    loss = curve.loss[np.isfinite(curve.loss)]
    if not len(loss):
        return math.nan, None
    tail = loss[-min(last or default_last(len(loss)), len(loss)) :]
    return float(tail.mean()), correlated_error(tail)


def timed(curve: Curve) -> Curve:
    """The steps whose time counts: without the first tenth, at most 10."""
    return Curve(curve.name, curve.rows[min(10, len(curve.rows) // 10) :])


def speed_of(curve: Curve) -> Speed:
    """Medians of speed, of the steps that count."""
    rows = timed(curve)
    columns = {field: rows.column(field) for field in Speed.__annotations__ if field != "input_wait"}
    waited = rows.column("input_wait_s") / columns["step_time_s"]
    return Speed(**{field: median(values) for field, values in columns.items()}, input_wait=median(waited))


def median(values: Sequence[float] | np.ndarray) -> float:
    """The median of what is finite; NaN if nothing is."""
    array = np.asarray(values, np.float64)
    array = array[np.isfinite(array)]
    return float(np.median(array)) if len(array) else math.nan
