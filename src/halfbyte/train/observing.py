"""Looking at a run while it goes: an observer is shown weights and batch before some steps, and changes neither."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jax.sharding import Mesh

from halfbyte.recipe import Resolved

from .config import TrainConfig


@dataclass(frozen=True)
class Moment:
    """What step number `step` is about to compute with."""

    step: int
    config: TrainConfig
    resolved: Resolved
    mesh: Mesh
    params: Any
    batch: Any


class Observer(Protocol):
    """Shown every `every`-th step, the first one too."""

    every: int

    def observe(self, moment: Moment) -> Sequence[str]:
        """Look; lines for the log."""
        ...


def due(observer: Observer, step: int) -> bool:
    """Whether the observer looks before step number `step` (from 1)."""
    return observer.every > 0 and (step - 1) % observer.every == 0
