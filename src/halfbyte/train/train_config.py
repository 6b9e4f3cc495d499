"""Config of a run as one frozen value. Flags, JSON and presets create it; its constructor validates everything.

Top-level fields are the flags that every command shares; the rest lives in groups, reached by dotted flags
(`--optimizer.learning-rate 1e-3`).
"""

import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from halfbyte.distributed import parse_mesh
from halfbyte.io import check_choices, check_float, check_int, check_run_name
from halfbyte.io.dataclass_json import Removed
from halfbyte.io.trusted_programs import UntrustedPinnedProgramError
from halfbyte.models import LlamaConfig
from halfbyte.recipes import (
    Policy,
    Recipe,
    pin_to_digest,
    policy,
    policy_to_text,
    read_policy_text,
    recipe,
    recipe_to_text,
)
from halfbyte.renamed import renamed_members, renamed_value
from halfbyte.train.optimizers import OptimizerConfig, check_warmup

NOISE_SEED_STRIDE = 1_640_531_527  # odd, so that no small seeds of two twins are the same


@renamed_members(twin="noise_seed")
@dataclass(frozen=True)
class PrecisionConfig:
    """How the recipe is carried out, and when it changes."""

    REMOVED: ClassVar = {
        name: Removed(default, "the reset of oscillating weights has no replacement")
        for name, default in (("reset_at", 0.0), ("reset_every", 200), ("reset_over", 50), ("reset_ratio", 8.0))
    }

    backend: str = "auto"
    """Of the quantized GEMMs: auto, reference, emulated, fused, fp8 or native."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of activations."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the gradients of matrices while fsdp adds them up: bfloat16 sends half the bytes and rounds every summand."""
    switch_at: float = 0.0
    """Leave the recipe at this step (1 or more) or fraction of the run; 0: never."""
    switch_to: str = "bf16"
    """The recipe from then on."""
    switch_part: Literal["forward", "backward", "both"] = "both"
    """Which GEMMs change: forward is fprop, backward is dgrad and wgrad."""
    noise_seed: int = 0
    """A run that is equal but for rounding: other random bits, and master weights that begin a millionth away; 0: none.
    What two of them differ by is noise."""

    def __post_init__(self) -> None:
        check_choices(self, group="precision.")
        object.__setattr__(self, "backend", renamed_value("backend", self.backend))
        object.__setattr__(self, "switch_to", _canonical_recipe_text(self.switch_to))
        with suppress(UntrustedPinnedProgramError):  # a program of a stored config is refused where it would run
            recipe(self.switch_to)
        wanted = "0 (never), a fraction or a step"
        check_float("precision.switch_at", self.switch_at, holds=self.switch_at >= 0, wanted=wanted)
        check_int("precision.noise_seed", self.noise_seed, zero="none")


LARGEST_SCALE, SMALLEST_SCALE = 2.0**24, 2.0**-24
"""Between which a loss scale stays: its inverse must be a normal number, or gradients come out as zero."""


@dataclass(frozen=True)
class LossScaleConfig:
    """Dynamic loss scaling by powers of two, which move no 4-bit code. An overflow skips the step and halves."""

    mode: Literal["off", "dynamic"] = "off"
    initial: float = 2.0**15
    growth_interval: int = 2000
    """Steps without overflow before the scale doubles."""

    def __post_init__(self) -> None:
        check_choices(self, group="loss_scale.")
        power_of_two = 0 < self.initial <= LARGEST_SCALE and math.frexp(self.initial)[0] == 0.5
        check_float("loss_scale.initial", self.initial, holds=power_of_two, wanted="a power of two, at most 2**24")
        check_int("loss_scale.growth_interval", self.growth_interval, least=1)


@dataclass(frozen=True)
class ValidationConfig:
    """Validation loss, per source, at intervals and at the end."""

    every: int = 0
    """Steps between validations; 0: only at the end."""
    at_end: bool = True
    """Whether the last step has one, too. Without any, nothing is compiled for it."""
    batches: int = 16
    """Batches a source; 0: the whole split."""

    def __post_init__(self) -> None:
        check_int("validation.every", self.every, zero="only at the end")
        check_int("validation.batches", self.batches, zero="the whole split")


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep."""

    every: int = 500
    """Steps between checkpoints; the last step is always saved. 0: only the last."""
    keep_last: int = 2
    keep_every: int = 0
    """Keep every checkpoint whose step is a multiple of this; 0: none."""

    def __post_init__(self) -> None:
        check_int("checkpoint.every", self.every, zero="only the last")
        check_int("checkpoint.keep_last", self.keep_last, least=1)
        check_int("checkpoint.keep_every", self.keep_every, zero="none")


@renamed_members(returns="max_rollbacks", skips="max_skipped_steps", spike="spike_threshold")
@dataclass(frozen=True)
class GuardConfig:
    """When a run has diverged, and how often it may roll back."""

    max_skipped_steps: int = 3
    """Steps in a row with a loss or gradient that is not finite: skipped and counted up to here, then the run has
    diverged. Under dynamic loss scaling overflows are expected, and 25 are allowed."""
    spike_threshold: float = 0.0
    """The loss has spiked when it exceeds this many times the median of the last 64 steps; 0: not looked at."""
    max_rollbacks: int = 3
    """How often the run may go back to a checkpoint (divergence, spike, weights changed in memory) before it stops."""

    def __post_init__(self) -> None:
        check_int("guard.max_skipped_steps", self.max_skipped_steps)
        check_int("guard.max_rollbacks", self.max_rollbacks)
        threshold, sane = self.spike_threshold, not self.spike_threshold or 1.0 < self.spike_threshold < 1e6
        check_float("guard.spike_threshold", threshold, holds=sane, wanted="0 (off) or between 1 and a million")


@dataclass(frozen=True)
class LogConfig:
    """Where metrics are written in addition to metrics.jsonl."""

    every: int = 1
    """Steps between printed lines (not on a terminal, which shows all)."""
    tensorboard: bool = True
    wandb: str = ""
    """Project of Weights & Biases; needs the extra `wandb`."""

    def __post_init__(self) -> None:
        check_int("log.every", self.every, least=1)


@dataclass(frozen=True)
class TrainConfig:
    """Everything that defines a run."""

    name: str
    model: LlamaConfig
    recipe: str = "nvfp4"
    """bf16, fp8, mxfp8, mxfp4, nvfp4, nvfp4_no_rht, ... (`halfbyte recipes`), or FILE.py:NAME for one of your own."""
    policy: str = "mlp"
    """Which linears: mlp, experts, all_linear, paper, rules ("all_linear; layers[-4:]=bf16"), @FILE, FILE.py:NAME."""
    mesh: str = ""
    """AXIS=SIZE,... over data, fsdp, expert, tensor, context; empty: fsdp over all devices."""
    data: str = "demo"
    """A prepared directory, several as DIR:WEIGHT,DIR:WEIGHT, `demo`, or `synthetic`."""
    init_from: str = ""
    """Begin with the weights of this run or Hugging Face folder, at step 0; empty: random ones by the seed."""
    steps: int = 1000
    batch: int = 32
    """Sequences of a global step."""
    seq: int = 0
    """Tokens a sequence; 0: as the data set was packed."""
    accumulate: int = 1
    """Microbatches a step."""
    seed: int = 0
    z_loss: float = 0.0
    balance_loss: float = 0.01
    """Of models with experts: weight of the loss that keeps their load even, the mean over layers (1 where it is)."""
    router_z_loss: float = 0.0
    """Of models with experts: weight of the mean squared logsumexp of their routers' logits."""
    balance_rate: float = 0.001
    """Of models with sigmoid routers: how far a step moves the bias of an expert that has not the mean load."""
    remat: Literal["none", "dots", "full", "quantized"] = "none"
    unroll: int = 1
    """Layers a loop iteration; 0: all, no loop. Faster on a GPU (nothing is copied in and out), slower to compile.
    Norms are kernels without a loop, and in one of single layers without remat: their sums have another order than
    XLA's and now and then another last bit."""
    schedule_by: Literal["roofline", "xla"] = "roofline"
    """On several GPUs: how long things take when XLA orders a step. A roofline of the program itself (compiled twice,
    once where it is kept), or XLA's own guess."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    radar: int = 0
    """Steps between probes of every quantized GEMM against what its recipe gives (radar.jsonl); 0: none."""
    telemetry: int = 0
    """Steps between records of every operand: amax, shares that round to zero or saturate; 0: none."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    on_divergence: Literal["stop", "fp8", "bf16"] = "stop"
    """When the loss is not finite or spikes: stop, or go back to the last checkpoint, skip the data since and go on in
    this precision."""
    deterministic: bool = False
    """On a GPU: only operations that give the same bits every time; slower. On a CPU runs repeat themselves anyway."""
    watchdog_s: float = 1800.0
    """End every rank, naming the one that hangs, when no step has ended for this long; 0: off."""
    compile_cache: str = ""
    """Directory that keeps compiled programs between runs; empty: off."""

    def __post_init__(self) -> None:
        check_run_name(self.name)
        object.__setattr__(self, "recipe", _canonical_recipe_text(self.recipe))
        parse_mesh(self.mesh)
        value: Any = self.policy  # the rules, not the file, are what a run is
        rules = policy_to_text(value) if isinstance(value, Policy) else pin_to_digest(read_policy_text(value))
        object.__setattr__(self, "policy", rules)
        with suppress(UntrustedPinnedProgramError):
            policy(self.policy, recipe(self.recipe))
        check_choices(self)
        for name in ("steps", "batch", "accumulate"):
            check_int(name, getattr(self, name), least=1)
        if self.batch % self.accumulate:
            raise ValueError(
                f"batch {self.batch} does not split into {self.accumulate} microbatches (accumulate); "
                "make batch a multiple of accumulate"
            )
        check_int("seq", self.seq, zero="as the data set was packed")
        if self.seq > self.model.max_seq:
            raise ValueError(
                f"seq must be between 1 and the model's max_seq {self.model.max_seq}, got {self.seq}; "
                f"raise max_seq, too: --model.max-seq {self.seq}"
            )
        check_int("unroll", self.unroll, zero="all layers")
        check_int("seed", self.seed)
        check_int("radar", self.radar, zero="none")
        check_int("telemetry", self.telemetry, zero="none")
        for name in ("z_loss", "balance_loss", "router_z_loss", "balance_rate"):
            check_float(name, getattr(self, name), holds=getattr(self, name) >= 0, wanted="0 or more")
        check_float("watchdog_s", self.watchdog_s, holds=self.watchdog_s >= 0, wanted="0 (off) or more seconds")
        check_warmup(self.optimizer, self.steps)

    @property
    def rounding_seed(self) -> int:
        """Returns the seed of stochastic rounding; initialization and data order use `seed`."""
        return (self.seed + NOISE_SEED_STRIDE * self.precision.noise_seed) % 2**31


def _canonical_recipe_text(value: Any) -> str:
    """Returns a recipe as the config stores it: its name, its file with the file's hash, or all its fields."""
    return recipe_to_text(value) if isinstance(value, Recipe) else pin_to_digest(value)


RESUME_GUARDED_FIELDS = (
    "model", "recipe", "policy", "precision", "optimizer", "loss_scale",
    "data", "batch", "seq", "accumulate", "seed", "z_loss", "balance_loss", "router_z_loss", "balance_rate",
    "init_from", "unroll",
)  # fmt: skip
"""Fields that may not change when a run resumes, unless the person says so: they change what is computed."""
RESUME_IGNORED_FIELDS = ("model.name", "precision.backend")
"""Those of them that change nothing."""
