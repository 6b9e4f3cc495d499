"""Metrics of a run: rows of metrics.jsonl, metrics fetched one step late, throughput and MFU.

A metrics file has one JSON object per line. A kill truncates the last line, and a bad disk or another program may leave
other bytes in the middle. Such lines are skipped and counted; they never stop a run.

The metrics of a step are fetched after the next step was dispatched, so the device never waits. Step time is the time
between the moments at which two results were ready: the compile of the first step is counted once, separately.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from halfbyte.io import UnreadableFile, open_no_follow, open_regular_file

MAX_ROW_BYTES = 1 << 20
"""Limit per line; longer lines are not rows."""
MAX_METRICS_BYTES, MAX_ROWS = 4 << 30, 10_000_000
"""Limits per file, enough for seven million steps."""


@dataclass(frozen=True)
class MetricRows:
    """Whole lines up to a step, the numbers of damaged lines, which are skipped, and lines after the step."""

    lines: tuple[bytes, ...]
    damaged: tuple[int, ...]
    later: tuple[bytes, ...]


def read_rows_until(path: str | os.PathLike[str], step: int) -> MetricRows:
    """Reads the lines of a metrics file up to and including `step`, as they are stored."""
    lines, damaged, later = [], [], []
    for number, line, row in _rows(path):
        if row is None:
            damaged.append(number)
        elif row.get("step", 0) > step:
            later.append(line)
        else:
            lines.append(line)
    return MetricRows(tuple(lines), tuple(damaged), tuple(later))


def append_row(path: str | os.PathLike[str], row: Mapping[str, Any]) -> None:
    """Appends one row, through `replace_nonfinite`, to a file that is not a symbolic link."""
    with open(path, "a", encoding="utf-8", opener=open_no_follow) as file:
        file.write(json.dumps(replace_nonfinite(row), allow_nan=False) + "\n")


def replace_nonfinite(value: Any) -> Any:
    """Returns `value` with None for every number that is not finite: JSON cannot represent those."""
    if isinstance(value, Mapping):
        return {str(name): replace_nonfinite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads all rows of a metrics file; damaged lines are skipped."""
    return [row for _, _, row in _rows(path) if row is not None]


def parse_metric(value: Any) -> float:
    """Returns a logged value as a float; NaN if it is not a number. Diverged runs log "nan" and "inf" as strings."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def missing_steps(rows: Iterable[Mapping[str, Any]], last: int) -> tuple[int, int, int]:
    """Returns (number of steps from 1 to `last` without a row, the first of them, the last of them).

    The run time depends on the number of rows, not on `last`.
    """
    present = {row["step"] for row in rows if 1 <= row.get("step", 0) <= last}
    first = next((step for step in range(1, last + 1) if step not in present), 0)
    final = next((step for step in range(last, 0, -1) if step not in present), 0)
    return last - len(present), first, final


@dataclass(frozen=True)
class FinishedStep:
    """A step whose metrics are on the host."""

    step: int
    values: dict[str, float]
    step_time_s: float
    joules: float | None
    """Per device; None if energy is not measured."""
    host: Mapping[str, Any]


@dataclass
class DeferredMetrics:
    """Holds the metrics of the newest step on the device and returns those of the step before."""

    clock: Callable[[], float] = time.perf_counter
    energy: Callable[[], float | None] = lambda: None
    """Joules per device so far."""
    _pending: tuple[int, Mapping[str, Any], Mapping[str, Any]] | None = None
    _ready_at: float = field(default=0.0)
    _last_joules: float | None = None

    def __post_init__(self) -> None:
        self.restart_clock()

    def enqueue(self, step: int, values: Mapping[str, Any], **host: Any) -> FinishedStep | None:
        """Stores the metrics of a step that was just dispatched; waits for the step before and returns it.

        `host` is returned with the step, unchanged.
        """
        finished = self.flush()
        self._pending = (step, values, host)
        return finished

    def flush(self) -> FinishedStep | None:
        """Returns the step that is still pending; None if there is none."""
        if self._pending is None:
            return None
        (step, values, host), self._pending = self._pending, None
        fetched = {name: float(value) for name, value in jax.device_get(dict(values)).items()}
        ready, joules_before = self._ready_at, self._last_joules
        self.restart_clock()
        joules = None if joules_before is None or self._last_joules is None else self._last_joules - joules_before
        return FinishedStep(step=step, values=fetched, step_time_s=self._ready_at - ready, joules=joules, host=host)

    def restart_clock(self) -> None:
        """Excludes the time until now (validation, a checkpoint) from the next step."""
        self._ready_at, self._last_joules = self.clock(), self.energy()


def weighted_peak_flops(shares: Mapping[str, float], peaks: Mapping[str, float]) -> float | None:
    """Returns the dense peak in FLOP/s of a mix of GEMM formats: `1 / sum(share / peak)`. None if a peak is unknown.

    `shares` maps the format a GEMM runs in to its share of all FLOPs; shares add up to 1.
    """
    if any(share > 0 and not peaks.get(name) for name, share in shares.items()):
        return None
    seconds = sum(share / peaks[name] for name, share in shares.items() if share > 0)
    return 1 / seconds if seconds else None


@dataclass(frozen=True)
class Throughput:
    """Converts step times to rates; `tokens` are those of one global step.

    FLOPs are counted from the model's shapes (`models.params`): recomputation does not count. MFU divides by the dense
    peak of the formats that the GEMMs run in; if a peak is not in the device table, it is None.
    """

    tokens: int
    flops_per_token: float
    devices: int
    peak: float | None = None

    def rates(self, step_time_s: float, joules: float | None = None) -> dict[str, float | None]:
        """Returns `tokens_per_s_per_device`, `tflops_per_device`, `mfu` (None without a peak); `joules_per_device` and
        `tokens_per_joule` (None if energy is not measured, the latter also if the counter has not advanced).
        """
        tokens_per_s = self.tokens / step_time_s / self.devices
        flops = tokens_per_s * self.flops_per_token
        return {
            "tokens_per_s_per_device": tokens_per_s,
            "tflops_per_device": flops / 1e12,
            "mfu": flops / self.peak if self.peak else None,
            "joules_per_device": joules,
            "tokens_per_joule": self.tokens / self.devices / joules if joules else None,
        }


def _rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Yields (line number, line without its end, row or None if it is damaged); blank lines are skipped."""
    with open(path, "rb", opener=open_regular_file) as file:
        number = 0
        if (size := os.fstat(file.fileno()).st_size) > MAX_METRICS_BYTES:
            raise UnreadableFile(
                f"{path} has {size:,} bytes, and {MAX_METRICS_BYTES:,} are read of such a file; remove it"
            )
        while line := file.readline(MAX_ROW_BYTES):
            number += 1
            if number > MAX_ROWS:
                raise UnreadableFile(f"{path} has more than {MAX_ROWS:,} lines, the most that are read; remove it")
            if line.strip():
                yield number, line.rstrip(b"\n"), _record(line)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    step = row.get("step", 0)
    if type(step) is float and step.is_integer():  # MaxText logs steps as floats
        row["step"] = step = int(step)
    return row if type(step) is int else None
