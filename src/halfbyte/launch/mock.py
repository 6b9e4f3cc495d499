"""One GPU stands for one of N, so that a mesh can be timed without owning it: compute only.

JAX's CUDA client can be told of N devices in N processes, of which one is here. A step is then partitioned, autotuned
and scheduled for N, and at run time every collective is skipped: what is left is the time of one device's computation,
without communication. Gathered arrays hold what happened to be in memory, mostly zeros, so results are garbage: for
measuring alone. GEMMs over zeros draw less power, and run faster than over numbers.

Arrays must be made inside jit or by `jax.make_array_from_callback`: `device_put` would wait for other processes for
ever. Autotuning must not be shared with them (`--xla_gpu_shard_autotuning=false`), for the same reason.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass

import jax

MOCK_NOTE = "arrays that collectives would have filled are mostly zeros, over which GEMMs run up to 1.3x faster (H200)"
NO_SHARED_AUTOTUNING = "--xla_gpu_shard_autotuning=false"


@dataclass(frozen=True)
class Mock:
    """What was set up. `label` belongs to every figure that is measured under it."""

    devices: int
    label: str
    mocked: bool


def mock_gpus(count: int, environ: MutableMapping[str, str], *, gpu: bool) -> Mock:
    """Make this process see `count` devices: mocked, if it has a `gpu`, else that many real devices of the CPU.

    Must run before the first use of a device.
    """
    if count < 2:
        raise ValueError(f"mock-gpus must be at least 2, the devices of the mesh to stand for, got {count}")
    if gpu:
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {NO_SHARED_AUTOTUNING}".strip()
        jax.config.update("jax_cuda_visible_devices", "0")
        # slices x hosts x devices of a host, of which this process has one
        jax.config.update("jax_mock_gpu_topology", f"1x{count}x1")
        return Mock(count, "compute only", mocked=True)
    if getattr(jax.config, "jax_num_cpu_devices") != count:  # noqa: B009  JAX makes its settings at run time
        jax.config.update("jax_num_cpu_devices", count)
    return Mock(count, f"{count} CPU devices, nothing mocked", mocked=False)


def check_mock(mock: Mock) -> None:
    """Raises RuntimeError if JAX does not see the devices that were asked for: a figure would be of another mesh."""
    here = 1 if mock.mocked else mock.devices
    found = jax.device_count(), jax.local_device_count()
    if found != (mock.devices, here):
        raise RuntimeError(
            f"asked for {mock.devices} devices, {here} of them in this process, but JAX has {found[0]} and {found[1]}; "
            "the mock must be set up before JAX touches a device"
        )
