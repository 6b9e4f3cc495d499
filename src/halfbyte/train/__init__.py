"""Training: config, state, the pure step, and the host loop around it."""

from .config import (
    CheckpointConfig,
    GuardConfig,
    LogConfig,
    LossScaleConfig,
    PrecisionConfig,
    TrainConfig,
    ValidationConfig,
)
from .loop import Diverged, RunResult
from .observing import Moment, Observer
from .precision import Phase, phases, resolve
from .precision_manifest import Manifest, build_manifest, table
from .preflight import MemoryEstimate, check, estimate_memory, run_mesh
from .run import train
from .source import Source, open_source
from .state import TrainState, abstract_state, create_state
from .step import abstract_batch, jit_train_step, lower_train_step, make_eval_step, make_train_step

__all__ = [
    "CheckpointConfig",
    "Diverged",
    "GuardConfig",
    "LogConfig",
    "LossScaleConfig",
    "Manifest",
    "MemoryEstimate",
    "Moment",
    "Observer",
    "Phase",
    "PrecisionConfig",
    "RunResult",
    "Source",
    "TrainConfig",
    "TrainState",
    "ValidationConfig",
    "abstract_batch",
    "abstract_state",
    "build_manifest",
    "check",
    "create_state",
    "estimate_memory",
    "jit_train_step",
    "lower_train_step",
    "make_eval_step",
    "make_train_step",
    "open_source",
    "phases",
    "resolve",
    "run_mesh",
    "table",
    "train",
]
