"""The largest batch whose step fits a device's memory, found from compiled programs.

What a step needs is known once it is compiled: arguments and temporaries, with the donated state counted once. It grows
with the batch, a little more than linearly where the gradients hide part of a small batch's activations. So a search
compiles two small batches, goes where their line meets the limit, and from there closes in on the limit between the
largest batch that fits and the smallest that does not, with few compilations because each may take a minute.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from halfbyte.sharding import DEFAULT_RULES, axis_size
from halfbyte.train import TrainConfig, abstract_batch, abstract_state, jit_train_step, phases
from halfbyte.train.scheduling import Scheduling
from halfbyte.train.step import compile_train_step

MOST = 1 << 16  # sequences: a search that gets here was given a wrong limit
FARTHEST = 32  # times the largest batch known to fit: two batches that need the same memory say nothing of the third


@dataclasses.dataclass(frozen=True)
class Fit:
    """The largest batch that fits (0: none does), its compiled step, and the bytes that each tried batch needs."""

    batch: int
    compiled: Any
    needed: dict[int, int]


def compile_step(config: TrainConfig, mesh: Mesh, *, seq: int, options: Mapping[str, Any] | None = None) -> Any:
    """The step over plain rows (no segments), compiled from shapes alone; `options` of XLA beside the step's own."""
    resolved = phases(config)[0].resolved(config)
    step = jit_train_step(config, resolved, mesh, options=options)
    batch = {name: abstract_batch(config, mesh, seq=seq)[name] for name in ("tokens", "targets")}
    lowered = step.lower(abstract_state(config, mesh), batch)
    return compile_train_step(lowered, resolved, Scheduling(mesh, config.schedule_by, options=options))


def bytes_needed(compiled: Any) -> int:
    """What a device must have for this program: arguments, temporaries, and results that reuse no argument."""
    found = compiled.memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return int(found.argument_size_in_bytes + found.temp_size_in_bytes + results)


def fit_batch(
    config: TrainConfig, mesh: Mesh, *, seq: int, limit: int, say: Callable[[str], None] = lambda _: None
) -> Fit:
    """The largest batch of `config`'s step that needs at most `limit` bytes a device."""
    unit = axis_size(mesh, DEFAULT_RULES.mesh_axes("batch")) * config.accumulate
    best: dict[int, Any] = {}

    def needed(batch: int) -> int:
        compiled = compile_step(dataclasses.replace(config, batch=batch), mesh, seq=seq)
        size = bytes_needed(compiled)
        say(f"  batch {batch} needs {size / 2**30:.3f} of {limit / 2**30:.3f} GiB")
        if size <= limit and batch > max(best, default=0):
            best.clear()
            best[batch] = compiled
        return size

    batch, sizes = search(needed, limit=limit, unit=unit)
    return Fit(batch, best.get(batch), sizes)


def search(needed: Callable[[int], int], *, limit: int, unit: int = 1) -> tuple[int, dict[int, int]]:
    """(the largest multiple of `unit` with `needed` at most `limit`, or 0; all that were asked). `needed` must grow."""
    sizes: dict[int, int] = {0: 0}
    guess = unit
    while True:
        sizes[guess] = needed(guess)
        low = max(b for b, size in sizes.items() if size <= limit)
        high = min((b for b, size in sizes.items() if size > limit), default=MOST // unit * unit)
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
    return min(max(meets, low + unit), high - unit, FARTHEST * low if low else high)
