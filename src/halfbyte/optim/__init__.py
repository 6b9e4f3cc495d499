"""AdamW, schedules, clipping: optax, as frozen configs."""

from .adamw import adamw, apply, clip_by_norm, global_norm
from .config import OptimizerConfig, span
from .schedule import learning_rate

__all__ = ["OptimizerConfig", "adamw", "apply", "clip_by_norm", "global_norm", "learning_rate", "span"]
