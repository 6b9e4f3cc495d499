"""Progress of long work, on stderr: a bar on a terminal, a plain line now and then elsewhere, or nothing."""

import sys
import time
from typing import Self

import rich.console
import rich.progress

from halfbyte.inputs import printable

SECONDS_BETWEEN_LINES = 10.0


class Meter:
    """Counts bytes of work done. `shown=False` is silent. A context manager."""

    def __init__(self, label: str, total: int, *, shown: bool):
        self.label, self.total, self.done = printable(label), max(total, 1), 0
        self._lines = shown and not sys.stderr.isatty()
        self._begun = self._said = time.monotonic()
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.DownloadColumn(binary_units=True),
            rich.progress.TransferSpeedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=rich.console.Console(stderr=True),
            disable=not shown or self._lines,
        )
        self._task = self._bar.add_task(self.label, total=self.total)

    def advance(self, amount: int) -> None:
        self.done += amount
        self._bar.update(self._task, advance=amount)
        if self._lines and time.monotonic() - self._said >= SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            seconds = self._said - self._begun
            print(f"{self.label}: {100 * self.done / self.total:.0f}% after {seconds:.0f} s", file=sys.stderr)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
