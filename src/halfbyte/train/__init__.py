"""Training: config, state, the pure step, the host loop around it, optimizers, metrics and profiles.

`halfbyte.train` is this package and also a public function: calling the package trains a run.
"""

import datetime
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from halfbyte.renamed import old_names
from halfbyte.train.train_config import (
    CheckpointConfig,
    GuardConfig,
    LogConfig,
    LossScaleConfig,
    PrecisionConfig,
    TrainConfig,
    ValidationConfig,
)

if TYPE_CHECKING:
    from halfbyte.train.batch_source import BatchSource, open_batch_source
    from halfbyte.train.loop import DivergedError, RunResult
    from halfbyte.train.manifest_entries import PrecisionManifest, manifest_table
    from halfbyte.train.metric_writers import (
        BackgroundSink,
        FaultTolerantSink,
        JsonlSink,
        Sink,
        TensorBoardSink,
        WandbSink,
    )
    from halfbyte.train.metrics_log import (
        DeferredMetrics,
        FinishedStep,
        Throughput,
        append_row,
        missing_steps,
        parse_metric,
        read_rows,
        read_rows_until,
        replace_nonfinite,
        weighted_peak_flops,
    )
    from halfbyte.train.optimizers import (
        OptimizerConfig,
        adamw,
        apply_updates,
        check_warmup,
        clip_by_norm,
        global_norm,
        learning_rate_schedule,
        muon,
        resolve_steps,
    )
    from halfbyte.train.precision_manifest import build_precision_manifest
    from halfbyte.train.precision_phases import PrecisionPhase, phases, resolve_policy
    from halfbyte.train.preflight import MemoryEstimate, estimate_memory, run_mesh, run_preflight
    from halfbyte.train.profiler import ProfileCapture, ProfileConfig
    from halfbyte.train.progress_display import CompileIndicator, ProgressDisplay, make_display
    from halfbyte.train.run import train
    from halfbyte.train.train_state import Observer, StepSnapshot, TrainState, abstract_state, create_state
    from halfbyte.train.train_step import (
        abstract_batch,
        jit_train_step,
        lower_train_step,
        make_eval_step,
        make_train_step,
    )

# Names of modules that take half a second to import: a config, and the help of a command, need none of them.
_LATER = {
    "batch_source": ("BatchSource", "open_batch_source"),
    "loop": ("DivergedError", "RunResult"),
    "metric_writers": ("BackgroundSink", "FaultTolerantSink", "JsonlSink", "Sink", "TensorBoardSink", "WandbSink"),
    "metrics_log": (
        "FinishedStep",
        "DeferredMetrics",
        "Throughput",
        "append_row",
        "replace_nonfinite",
        "missing_steps",
        "weighted_peak_flops",
        "parse_metric",
        "read_rows",
        "read_rows_until",
    ),
    "optimizers": (
        "OptimizerConfig",
        "adamw",
        "apply_updates",
        "check_warmup",
        "clip_by_norm",
        "global_norm",
        "learning_rate_schedule",
        "muon",
        "resolve_steps",
    ),
    "manifest_entries": ("PrecisionManifest", "manifest_table"),
    "precision_manifest": ("build_precision_manifest",),
    "precision_phases": ("PrecisionPhase", "phases", "resolve_policy"),
    "preflight": ("MemoryEstimate", "run_preflight", "estimate_memory", "run_mesh"),
    "profiler": ("ProfileCapture", "ProfileConfig"),
    "progress_display": ("CompileIndicator", "ProgressDisplay", "make_display"),
    "run": ("train",),
    "train_state": ("Observer", "StepSnapshot", "TrainState", "abstract_state", "create_state"),
    "train_step": ("abstract_batch", "jit_train_step", "lower_train_step", "make_eval_step", "make_train_step"),
}
_attribute = old_names(__name__, _LATER)


class _CallablePackage(ModuleType):
    """Resolves lazy names; `halfbyte.train(config)` trains a run."""

    def __getattr__(self, name: str) -> Any:
        return _attribute(name)

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


sys.modules[__name__].__class__ = _CallablePackage
