"""What the numbers of a step say about the run: all well, a step to be skipped, or trouble that needs a decision.

Trouble is: loss or gradients that are not finite several times in a row, weights that are not finite (no later step can
mend them), weights that are not those that the step before has written (memory lost a bit), gradients that are zero
several times in a row, and, where it is asked for, a loss far above its own median.
"""

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from .config import TrainConfig

OVERFLOWS = 25
"""Steps in a row that dynamic loss scaling may skip."""
WINDOW = 64
FEWEST = 16
"""Losses of the window, and how many there must be before one of them can be a spike."""


class Trouble(Exception):
    """A step after which the run cannot simply go on. `fault` is of memory rather than of arithmetic."""

    def __init__(self, step: int, reason: str, *, fault: bool = False):
        super().__init__(reason)
        self.step, self.reason, self.fault = step, reason, fault


@dataclass(frozen=True)
class Return:
    """One return to a checkpoint: kept in checkpoints and in manifest.json. `recipe`: in which the run went on, or ""
    for its own; `skipped`: batches of the data that were left out."""

    step: int
    at: int
    reason: str
    recipe: str
    skipped: int


@dataclass
class Guard:
    """Looks at one step after the other."""

    config: TrainConfig
    skipped: float = 0.0
    in_a_row: int = 0
    idle: int = 0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def look(self, step: int, values: Mapping[str, float]) -> str | None:
        """None when all is well, a sentence when the step was skipped and the run goes on. Raises Trouble."""
        skipped_now = values["skipped"] > self.skipped
        self.skipped = values["skipped"]
        if values["weights_intact"] < 1:
            raise Trouble(
                step,
                f"step {step}: the weights are not those that the step before has written: memory has changed them",
                fault=True,
            )
        if values["weights_not_finite"]:
            count = int(values["weights_not_finite"])
            raise Trouble(step, f"step {step}: {count} weights are not finite, and no step can mend them")
        self.in_a_row = self.in_a_row + 1 if skipped_now else 0
        if skipped_now:
            return self._skip(step, values)
        self._look_for_no_gradient(step, values)
        self._look_for_a_spike(step, values["loss"])
        self.losses.append(values["loss"])
        return None

    def _skip(self, step: int, values: Mapping[str, float]) -> str:
        scaled = self.config.loss_scale.mode == "dynamic"
        allowed = max(OVERFLOWS, self.config.guard.skips) if scaled else self.config.guard.skips
        what = f"loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"
        if self.in_a_row > allowed:
            times = f", {self.in_a_row} steps in a row" if self.in_a_row > 1 else ""
            raise Trouble(step, f"step {step}: {what}{times}")
        then = "loss scale halved" if scaled else f"{self.in_a_row} of at most {allowed} in a row"
        return f"step {step}: {what}; STEP SKIPPED, weights unchanged ({then})"

    def _look_for_no_gradient(self, step: int, values: Mapping[str, float]) -> None:
        self.idle = self.idle + 1 if values["grad_norm"] == 0 else 0
        if self.idle > self.config.guard.skips:
            raise Trouble(
                step,
                f"step {step}: loss {values['loss']:g}, and the gradient has been 0 for {self.idle} steps: nothing is "
                "learnt; a weight that is far too large does so, and so does data without a target",
            )

    def _look_for_a_spike(self, step: int, loss: float) -> None:
        limit = self.config.guard.spike
        if not limit or len(self.losses) < FEWEST:
            return
        usual = statistics.median(self.losses)
        if loss > limit * usual:
            raise Trouble(
                step, f"step {step}: LOSS SPIKE, {loss:.4f} is {loss / usual:.1f} times the median {usual:.4f}"
            )

    def restart(self, skipped: float) -> None:
        """Begin anew after a return to a checkpoint, whose count of skipped steps is given."""
        self.skipped, self.in_a_row, self.idle = skipped, 0, 0
        self.losses.clear()
