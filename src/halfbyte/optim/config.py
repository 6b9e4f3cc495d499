"""The optimizer as a frozen value, checked when it is made."""

import math
from dataclasses import dataclass
from typing import Literal

STATE_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon on float32 master weights, a learning-rate schedule, and a clip of the global gradient norm."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: matrices of linears by Muon, all else by AdamW, under one learning rate."""
    learning_rate: float = 3e-4
    """The peak, reached after warm-up."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """wsd: warm-up, stable, then a linear decay over the last `decay` part of the run."""
    warmup: float = 0.02
    """Steps if 1 or more, else a fraction of the run."""
    decay: float = 0.2
    """wsd only. Steps if 1 or more, else a fraction of the run."""
    final: float = 0.1
    """Learning rate at the last step, as a fraction of the peak."""
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    """Muon's, of a matrix; b1 and b2 are AdamW's."""
    weight_decay: float = 0.1
    """Decoupled; matrices only (norms are masked)."""
    clip: float = 1.0
    """Largest global gradient norm; 0 turns the clip off."""
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
    nu_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        ranges = {
            "name": (self.name in ("adamw", "muon"), "adamw or muon"),
            "learning_rate": (self.learning_rate > 0, "above 0"),
            "warmup": (self.warmup >= 0, "0 or more"),
            "decay": (self.decay > 0, "above 0"),
            "final": (0 <= self.final <= 1, "between 0 and 1"),
            "b1": (0 <= self.b1 < 1, "in [0, 1)"),
            "b2": (0 <= self.b2 < 1, "in [0, 1)"),
            "eps": (self.eps > 0, "above 0"),
            "momentum": (0 <= self.momentum < 1, "in [0, 1)"),
            "weight_decay": (self.weight_decay >= 0, "0 or more"),
            "clip": (self.clip >= 0, "0 (off) or more"),
            "schedule": (self.schedule in ("cosine", "wsd", "constant"), "cosine, wsd or constant"),
            "mu_dtype": (self.mu_dtype in STATE_DTYPES, "float32 or bfloat16"),
            "nu_dtype": (self.nu_dtype in STATE_DTYPES, "float32 or bfloat16"),
        }
        for name, (holds, wanted) in ranges.items():
            value = getattr(self, name)
            if not holds or (isinstance(value, float) and not math.isfinite(value)):
                raise ValueError(f"optimizer.{name} must be {wanted}, got {value!r}")


def span(value: float, steps: int) -> int:
    """Steps meant by a length that is a number of steps (1 or more) or a fraction of the run."""
    return round(value) if value >= 1 else round(value * steps)


def check_warmup(config: OptimizerConfig, steps: int) -> int:
    """Steps of warm-up; ValueError when the run is shorter."""
    warmup = span(config.warmup, steps)
    if warmup > steps:
        raise ValueError(
            f"optimizer.warmup of {warmup} steps is longer than the run of {steps} steps; lower it or raise --steps"
        )
    return warmup
