"""What a plan knows of a step before it asks how long it takes: from the compiled program, or from the config alone."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from halfbyte import bench, models, ops
from halfbyte.bench.load import even_load
from halfbyte.bench.operand_traffic import compulsory_bytes
from halfbyte.bench.placement import AGAIN, EXPERTS
from halfbyte.devices import target_cudnn, topology
from halfbyte.devices.platform import CUDA_PLUGINS, any_installed
from halfbyte.inputs.kept import is_kept, kept
from halfbyte.launch.xla_flags import FLAG_SETS, as_known
from halfbyte.program import Program, gemms, read
from halfbyte.sharding import parse_mesh
from halfbyte.sharding.mesh import whole_sizes
from halfbyte.train import TrainConfig, abstract_state, phases, run_mesh
from halfbyte.train.preflight import check, shard_bytes
from halfbyte.train.step import compiler_options

from . import analytic
from .cluster import Cluster, crossing
from .linears import fp4_calls, linear_gemms
from .schedule import Event, from_json, schedule, walk

NATIVE = ("block-scaled", "mosaic")  # who multiplies codes as they are: a library, or our kernel of experts
BEAT = 15.0  # seconds between two signs of life
FLAGS = "recommended"  # of XLA, which `train` sets


@dataclasses.dataclass(frozen=True)
class Reading:
    """One device's part of a step."""

    compiled: bool
    events: tuple[Event, ...]
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

    def _linears(self) -> Iterator[tuple[Event, int]]:
        return ((e, times) for e, times in walk(self.events) if e.what == "gemm" and e.purpose != "attention")

    @property
    def operand_bytes(self) -> float:
        """Moved to make operands."""
        return sum(times * each.moved for each, times in walk(self.events) if each.purpose == "operands")

    @property
    def bytes_needed(self) -> float:
        """Of a device's memory."""
        return sum(self.memory.values())


def can_compile() -> bool:
    """Returns True if the CUDA compiler plugin is installed; `check_cuda_compiler` asks for `ptxas`, too."""
    return any_installed(CUDA_PLUGINS)


def reading(config: TrainConfig, on: Cluster, flags: str = FLAGS, *, say: Callable[[str], None]) -> Reading:
    """The step of `config` on `on`: compiled with a set of flags, or from the config where the plugin is missing."""
    if not can_compile():
        return by_hand(config, on)

    def make() -> dict[str, Any]:
        with heard(f"{config.name} in {config.recipe} on {on.count} {on.device.name} ({config.mesh})", say):
            return dataclasses.asdict(compiled(config, on, flags))

    found = kept("plan", facts(config, on, flags), make, say=say)
    return Reading(**{**found, "events": tuple(from_json(each) for each in found["events"])})


def has_read(config: TrainConfig, on: Cluster) -> bool:
    """Whether `reading` would answer without compiling."""
    return is_kept("plan", facts(config, on))


def facts(config: TrainConfig, on: Cluster, flags: str = FLAGS) -> dict[str, Any]:
    """All that a reading depends on, beside source and versions."""
    return {"config": dataclasses.asdict(config), "on": str(on), "flags": flags}


@contextlib.contextmanager
def heard(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Says that `what` is compiled, at its beginning, every few seconds, and at its end."""
    begun, ended = time.monotonic(), threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT):
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


def by_hand(config: TrainConfig, on: Cluster) -> Reading:
    """What shapes alone say."""
    linears = linear_gemms(config, on.device)
    native = fp4_calls(linears)
    return Reading(
        compiled=False,
        events=analytic.step(config, on, linears),
        memory=analytic.memory(config),
        needed_flops=needed(config) / on.count,
        filling_flops=_filling(config, on),
        native=native,
        native_expected=native,
        compulsory=_compulsory(config),
    )


def needed(config: TrainConfig) -> float:
    """GEMM FLOPs of a whole step; of a recipe that multiplies x in two pieces both."""
    sites = {site.path: site.flops / 3 / config.model.layers for site in
             models.gemm_sites(config.model, config.batch, config.seq)}  # fmt: skip
    total = float(sum(bench.needed_flops(config).values()))
    for segment in phases(config)[0].resolved(config).segments:
        for path, recipe in segment.recipes.items():
            if recipe.remainder:
                total += (segment.stop - segment.start) * sites[path] * (2 if path in AGAIN[config.remat] else 1)
    return total


def compiled(config: TrainConfig, on: Cluster, flags: str = FLAGS) -> Reading:
    """The trainer's own step, compiled with the flags that `train` sets, or another set of them, and read."""
    mesh = run_mesh(config, np.array(topology(on.device, hosts=on.hosts, per_host=on.per_host).devices))
    check(config, mesh, seq=config.seq, device=on.device, memory=None)
    own = compiler_options(config, mesh, phases(config)[0].resolved(config)) or {}
    options = {each.name: each.option for each in as_known(FLAG_SETS[flags]) if each.name not in own}
    with ops.compile_for(on.device), target_cudnn():
        return read_step(bench.compile_step(config, mesh, seq=config.seq, options=options), config, mesh, on)


def read_step(made: Any, config: TrainConfig, mesh: Mesh, on: Cluster) -> Reading:
    """A compiled step, read. Unreadable where an instruction cannot be placed."""
    program, state = read(made.as_text()), abstract_state(config, mesh)
    weights, load = shard_bytes(state.params), even_load(config, on.count)
    multiplied = gemms(program, turns=load.turns, branches=load.branches)
    linears = linear_gemms(config, on.device)
    return Reading(
        compiled=True,
        events=schedule(program, dict(mesh.shape), crossing(config.mesh, on), load),
        memory=_memory(made.memory_analysis(), program, config, weights=weights, state=shard_bytes(state)),
        needed_flops=needed(config) / on.count,
        filling_flops=_filling(config, on) + sum(each.filling for each in linears),
        native=sum(each.times for each in multiplied if each.kind in NATIVE and each.format == "fp4"),
        native_expected=fp4_calls(linears),
        compulsory=_compulsory(config),
    )


def _filling(config: TrainConfig, on: Cluster) -> float:
    needed = sum(flops for path, flops in bench.needed_flops(config).items() if path in EXPERTS)
    return (even_load(config, on.count).filled - 1) * needed / on.count


def _compulsory(config: TrainConfig) -> float | None:
    """Of formats in blocks: with one scale a tensor, the compiler fuses away bytes that this count holds compulsory."""
    segments = phases(config)[0].resolved(config).segments
    blocks = [r.fprop_x.format.block for segment in segments for r in segment.recipes.values() if r.quantized]
    if not blocks or None in blocks or config.accumulate > 1:
        return None
    return compulsory_bytes(config, whole_sizes(parse_mesh(config.mesh)))


def _memory(found: Any, program: Program, config: TrainConfig, *, weights: int, state: int) -> dict[str, float]:
    """XLA's total by category. Weights and optimizer are exact, residuals are the stacks that the forward loop hands to
    the backward loop, workspace the largest scratch of a library; activations are the rest.
    """
    total = found.argument_size_in_bytes + found.temp_size_in_bytes
    total += found.output_size_in_bytes - found.alias_size_in_bytes
    rest = max(total - state, 0)
    gradients = min(weights, rest)
    residuals = min(_stacks(program, config.model.layers), rest - gradients)
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


def _stacks(program: Program, layers: int) -> int:
    """Bytes of what a loop over layers keeps of all of them and was not given: no array of the step's state has that
    shape (which leaves out weights, moments and gradients).
    """
    entry = program.computations[program.entry]
    given = {array for found in entry if found.opcode == "parameter" for array in found.results}
    loops = [[a for a in found.results if a not in given] for found in entry if found.opcode == "while"]
    return max((sum(a.bytes for a in made if len(a.dims) > 2 and a.dims[0] == layers) for made in loops), default=0)
