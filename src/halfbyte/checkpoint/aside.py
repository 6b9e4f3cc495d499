"""A copy of the state beside the one that training goes on with, so that writing it down stops no step."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

MARGIN = 1.25  # a copy fits where this many times its size was never used; steps that come may take a little more
HOST_SHARE = 0.5  # of the host's free memory, at most, is locked for copies of the state


def shards(tree: Any) -> Iterator[jax.Array]:
    """What this process holds of the arrays, device by device."""
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards if isinstance(leaf, jax.Array) else ():
            yield shard.data


def bytes_by_device(tree: Any) -> dict[jax.Device, int]:
    """What the arrays take on each device of this process."""
    total: dict[jax.Device, int] = {}
    for shard in shards(tree):
        total[shard.device] = total.get(shard.device, 0) + shard.nbytes
    return total


def never_used(device: jax.Device) -> float:
    """Bytes of a device that no step so far has touched; infinite where the device does not count them (a CPU)."""
    counted: Mapping[str, int] | None = device.memory_stats()
    if counted is None:
        return float("inf")
    return counted.get("bytes_limit", 0) - counted.get("peak_bytes_in_use", 0)


def without_room(tree: Any, *, copied_before: bool) -> str | None:
    """Why a copy does not fit beside the state and a step's own memory; None when it does. What a copy has used
    before, it may use again."""
    for device, size in bytes_by_device(tree).items():
        free = never_used(device) + copied_before * size
        if MARGIN * size > free:
            return f"the state takes {size / 2**30:.1f} GiB of {device} and {free / 2**30:.1f} GiB of it are free"
    return None


def copied(tree: Any) -> Any:
    """The arrays again, where they are. Other leaves are passed on."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def on_gpus() -> bool:
    """Whether arrays are copied to the host over a bus; on a CPU they are there."""
    return jax.local_devices()[0].platform == "gpu"


def free_on_the_host(root: Path = Path("/")) -> float:
    """Bytes of memory that a Linux host, or the container that this runs in, can still give; 0 where neither says."""
    free = []
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.M)
        free += [1024 * int(found[1])] if found else []
    with contextlib.suppress(OSError, ValueError):  # "max": the container has no limit of its own
        limit, used = ((root / "sys/fs/cgroup" / name).read_text() for name in ("memory.max", "memory.current"))
        free.append(int(limit) - int(used))
    return min(free, default=0)


def lock_host_memory(tree: Any) -> str | None:
    """Have JAX lock as much of the host's memory as the arrays take; it keeps it, and copies to the host are then as
    fast as the bus. Locking is slow, and no step runs meanwhile: on an H200's host 9 s for 14 GiB, copied in 0.3 s
    afterwards. None, or why it cannot be had."""
    size, free = sum(bytes_by_device(tree).values()), free_on_the_host()
    if size > HOST_SHARE * free:
        return f"the state takes {size / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of the host's memory are free"
    try:
        locked = [jax.device_put(shard, shard.sharding.with_memory_kind("pinned_host")) for shard in shards(tree)]
        jax.block_until_ready(locked)
    except jax.errors.JaxRuntimeError as error:
        return f"{str(error).splitlines()[0][:160]} (XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB is JAX's limit)"
    return None
