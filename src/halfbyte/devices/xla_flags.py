"""XLA, NCCL and allocator settings for GPU runs, each with its reason, and which flags the installed XLA knows.

Settings enter through environment variables, so they must be applied before JAX starts its backend. Each applied
setting is logged, and none overrides a setting of the user. A flag that the installed XLA does not know would end the
process, so it is left out, and that is logged too (`is_known_xla_flag`).
"""

import functools
import mmap
import subprocess
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from halfbyte.devices.jax_versions import ALL_GATHER_PIPELINING, REDUCE_SCATTER_PIPELINING

GIB = 2**30
PIPELINING_MODE_PREFIX = "COLLECTIVE_PIPELINING_MODE_"
OPTIONS = {"true": True, "false": False, "on": f"{PIPELINING_MODE_PREFIX}ON", "off": f"{PIPELINING_MODE_PREFIX}OFF"}


@dataclass(frozen=True)
class RuntimeFlag:
    """One flag (`xla_...`, joined into XLA_FLAGS) or environment variable, with its reason."""

    name: str
    value: str
    why: str
    renamed_from: "RuntimeFlag | None" = None  # its name in an older XLA

    @property
    def is_flag(self) -> bool:
        """Returns True for an XLA flag, False for an environment variable."""
        return self.name.startswith("xla_")

    @property
    def assignment(self) -> str:
        """Returns the setting as written in XLA_FLAGS or in a shell."""
        return f"{'--' if self.is_flag else ''}{self.name}={self.value}"

    @property
    def option(self) -> Any:
        """Returns the value as a compiler option of a single compilation."""
        return OPTIONS.get(self.value, int(self.value) if self.value.isdigit() else self.value)


def max_concurrent_collectives(count: int) -> RuntimeFlag:
    """Returns the flag that limits the collectives in flight at once."""
    return RuntimeFlag(
        "xla_gpu_experimental_parallel_collective_overlap_limit", str(count), "none waits for another's end"
    )


# Weights are all-gathered one iteration of the layer loop ahead, gradients reduce-scattered one late (XLA's default).
# All may be in flight at once, so each overlaps with the GEMMs of a whole iteration. With a lower limit, XLA waits for
# one before it starts the next. They are not combined beyond XLA's own sizes. docs/distributed.md shows the schedules.
LATENCY_HIDING_SCHEDULER = RuntimeFlag(
    "xla_gpu_enable_latency_hiding_scheduler", "true", "overlap FSDP gathers with GEMMs"
)
PIPELINED_ALL_GATHER_REASON = "a layer's weights travel beside the GEMMs of the last"
PIPELINED_ALL_GATHER = RuntimeFlag(
    ALL_GATHER_PIPELINING[0],
    "on",
    PIPELINED_ALL_GATHER_REASON,
    RuntimeFlag(ALL_GATHER_PIPELINING[1], "true", PIPELINED_ALL_GATHER_REASON),
)


GPU_FLAGS = (LATENCY_HIDING_SCHEDULER, PIPELINED_ALL_GATHER, max_concurrent_collectives(16))
SCHEDULER_ONLY_FLAGS = (LATENCY_HIDING_SCHEDULER,)
COMBINED = tuple(
    RuntimeFlag(f"xla_gpu_{kind}_combine_threshold_bytes", str(GIB), "one a layer, not one a weight")
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
)
WHILE_LOOP_DOUBLE_BUFFERING = RuntimeFlag(
    "xla_gpu_enable_while_loop_double_buffering", "true", "two layers a turn of the loop"
)
# Gradients are reduce-scattered in the iteration that computes them, so XLA copies none into the next. Those of
# attention's linears come last and are partly exposed, more so the larger the model (docs/distributed.md).
PIPELINED_REDUCE_SCATTER_REASON = "gradients are not copied into the next turn of the loop"
PIPELINED_REDUCE_SCATTER = (
    RuntimeFlag(REDUCE_SCATTER_PIPELINING[0], "off", PIPELINED_REDUCE_SCATTER_REASON,
                RuntimeFlag(REDUCE_SCATTER_PIPELINING[1], "false", PIPELINED_REDUCE_SCATTER_REASON)),
    RuntimeFlag("xla_gpu_reduce_scatter_combine_threshold_bytes", "0", "each gradient leaves as soon as it is there"),
    RuntimeFlag(
        "xla_gpu_memory_limit_slop_factor", "300", "XLA counts a loop's stacks twice, and orders to save memory"),
)  # fmt: skip
# Choices of `halfbyte bench --flags`: the same program under different XLA flags.
FLAG_SETS: dict[str, tuple[RuntimeFlag, ...]] = {
    "recommended": GPU_FLAGS,
    "none": (),
    "serial": SCHEDULER_ONLY_FLAGS,
    "four": (LATENCY_HIDING_SCHEDULER, max_concurrent_collectives(4)),
    "ahead-serial": (LATENCY_HIDING_SCHEDULER, PIPELINED_ALL_GATHER),
    "combined": SCHEDULER_ONLY_FLAGS + COMBINED,
    "combined-ahead": (*GPU_FLAGS, *COMBINED),
    "doubled": (*GPU_FLAGS, WHILE_LOOP_DOUBLE_BUFFERING),
    "own-turn": (*GPU_FLAGS, *PIPELINED_REDUCE_SCATTER),
}
# Hopper only: NVIDIA's tuning guide for JAX advises against a single queue on Blackwell.
HOPPER_FLAGS = (RuntimeFlag("CUDA_DEVICE_MAX_CONNECTIONS", "1", "collectives launch before the GEMM they hide behind"),)
# The rest of the memory is for the CUDA context, kernels and NCCL's buffers.
ONE_GPU = (
    RuntimeFlag("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.97", "the default of 0.75 leaves a quarter of the card unused"),
)
MANY_GPUS = (
    RuntimeFlag("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92", "the default of 0.75 leaves a quarter of the card unused"),
    RuntimeFlag("NCCL_NVLS_ENABLE", "1", "reductions inside the NVLink switch"),
)


# The first flag also disables timing-based autotuning, the second excludes kernels that are not deterministic.
DETERMINISTIC_OPS = (
    RuntimeFlag("xla_gpu_deterministic_ops", "true", "the same bits every time: attention's backward pass, scatters"),
    RuntimeFlag("xla_gpu_exclude_nondeterministic_ops", "true", "no kernel that adds up in an order of its own"),
)


@dataclass(frozen=True)
class AppliedFlag:
    """Outcome of a setting: `value` is the one in effect, None if it was left out. Its `str` is a line for the log."""

    setting: RuntimeFlag
    value: str | None
    set_by_user: bool = False

    def __str__(self) -> str:
        setting = self.setting
        if self.set_by_user:
            against = "" if self.value == setting.value else f", not {setting.value} ({setting.why})"
            return f"kept as you set it: {setting.name}={self.value}{against}"
        if self.value is None:
            return f"left out, this XLA does not know it: {setting.assignment}"
        return f"set {setting.assignment}  ({setting.why})"

    def to_json(self) -> dict[str, Any]:
        """Returns name, value in effect, and whether the user set it."""
        return {"name": self.setting.name, "value": self.value, "kept": self.set_by_user}


@functools.cache
def is_known_xla_flag(flag: str) -> bool:
    """Returns True if the installed XLA library has this flag, that is, a function that sets it.

    The old names of renamed flags are also in the library, but compilation options with an old name are refused.
    """
    spec = find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        return False
    for library in Path(next(iter(spec.submodule_search_locations))).glob("libjax_common.*"):
        with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(f"set_{flag}".encode()) >= 0:
                return True
    return False


def deterministic_flags(autotuned: Path) -> tuple[RuntimeFlag, ...]:
    """Returns the settings of `--deterministic` on a GPU.

    The first start of a run dumps its autotuning results to the file `autotuned`; a resumed run loads them.
    """
    if autotuned.exists():
        cache = RuntimeFlag("xla_gpu_load_autotune_results_from", str(autotuned), "the kernels that the run began with")
    else:
        cache = RuntimeFlag("xla_gpu_dump_autotune_results_to", str(autotuned), "a resumed run takes the same kernels")
    return (*DETERMINISTIC_OPS, cache)


def recommended_flags(device: str, *, several: bool, flags: str = "recommended") -> tuple[RuntimeFlag, ...]:
    """Returns settings for a GPU by its product name (`NVIDIA H200`), with the XLA flags of a set of FLAG_SETS.

    No settings for any other device.
    """
    name = device.upper()
    if not any(word in name for word in ("NVIDIA", "H100", "H200", "B200", "B300")):
        return ()
    family = HOPPER_FLAGS if any(word in name for word in ("H100", "H200")) else ()
    return FLAG_SETS[flags] + family + (MANY_GPUS if several else ONE_GPU)


def visible_gpus() -> list[str]:
    """Returns the product names that nvidia-smi lists; empty without nvidia-smi. Does not start JAX."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listing.stdout.splitlines() if line.strip()]


def apply_flags(
    settings: tuple[RuntimeFlag, ...],
    environ: MutableMapping[str, str],
    *,
    known: Callable[[str], bool] = is_known_xla_flag,
) -> list[AppliedFlag]:
    """Puts settings into `environ` that the user has not set; returns the outcome of each."""
    return [_apply(setting, environ, known) for setting in settings]


def with_installed_names(
    settings: tuple[RuntimeFlag, ...], known: Callable[[str], bool] = is_known_xla_flag
) -> tuple[RuntimeFlag, ...]:
    """Returns the settings by their names in the installed XLA."""
    return tuple(flag.renamed_from if flag.renamed_from and not known(flag.name) else flag for flag in settings)


def _apply(setting: RuntimeFlag, environ: MutableMapping[str, str], known: Callable[[str], bool]) -> AppliedFlag:
    names = (setting, setting.renamed_from) if setting.renamed_from else (setting,)
    for flag in names:
        users_value = _already_set(flag, environ)
        if users_value is not None:
            return AppliedFlag(flag, users_value, set_by_user=True)
    (setting,) = with_installed_names((setting,), known)
    if setting.is_flag and not known(setting.name):
        return AppliedFlag(setting, None)
    if setting.is_flag:
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {setting.assignment}".strip()
    else:
        environ[setting.name] = setting.value
    return AppliedFlag(setting, setting.value)


def _already_set(setting: RuntimeFlag, environ: Mapping[str, str]) -> str | None:
    """Returns the value that the user has set, the last of several; None if there is none."""
    if not setting.is_flag:
        return environ.get(setting.name)
    flags = [word.partition("=") for word in environ.get("XLA_FLAGS", "").split()]
    values = [value or "true" for name, _, value in flags if name == f"--{setting.name}"]
    return values[-1] if values else None
