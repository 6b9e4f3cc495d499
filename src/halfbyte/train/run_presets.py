"""Run presets: a frozen config by name. A new preset is a new entry of `RUN_PRESETS`.

Learning rates decrease with model size as in the Llama 3 report and the small-model literature. Batch sizes are those
of published NVFP4 runs where there is one.
"""

import dataclasses
import difflib
from collections.abc import Callable
from functools import partial

from halfbyte import models
from halfbyte.train.optimizers import OptimizerConfig
from halfbyte.train.train_config import CheckpointConfig, LogConfig, PrecisionConfig, TrainConfig, ValidationConfig


def _demo_preset(name: str) -> TrainConfig:
    """Returns a run on the embedded corpus: minutes on a laptop."""
    return TrainConfig(
        name=name,
        model=models.preset(name),
        data="demo",
        steps=340,
        batch=8,
        seq=128,
        optimizer=OptimizerConfig(learning_rate=1e-2, schedule="wsd", warmup=0.03, decay=0.97, final=0.0),
        validation=ValidationConfig(every=170, batches=0),
        checkpoint=CheckpointConfig(every=170),
        log=LogConfig(every=10),
    )


def _small_preset(name: str, *, learning_rate: float, batch: int, seq: int) -> TrainConfig:
    """Returns a run of a model size of the low-precision training literature."""
    return TrainConfig(
        name=name,
        model=models.preset(name),
        data="synthetic",
        steps=10_000,
        batch=batch,
        seq=seq,
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup=0.05),
        validation=ValidationConfig(every=500),
    )


def _large_preset(name: str, *, batch: int, seq: int, learning_rate: float, remat: str, mesh: str = "") -> TrainConfig:
    """Returns a run on `mesh`; without one on a single device, or with FSDP over all devices."""
    return TrainConfig(
        name=name,
        model=models.preset(name),
        data="synthetic",
        mesh=mesh,
        steps=10_000,
        batch=batch,
        seq=seq,
        remat=remat,  # type: ignore[arg-type]
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup=0.01),
        checkpoint=CheckpointConfig(every=500, keep_last=2, keep_every=5000),
        watchdog_s=1800.0,
    )


def _nvl72_preset(name: str, *, mesh: str, devices: int, learning_rate: float) -> TrainConfig:
    """Returns a run with one sequence per device, in the fastest layout of a search for GB300 racks.

    See docs/distributed.md: only weights are sharded, over all devices, gradients are reduced in bfloat16, the MLP runs
    in the recipe of the run and the linears of attention in MXFP8.
    """
    base = _large_preset(name, mesh=mesh, batch=devices, seq=8192, learning_rate=learning_rate, remat="quantized")
    return dataclasses.replace(base, policy="mlp_mxfp8", precision=PrecisionConfig(reduce_dtype="bfloat16"))


def _moe_preset(name: str, *, mesh: str, batch: int, accumulate: int = 1) -> TrainConfig:
    """Returns a run with experts sharded over devices. `tensor` and microbatches limit the tokens per device."""
    base = _large_preset(name, mesh=mesh, batch=batch, seq=4096, learning_rate=3e-4, remat="full")
    return dataclasses.replace(base, policy="experts", accumulate=accumulate)


RUN_PRESETS: dict[str, Callable[[str], TrainConfig]] = {
    "demo": _demo_preset,
    "moe-demo": lambda name: dataclasses.replace(_demo_preset(name), policy="experts"),
    "llama-60m": partial(_small_preset, learning_rate=2e-3, batch=64, seq=1024),
    "llama-125m": partial(_small_preset, learning_rate=1.5e-3, batch=64, seq=2048),
    "llama-350m": partial(_small_preset, learning_rate=1e-3, batch=128, seq=2048),
    "qwen3-0.6b": partial(_large_preset, batch=16, seq=4096, learning_rate=1e-3, remat="none"),
    "llama3.2-1b": partial(_large_preset, batch=8, seq=4096, learning_rate=5e-4, remat="none"),
    "qwen3-1.7b": partial(_large_preset, batch=8, seq=4096, learning_rate=5e-4, remat="none"),
    "olmoe-1b-7b": partial(_moe_preset, mesh="expert=8", batch=8),
    "llama3-8b": partial(_large_preset, batch=32, seq=8192, learning_rate=3e-4, remat="quantized"),
    "qwen3-8b": partial(_large_preset, batch=32, seq=8192, learning_rate=3e-4, remat="quantized"),
    "qwen3-30b-a3b": partial(_moe_preset, mesh="expert=8", batch=8),
    "mixtral-8x7b": partial(_moe_preset, mesh="fsdp=4,expert=8", batch=32),
    "llama3.1-70b": partial(_nvl72_preset, mesh="fsdp=64", devices=64, learning_rate=1.5e-4),
    "qwen3-235b-a22b": partial(_moe_preset, mesh="fsdp=16,tensor=4", batch=64, accumulate=4),
    "llama3.1-405b": partial(_nvl72_preset, mesh="dcn.fsdp=2,fsdp=64", devices=128, learning_rate=8e-5),
}
"""Name -> function that returns its config."""


def run_names() -> list[str]:
    """Returns the names of all run presets, smallest first."""
    return list(RUN_PRESETS)


def run_config(name: str) -> TrainConfig:
    """Returns the config of a run preset; the ValueError for an unknown name suggests the nearest ones."""
    if name not in RUN_PRESETS:
        near = difflib.get_close_matches(name, RUN_PRESETS, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"no run is called {name!r}; {hint}runs: {', '.join(RUN_PRESETS)}")
    return RUN_PRESETS[name](name)
