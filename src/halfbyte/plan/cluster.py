"""How many GPUs there are, how they stand in hosts and racks, and the mesh that a run would have on them.

GB200 and GB300 come as trays of four GPUs, at most eighteen trays in a rack, whose NVLinks join all of them; Hopper,
B200 and B300 as boards of eight. A cluster is racks that are equally full.
"""

import dataclasses
from collections.abc import Mapping
from math import prod

from halfbyte.devices import DEVICES, Device
from halfbyte.sharding import DEFAULT_RULES, format_mesh, parse_mesh
from halfbyte.sharding.hybrid import DCN
from halfbyte.sharding.mesh import EVERY, whole_sizes
from halfbyte.train import TrainConfig

TRAY = {"gb200": 4, "gb300": 4}
BOARD = 8


@dataclasses.dataclass(frozen=True)
class Cluster:
    """`count` GPUs of one kind, `per_host` in a host, `rack` that NVLink joins."""

    device: Device
    count: int
    per_host: int
    rack: int

    @property
    def hosts(self) -> int:
        """Hosts in all."""
        return self.count // self.per_host


def cluster(device: Device, count: int) -> Cluster:
    """ValueError for a device that is no GPU of the table, and for a count that trays and racks cannot make."""
    if device.nvlink_domain is None or device.nvlink_bandwidth is None:
        linked = [name for name, each in DEVICES.items() if each.nvlink_domain]
        raise ValueError(f"device: {device.name} has no links in the table; plan for one of {', '.join(linked)}")
    board, domain = TRAY.get(device.name, BOARD), device.nvlink_domain
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if count <= board:
        if board % count:
            raise ValueError(_no_rack(device, count, [size for size in (1, 2, 4, 8) if size <= board]))
        return Cluster(device, count, count, count)
    racks = [size for size in range(domain, domain // 2 - 1, -board) if count % size == 0 and size % board == 0]
    if count <= domain and count % board == 0:
        return Cluster(device, count, board, count)
    if not racks:
        near = (made for away in range(count) for made in (count - away, count + away) if _made(made, board, domain))
        raise ValueError(_no_rack(device, count, sorted({next(near), next(near)})))
    power = [size for size in racks if size & (size - 1) == 0]
    return Cluster(device, count, board, (power or racks)[0])


def _made(count: int, board: int, domain: int) -> bool:
    if count <= domain:
        return count > 0 and count % board == 0
    return any(count % size == 0 for size in range(domain, domain // 2 - 1, -board) if size % board == 0)


def _no_rack(device: Device, count: int, near: list[int]) -> str:
    size = TRAY.get(device.name, BOARD)
    return (
        f"count: no cluster has {count} {device.name}: they come {size} to a host and at most {device.nvlink_domain} "
        f"to a domain of NVLink, racks equally full; take {' or '.join(map(str, near))}"
    )


def placed(config: TrainConfig, on: Cluster, *, mesh: str = "", batch: int = 0) -> tuple[TrainConfig, tuple[str, ...]]:
    """The run as it would be placed on `on`, and what was assumed. Without `mesh`: its own where that has as many
    devices, more copies of it where a multiple does, else FSDP over all, racks said. Without `batch`: its own, once for
    each copy, or one sequence for each shard where that does not divide.
    """
    shape, said, copies = parse_mesh(config.mesh), list[str](), 1
    size = prod(shape.values())
    if mesh:
        shape = parse_mesh(checked_mesh(mesh, on))
    elif size > 1 and on.count != size and on.count % size == 0:
        copies = on.count // size
        shape[f"{DCN}data"] = shape.get(f"{DCN}data", 1) * copies
        said.append(f"mesh of the preset, {copies} times over `{DCN}data`")
    elif size != on.count:
        shape = {f"{DCN}fsdp": on.count // on.rack, "fsdp": on.rack}
        said.append("mesh: FSDP over all devices")
    parts = batch_shards(shape) * config.accumulate
    if batch and batch % parts:
        raise ValueError(f"batch: {batch} sequences are no multiple of {parts}, the shards of {format_mesh(shape)}")
    chosen = batch or config.batch * copies
    if chosen % parts:
        chosen = parts
        said.append(f"batch {parts}: one sequence of {config.seq} for each of {parts} shards")
    elif not batch and copies > 1:
        said.append(f"batch {chosen}: the preset's, {copies} times")
    return dataclasses.replace(config, mesh=format_mesh(shape), batch=chosen), tuple(said)


def batch_shards(shape: Mapping[str, int]) -> int:
    """How many parts a mesh of this shape cuts a batch into."""
    sizes = whole_sizes(shape)
    return prod(sizes.get(axis, 1) for axis in DEFAULT_RULES.mesh_axes("batch"))


def checked_mesh(text: str, on: Cluster) -> str:
    """A mesh that was asked for. ValueError if it is not over `on.count` devices."""
    shape = parse_mesh(text)
    size = prod(shape.values())
    if size != on.count:
        raise ValueError(
            f"mesh: {text} needs {size} devices, and --count is {on.count}; change an axis so that the product is "
            f"{on.count}"
        )
    return format_mesh(shape)


def crossing(mesh: str, on: Cluster) -> dict[str, tuple[int, int]]:
    """Axis -> (members within a rack, racks that it crosses), for axes of more than one device. An axis that leaves a
    rack without saying so crosses as few as it must, the outermost first.
    """
    shape = parse_mesh(mesh)
    left = prod(shape.values()) // on.rack // prod(shape.get(DCN + axis, 1) for axis in EVERY)
    found: dict[str, tuple[int, int]] = {}
    for axis in EVERY:
        inner, outer = shape.get(axis, 1), shape.get(DCN + axis, 1)
        while left > 1 and inner % 2 == 0:
            inner, outer, left = inner // 2, outer * 2, left // 2
        if inner * outer > 1:
            found[axis] = inner, outer
    return found


def span(axes: tuple[str, ...], over: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """(members of a group over `axes` within a rack, racks)."""
    return prod(over[axis][0] for axis in axes), prod(over[axis][1] for axis in axes)
