"""The 8B step over eight GPUs of one kind, compiled without one, and what must hold of it under every recipe."""

import dataclasses

import numpy as np
from step_placement import placement

from halfbyte import ops, plan
from halfbyte.devices import is_known_xla_flag, target_cudnn, topology
from halfbyte.devices.jax_versions import ALL_GATHER_PIPELINING
from halfbyte.devices.xla_flags import FLAG_SETS, with_installed_names
from halfbyte.hlo import parse_hlo
from halfbyte.plan import FITTED_RATES
from halfbyte.plan.simulator import events_of_program, iter_events, simulate_step
from halfbyte.train import run_mesh
from halfbyte.train.run_presets import run_config

SEQ = 8192
# Hidden share of the time in which weights and their gradients are sent. XLA of JAX 0.11 and later, which has the newer
# flag, orders these steps so that more is exposed (docs/distributed.md).
MIN_HIDDEN = 0.6 if is_known_xla_flag(ALL_GATHER_PIPELINING[0]) else 0.97  # 0.991 to 1.000 on JAX 0.10.2


def config_of(recipe, *, batch):
    """The preset's run on fsdp=8. All its 32 layers: they are a loop, which costs the compiler no more than one. XLA's
    own guess of times is good enough at this size, and takes one compilation less (test_405b.py has the other).
    """
    return dataclasses.replace(
        run_config("llama3-8b"), recipe=recipe, mesh="fsdp=8", batch=batch, seq=SEQ, remat="quantized",
        data="synthetic", unroll=1, accumulate=1, schedule_by="xla",
    )  # fmt: skip


def compile_for(device, config, *, hosts, options=None):
    """(mesh, compiled step) for eight of `device` in `hosts`, with the flags that `train` sets there, and `options`."""
    mesh = run_mesh(config, np.array(topology(device, hosts=hosts, per_host=8 // hosts).devices))
    with ops.compile_for(device), target_cudnn():
        return mesh, plan.compile_step(config, mesh, seq=SEQ, options=recommended() | (options or {}))


def recommended(flags="recommended"):
    """The flags that `train` sets, or those of another set, as options of a compilation."""
    return {each.name: each.option for each in with_installed_names(FLAG_SETS[flags])}


def kernels_kept(folder):
    """Compiler options that cache kernels in `folder`: a step that is compiled twice, the second time with the times of
    a roofline, compiles each kernel once. XLA of JAX 0.11 has removed the second option and rejects it.
    """
    parallel = "xla_gpu_enable_llvm_module_compilation_parallelism"
    cache = {"xla_gpu_kernel_cache_file": str(folder / "kernels")}
    return cache | ({parallel: True} if is_known_xla_flag(parallel) else {})


def hidden_share(events, device):
    """Returns the hidden share of the time in which weights are all-gathered and their gradients reduce-scattered, as
    `halfbyte plan` simulates it. Sums over `tensor` are left out: nothing runs concurrently with them.
    """
    timeline = simulate_step(_sending_weights(events), FITTED_RATES.rates(device), queued=False)
    return 1 - timeline.exposed_communication / sum(timeline.link.values())


def _sending_weights(events):
    """Returns the events without the other collectives."""
    inner = (dataclasses.replace(each, body=_sending_weights(each.body)) for each in events)
    return tuple(each for each in inner if each.what != "send" or _sends_weights(each))


def _sends_weights(event):
    return event.format in ("all-gather", "reduce-scatter") and "fsdp" in event.axes


def check(compiled, config, mesh, device):
    """Placed and overlapped as promised; its (placement, program)."""
    found, program = placement(compiled, config, mesh), parse_hlo(compiled.as_text())
    assert found.excess <= 1.02
    assert found.bytes_needed < device.memory_bytes
    assert not found.unsharded_reduces  # no float32 all-reduce of a whole dW
    if config.recipe != "bf16":
        assert not found.unquantized_gathers and found.gathered["u8"]  # weights of the MLP travel as codes
    sizes = dict(mesh.shape)
    scheduled = events_of_program(
        program, sizes, {axis: (size, 1) for axis, size in sizes.items()}
    )  # as `plan` reads it
    assert (
        sum(event.flops * times for event, times in iter_events(scheduled) if event.what == "gemm")
        == found.multiplied_flops
    )
    hidden = hidden_share(scheduled, device)
    print(f"8 {device.name}, {config.recipe}: {hidden:.3f} of the time of sending weights is hidden")
    assert hidden >= MIN_HIDDEN
    return found, program
