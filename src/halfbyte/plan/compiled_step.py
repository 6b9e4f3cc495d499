"""Profile a step without times: events, memory and FLOPs, from the compiled program or only from the config."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from halfbyte import models, ops
from halfbyte.devices import target_cudnn, topology
from halfbyte.devices.compile_target import CUDA_PLUGINS, any_installed
from halfbyte.devices.xla_flags import FLAG_SETS, with_installed_names
from halfbyte.distributed import parse_mesh
from halfbyte.distributed.mesh import total_axis_sizes
from halfbyte.hlo import HloModule, find_gemms, parse_hlo
from halfbyte.io.disk_cache import cached_json, is_cached
from halfbyte.plan import analytic_step
from halfbyte.plan.analytic_step import fp4_calls, planned_gemms
from halfbyte.plan.cluster_model import ClusterModel, axes_across_racks
from halfbyte.plan.operand_traffic import compulsory_bytes
from halfbyte.plan.simulator import StepEvent, event_from_json, events_of_program, iter_events
from halfbyte.plan.step_placement import (
    EXPERT_LINEARS,
    REMAT_LINEARS,
    balanced_expert_load,
    compile_step,
    needed_flops,
    peak_bytes,
)
from halfbyte.train import TrainConfig, abstract_state, phases, run_mesh
from halfbyte.train.preflight import run_preflight, shard_bytes
from halfbyte.train.train_step import compiler_options

NATIVE_GEMM_KINDS = ("block-scaled", "mosaic")  # HloGemm.kind of GEMMs over codes: cuDNN's, and the grouped kernel
PROGRESS_INTERVAL_S = 15.0  # seconds between two progress lines
FLAGS = "recommended"  # the XLA flag set that `train` uses by default


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """Events, memory and FLOPs of one device in a step."""

    compiled: bool
    events: tuple[StepEvent, ...]
    memory: Mapping[str, float]
    """Bytes by category."""
    needed_flops: float
    """FLOPs that the GEMMs of linears and routers need."""
    filling_flops: float
    """FLOPs of padding rows in tiles, of expert GEMMs and of block-scaled GEMMs."""
    native: int
    """Calls of native FP4 GEMMs, including those of experts."""
    native_expected: int
    compulsory: float | None
    """Bytes that quantized operands must move; None if `compulsory_bytes` does not apply."""

    @property
    def gemm_flops(self) -> float:
        """Returns the FLOPs of the linears' GEMMs in a step."""
        return sum(times * event.flops for event, times in self._linears())

    @property
    def remade_flops(self) -> float:
        """Returns the GEMM FLOPs that XLA's rematerialization repeats to save memory.

        XLA names the copies of an instruction `NAME.remat...`; all but the first count.
        """
        first_copy: dict[str, str] = {}
        copies = (
            (first_copy.setdefault(event.name.partition(".remat")[0], event.name), event, times)
            for event, times in self._linears()
        )
        return sum(times * event.flops for original, event, times in copies if original != event.name)

    def _linears(self) -> Iterator[tuple[StepEvent, int]]:
        return (
            (event, times)
            for event, times in iter_events(self.events)
            if event.what == "gemm" and event.purpose != "attention"
        )

    @property
    def operand_bytes(self) -> float:
        """Returns the bytes that quantize passes move."""
        return sum(times * event.moved for event, times in iter_events(self.events) if event.purpose == "operands")

    @property
    def bytes_needed(self) -> float:
        """Returns the bytes of device memory, all categories together."""
        return sum(self.memory.values())


def can_compile() -> bool:
    """Returns True if the CUDA compiler plugin is installed; `check_cuda_compiler` asks for `ptxas`, too."""
    return any_installed(CUDA_PLUGINS)


def profile_step(
    config: TrainConfig, cluster: ClusterModel, flags: str = FLAGS, *, say: Callable[[str], None]
) -> StepProfile:
    """Returns the profile of the step of `config` on `cluster`, compiled with a set of XLA flags and cached on disk.

    It is computed from the config instead if the compiler plugin is missing or no program can fit.
    """
    if not can_compile() or analytic_step.memory_floor(config) > cluster.usable_bytes:
        return profile_from_config(config, cluster)

    def compile_profile() -> dict[str, Any]:
        with report_compile_progress(
            f"{config.name} in {config.recipe} on {cluster.count} {cluster.device.name} ({config.mesh})", say
        ):
            return dataclasses.asdict(profile_compiled_step(config, cluster, flags))

    profile = cached_json("plan", profile_cache_key(config, cluster, flags), compile_profile, say=say)
    return StepProfile(**{**profile, "events": tuple(event_from_json(event) for event in profile["events"])})


def is_profile_cached(config: TrainConfig, cluster: ClusterModel) -> bool:
    """Returns True if `profile_step` would return without compiling."""
    return is_cached("plan", profile_cache_key(config, cluster))


def profile_cache_key(config: TrainConfig, cluster: ClusterModel, flags: str = FLAGS) -> dict[str, Any]:
    """Returns everything that a profile depends on, except source and versions (the cache adds those)."""
    return {"config": dataclasses.asdict(config), "on": str(cluster), "flags": flags}


@contextlib.contextmanager
def report_compile_progress(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Report through `say` that `what` is compiled: at the start, every PROGRESS_INTERVAL_S and at the end."""
    start, ended = time.monotonic(), threading.Event()

    def report() -> None:
        while not ended.wait(PROGRESS_INTERVAL_S):
            say(f"  ... {time.monotonic() - start:.0f} s")

    say(f"compiling {what} ...")
    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
        say(f"  compiled and read in {time.monotonic() - start:.0f} s")
    finally:
        ended.set()
        reporter.join()


def profile_from_config(config: TrainConfig, cluster: ClusterModel) -> StepProfile:
    """Returns the analytic profile, computed from shapes only."""
    linears = planned_gemms(config, cluster.device)
    native = fp4_calls(linears)
    return StepProfile(
        compiled=False,
        events=analytic_step.analytic_step_events(config, cluster, linears),
        memory=analytic_step.analytic_memory(config),
        needed_flops=required_gemm_flops(config) / cluster.count,
        filling_flops=_padding_flops(config, cluster),
        native=native,
        native_expected=native,
        compulsory=_compulsory(config),
    )


def required_gemm_flops(config: TrainConfig) -> float:
    """Returns the GEMM FLOPs of a step on all devices, including the second fprop GEMM of two-term recipes."""
    sites = {site.path: site.flops / 3 / config.model.layers for site in
             models.linear_shapes(config.model, config.batch, config.seq)}  # fmt: skip
    total = float(sum(needed_flops(config).values()))
    for segment in phases(config)[0].resolved(config).segments:
        for path, recipe in segment.recipes.items():
            if recipe.remainder:
                calls = 2 if path in REMAT_LINEARS[config.remat] else 1
                total += (segment.stop - segment.start) * sites[path] * calls
    return total


def profile_compiled_step(config: TrainConfig, cluster: ClusterModel, flags: str = FLAGS) -> StepProfile:
    """Compile the trainer's step with a set of XLA flags and return its profile."""
    mesh = run_mesh(config, np.array(topology(cluster.device, hosts=cluster.hosts, per_host=cluster.per_host).devices))
    run_preflight(config, mesh, seq=config.seq, device=cluster.device, memory=None)
    step_options = compiler_options(config, mesh, phases(config)[0].resolved(config)) or {}
    options = {
        flag.name: flag.option for flag in with_installed_names(FLAG_SETS[flags]) if flag.name not in step_options
    }
    with ops.compile_for(cluster.device), target_cudnn():
        return parse_compiled_step(compile_step(config, mesh, seq=config.seq, options=options), config, mesh, cluster)


def parse_compiled_step(compiled: Any, config: TrainConfig, mesh: Mesh, cluster: ClusterModel) -> StepProfile:
    """Returns the profile of a compiled step. Raises HloParseError for an instruction that cannot be interpreted."""
    program, state = parse_hlo(compiled.as_text()), abstract_state(config, mesh)
    weights, load = shard_bytes(state.params), balanced_expert_load(config, cluster.count)
    gemms = find_gemms(program, turns=load.trip_count, branches=load.branches)
    linears = planned_gemms(config, cluster.device)
    return StepProfile(
        compiled=True,
        events=events_of_program(program, dict(mesh.shape), axes_across_racks(config.mesh, cluster), load),
        memory=_memory(peak_bytes(compiled), program, config, weights=weights, state=shard_bytes(state)),
        needed_flops=required_gemm_flops(config) / cluster.count,
        filling_flops=_padding_flops(config, cluster) + sum(gemm.padding_flops for gemm in linears),
        native=sum(gemm.execution_count for gemm in gemms if gemm.kind in NATIVE_GEMM_KINDS and gemm.format == "fp4"),
        native_expected=fp4_calls(linears),
        compulsory=_compulsory(config),
    )


def _padding_flops(config: TrainConfig, cluster: ClusterModel) -> float:
    needed = sum(flops for path, flops in needed_flops(config).items() if path in EXPERT_LINEARS)
    return (balanced_expert_load(config, cluster.count).filled - 1) * needed / cluster.count


def _compulsory(config: TrainConfig) -> float | None:
    """Returns `compulsory_bytes`; None without quantized linears, with per-tensor formats, or with accumulation.

    With per-tensor scales XLA fuses away some of the bytes that `compulsory_bytes` counts.
    """
    segments = phases(config)[0].resolved(config).segments
    blocks = [r.fprop_x.format.block for segment in segments for r in segment.recipes.values() if r.quantized]
    if not blocks or None in blocks or config.accumulate > 1:
        return None
    return compulsory_bytes(config, total_axis_sizes(parse_mesh(config.mesh)))


def _memory(total: int, program: HloModule, config: TrainConfig, *, weights: int, state: int) -> dict[str, float]:
    """Returns XLA's total memory by category.

    Weights and optimizer are exact. Residuals are the stacks that the forward loop writes for the backward loop,
    workspace is the largest scratch buffer of a library call, and activations are the remainder.
    """
    other = max(total - state, 0)
    gradients = min(weights, other)
    residuals = min(_stacked_residual_bytes(program, config.model.layers), other - gradients)
    scratch = (
        array.bytes
        for call in program.instructions.values()
        if call.opcode == "custom-call"
        for array in call.results[1:]
    )
    workspace = min(max(scratch, default=0), other - gradients - residuals)
    return {
        "weights": weights,
        "optimizer": state - weights,
        "gradients": gradients,
        "residuals": residuals,
        "activations": other - gradients - residuals - workspace,
        "workspace": workspace,
    }


def _stacked_residual_bytes(program: HloModule, layers: int) -> int:
    """Returns the bytes of the largest set of stacked arrays [layers, ...] that a loop outputs.

    Arrays with the shape and dtype of a program input are left out: they are weights, moments and gradients.
    """
    entry = program.computations[program.entry]
    inputs = {array for instruction in entry if instruction.opcode == "parameter" for array in instruction.results}
    loops = [
        [array for array in instruction.results if array not in inputs]
        for instruction in entry
        if instruction.opcode == "while"
    ]
    return max(
        (sum(array.bytes for array in outputs if len(array.dims) > 2 and array.dims[0] == layers) for outputs in loops),
        default=0,
    )
