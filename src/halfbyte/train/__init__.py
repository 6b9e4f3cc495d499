"""Training: config, state, the pure step, and the host loop around it."""

import datetime
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .config import (
    CheckpointConfig,
    GuardConfig,
    LogConfig,
    LossScaleConfig,
    PrecisionConfig,
    TrainConfig,
    ValidationConfig,
)

if TYPE_CHECKING:
    from .loop import Diverged, RunResult
    from .manifest_table import table
    from .observing import Moment, Observer
    from .precision import Phase, phases, resolve
    from .precision_manifest import Manifest, build_manifest
    from .preflight import MemoryEstimate, check, estimate_memory, run_mesh
    from .run import train
    from .source import Source, open_source
    from .state import TrainState, abstract_state, create_state
    from .step import abstract_batch, jit_train_step, lower_train_step, make_eval_step, make_train_step

# Names of modules that take half a second to import: a config, and the help of a command, need none of them.
_LATER = {
    "loop": ("Diverged", "RunResult"),
    "manifest_table": ("table",),
    "observing": ("Moment", "Observer"),
    "precision": ("Phase", "phases", "resolve"),
    "precision_manifest": ("Manifest", "build_manifest"),
    "preflight": ("MemoryEstimate", "check", "estimate_memory", "run_mesh"),
    "run": ("train",),
    "source": ("Source", "open_source"),
    "state": ("TrainState", "abstract_state", "create_state"),
    "step": ("abstract_batch", "jit_train_step", "lower_train_step", "make_eval_step", "make_train_step"),
}
_HOME = {name: module for module, names in _LATER.items() for name in names}


class _CallableRoom(ModuleType):
    """`halfbyte.train` is this room and also a public function: calling the room trains a run."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        setattr(self, name, value)
        return value

    def __call__(self, config: TrainConfig, run_dir: str | Path | None = None, **options: Any) -> "RunResult":
        """Train `config` in `run_dir` (default runs/NAME-DATE), silently; a directory with a checkpoint is resumed.

        `options` are those of `train.train`: `allow_change`, `until`, `initial`, `observers`, and `console` to be shown
        what the command line shows.
        """
        from rich.console import Console

        date = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        directory = Path(run_dir) if run_dir is not None else Path("runs") / f"{config.name}-{date}"
        options.setdefault("console", Console(quiet=True))
        result: RunResult = self.train(config, directory, **options)
        return result


sys.modules[__name__].__class__ = _CallableRoom
