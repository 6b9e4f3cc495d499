"""AdamW, Muon, schedules, clipping: optax, as frozen configs."""

from .adamw import adamw, apply, clip_by_norm, global_norm
from .config import OptimizerConfig, check_warmup, span
from .muon import muon
from .schedule import learning_rate
