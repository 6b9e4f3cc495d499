"""What a plan knows of a step before it asks how long it takes: from the compiled program, or from the config alone."""

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
)
from halfbyte.train import TrainConfig, abstract_state, phases, run_mesh
from halfbyte.train.preflight import run_preflight, shard_bytes
from halfbyte.train.train_step import compiler_options

NATIVE_GEMM_KINDS = ("block-scaled", "mosaic")  # who multiplies codes as they are: a library, or our kernel of experts
PROGRESS_INTERVAL_S = 15.0  # seconds between two signs of life
FLAGS = "recommended"  # of XLA, which `train` sets


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """One device's part of a step."""

    compiled: bool
    events: tuple[StepEvent, ...]
    memory: Mapping[str, float]
    """Bytes by category."""
    needed_flops: float
    """Of the GEMMs of linears and routers."""
    filling_flops: float
    """Of rows that only fill tiles up: experts', and those of block-scaled GEMMs."""
    native: int
    """Native FP4 GEMMs of a step, experts' too."""
    native_expected: int
    compulsory: float | None
    """Bytes that operands must move; None where nobody can say."""

    @property
    def gemm_flops(self) -> float:
        """Multiplied by the linears' GEMMs in a step."""
        return sum(times * each.flops for each, times in self._linears())

    @property
    def remade_flops(self) -> float:
        """Of these, what XLA multiplies again for want of memory: all but the first of an instruction's copies, which
        it names so."""
        first: dict[str, str] = {}
        made = ((first.setdefault(e.name.partition(".remat")[0], e.name), e, times) for e, times in self._linears())
        return sum(times * each.flops for earliest, each, times in made if earliest != each.name)

    def _linears(self) -> Iterator[tuple[StepEvent, int]]:
        return ((e, times) for e, times in iter_events(self.events) if e.what == "gemm" and e.purpose != "attention")

    @property
    def operand_bytes(self) -> float:
        """Moved to make operands."""
        return sum(times * each.moved for each, times in iter_events(self.events) if each.purpose == "operands")

    @property
    def bytes_needed(self) -> float:
        """Of a device's memory."""
        return sum(self.memory.values())


def can_compile() -> bool:
    """Returns True if the CUDA compiler plugin is installed; `check_cuda_compiler` asks for `ptxas`, too."""
    return any_installed(CUDA_PLUGINS)


def profile_step(
    config: TrainConfig, on: ClusterModel, flags: str = FLAGS, *, say: Callable[[str], None]
) -> StepProfile:
    """The step of `config` on `on`: compiled with a set of flags, or from the config where the plugin is missing or no
    program can fit.
    """
    if not can_compile() or analytic_step.memory_floor(config) > on.usable_bytes:
        return profile_from_config(config, on)

    def make() -> dict[str, Any]:
        with report_compile_progress(
            f"{config.name} in {config.recipe} on {on.count} {on.device.name} ({config.mesh})", say
        ):
            return dataclasses.asdict(profile_compiled_step(config, on, flags))

    found = cached_json("plan", profile_cache_key(config, on, flags), make, say=say)
    return StepProfile(**{**found, "events": tuple(event_from_json(each) for each in found["events"])})


def is_profile_cached(config: TrainConfig, on: ClusterModel) -> bool:
    """Returns True if `profile_step` would answer without compiling."""
    return is_cached("plan", profile_cache_key(config, on))


def profile_cache_key(config: TrainConfig, on: ClusterModel, flags: str = FLAGS) -> dict[str, Any]:
    """Returns all that a profile depends on, besides source and versions."""
    return {"config": dataclasses.asdict(config), "on": str(on), "flags": flags}


@contextlib.contextmanager
def report_compile_progress(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Says that `what` is compiled, at its beginning, every few seconds, and at its end."""
    begun, ended = time.monotonic(), threading.Event()

    def beat() -> None:
        while not ended.wait(PROGRESS_INTERVAL_S):
            say(f"  ... {time.monotonic() - begun:.0f} s")

    say(f"compiling {what} ...")
    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    try:
        yield
        say(f"  compiled and read in {time.monotonic() - begun:.0f} s")
    finally:
        ended.set()
        beating.join()


def profile_from_config(config: TrainConfig, on: ClusterModel) -> StepProfile:
    """What shapes alone say."""
    linears = planned_gemms(config, on.device)
    native = fp4_calls(linears)
    return StepProfile(
        compiled=False,
        events=analytic_step.analytic_step_events(config, on, linears),
        memory=analytic_step.analytic_memory(config),
        needed_flops=required_gemm_flops(config) / on.count,
        filling_flops=_padding_flops(config, on),
        native=native,
        native_expected=native,
        compulsory=_compulsory(config),
    )


def required_gemm_flops(config: TrainConfig) -> float:
    """GEMM FLOPs of a whole step; of a recipe that multiplies x in two pieces both."""
    sites = {site.path: site.flops / 3 / config.model.layers for site in
             models.linear_shapes(config.model, config.batch, config.seq)}  # fmt: skip
    total = float(sum(needed_flops(config).values()))
    for segment in phases(config)[0].resolved(config).segments:
        for path, recipe in segment.recipes.items():
            if recipe.remainder:
                calls = 2 if path in REMAT_LINEARS[config.remat] else 1
                total += (segment.stop - segment.start) * sites[path] * calls
    return total


def profile_compiled_step(config: TrainConfig, on: ClusterModel, flags: str = FLAGS) -> StepProfile:
    """The trainer's own step, compiled with the flags that `train` sets, or another set of them, and read."""
    mesh = run_mesh(config, np.array(topology(on.device, hosts=on.hosts, per_host=on.per_host).devices))
    run_preflight(config, mesh, seq=config.seq, device=on.device, memory=None)
    own = compiler_options(config, mesh, phases(config)[0].resolved(config)) or {}
    options = {each.name: each.option for each in with_installed_names(FLAG_SETS[flags]) if each.name not in own}
    with ops.compile_for(on.device), target_cudnn():
        return parse_compiled_step(compile_step(config, mesh, seq=config.seq, options=options), config, mesh, on)


def parse_compiled_step(made: Any, config: TrainConfig, mesh: Mesh, on: ClusterModel) -> StepProfile:
    """Returns the profile of a compiled step. Raises HloParseError for an instruction that cannot be interpreted."""
    program, state = parse_hlo(made.as_text()), abstract_state(config, mesh)
    weights, load = shard_bytes(state.params), balanced_expert_load(config, on.count)
    multiplied = find_gemms(program, turns=load.trip_count, branches=load.branches)
    linears = planned_gemms(config, on.device)
    return StepProfile(
        compiled=True,
        events=events_of_program(program, dict(mesh.shape), axes_across_racks(config.mesh, on), load),
        memory=_memory(made.memory_analysis(), program, config, weights=weights, state=shard_bytes(state)),
        needed_flops=required_gemm_flops(config) / on.count,
        filling_flops=_padding_flops(config, on) + sum(each.padding_flops for each in linears),
        native=sum(
            each.execution_count for each in multiplied if each.kind in NATIVE_GEMM_KINDS and each.format == "fp4"
        ),
        native_expected=fp4_calls(linears),
        compulsory=_compulsory(config),
    )


def _padding_flops(config: TrainConfig, on: ClusterModel) -> float:
    needed = sum(flops for path, flops in needed_flops(config).items() if path in EXPERT_LINEARS)
    return (balanced_expert_load(config, on.count).filled - 1) * needed / on.count


def _compulsory(config: TrainConfig) -> float | None:
    """Of formats in blocks: with one scale a tensor, the compiler fuses away bytes that this count holds compulsory."""
    segments = phases(config)[0].resolved(config).segments
    blocks = [r.fprop_x.format.block for segment in segments for r in segment.recipes.values() if r.quantized]
    if not blocks or None in blocks or config.accumulate > 1:
        return None
    return compulsory_bytes(config, total_axis_sizes(parse_mesh(config.mesh)))


def _memory(found: Any, program: HloModule, config: TrainConfig, *, weights: int, state: int) -> dict[str, float]:
    """XLA's total by category. Weights and optimizer are exact, residuals are the stacks that the forward loop hands to
    the backward loop, workspace the largest scratch of a library; activations are the rest.
    """
    total = found.argument_size_in_bytes + found.temp_size_in_bytes
    total += found.output_size_in_bytes - found.alias_size_in_bytes
    rest = max(total - state, 0)
    gradients = min(weights, rest)
    residuals = min(_stacked_residual_bytes(program, config.model.layers), rest - gradients)
    scratch = (a.bytes for f in program.instructions.values() if f.opcode == "custom-call" for a in f.results[1:])
    workspace = min(max(scratch, default=0), rest - gradients - residuals)
    return {
        "weights": weights,
        "optimizer": state - weights,
        "gradients": gradients,
        "residuals": residuals,
        "activations": rest - gradients - residuals - workspace,
        "workspace": workspace,
    }


def _stacked_residual_bytes(program: HloModule, layers: int) -> int:
    """Bytes of what a loop over layers keeps of all of them and was not given: no array of the step's state has that
    shape (which leaves out weights, moments and gradients).
    """
    entry = program.computations[program.entry]
    given = {array for found in entry if found.opcode == "parameter" for array in found.results}
    loops = [[a for a in found.results if a not in given] for found in entry if found.opcode == "while"]
    return max((sum(a.bytes for a in made if len(a.dims) > 2 and a.dims[0] == layers) for made in loops), default=0)
