"""A copy of the state beside the one that training goes on with, so that writing it down stops no step."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from .checksum import inspect

MARGIN = 1.25  # a copy fits where this many times its size was never used; steps that come may take a little more
GIB = 2**30
HOST_SHARE = 0.5  # of the host's free memory, at most, is locked for copies of the state
JAX_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


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
            return f"the state takes {size / GIB:.1f} GiB of {device} and {free / GIB:.1f} GiB of it are free"
    return None


def copied(tree: Any) -> Any:
    """The arrays again, where they are. Other leaves are passed on."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def run_once(items: Mapping[str, Any]) -> None:
    """Run the programs of a save, which are compiled by that. Not over several processes: there all must begin a
    program in the same order, which threads do not keep."""
    if jax.process_count() == 1:
        for tree in items.values():
            inspect(tree)
        for leaf in jax.tree.leaves(items) if without_room(items, copied_before=False) is None else ():
            jax.block_until_ready(copied(leaf))


def on_gpus() -> bool:
    """Whether arrays are copied to the host over a bus; on a CPU they are there."""
    return jax.local_devices()[0].platform == "gpu"


def free_on_the_host(root: Path = Path("/")) -> float:
    """Bytes of memory that a Linux host can still give, within the limits of the control groups (version 2) that this
    process is in; 0 where nobody says. What only caches files counts as free."""
    free = []
    with contextlib.suppress(OSError):
        free += _numbers(r"^MemAvailable:\s+(\d+) kB", root / "proc/meminfo", times=1024)
    group = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        group /= re.sub(r"^0::/*", "", (root / "proc/self/cgroup").read_text().splitlines()[-1])
    while group != root / "sys/fs":
        with contextlib.suppress(OSError, ValueError):  # "max": no limit of its own
            limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
            free.append(limit - used + sum(_numbers(r"^inactive_file (\d+)", group / "memory.stat")))
        group = group.parent
    return min(free, default=0)


def _numbers(pattern: str, file: Path, times: int = 1) -> list[int]:
    return [times * int(found) for found in re.findall(pattern, file.read_text(), re.M)]


def processes_here(root: Path = Path("/")) -> int:
    """How many processes share this host, if each has as many of its GPUs as this one."""
    return max(1, len(list((root / "dev").glob("nvidia[0-9]*"))) // jax.local_device_count())


def lock_host_memory(tree: Any) -> str | None:
    """Have JAX lock as much of the host's memory as the arrays take; it keeps it, and copies to the host are then as
    fast as the bus. Locking is slow, and no step runs meanwhile: on an H200's host 9 s for 14 GiB, copied in 0.3 s
    afterwards. None, or why it cannot be had."""
    size, free = sum(bytes_by_device(tree).values()), free_on_the_host() / processes_here()
    limit = float(os.environ.get(JAX_LIMIT, 64)) * GIB
    if size > HOST_SHARE * free:
        return f"the state takes {size / GIB:.1f} GiB, and {free / GIB:.1f} GiB of the host's memory are free for it"
    if size > limit:
        return f"the state takes {size / GIB:.1f} GiB, and JAX locks {limit / GIB:.1f} at most ({JAX_LIMIT})"
    try:
        locked = [jax.device_put(shard, shard.sharding.with_memory_kind("pinned_host")) for shard in shards(tree)]
        jax.block_until_ready(locked)
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0][:160]
    return None
