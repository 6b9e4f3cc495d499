"""Estimates before a run starts: how long it takes on this machine, and whether its recipe is faster than bf16.

GPUs of the device table are estimated by the plan's analytic step (`plan.analytic_step`). A CPU is estimated from the
speed of one float32 GEMM, measured when the command starts, and the bytes of the quantize passes: time on an idle
machine, within CPU_BAND.
"""

import dataclasses
import functools
import os
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from halfbyte.devices import Device, lookup
from halfbyte.train import TrainConfig
from halfbyte.train.run_presets import run_config

CPU_FLOPS_PER_OPERAND_BYTE = 300
"""A quantize pass on a CPU takes as long as this many FLOPs of a GEMM per byte that it writes. With the overhead within
15% of the processor time of four sizes of the demo, and of llama-60m's 122 s (tests/cli/test_first_hour.py)."""
CPU_STEP_OVERHEAD_S = 0.2
CPU_BAND = 2.0
"""The estimate is right within this factor: XLA does not keep all cores busy in small steps, other jobs slow all."""
PROBE_SIZE, PROBE_CALLS, PROBE_SAMPLES = 64, 20, 100
HOUR_S = 3600.0
SUGGESTED_RUNS = ("llama-350m", "llama-125m", "llama-60m", "demo")
MAX_EPOCHS = 20
"""Repetitions of a small data set in the run that `data prepare` suggests."""
PLAN_MARGIN = 0.10
"""Recipes that the plan expects to be at most this much faster than bf16 may be slower: fp8 of llama-350m on an H200 is
measured at 0.941x where the plan expects 1.08x."""


@functools.cache
def cpu_flops() -> float:
    """Returns FLOP/s of float32 GEMMs on all cores of this process: processor time of GEMMs that are too small for
    threads, which would count their waiting for a busy core. The fastest of some short samples."""
    square, best = np.ones((PROBE_SIZE, PROBE_SIZE), np.float32), float("inf")
    product = np.empty_like(square)
    for _ in range(PROBE_SAMPLES):
        began = time.thread_time()
        for _ in range(PROBE_CALLS):
            np.matmul(square, square, out=product)
        best = min(best, time.thread_time() - began)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 2 * PROBE_SIZE**3 * PROBE_CALLS / max(best, 1e-6) * cores


def visible_device() -> Device:
    """Returns the first GPU that nvidia-smi lists, else the CPU. Does not start JAX."""
    from halfbyte.devices.xla_flags import visible_gpus

    gpus = visible_gpus()
    return lookup(SimpleNamespace(platform="gpu", device_kind=gpus[0]) if gpus else SimpleNamespace(platform="cpu"))


def step_seconds(config: TrainConfig, seq: int, device: Device, count: int = 1) -> float | None:
    """Returns the expected seconds of a step on `count` devices; None if nothing is known of the device."""
    from halfbyte import models
    from halfbyte.plan.operand_traffic import compulsory_bytes

    config = dataclasses.replace(config, seq=seq, data="synthetic")
    if device.platform == "cpu":
        flops = config.batch * seq * models.flops_per_token(config.model, seq)
        passes = CPU_FLOPS_PER_OPERAND_BYTE * compulsory_bytes(dataclasses.replace(config, accumulate=1), {})
        return CPU_STEP_OVERHEAD_S + (flops + passes) / cpu_flops()
    return _planned_seconds(config, device, count)


def _planned_seconds(config: TrainConfig, device: Device, count: int) -> float | None:
    from halfbyte import plan

    try:
        cluster = plan.make_cluster(device, count)
        placed, _ = plan.place_run(config, cluster)
        return plan.evaluate_plan(placed, cluster, plan.profile_from_config(placed, cluster)).shared.seconds
    except (ValueError, KeyError):  # a board that the plan has no rates for, or a mesh that it cannot place
        return None


def start_notes(config: TrainConfig, seq: int, device: Device, count: int, *, steps: int) -> list[str]:
    """Returns what a person should know before the first of `steps` steps: run time, and a recipe slower than bf16."""
    seconds = step_seconds(config, seq, device, count)
    if seconds is None:
        return []
    notes = [
        f"estimate: {rough_duration(seconds)} per step, {rough_duration(steps * seconds)} for {steps:,} steps on this "
        f"machine{cpu_band(device)}, and compiling first"
    ]
    if device.platform != "cpu" and config.recipe != "bf16":
        plain = step_seconds(dataclasses.replace(config, recipe="bf16"), seq, device, count)
        notes += slower_than_bf16(config, device, seconds, plain)
    return notes


def cpu_band(device: Device) -> str:
    """Returns what an estimate for a CPU says of its accuracy."""
    return f", idle, within a factor of {CPU_BAND:g}" if device.platform == "cpu" else ""


def slower_than_bf16(config: TrainConfig, device: Device, seconds: float, plain: float | None) -> list[str]:
    """Returns a note if the recipe is not clearly faster than bf16, whose step takes `plain` seconds."""
    if plain is None or plain / seconds > 1 + PLAN_MARGIN:
        return []
    what, end = ("is slower than", "is") if plain / seconds < 1 else ("may be no faster than", "may be")
    return [
        f"NOTE: {config.recipe} {what} bf16 at the sizes of {config.model.name} on {device.name}: about "
        f"{plain / seconds:.2f}x its speed, +-{PLAN_MARGIN:.0%}; --recipe bf16 {end} the faster run"
    ]


def rough_duration(seconds: float) -> str:
    """Returns `about 40 ms`, `about 12 min`, `about 14 days`: one unit, rounded."""
    for unit, size, most in (("ms", 1e-3, 1.0), ("s", 1.0, 90.0), ("min", 60.0, 5400.0), ("h", 3600.0, 172800.0)):
        if seconds < most:
            return f"about {seconds / size:.2g} {unit}" if seconds / size < 10 else f"about {seconds / size:.0f} {unit}"
    return f"about {seconds / 86400:,.0f} days"


def suggested_run(manifest: Any) -> tuple[TrainConfig, float | None]:
    """Returns (run, its seconds) for a prepared data set: the largest small model with fewer parameters than the tokens
    that it sees, which this machine trains within an hour. The demo's size where there is none."""
    from halfbyte import models

    device = visible_device()
    totals = list(manifest.splits.get("train", {}).values())
    tokens, rows = sum(source.tokens for source in totals), sum(source.rows for source in totals)
    for name in SUGGESTED_RUNS:
        run = fit_to_data(run_config(name), manifest, rows)
        per_step = run.batch * manifest.seq_len
        budget = min(run.steps * per_step, MAX_EPOCHS * tokens)
        seconds = step_seconds(run, manifest.seq_len, device)
        steps = max(1, min(run.steps, -(-budget // per_step)))
        if name == SUGGESTED_RUNS[-1]:
            if seconds is not None:
                steps = max(1, min(steps, int(HOUR_S / seconds)))
            return dataclasses.replace(run, steps=steps), seconds and steps * seconds
        if models.count_params(run.model) <= budget and seconds is not None and steps * seconds <= HOUR_S:
            return dataclasses.replace(run, steps=steps), steps * seconds
    raise AssertionError("SUGGESTED_RUNS ends with the smallest")


def fit_to_data(run: TrainConfig, manifest: Any, rows: int) -> TrainConfig:
    """Returns the run with the data set's sequence length and vocabulary, and a batch that its rows fill."""
    from halfbyte.data.batch_loader import pad_vocab_size

    model, seq = run.model, manifest.seq_len
    if manifest.vocab_size > model.vocab_size:
        model = model.replace(vocab_size=pad_vocab_size(manifest.vocab_size))
    model = model.replace(max_seq=max(model.max_seq, seq))
    batch = max(1, min(run.batch, rows))
    return dataclasses.replace(run, model=model, seq=seq, batch=batch)


def changed_flags(run: TrainConfig, base: TrainConfig) -> list[str]:
    """Returns the flags of `halfbyte train` that make `run` of the preset `base`."""
    pairs = (
        ("--seq", run.seq, base.seq),
        ("--batch", run.batch, base.batch),
        ("--steps", run.steps, base.steps),
        ("--model.vocab-size", run.model.vocab_size, base.model.vocab_size),
        ("--model.max-seq", run.model.max_seq, base.model.max_seq),
    )
    return [word for flag, value, before in pairs if value != before for word in (flag, str(value))]
