"""Runs by name: each is a function that returns a frozen config. A new run is a new function.

Learning rates fall with size as the Llama 3 report and the small-model literature have it; batches are those of the
published NVFP4 runs where there is one.
"""

import dataclasses
import difflib
from collections.abc import Callable

from halfbyte import models
from halfbyte.optim import OptimizerConfig
from halfbyte.train import CheckpointConfig, LogConfig, PrecisionConfig, TrainConfig, ValidationConfig


def demo() -> TrainConfig:
    """A small Llama on the embedded corpus: minutes on a laptop."""
    return TrainConfig(
        name="demo",
        model=models.preset("demo"),
        data="demo",
        steps=340,
        batch=8,
        seq=128,
        optimizer=OptimizerConfig(learning_rate=1e-2, schedule="wsd", warmup=0.03, decay=0.97, final=0.0),
        validation=ValidationConfig(every=170, batches=0),
        checkpoint=CheckpointConfig(every=170),
        log=LogConfig(every=10),
    )


def moe_demo() -> TrainConfig:
    """A small mixture of 8 experts, 2 a token, on the embedded corpus: minutes on a laptop."""
    return dataclasses.replace(demo(), name="moe-demo", model=models.preset("moe-demo"), policy="experts")


def _small(name: str, *, learning_rate: float, batch: int, seq: int) -> TrainConfig:
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


def llama_60m() -> TrainConfig:
    """60M parameters: the smallest of the low-precision literature."""
    return _small("llama-60m", learning_rate=2e-3, batch=64, seq=1024)


def llama_125m() -> TrainConfig:
    """125M parameters."""
    return _small("llama-125m", learning_rate=1.5e-3, batch=64, seq=2048)


def llama_350m() -> TrainConfig:
    """350M parameters."""
    return _small("llama-350m", learning_rate=1e-3, batch=128, seq=2048)


def _large(name: str, *, mesh: str, batch: int, seq: int, learning_rate: float, remat: str) -> TrainConfig:
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


def llama3_2_1b() -> TrainConfig:
    """1.24B parameters, one device."""
    return _large("llama3.2-1b", mesh="", batch=8, seq=4096, learning_rate=5e-4, remat="none")


def qwen3_0_6b() -> TrainConfig:
    """0.60B parameters, one device."""
    return _large("qwen3-0.6b", mesh="", batch=16, seq=4096, learning_rate=1e-3, remat="none")


def qwen3_1_7b() -> TrainConfig:
    """1.72B parameters, one device."""
    return _large("qwen3-1.7b", mesh="", batch=8, seq=4096, learning_rate=5e-4, remat="none")


def qwen3_8b() -> TrainConfig:
    """8.19B parameters; FSDP over all devices."""
    return _large("qwen3-8b", mesh="", batch=32, seq=8192, learning_rate=3e-4, remat="quantized")


def llama3_8b() -> TrainConfig:
    """8.03B parameters; FSDP over all devices, 4 sequences of 8192 each on 8 of them."""
    return _large("llama3-8b", mesh="", batch=32, seq=8192, learning_rate=3e-4, remat="quantized")


def _rack(name: str, *, mesh: str, devices: int, learning_rate: float) -> TrainConfig:
    """The fastest layout that was found for racks of GB300 (docs/distributed.md): weights over all of them and nothing
    else, gradients that travel in bfloat16, the MLP in the run's recipe and attention's linears in MXFP8.
    """
    made = _large(name, mesh=mesh, batch=devices, seq=8192, learning_rate=learning_rate, remat="quantized")
    return dataclasses.replace(made, policy="mlp_mxfp8", precision=PrecisionConfig(reduce_dtype="bfloat16"))


def llama3_1_70b() -> TrainConfig:
    """70.6B parameters on 64 devices, a sequence each."""
    return _rack("llama3.1-70b", mesh="fsdp=64", devices=64, learning_rate=1.5e-4)


def llama3_1_405b() -> TrainConfig:
    """405.9B parameters on 64 devices in each of two racks, a sequence each."""
    return _rack("llama3.1-405b", mesh="dcn.fsdp=2,fsdp=64", devices=128, learning_rate=8e-5)


def _experts(name: str, *, mesh: str, batch: int) -> TrainConfig:
    made = _large(name, mesh=mesh, batch=batch, seq=4096, learning_rate=3e-4, remat="full")
    return dataclasses.replace(made, policy="experts")


def qwen3_30b_a3b() -> TrainConfig:
    """30.5B parameters, 3.4B a token, on 8 devices that share the experts."""
    return _experts("qwen3-30b-a3b", mesh="expert=8", batch=8)


def qwen3_235b_a22b() -> TrainConfig:
    """235B parameters, 22B a token, on 64 devices that share the experts. `tensor` and microbatches keep the tokens few
    that every device holds at once, and with `fsdp` all weights are cut 64 times."""
    return dataclasses.replace(_experts("qwen3-235b-a22b", mesh="fsdp=16,tensor=4", batch=64), accumulate=4)


RUNS: dict[str, Callable[[], TrainConfig]] = {
    "demo": demo,
    "moe-demo": moe_demo,
    "llama-60m": llama_60m,
    "llama-125m": llama_125m,
    "llama-350m": llama_350m,
    "qwen3-0.6b": qwen3_0_6b,
    "llama3.2-1b": llama3_2_1b,
    "qwen3-1.7b": qwen3_1_7b,
    "llama3-8b": llama3_8b,
    "qwen3-8b": qwen3_8b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "llama3.1-70b": llama3_1_70b,
    "qwen3-235b-a22b": qwen3_235b_a22b,
    "llama3.1-405b": llama3_1_405b,
}


def names() -> list[str]:
    """Names of all runs, smallest first."""
    return list(RUNS)


def run_config(name: str) -> TrainConfig:
    """The config of a run by name; ValueError with the nearest names."""
    if name not in RUNS:
        near = difflib.get_close_matches(name, RUNS, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"no run is called {name!r}; {hint}runs: {', '.join(RUNS)}")
    return RUNS[name]()
