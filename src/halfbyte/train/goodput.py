"""Goodput: of all the time since a run first began, how much went into steps that count.

    productive   steps of the run as it now stands, without the wait for their data
    lost         steps that were computed and thrown away: after a kill, a return to a checkpoint, a damaged checkpoint
    waiting      the rest: starting, compiling, data, saving, validating, and the time in which nobody ran it

The three add up to the time on the clock. The sums travel in the checkpoints; what a crash threw away is read from the
rows that the resumed run drops.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from halfbyte.metrics import number


@dataclass
class Goodput:
    """Seconds. `began`: time on the wall clock when the run first began."""

    began: float
    productive: float = 0.0
    lost: float = 0.0
    clock: Callable[[], float] = time.time

    @classmethod
    def resumed(cls, kept: Mapping[str, float] | None, dropped: Iterable[Mapping[str, Any]]) -> "Goodput":
        """Go on from what a checkpoint carries (None, or what is no goodput: a fresh start); `dropped` rows are lost
        time."""
        kept = kept if isinstance(kept, Mapping) else {}
        began, productive, lost = (number(kept.get(name)) for name in ("began", "productive", "lost"))
        found = cls(began, productive, lost) if math.isfinite(began + productive + lost) else cls(time.time())
        found.lost += sum(useful(row) for row in dropped)
        return found

    def step(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Count a step; what its row says about the run so far."""
        self.productive += useful(row)
        return {"goodput": self.productive / max(self.total, 1e-9)}

    def throw_away(self, since: float) -> None:
        """The run went back to a checkpoint at which `since` seconds had been productive."""
        self.lost += self.productive - since
        self.productive = since

    @property
    def total(self) -> float:
        """Seconds since the run first began."""
        return max(self.clock() - self.began, self.productive + self.lost)

    @property
    def waiting(self) -> float:
        """Seconds that were neither productive nor lost."""
        return self.total - self.productive - self.lost

    def to_json(self) -> dict[str, float]:
        """As a checkpoint carries it."""
        return {"began": self.began, "productive": self.productive, "lost": self.lost}

    def __str__(self) -> str:
        parts = {"productive": self.productive, "lost": self.lost, "waiting": self.waiting}
        shares = ", ".join(
            f"{name} {100 * seconds / self.total:.1f}% ({seconds:.1f} s)" for name, seconds in parts.items()
        )
        return f"goodput of {self.total:.1f} s: {shares}"


def useful(row: Mapping[str, Any]) -> float:
    """Seconds of a step that were spent computing."""
    return max(0.0, number(row.get("step_time_s", 0.0)) - number(row.get("input_wait_s", 0.0)))
