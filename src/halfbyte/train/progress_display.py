"""Shows the progress of a run: a live panel on a terminal, one line per step elsewhere."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from halfbyte.io import escape_control_chars

Row = Mapping[str, Any]
BARS = "▁▂▃▄▅▆▇█"
RUNNING_STEPS = frozenset({"data", "step"})
"""Activities of the loop that make up a step."""
ACTIVITIES = {
    "compile": "compiling",
    "validation": "validating",
    "save": "writing a checkpoint",
    "finish": "waiting until the checkpoint is written",
}
SLOW_STEP_S = 2.0


class ProgressDisplay(Protocol):
    """Shows steps and notes."""

    def step(self, row: Row) -> None: ...

    def note(self, text: str) -> None: ...

    def begin(self, activity: str) -> None:
        """Shows the current activity of the loop: a key of `ACTIVITIES`, or one of `RUNNING_STEPS`."""

    def close(self) -> None: ...


def make_display(console: Console, *, title: str, steps: int, every: int = 1, done: int = 0) -> "ProgressDisplay":
    """Returns a live panel if `console` is a terminal, else plain lines; `done` steps are already finished."""
    if console.is_terminal:
        return PanelDisplay(console, title=title, steps=steps, done=done)
    return LineDisplay(console, steps=steps, every=every)


def step_cells(row: Row) -> dict[str, str]:
    """Returns the metrics of a step as text, by label, in the order of the display."""
    mfu, time_s, tflops = row.get("mfu"), row["step_time_s"], row["tflops_per_device"]
    wait = 100 * row.get("input_wait_s", 0.0) / max(time_s, 1e-9)
    cells = {
        "loss": f"{row['loss']:.6f}",
        "lr": f"{row['learning_rate']:.2e}",
        "grad": f"{row['grad_norm']:.3f}",
        "time": f"{1e3 * time_s:.0f} ms" if time_s < 10 else f"{time_s:.1f} s",
        "tok/s/dev": f"{row['tokens_per_s_per_device']:,.0f}",
        "TFLOP/s/dev": f"{tflops:,.0f}" if tflops >= 100 else f"{tflops:.3g}",
        "MFU": "n/a" if mfu is None else f"{100 * mfu:.1f}%",
        "input wait": f"{wait:.1f}%",
    }
    if row.get("loss_scale", 1.0) != 1.0:
        cells["scale"] = f"{row['loss_scale']:g}"
    return cells


def format_duration(seconds: float) -> str:
    """Formats a duration as `m:ss` or `h:mm:ss`."""
    minutes, secs = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


class CompileIndicator:
    """Context manager that shows that a program is being compiled, and for how long.

    Shows a clock on a terminal, a line every half minute elsewhere, nothing with `shown=False`.
    """

    LINE_S = 30.0

    def __init__(self, console: Console, *, shown: bool):
        self._console, self._shown = console, shown
        self._began = time.monotonic()
        self._done = threading.Event()
        self._live: Live | None = None

    def __enter__(self) -> None:
        if self._shown and self._console.is_terminal:
            self._live = Live(get_renderable=self._clock, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        elif self._shown:
            self._console.print("compiling ...", soft_wrap=True)
            threading.Thread(target=self._lines, name="halfbyte-clock", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._live is not None:
            self._live.stop()

    def _clock(self) -> Text:
        return Text(f"compiling ... {format_duration(time.monotonic() - self._began)}", style="yellow")

    def _lines(self) -> None:
        while not self._done.wait(self.LINE_S):
            self._console.print(f"still compiling, {format_duration(time.monotonic() - self._began)}", soft_wrap=True)


class LineDisplay:
    """Prints one line every `every` steps, and for the first and the last step."""

    def __init__(self, console: Console, *, steps: int, every: int):
        self._console, self._steps, self._every = console, steps, every

    def step(self, row: Row) -> None:
        if row["step"] % self._every and row["step"] not in (1, self._steps):
            return
        numbers = "  ".join(f"{label} {value}" for label, value in step_cells(row).items())
        self.note(f"step {row['step']:>{len(str(self._steps))}}/{self._steps}  {numbers}")

    def note(self, text: str) -> None:
        self._console.print(Text(escape_control_chars(text)), soft_wrap=True)

    def begin(self, activity: str) -> None:
        pass

    def close(self) -> None:
        pass


class PanelDisplay:
    """Shows a progress bar, the metrics of the last step, the loss curve and the current activity.

    The panel is redrawn in place; notes scroll above it.
    """

    def __init__(self, console: Console, *, title: str, steps: int, done: int = 0):
        self._width = max(10, min(console.width - 34, 100))
        self._losses: list[float] = []
        self._row: Row | None = None
        self._steps, self._done = steps, done
        self._times: deque[float] = deque(maxlen=20)
        self._title = Text(f"\n{escape_control_chars(title)}", style="bold")
        self._began: float | None = None  # of the first step
        self._activity, self._since = "", time.monotonic()
        columns = (BarColumn(None), MofNCompleteColumn(), TextColumn("{task.fields[times]}", style="cyan"))
        self._progress = Progress(*columns, expand=True)
        self._task = self._progress.add_task("", total=steps, completed=done, times="")
        self._live = Live(get_renderable=self._picture, console=console, refresh_per_second=8)
        self._live.start()

    def begin(self, activity: str) -> None:
        if activity in RUNNING_STEPS and self._began is None:
            self._began = time.monotonic()
        if activity != self._activity and not {activity, self._activity} <= RUNNING_STEPS:
            self._since = time.monotonic()
        self._activity = activity

    def step(self, row: Row) -> None:
        self._row, self._done, self._since = row, row["step"], time.monotonic()
        self._losses.append(row["loss"])
        self._times.append(row["step_time_s"])
        self._progress.update(self._task, completed=row["step"])

    def note(self, text: str) -> None:
        self._live.console.print(Text(escape_control_chars(text)))

    def close(self) -> None:
        self._activity = ""
        self._live.stop()

    def _picture(self) -> Group:
        now = time.monotonic()
        self._progress.update(self._task, times=self._elapsed(now))
        if self._row is None:
            return Group(self._title, self._progress, self._status(now))
        cells = step_cells(self._row)
        table = Table.grid(*cells, expand=True, padding=(0, 1))
        table.add_row(*(Text(label, style="dim") for label in cells))
        table.add_row(*(Text(value, style="bold green" if label == "loss" else "") for label, value in cells.items()))
        return Group(self._title, self._progress, table, self._curve(), self._status(now))

    def _elapsed(self, now: float) -> str:
        """Returns the time since the first step, and an estimate of the remaining time from the last steps."""
        if self._began is None:
            return ""
        elapsed = format_duration(now - self._began)
        if not self._times:
            return elapsed
        left = (self._steps - self._done) * sum(self._times) / len(self._times)
        return f"{elapsed}, {format_duration(left)} left"

    def _status(self, now: float) -> Text:
        """Returns the activity and its duration; of a step only if it takes longer than `SLOW_STEP_S`."""
        seconds = now - self._since
        if not self._activity or (self._activity in RUNNING_STEPS and self._row is not None and seconds < SLOW_STEP_S):
            return Text()
        words = ACTIVITIES.get(self._activity) or f"running step {min(self._done + 1, self._steps)}"
        return Text(f"{words} ... {format_duration(seconds)}", style="yellow")

    def _curve(self) -> Text:
        points = bucket_means([loss for loss in self._losses if loss - loss == 0], self._width)
        if len(points) < 2:
            return Text()
        low, high = min(points), max(points)
        drawn, ends = (sparkline(points), "cyan"), (f"  (lowest {low:.3f})", "dim")
        return Text.assemble((f"{high:7.3f} ", "dim"), drawn, (f" {points[-1]:.3f}", "bold"), ends)


def bucket_means(values: list[float], width: int) -> list[float]:
    """Averages `values` in at most `width` buckets of consecutive values."""
    if len(values) <= width:
        return list(values)
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def sparkline(values: list[float]) -> str:
    """Returns one bar per value, scaled from the lowest to the highest value."""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] for value in values)
