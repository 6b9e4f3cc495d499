"""XLA, NCCL and allocator settings that a GPU run wants, applied in the open: printed, and never over a setting the
person made.

They enter through environment variables, so they must be set before JAX starts its backend. Each has its reason. A
flag that the installed XLA does not know (`devices.known_to_xla`) is left out, and that is said.
"""

import subprocess
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.devices.jax_versions import ALL_GATHER_PIPELINING, REDUCE_SCATTER_PIPELINING
from halfbyte.devices.xla import known_to_xla

GIB = 2**30
PIPELINING = "COLLECTIVE_PIPELINING_MODE_"
OPTIONS = {"true": True, "false": False, "on": f"{PIPELINING}ON", "off": f"{PIPELINING}OFF"}


@dataclass(frozen=True)
class Setting:
    """One flag (`xla_...`, joined into XLA_FLAGS) or environment variable, with its reason."""

    name: str
    value: str
    why: str
    formerly: "Setting | None" = None  # what an older XLA calls it

    @property
    def is_flag(self) -> bool:
        """True for an XLA flag, False for an environment variable."""
        return self.name.startswith("xla_")

    @property
    def assignment(self) -> str:
        """As a person would write it, in XLA_FLAGS or in a shell."""
        return f"{'--' if self.is_flag else ''}{self.name}={self.value}"

    @property
    def option(self) -> Any:
        """Its value where one compilation is given it, and not XLA_FLAGS."""
        return OPTIONS.get(self.value, int(self.value) if self.value.isdigit() else self.value)


# Weights are gathered a turn of the layers' loop ahead, gradients scattered a turn late (XLA's own default), and all of
# them may be under way at once: so each has a whole turn's GEMMs to hide behind. With fewer allowed, XLA ends one to
# start the next. They are not combined beyond XLA's own sizes. docs/distributed.md has what compiled schedules show.
SCHEDULED = Setting("xla_gpu_enable_latency_hiding_scheduler", "true", "overlap FSDP gathers with GEMMs")
WHY_AHEAD = "a layer's weights travel beside the GEMMs of the last"
AHEAD = Setting(ALL_GATHER_PIPELINING[0], "on", WHY_AHEAD, Setting(ALL_GATHER_PIPELINING[1], "true", WHY_AHEAD))


def under_way(count: int) -> Setting:
    """How many collectives may be under way at once."""
    return Setting("xla_gpu_experimental_parallel_collective_overlap_limit", str(count), "none waits for another's end")


EVERY_GPU = (SCHEDULED, AHEAD, under_way(16))
SERIAL = (SCHEDULED,)
COMBINED = tuple(
    Setting(f"xla_gpu_{kind}_combine_threshold_bytes", str(GIB), "one a layer, not one a weight")
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
)
DOUBLED = Setting("xla_gpu_enable_while_loop_double_buffering", "true", "two layers a turn of the loop")
# Gradients scattered in the turn that makes them: XLA copies none of them into the next. Those of attention's linears
# are made last and partly in the open, more of them the larger the model (docs/distributed.md).
WHY_OWN_TURN = "gradients are not copied into the next turn of the loop"
OWN_TURN = (
    Setting(REDUCE_SCATTER_PIPELINING[0], "off", WHY_OWN_TURN,
            Setting(REDUCE_SCATTER_PIPELINING[1], "false", WHY_OWN_TURN)),
    Setting("xla_gpu_reduce_scatter_combine_threshold_bytes", "0", "each gradient leaves as soon as it is there"),
    Setting("xla_gpu_memory_limit_slop_factor", "300", "XLA counts a loop's stacks twice, and orders to save memory"),
)  # fmt: skip
# The sets that `halfbyte bench --flags` selects from: the same program under other flags of XLA.
FLAG_SETS: dict[str, tuple[Setting, ...]] = {
    "recommended": EVERY_GPU,
    "none": (),
    "serial": SERIAL,
    "four": (SCHEDULED, under_way(4)),
    "ahead-serial": (SCHEDULED, AHEAD),
    "combined": SERIAL + COMBINED,
    "combined-ahead": (*EVERY_GPU, *COMBINED),
    "doubled": (*EVERY_GPU, DOUBLED),
    "own-turn": (*EVERY_GPU, *OWN_TURN),
}
# Hopper only: NVIDIA's tuning guide for JAX advises against a single queue on Blackwell.
HOPPER = (Setting("CUDA_DEVICE_MAX_CONNECTIONS", "1", "collectives launch before the GEMM they hide behind"),)
# The rest of the card is for the CUDA context and the kernels; NCCL takes its buffers from there as well.
ONE_GPU = (
    Setting("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.97", "the default of 0.75 leaves a quarter of the card unused"),
)
MANY_GPUS = (
    Setting("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92", "the default of 0.75 leaves a quarter of the card unused"),
    Setting("NCCL_NVLS_ENABLE", "1", "reductions inside the NVLink switch"),
)


# Both flags: the first also keeps the compiler from choosing by the clock, the second names what it then leaves out.
REPEATABLE = (
    Setting("xla_gpu_deterministic_ops", "true", "the same bits every time: attention's backward pass, scatters"),
    Setting("xla_gpu_exclude_nondeterministic_ops", "true", "no kernel that adds up in an order of its own"),
)


def repeatable(autotuned: Path) -> tuple[Setting, ...]:
    """Settings of `--deterministic` on a GPU. What autotuning chose is kept in the file `autotuned` of the run
    directory, and a resumed run takes it from there."""
    if autotuned.exists():
        kept = Setting("xla_gpu_load_autotune_results_from", str(autotuned), "the kernels that the run began with")
    else:
        kept = Setting("xla_gpu_dump_autotune_results_to", str(autotuned), "a resumed run takes the same kernels")
    return (*REPEATABLE, kept)


def recommended(device: str, *, several: bool, flags: str = "recommended") -> tuple[Setting, ...]:
    """Settings for a GPU by its product name (`NVIDIA H200`), with the flags of XLA that a set of FLAG_SETS names; none
    for anything else.
    """
    name = device.upper()
    if not any(word in name for word in ("NVIDIA", "H100", "H200", "B200", "B300")):
        return ()
    family = HOPPER if any(word in name for word in ("H100", "H200")) else ()
    return FLAG_SETS[flags] + family + (MANY_GPUS if several else ONE_GPU)


def visible_gpus() -> list[str]:
    """Product names from the driver's own tool; empty where there is none. JAX is not started."""
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listing = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listing.stdout.splitlines() if line.strip()]


@dataclass(frozen=True)
class Applied:
    """What became of a setting: `value` is what now holds, None where it was left out. As text, a line for the log."""

    setting: Setting
    value: str | None
    kept: bool = False

    def __str__(self) -> str:
        setting = self.setting
        if self.kept:
            against = "" if self.value == setting.value else f", not {setting.value} ({setting.why})"
            return f"kept as you set it: {setting.name}={self.value}{against}"
        if self.value is None:
            return f"left out, this XLA does not know it: {setting.assignment}"
        return f"set {setting.assignment}  ({setting.why})"

    def to_json(self) -> dict[str, Any]:
        """The setting by name, what holds, and whether the person set it."""
        return {"name": self.setting.name, "value": self.value, "kept": self.kept}


def apply(
    settings: tuple[Setting, ...], environ: MutableMapping[str, str], *, known: Callable[[str], bool] = known_to_xla
) -> list[Applied]:
    """Put settings into `environ` where the person has not; what became of each."""
    return [_apply(setting, environ, known) for setting in settings]


def as_known(settings: tuple[Setting, ...], known: Callable[[str], bool] = known_to_xla) -> tuple[Setting, ...]:
    """The settings by the names that the installed XLA has for them."""
    return tuple(each.formerly if each.formerly and not known(each.name) else each for each in settings)


def _apply(setting: Setting, environ: MutableMapping[str, str], known: Callable[[str], bool]) -> Applied:
    names = (setting, setting.formerly) if setting.formerly else (setting,)
    for each in names:
        yours = _already_set(each, environ)
        if yours is not None:
            return Applied(each, yours, kept=True)
    (setting,) = as_known((setting,), known)
    if setting.is_flag and not known(setting.name):
        return Applied(setting, None)
    if setting.is_flag:
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {setting.assignment}".strip()
    else:
        environ[setting.name] = setting.value
    return Applied(setting, setting.value)


def _already_set(setting: Setting, environ: Mapping[str, str]) -> str | None:
    """The value that the person has given, the last where there are several; None where there is none."""
    if not setting.is_flag:
        return environ.get(setting.name)
    given = [word.partition("=") for word in environ.get("XLA_FLAGS", "").split()]
    values = [value or "true" for name, _, value in given if name == f"--{setting.name}"]
    return values[-1] if values else None
