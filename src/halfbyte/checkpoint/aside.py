"""A copy of the state beside the one that training goes on with, so that writing it down stops no step."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

MARGIN = 1.25  # a copy fits where this many times its size was never used; steps that come may take a little more


def bytes_by_device(tree: Any) -> dict[jax.Device, int]:
    """What the arrays take on each device of this process."""
    total: dict[jax.Device, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards if isinstance(leaf, jax.Array) else ():
            total[shard.device] = total.get(shard.device, 0) + shard.data.nbytes
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
