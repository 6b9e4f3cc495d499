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
# Full remat repeats down, too: the gradient of the combine weights reads its output.
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
    """Rows of all experts of one device in one microbatch."""

    needed: float
    """Rows that hold tokens."""
    rows: float
    """Rows of non-empty tiles, with padding."""
    tile: int = MAX_TILE_ROWS
    """Rows per tile."""

    @property
    def filled(self) -> float:
        """Returns the padded rows over the needed ones."""
        return self.rows / self.needed if self.needed else 1.0

    @property
    def tiles(self) -> int:
        """Returns the number of non-empty tiles."""
        return round(self.rows / self.tile)

    def share(self, gemm: HloGemm) -> float:
        """Returns the fraction of a GEMM's buffer rows that are multiplied; 1 for a GEMM that is not grouped."""
        return min(self.rows / gemm.rows, 1.0) if gemm.rows else 1.0

    def flops(self, gemm: HloGemm) -> int:
        """Returns the FLOPs of a GEMM in a step, without skipped tiles."""
        return round(self.share(gemm) * gemm.flops)

    def skipped_bytes(self, gemm: HloGemm) -> float:
        """Returns the bytes of a GEMM's operands in empty tiles, which the kernel does not read."""
        row_dim = -1 if gemm.format == "fp4" and len(gemm.result.dims) == 3 else 0  # codes are K-major
        in_tiles = (
            array for array in (gemm.lhs, gemm.rhs) if len(array.dims) == 2 and array.dims[row_dim] == gemm.rows
        )
        return (1.0 - self.share(gemm)) * sum(array.bytes for array in in_tiles)

    def trip_count(self, program: HloModule, loop: HloInstruction) -> int:
        """Returns the trip count of a loop; for a loop over tiles, which has no known one, the non-empty tiles."""
        try:
            return trip_count(program, loop)
        except HloParseError:
            if not any(file in str(loop.source) for file in MOE_LOOP_FILES):
                raise
            return self.tiles

    def branches(self, program: HloModule, conditional: HloInstruction) -> Sequence[str]:
        """Returns the branches of a conditional that may run; of the one over buffer capacities, the smaller buffer."""
        if MOE_SOURCE_FILE not in str(conditional.source):
            return conditional.called_computations
        size = lambda name: sum(array.bytes for op in program.computations[name] for array in op.results)  # noqa: E731
        return (min(conditional.called_computations, key=size),)


NO_EXPERTS = ExpertRowLoad(0.0, 0.0)
"""Load of a model without experts."""


@dataclasses.dataclass(frozen=True)
class BatchFit:
    """The largest batch that fits (0: none does), its compiled step, and the bytes that each tried batch needs."""

    batch: int
    compiled: Any
    bytes_per_batch: dict[int, int]


def token_expert_pairs(config: TrainConfig) -> int:
    """Returns the (token, expert) pairs of a microbatch on all devices."""
    return config.batch // config.accumulate * config.seq * config.model.experts_per_token


def balanced_expert_load(config: TrainConfig, devices: int, device: Device | None = None) -> ExpertRowLoad:
    """Returns the load per device if all experts get equally many rows.

    The tile size is that of GPUs, or the one chosen on `device` for the recipes of all layers.
    """
    if not config.model.experts:
        return NO_EXPERTS
    pairs, experts, tile = token_expert_pairs(config), config.model.experts, MAX_TILE_ROWS
    if device is not None:
        recipes = (segment.recipes for segment in phases(config)[0].resolved(config).segments)
        expert_recipes = [path_recipes[f"layers/mlp/{name}"] for path_recipes in recipes for name in EXPERT_SITES]
        tile = choose_tile_rows(pairs, experts, expert_recipes, device=device)
    return ExpertRowLoad(pairs / devices, (pairs + experts * (tile - 1) / 2) / devices, tile)


def needed_flops(config: TrainConfig) -> dict[str, int]:
    """Returns path -> GEMM FLOPs of a step on all devices: fprop, dgrad, wgrad, and what the remat policy repeats."""
    repeated, model = REMAT_LINEARS[config.remat], config.model
    sites = models.linear_shapes(model, config.batch, config.seq)
    needed = {site.path: site.flops // 3 * (4 if site.path in repeated else 3) for site in sites}
    if model.experts:
        router_flops = 2 * model.layers * config.batch * config.seq * model.embed * model.experts
        needed[ROUTER] = router_flops * (4 if config.remat == "full" else 3)
    return needed


def compiled_linear_gemms(program: HloModule, load: ExpertRowLoad = NO_EXPERTS) -> list[HloGemm]:
    """Returns the GEMMs of a program, except those of attention, under the expert `load`."""
    gemms = find_gemms(program, turns=load.trip_count, branches=load.branches)
    return [gemm for gemm in gemms if op_category(program, gemm.instruction) == "gemm"]


def compile_step(config: TrainConfig, mesh: Mesh, *, seq: int, options: Mapping[str, Any] | None = None) -> Any:
    """Compile the train step from shapes only, for rows without segments.

    `options` are XLA options in addition to those of the step.
    """
    resolved = phases(config)[0].resolved(config)
    step = jit_train_step(config, resolved, mesh, options=options)
    batch = {name: abstract_batch(config, mesh, seq=seq)[name] for name in ("tokens", "targets")}
    lowered = step.lower(abstract_state(config, mesh), batch)
    return compile_train_step(lowered, resolved, StepScheduling(mesh, config.schedule_by, options=options))


def peak_bytes(compiled: Any) -> int:
    """Returns the device memory that a program needs: arguments, temporaries, and outputs that alias no argument."""
    analysis = compiled.memory_analysis()
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return int(analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + results)


def largest_fitting_batch(
    config: TrainConfig, mesh: Mesh, *, seq: int, limit: int, say: Callable[[str], None] = lambda _: None
) -> BatchFit:
    """Search for the largest batch whose train step needs at most `limit` bytes per device."""
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
    """Returns (the largest multiple of `unit` with `needed` at most `limit`, or 0; batch -> `needed` of all calls).

    `needed` must be increasing.
    """
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
    """Returns the batch at which the line through two known batches crosses the limit, strictly between low and high.

    The line goes through both ends of the bracket or, before any batch exceeded the limit, through the two largest.
    Returns the middle of the bracket instead once lines have moved the same end three times.
    """
    below, above = (sorted(b for b in sizes if test(sizes[b])) for test in (limit.__ge__, limit.__lt__))
    if not above and len(below) < 3:  # batch 0 is in `sizes`, but was not measured
        return 2 * low
    if above and (len(below) > 5 or len(above) > 3):
        return (low + high) // (2 * unit) * unit
    a, b = (low, high) if above else below[-2:]
    slope = (sizes[b] - sizes[a]) / (b - a)
    crossing = a + int((limit - sizes[a]) / max(slope, 1.0)) // unit * unit
    return min(max(crossing, low + unit), high - unit, MAX_EXTRAPOLATION_FACTOR * low if low else high)
