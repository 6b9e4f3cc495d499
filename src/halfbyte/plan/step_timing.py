"""What a training step costs here, recipe by recipe, in one run: time, rates, memory, and the GEMMs that were compiled.

The step is the trainer's own, with float32 master weights and AdamW, over synthetic tokens of one document a row. Every
recipe starts from the same state; timings are medians over repeated batches of steps after warm-up. The command gives
no ratio unless `ops.backends_match_reference` holds for every backend on this device.
"""

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from halfbyte import ops
from halfbyte.devices import lookup, open_energy_meter
from halfbyte.hlo import HloParseError, parse_hlo
from halfbyte.plan.step_placement import (
    NO_EXPERTS,
    ExpertRowLoad,
    balanced_expert_load,
    compile_step,
    compiled_linear_gemms,
    largest_fitting_batch,
    peak_bytes,
)
from halfbyte.train import TrainConfig, abstract_state, build_precision_manifest, create_state, phases, run_mesh
from halfbyte.train.precision_manifest import PrecisionManifest
from halfbyte.train.preflight import backend_summary, pass_summary, shard_bytes
from halfbyte.train.train_step import batch_sharding

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class StepMeasurement:
    """One recipe. `milliseconds` is None if it did not run, and `note` says why."""

    recipe: str
    policy: str
    remat: str
    backends: str
    batch: int = 0
    milliseconds: float | None = None
    spread: float = 0.0
    tokens_per_s: float | None = None
    joules: float | None = None  # of a device and step, as the driver counts them
    tokens_per_joule: float | None = None
    tflops: float | None = None
    mfu: float | None = None  # of peak_tflops
    peak_tflops: float | None = None  # dense, of the mix of formats that the multipliers run in
    ratio: float | None = None
    temporaries_gib: float | None = None
    activations_gib: float | None = None  # temporaries without the float32 gradients
    needed_gib: float | None = None  # arguments and temporaries
    limit_gib: float | None = None  # what the batch was fitted to
    arguments_gib: float | None = None
    peak_gib: float | None = None
    compile_s: float | None = None
    loss: float | None = None
    gemms: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    """As compiled, by format, experts under an even load: `gemm_calls_and_flops`."""
    linears: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Of each linear of a layer, for each of its GEMMs: operands, who multiplies, who made the operands."""
    compute_only: bool = False  # collectives were skipped: mocked GPUs
    note: str = ""


def gemm_calls_and_flops(text: str, load: ExpertRowLoad = NO_EXPERTS) -> dict[str, dict[str, int]]:
    """Calls and FLOPs of one device and step of the linears' GEMMs in a compiled program's text, by the format that is
    multiplied; those of our kernel apart. Of experts those that their `load` takes.
    """
    work: dict[str, dict[str, int]] = {}
    for gemm in compiled_linear_gemms(parse_hlo(text), load):
        name = f"{gemm.format} by our kernel" if gemm.kind == "mosaic" else gemm.format
        each = work.setdefault(name, {"calls": 0, "flops": 0})
        each["calls"] += gemm.execution_count
        each["flops"] += load.flops(gemm)
    return work


def measure_step(
    config: TrainConfig, *, seq: int, steps: int = 10, repeats: int = 3, warmup: int = 3, compiled: Any = None
) -> StepMeasurement:
    """The step of `config` on synthetic tokens: `repeats` timings of `steps` steps each (of `compiled`, if given)."""
    mesh = run_mesh(config)
    row = _row(config, seq)
    started = time.perf_counter()
    try:
        if compiled is None:
            compiled = compile_step(config, mesh, seq=seq)
            row = dataclasses.replace(row, compile_s=time.perf_counter() - started)
        load = balanced_expert_load(dataclasses.replace(config, seq=seq), mesh.size, ops.target_device())
        row = _with_program_stats(row, compiled, load, gradients=shard_bytes(abstract_state(config, mesh).params))
        state, batch = create_state(config, mesh), synthetic_batch(config, mesh, seq)
        times, joules, metrics = _time(compiled, state, batch, steps=steps, repeats=repeats, warmup=warmup)
        return _with_times(row, config, seq, times, float(metrics["loss"]), joules=joules)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return dataclasses.replace(row, note="out of memory: " + str(error).splitlines()[0][:120])


def measure_largest(
    config: TrainConfig, *, seq: int, limit: int, say: Callable[[str], None] = lambda _: None
) -> StepMeasurement:
    """The step at the largest batch that needs at most `limit` bytes a device, executed there to prove it.

    A device that cannot run what the compiler says would fit (its allocator's memory in pieces) is asked for less.
    """
    mesh = run_mesh(config)
    fit = largest_fitting_batch(config, mesh, seq=seq, limit=limit, say=say)
    if not fit.batch:
        smallest = min(fit.bytes_per_batch)
        short = f"batch {smallest} needs {fit.bytes_per_batch[smallest] / GIB:.2f} GiB"
        return dataclasses.replace(_row(config, seq), batch=0, limit_gib=limit / GIB, note=short)
    unit = min(fit.bytes_per_batch)
    compiled = fit.compiled
    for batch in range(fit.batch, 0, -unit):
        at = dataclasses.replace(config, batch=batch)
        row = measure_step(at, seq=seq, steps=2, repeats=1, warmup=1, compiled=compiled)
        compiled = None
        if row.milliseconds is not None or batch <= fit.batch - 2 * unit:
            break
        say(f"  batch {batch} did not run: {row.note}")
    return dataclasses.replace(row, limit_gib=limit / GIB)


def _row(config: TrainConfig, seq: int) -> StepMeasurement:
    sites = [site for site in _manifest(config, seq).sites if site.path.startswith("layers/")]
    found = Counter(
        f"{backend_summary(site.backend, site.gemms)}, operands by {pass_summary(site.gemms)}" for site in sites
    )
    backends = " | ".join(f"{count} x {name}" for name, count in sorted(found.items()))
    linears = {
        f"{site.path} {site.layers[0]}-{site.layers[1] - 1}": {n: dataclasses.asdict(g) for n, g in site.gemms.items()}
        for site in sites
    }
    return StepMeasurement(config.recipe, config.policy, config.remat, backends, config.batch, linears=linears)


def _with_program_stats(row: StepMeasurement, compiled: Any, load: ExpertRowLoad, *, gradients: int) -> StepMeasurement:
    """`row` with what the compiled program says of itself; `gradients` are a device's, in bytes."""
    found = compiled.memory_analysis()
    try:
        gemms, note = gemm_calls_and_flops(compiled.as_text(), load), row.note
    except HloParseError as error:  # a time is worth having without the FLOPs
        gemms, note = {}, f"GEMMs not counted: {error}"
    return dataclasses.replace(
        row,
        note=note,
        temporaries_gib=found.temp_size_in_bytes / GIB,
        activations_gib=(found.temp_size_in_bytes - gradients) / GIB,
        arguments_gib=found.argument_size_in_bytes / GIB,
        needed_gib=peak_bytes(compiled) / GIB,
        gemms=gemms,
    )


def _time(
    compiled: Any, state: Any, batch: Any, *, steps: int, repeats: int, warmup: int
) -> tuple[list[float], float | None, dict[str, jax.Array]]:
    """Seconds a step of every repeat, joules of a device and step, and the last step's metrics."""
    counted = open_energy_meter(jax.local_devices())
    for _ in range(warmup):
        state, metrics = compiled(state, batch)
    jax.block_until_ready(metrics)
    times, before = [], counted.joules()
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(steps):
            state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics)
        times.append((time.perf_counter() - started) / steps)
    after = counted.joules()
    joules = None if before is None or after is None else (after - before) / (repeats * steps)
    return times, joules, metrics


def _with_times(
    row: StepMeasurement, config: TrainConfig, seq: int, times: list[float], loss: float, *, joules: float | None = None
) -> StepMeasurement:
    """`row` with what `times` and `joules` say."""
    median = statistics.median(times)
    meter = _manifest(config, seq).meter(
        lookup(jax.devices()[0]), tokens=config.batch * seq, devices=len(jax.devices())
    )
    rates = meter.rates(median, joules)
    stats = jax.local_devices()[0].memory_stats() or {}
    return dataclasses.replace(
        row,
        milliseconds=1e3 * median,
        spread=(max(times) - min(times)) / median,
        tokens_per_s=rates["tokens_per_s_per_device"],
        joules=joules,
        tokens_per_joule=rates["tokens_per_joule"],
        tflops=rates["tflops_per_device"],
        mfu=rates["mfu"],
        peak_tflops=meter.peak / 1e12 if meter.peak else None,
        peak_gib=stats["peak_bytes_in_use"] / GIB if "peak_bytes_in_use" in stats else None,
        loss=loss,
    )


def synthetic_batch(config: TrainConfig, mesh: Any, seq: int) -> dict[str, jax.Array]:
    """Random tokens, one document a row: the batch holds no segment ids, so that attention is plainly causal."""
    rng = np.random.default_rng(config.seed)
    rows = rng.integers(0, config.model.vocab_size, (config.batch, seq + 1), dtype=np.int32)
    where = batch_sharding(mesh)
    parts = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
    # Each process makes the shards of its own devices: under mocked GPUs nobody else is there to send any.
    return {name: _sharded(part, where) for name, part in parts.items()}


def _sharded(whole: np.ndarray, where: Any) -> jax.Array:
    return jax.make_array_from_callback(whole.shape, where, lambda index: whole[index])


def _manifest(config: TrainConfig, seq: int) -> PrecisionManifest:
    """The manifest that the run would have."""
    phase = phases(config)[0]
    return build_precision_manifest(config, phase.resolved(config), phase.recipe, seq=seq, device=ops.target_device())


def with_speed_ratio(rows: list[StepMeasurement]) -> list[StepMeasurement]:
    """The rows with their speed as a ratio to bf16 under the same remat, or to the first bf16 row."""
    bases = {row.remat: each for row in rows if row.recipe == "bf16" and (each := _per_sequence(row))}
    first = next(iter(bases.values()), None)
    return [dataclasses.replace(row, ratio=_ratio(bases.get(row.remat, first), _per_sequence(row))) for row in rows]


def as_compute_only(row: StepMeasurement) -> StepMeasurement:
    """`row` as it is worth under mocked GPUs: its loss is garbage, and its rates are bounds."""
    return dataclasses.replace(row, loss=None, compute_only=True)


def _per_sequence(row: StepMeasurement) -> float | None:
    return row.milliseconds / (row.batch or 1) if row.milliseconds else None


def _ratio(base: float | None, found: float | None) -> float | None:
    return base / found if base and found else None
