"""GEMM FLOPs that a step needs, the load of its experts, and the largest batch that fits a device's memory.

No compiled program states how many rows the experts multiply: its buffers fit any routing, and empty tiles are skipped.
A balanced load is assumed: every expert has equally many rows, and its last tile is half full on average.

The memory of a step is known once it is compiled: arguments and temporaries, the donated state counted once. It grows
with the batch, slightly more than linearly where gradients hide part of a small batch's activations. Each compilation
may take a minute, so `largest_fitting_batch` compiles two small batches, extrapolates their line to the limit, and
interpolates between the largest batch that fits and the smallest that does not.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from halfbyte import models
from halfbyte.devices import Device
from halfbyte.distributed import DEFAULT_RULES, axis_size
from halfbyte.hlo import HloGemm, HloInstruction, HloModule, HloParseError, find_gemms, op_category
from halfbyte.hlo.trip_counts import trip_count
from halfbyte.models.config import EXPERT_SITES, SHARED_SITES
from halfbyte.ops.expert_tiles import MAX_TILE_ROWS, choose_tile_rows
from halfbyte.train import TrainConfig, abstract_batch, abstract_state, jit_train_step, phases
from halfbyte.train.train_step import StepScheduling, compile_train_step

MOE_SOURCE_FILE = "models/moe"  # where the conditional over the two buffer capacities is traced
MOE_LOOP_FILES = ("ops/grouped_linear", MOE_SOURCE_FILE)  # where the loops over non-empty tiles are traced
GATE_UP = tuple(f"layers/mlp/{name}" for name in ("gate", "up", *SHARED_SITES[:2]))
# down too: the gradient of its weight reads its result.
EXPERT_LINEARS = tuple(f"layers/mlp/{name}" for name in EXPERT_SITES)
ROUTER = "layers/mlp/router"
REMAT_LINEARS = {
    "none": (),
    "dots": (),
    "quantized": GATE_UP,
    "full": (*(f"layers/attention/{name}" for name in "qkvo"), *GATE_UP, *EXPERT_LINEARS),
}
"""Linears whose forward GEMM the backward pass runs again, by remat policy."""
MAX_BATCH = 1 << 16  # sequences: a search that gets here was given a wrong limit
# Times the largest batch known to fit: the line through two batches that need the same memory is flat.
MAX_EXTRAPOLATION_FACTOR = 32


@dataclass(frozen=True)
class ExpertRowLoad:
    """Of one device and microbatch, all rows of its experts."""

    needed: float
    """That tokens have."""
    rows: float
    """In whole tiles."""
    tile: int = MAX_TILE_ROWS
    """Rows of one."""

    @property
    def filled(self) -> float:
        """Rows in whole tiles for each that a token has."""
        return self.rows / self.needed if self.needed else 1.0

    @property
    def tiles(self) -> int:
        """That have rows."""
        return round(self.rows / self.tile)

    def share(self, gemm: HloGemm) -> float:
        """Of a GEMM's FLOPs: 1 for one that is not of experts."""
        return min(self.rows / gemm.rows, 1.0) if gemm.rows else 1.0

    def flops(self, gemm: HloGemm) -> int:
        """Of a GEMM in a step."""
        return round(self.share(gemm) * gemm.flops)

    def skipped_bytes(self, gemm: HloGemm) -> float:
        """Bytes of a GEMM's operands in tiles without rows."""
        at = -1 if gemm.format == "fp4" and len(gemm.result.dims) == 3 else 0  # codes are K-major
        in_tiles = (a for a in (gemm.lhs, gemm.rhs) if len(a.dims) == 2 and a.dims[at] == gemm.rows)
        return (1.0 - self.share(gemm)) * sum(array.bytes for array in in_tiles)

    def trip_count(self, program: HloModule, loop: HloInstruction) -> int:
        """Of a loop; of one over tiles, those that have rows."""
        try:
            return trip_count(program, loop)
        except HloParseError:
            if not any(place in str(loop.source) for place in MOE_LOOP_FILES):
                raise
            return self.tiles

    def branches(self, program: HloModule, found: HloInstruction) -> Sequence[str]:
        """The computations of a branch that may be taken; of one over buffer capacities, the smaller."""
        if MOE_SOURCE_FILE not in str(found.source):
            return found.called_computations
        size = lambda name: sum(array.bytes for each in program.computations[name] for array in each.results)  # noqa: E731
        return (min(found.called_computations, key=size),)


NO_EXPERTS = ExpertRowLoad(0.0, 0.0)
"""Of a model without experts."""


@dataclasses.dataclass(frozen=True)
class BatchFit:
    """The largest batch that fits (0: none does), its compiled step, and the bytes that each tried batch needs."""

    batch: int
    compiled: Any
    bytes_per_batch: dict[int, int]


def token_expert_pairs(config: TrainConfig) -> int:
    """(token, expert) pairs of a microbatch, all devices together."""
    return config.batch // config.accumulate * config.seq * config.model.experts_per_token


def balanced_expert_load(config: TrainConfig, devices: int, device: Device | None = None) -> ExpertRowLoad:
    """That of `config` on so many devices, which share its experts: GPUs, or `device`, whose tiles may be smaller; the
    largest, where layers differ.
    """
    if not config.model.experts:
        return NO_EXPERTS
    pairs, experts, tile = token_expert_pairs(config), config.model.experts, MAX_TILE_ROWS
    if device is not None:
        recipes = (each.recipes for each in phases(config)[0].resolved(config).segments)
        all_of_them = [found[f"layers/mlp/{name}"] for found in recipes for name in EXPERT_SITES]
        tile = choose_tile_rows(pairs, experts, all_of_them, device=device)
    return ExpertRowLoad(pairs / devices, (pairs + experts * (tile - 1) / 2) / devices, tile)


def needed_flops(config: TrainConfig) -> dict[str, int]:
    """GEMM FLOPs of a whole step by linear and router: forward, both gradients, and what its remat policy repeats."""
    again, model = REMAT_LINEARS[config.remat], config.model
    sites = models.linear_shapes(model, config.batch, config.seq)
    needed = {site.path: site.flops // 3 * (4 if site.path in again else 3) for site in sites}
    if model.experts:
        each = 2 * model.layers * config.batch * config.seq * model.embed * model.experts
        needed[ROUTER] = each * (4 if config.remat == "full" else 3)
    return needed


def compiled_linear_gemms(program: HloModule, load: ExpertRowLoad = NO_EXPERTS) -> list[HloGemm]:
    """The GEMMs of a program that are not attention's, under the `load` of its experts."""
    found = find_gemms(program, turns=load.trip_count, branches=load.branches)
    return [gemm for gemm in found if op_category(program, gemm.instruction) == "gemm"]


def compile_step(config: TrainConfig, mesh: Mesh, *, seq: int, options: Mapping[str, Any] | None = None) -> Any:
    """The step over plain rows (no segments), compiled from shapes alone; `options` of XLA beside the step's own."""
    resolved = phases(config)[0].resolved(config)
    step = jit_train_step(config, resolved, mesh, options=options)
    batch = {name: abstract_batch(config, mesh, seq=seq)[name] for name in ("tokens", "targets")}
    lowered = step.lower(abstract_state(config, mesh), batch)
    return compile_train_step(lowered, resolved, StepScheduling(mesh, config.schedule_by, options=options))


def peak_bytes(compiled: Any) -> int:
    """What a device must have for this program: arguments, temporaries, and results that reuse no argument."""
    found = compiled.memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return int(found.argument_size_in_bytes + found.temp_size_in_bytes + results)


def largest_fitting_batch(
    config: TrainConfig, mesh: Mesh, *, seq: int, limit: int, say: Callable[[str], None] = lambda _: None
) -> BatchFit:
    """The largest batch of `config`'s step that needs at most `limit` bytes a device."""
    unit = axis_size(mesh, DEFAULT_RULES.mesh_axes("batch")) * config.accumulate
    best: dict[int, Any] = {}

    def needed(batch: int) -> int:
        compiled = compile_step(dataclasses.replace(config, batch=batch), mesh, seq=seq)
        size = peak_bytes(compiled)
        say(f"  batch {batch} needs {size / 2**30:.3f} of {limit / 2**30:.3f} GiB")
        if size <= limit and batch > max(best, default=0):
            best.clear()
            best[batch] = compiled
        return size

    batch, sizes = search_largest(needed, limit=limit, unit=unit)
    return BatchFit(batch, best.get(batch), sizes)


def search_largest(needed: Callable[[int], int], *, limit: int, unit: int = 1) -> tuple[int, dict[int, int]]:
    """(the largest multiple of `unit` with `needed` at most `limit`, or 0; all that were asked). `needed` must grow."""
    sizes: dict[int, int] = {0: 0}
    guess = unit
    while True:
        sizes[guess] = needed(guess)
        low = max(b for b, size in sizes.items() if size <= limit)
        high = min((b for b, size in sizes.items() if size > limit), default=MAX_BATCH // unit * unit)
        if high - low <= unit:
            del sizes[0]
            return low, sizes
        guess = _next(sizes, low, high, limit, unit)


def _next(sizes: dict[int, int], low: int, high: int, limit: int, unit: int) -> int:
    """Where the line through two known batches meets the limit, strictly between low and high.

    The line through both ends of the bracket; while nothing has failed, through the two largest batches; the middle
    where a line has already closed in from one side three times.
    """
    below, above = (sorted(b for b in sizes if test(sizes[b])) for test in (limit.__ge__, limit.__lt__))
    if not above and len(below) < 3:  # 0 is no measurement
        return 2 * low
    if above and (len(below) > 5 or len(above) > 3):
        return (low + high) // (2 * unit) * unit
    a, b = (low, high) if above else below[-2:]
    slope = (sizes[b] - sizes[a]) / (b - a)
    meets = a + int((limit - sizes[a]) / max(slope, 1.0)) // unit * unit
    return min(max(meets, low + unit), high - unit, MAX_EXTRAPOLATION_FACTOR * low if low else high)
