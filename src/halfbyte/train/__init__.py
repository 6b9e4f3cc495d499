"""Training: config, state, the pure step, and the host loop around it."""

import datetime
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

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


class _CallableRoom(ModuleType):
    """`halfbyte.train` is this room and also a public function: calling the room trains a run."""

    def __call__(self, config: TrainConfig, run_dir: str | Path | None = None, **options: Any) -> RunResult:
        """Train `config` in `run_dir` (default runs/NAME-DATE), silently; a directory with a checkpoint is resumed.

        `options` are those of `train.train`: `allow_change`, `until`, `initial`, `observers`, and `console` to be shown
        what the command line shows.
        """
        date = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        directory = Path(run_dir) if run_dir is not None else Path("runs") / f"{config.name}-{date}"
        options.setdefault("console", Console(quiet=True))
        return train(config, directory, **options)


sys.modules[__name__].__class__ = _CallableRoom
