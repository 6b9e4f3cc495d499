"""Measure a training step on this device, per recipe: time, rates, memory, and the compiled GEMMs.

The step is that of the trainer, with float32 master weights and AdamW, over synthetic tokens with one document per row.
Every recipe starts from the same state; timings are medians over repeated groups of steps after warm-up. The command
prints no ratio unless `ops.backends_match_reference` holds for every backend on this device.
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
from halfbyte.train.manifest_entries import PrecisionManifest, backend_summary, pass_summary
from halfbyte.train.preflight import GIB, shard_bytes
from halfbyte.train.train_step import batch_sharding


@dataclasses.dataclass(frozen=True)
class StepMeasurement:
    """Measurements of one recipe. `milliseconds` is None if it did not run; then `note` has the reason."""

    recipe: str
    policy: str
    remat: str
    backends: str
    batch: int = 0
    milliseconds: float | None = None
    spread: float = 0.0
    tokens_per_s: float | None = None
    joules: float | None = None  # per device and step, by the driver's energy counter
    tokens_per_joule: float | None = None
    tflops: float | None = None
    mfu: float | None = None  # fraction of peak_tflops
    peak_tflops: float | None = None  # dense peak of the mix of tensor-core formats
    ratio: float | None = None
    temporaries_gib: float | None = None
    activations_gib: float | None = None  # temporaries without the float32 gradients
    needed_gib: float | None = None  # arguments and temporaries
    limit_gib: float | None = None  # memory limit of the batch search
    arguments_gib: float | None = None
    peak_gib: float | None = None
    compile_s: float | None = None
    loss: float | None = None
    gemms: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    """`gemm_calls_and_flops` of the compiled step, with a balanced expert load."""
    linears: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Linear -> GEMM -> operands, backend and quantize pass, from the precision manifest."""
    compute_only: bool = False  # collectives were skipped (mocked GPUs)
    note: str = ""


def gemm_calls_and_flops(text: str, load: ExpertRowLoad = NO_EXPERTS) -> dict[str, dict[str, int]]:
    """Returns calls and FLOPs per device and step of the linears' GEMMs in a compiled program's text, by GEMM format.

    GEMMs of this package's kernel are listed separately. Expert GEMMs count with their `load`.
    """
    work: dict[str, dict[str, int]] = {}
    for gemm in compiled_linear_gemms(parse_hlo(text), load):
        name = f"{gemm.format} by our kernel" if gemm.kind == "mosaic" else gemm.format
        entry = work.setdefault(name, {"calls": 0, "flops": 0})
        entry["calls"] += gemm.execution_count
        entry["flops"] += load.flops(gemm)
    return work


def measure_step(
    config: TrainConfig, *, seq: int, steps: int = 10, repeats: int = 3, warmup: int = 3, compiled: Any = None
) -> StepMeasurement:
    """Measure the step of `config` on synthetic tokens: `repeats` timings of `steps` steps each.

    The step is compiled, unless `compiled` is given. Running out of memory is returned as a `note`.
    """
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
    """Measure the step at the largest batch that needs at most `limit` bytes per device and also runs.

    Smaller batches are tried if the device cannot run one that fits by XLA's count (fragmented allocator memory).
    """
    mesh = run_mesh(config)
    fit = largest_fitting_batch(config, mesh, seq=seq, limit=limit, say=say)
    if not fit.batch:
        smallest = min(fit.bytes_per_batch)
        note = f"batch {smallest} needs {fit.bytes_per_batch[smallest] / GIB:.2f} GiB"
        return dataclasses.replace(_row(config, seq), batch=0, limit_gib=limit / GIB, note=note)
    unit = min(fit.bytes_per_batch)
    compiled = fit.compiled
    for batch in range(fit.batch, 0, -unit):
        batch_config = dataclasses.replace(config, batch=batch)
        row = measure_step(batch_config, seq=seq, steps=2, repeats=1, warmup=1, compiled=compiled)
        compiled = None
        if row.milliseconds is not None or batch <= fit.batch - 2 * unit:
            break
        say(f"  batch {batch} did not run: {row.note}")
    return dataclasses.replace(row, limit_gib=limit / GIB)


def _row(config: TrainConfig, seq: int) -> StepMeasurement:
    sites = [site for site in _manifest(config, seq).sites if site.path.startswith("layers/")]
    counts = Counter(
        f"{backend_summary(site.backend, site.gemms)}, operands by {pass_summary(site.gemms)}" for site in sites
    )
    backends = " | ".join(f"{count} x {name}" for name, count in sorted(counts.items()))
    linears = {
        f"{site.path} {site.layers[0]}-{site.layers[1] - 1}": {n: dataclasses.asdict(g) for n, g in site.gemms.items()}
        for site in sites
    }
    return StepMeasurement(config.recipe, config.policy, config.remat, backends, config.batch, linears=linears)


def _with_program_stats(row: StepMeasurement, compiled: Any, load: ExpertRowLoad, *, gradients: int) -> StepMeasurement:
    """Returns `row` with memory and GEMMs of the compiled program; `gradients` is in bytes per device."""
    analysis = compiled.memory_analysis()
    try:
        gemms, note = gemm_calls_and_flops(compiled.as_text(), load), row.note
    except HloParseError as error:  # the time is useful without the FLOPs
        gemms, note = {}, f"GEMMs not counted: {error}"
    return dataclasses.replace(
        row,
        note=note,
        temporaries_gib=analysis.temp_size_in_bytes / GIB,
        activations_gib=(analysis.temp_size_in_bytes - gradients) / GIB,
        arguments_gib=analysis.argument_size_in_bytes / GIB,
        needed_gib=peak_bytes(compiled) / GIB,
        gemms=gemms,
    )


def _time(
    compiled: Any, state: Any, batch: Any, *, steps: int, repeats: int, warmup: int
) -> tuple[list[float], float | None, dict[str, jax.Array]]:
    """Returns (seconds per step of each repeat, joules per device and step, metrics of the last step)."""
    meter = open_energy_meter(jax.local_devices())
    for _ in range(warmup):
        state, metrics = compiled(state, batch)
    jax.block_until_ready(metrics)
    times, before = [], meter.joules()
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(steps):
            state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics)
        times.append((time.perf_counter() - started) / steps)
    after = meter.joules()
    joules = None if before is None or after is None else (after - before) / (repeats * steps)
    return times, joules, metrics


def _with_times(
    row: StepMeasurement, config: TrainConfig, seq: int, times: list[float], loss: float, *, joules: float | None = None
) -> StepMeasurement:
    """Returns `row` with the rates that follow from `times` and `joules`."""
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
    """Returns random tokens and targets [batch, seq], one document per row.

    The batch has no segment ids, so that attention is plainly causal.
    """
    rng = np.random.default_rng(config.seed)
    rows = rng.integers(0, config.model.vocab_size, (config.batch, seq + 1), dtype=np.int32)
    sharding = batch_sharding(mesh)
    arrays = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
    # Each process creates the shards of its own devices, because mocked GPUs have no peers that could send any.
    return {name: _sharded(array, sharding) for name, array in arrays.items()}


def _sharded(array: np.ndarray, sharding: Any) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _manifest(config: TrainConfig, seq: int) -> PrecisionManifest:
    """Returns the precision manifest of a run of `config`."""
    phase = phases(config)[0]
    return build_precision_manifest(config, phase.resolved(config), phase.recipe, seq=seq, device=ops.target_device())


def with_speed_ratio(rows: list[StepMeasurement]) -> list[StepMeasurement]:
    """Returns the rows with their speedup over bf16 under the same remat policy, else over the first bf16 row."""
    bases = {row.remat: per_sequence for row in rows if row.recipe == "bf16" and (per_sequence := _per_sequence(row))}
    default_base = next(iter(bases.values()), None)
    return [
        dataclasses.replace(row, ratio=_ratio(bases.get(row.remat, default_base), _per_sequence(row))) for row in rows
    ]


def as_compute_only(row: StepMeasurement) -> StepMeasurement:
    """Returns `row` of a run on mocked GPUs: without the loss, which is garbage; its rates are bounds."""
    return dataclasses.replace(row, loss=None, compute_only=True)


def _per_sequence(row: StepMeasurement) -> float | None:
    return row.milliseconds / (row.batch or 1) if row.milliseconds else None


def _ratio(base: float | None, value: float | None) -> float | None:
    return base / value if base and value else None
