"""Model of a cluster: hosts and racks of GPUs, the mesh of a run on them, and the rates of a device.

GB200 and GB300 come as trays of four GPUs, at most eighteen trays per rack, all joined by NVLink; Hopper, B200 and B300
as boards of eight. All racks of a cluster are equally full.

A GEMM takes its FLOPs over the achieved rate of its format, or its bytes over the memory bandwidth if that is longer. A
pass takes its bytes over an achieved bandwidth, at least one kernel launch. A collective takes its bytes over the rate
that XLA has measured for its kind and number of GPUs, plus a latency. Fitted rates are in `rate_calibration.py`.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from jax.sharding import AbstractMesh

from halfbyte import models
from halfbyte.devices import DEVICES, Device
from halfbyte.devices.device_table import NETWORK_BANDWIDTH
from halfbyte.distributed import DEFAULT_RULES, mesh_to_text, parse_mesh
from halfbyte.distributed.mesh import ALL_MESH_AXES, DCN, check_slice_crossing, total_axis_sizes
from halfbyte.distributed.sharding_rules import check_sharded
from halfbyte.hlo.collective_ops import network_bytes, wire_bytes
from halfbyte.kernels.fp8_cast import TILING
from halfbyte.train import TrainConfig, phases

GPUS_PER_TRAY = {"gb200": 4, "gb300": 4}
GPUS_PER_BOARD = 8
KERNEL_LAUNCH_S = 2e-6  # seconds that a kernel takes at least
COLLECTIVE_LATENCY_S = {"nvlink": 15e-6, "network": 40e-6}
ACHIEVED_FRACTION = 0.78  # of a network card
# XLA's own measurements (openxla/xla, default_collective_perf_table), GB/s of the whole array on 8 and on 72 GPUs.
HOPPER_COLLECTIVES = {
    "all-gather": (402, 402),
    "reduce-scatter": (376, 376),
    "all-to-all": (388, 388),
    "all-reduce": (230, 230),
}
BLACKWELL = {
    "all-gather": (778, 674),
    "reduce-scatter": (798, 697),
    "all-to-all": (770, 641),
    "all-reduce": (480, 461),
}
ULTRA = {"all-gather": (784, 669), "reduce-scatter": (797, 686), "all-to-all": (769, 630), "all-reduce": (482, 452)}
NVLINK = {
    **dict.fromkeys(("h100", "h200"), HOPPER_COLLECTIVES),
    **dict.fromkeys(("b200", "gb200"), BLACKWELL),
    **dict.fromkeys(("b300", "gb300"), ULTRA),
}
# FLOP/s of causal cuDNN attention by the width of a head, forward and backward: narrow heads have twice as many
# exponentials for each FLOP. Measured on an H200 (docs/evidence/plan_rates_h200.json); for Blackwell vendor
# figures that nobody here has measured, one for both.
ATTENTION_RATES = {
    "h": {64: (409e12, 347e12), 128: (547e12, 485e12)},
    "b2": dict.fromkeys((64, 128), (1500e12, 1100e12)),
    "b3": dict.fromkeys((64, 128), (1750e12, 1250e12)),
}
GROUPED_PREFIX = "grouped "  # before the format of a GEMM over many experts
SMALL_GEMM_FLOPS = 4e6  # bytes: collectives of less wait for latency, and take nothing of a link


@dataclasses.dataclass(frozen=True)
class ClusterModel:
    """`count` GPUs of one kind, `per_host` in a host, `rack` that NVLink joins."""

    device: Device
    count: int
    per_host: int
    rack: int

    @property
    def hosts(self) -> int:
        """Hosts in all."""
        return self.count // self.per_host

    @property
    def usable_bytes(self) -> float:
        """Bytes of a device that `train` lets XLA use: a larger part of a single device than of one among several."""
        return (0.97 if self.count == 1 else 0.92) * (self.device.memory_bytes or 0)


@dataclass(frozen=True)
class DeviceRates:
    """What one device of a cluster reaches."""

    device: Device
    gemm: Mapping[str, float]
    """FLOP/s by format: bf16, fp8, fp4."""
    memory: float
    """Bytes/s of a pass that the compiler makes."""
    own_kernel_bandwidth: float
    """Bytes/s of a pass of our own kernels."""
    gains: Mapping[str, float] = field(default_factory=dict)
    """How much faster than these figures GEMMs of a format, or attention, run where nothing holds the clock back."""

    def gemm_seconds(self, flops: float, moved: float, format: str) -> float:
        """Seconds of one GEMM."""
        rate = self.gains.get(format, 1.0) * self.achieved_flops(format)
        return max(flops / rate, moved / self.memory, KERNEL_LAUNCH_S)

    def achieved_flops(self, format: str) -> float:
        """FLOP/s of GEMMs of `format`. Those over many experts have a dense one's where nobody has timed them."""
        return self.gemm.get(format) or self.gemm.get(format.removeprefix(GROUPED_PREFIX), self.gemm["bf16"])

    def memory_seconds(self, moved: float, *, ours: bool = False) -> float:
        """Seconds of one pass over memory."""
        return max(moved / (self.own_kernel_bandwidth if ours else self.memory), KERNEL_LAUNCH_S)

    def attention_seconds(self, flops: float, *, backward: bool, head_dim: int) -> float:
        """Seconds of one call of fused attention."""
        name = self.device.name.removeprefix("g")
        known = next(rates for start, rates in ATTENTION_RATES.items() if name.startswith(start))
        rate = self.gains.get("attention", 1.0) * known[64 if head_dim <= 64 else 128][backward]
        return max(flops / rate, KERNEL_LAUNCH_S)

    def collective_seconds(self, kind: str, whole: float, inner: int, outer: int) -> tuple[float, str]:
        """(seconds, link) of one collective of `whole` bytes between `inner` devices in each of `outer` racks."""
        nvlink = whole / self._nvlink(kind, inner * outer) if inner > 1 else 0.0
        if outer == 1:
            return nvlink + COLLECTIVE_LATENCY_S["nvlink"], "nvlink"
        leaves = network_bytes(kind, whole, inner, outer)
        hops = 1 + math.log2(outer) / 4
        return max(nvlink, leaves / (NETWORK_BANDWIDTH[self.device.name] * ACHIEVED_FRACTION)) + COLLECTIVE_LATENCY_S[
            "network"
        ] * hops, "network"

    def _nvlink(self, kind: str, group: int) -> float:
        """Returns bytes/s of the whole array, between 8 and 72 GPUs by the logarithm of their number. Links of fewer
        than 8 are as fast, and each sends a smaller part of the array.
        """
        table = NVLINK[self.device.name]
        few, many = table.get(kind, table["all-to-all"])
        part = min(max(math.log(group / 8) / math.log(72 / 8), 0.0), 1.0)
        return 1e9 * (few + (many - few) * part) * max(wire_bytes(kind, 1, 8) / wire_bytes(kind, 1, group), 1.0)


def make_cluster(device: Device, count: int) -> ClusterModel:
    """ValueError for a device that is no GPU of the table, and for a count that trays and racks cannot make."""
    if device.nvlink_domain is None or device.nvlink_bandwidth is None:
        linked = [name for name, each in DEVICES.items() if each.nvlink_domain]
        raise ValueError(f"device: {device.name} has no links in the table; plan for one of {', '.join(linked)}")
    board, domain = GPUS_PER_TRAY.get(device.name, GPUS_PER_BOARD), device.nvlink_domain
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if count <= board:
        if board % count:
            raise ValueError(_no_rack(device, count, [size for size in (1, 2, 4, 8) if size <= board]))
        return ClusterModel(device, count, count, count)
    racks = [size for size in range(domain, domain // 2 - 1, -board) if count % size == 0 and size % board == 0]
    if count <= domain and count % board == 0:
        return ClusterModel(device, count, board, count)
    if not racks:
        near = (
            made for away in range(count) for made in (count - away, count + away) if _can_be_built(made, board, domain)
        )
        raise ValueError(_no_rack(device, count, sorted({next(near), next(near)})))
    power = [size for size in racks if size & (size - 1) == 0]
    return ClusterModel(device, count, board, (power or racks)[0])


def _can_be_built(count: int, board: int, domain: int) -> bool:
    if count <= domain:
        return count > 0 and count % board == 0
    return any(count % size == 0 for size in range(domain, domain // 2 - 1, -board) if size % board == 0)


def _no_rack(device: Device, count: int, near: list[int]) -> str:
    size = GPUS_PER_TRAY.get(device.name, GPUS_PER_BOARD)
    return (
        f"count: no cluster has {count} {device.name}: they come {size} to a host and at most {device.nvlink_domain} "
        f"to a domain of NVLink, racks equally full; take {' or '.join(map(str, near))}"
    )


def place_run(
    config: TrainConfig, on: ClusterModel, *, mesh: str = "", batch: int = 0
) -> tuple[TrainConfig, tuple[str, ...]]:
    """Returns the run as it would be placed on `on`, and what was assumed.

    Without `mesh`: its own where that has as many devices, more copies of it where a multiple does, else FSDP over as
    many devices as the model divides over. Without `batch`: its own, once for each copy, or one sequence for each shard
    where that does not divide. Raises ValueError for a `mesh` that `train` refuses, with one that it does not.
    """
    shape, said, copies, refused = parse_mesh(checked_mesh(mesh, on) if mesh else config.mesh), list[str](), 1, ""
    size = prod(shape.values())
    if size > 1 and on.count != size and on.count % size == 0:
        copies = on.count // size
        shape[f"{DCN}data"] = shape.get(f"{DCN}data", 1) * copies
        said.append(f"mesh of the preset, {copies} times over `{DCN}data`")
    if prod(shape.values()) == on.count:
        placed = _with_batch(config, shape, batch, copies, said)
        refused = layout_error(placed[0], on)
        if not refused:
            return placed
    for shape in _fsdp_shapes(on):
        copies = shape[f"{DCN}data"] * shape["data"]
        over = f"{on.count // copies} devices, {copies} times: no shard may be smaller" if copies > 1 else "all devices"
        placed = _with_batch(config, shape, 0 if mesh else batch, 1, [f"mesh: FSDP over {over}"])
        if not layout_error(placed[0], on):
            if mesh:
                raise ValueError(f"{refused}; --mesh {placed[0].mesh or 'fsdp=1'} works")
            return placed
    raise ValueError(refused or f"count: {config.model.name} divides over no mesh of {on.count} devices; take another")


def _with_batch(
    config: TrainConfig, shape: Mapping[str, int], batch: int, copies: int, said: list[str]
) -> tuple[TrainConfig, tuple[str, ...]]:
    """Returns the run on a mesh with a batch that its shards divide, and what was assumed besides `said`."""
    parts = batch_shards(shape) * config.accumulate
    if batch and batch % parts:
        raise ValueError(f"batch: {batch} sequences are no multiple of {parts}, the shards of {mesh_to_text(shape)}")
    chosen = batch or config.batch * copies
    if chosen % parts:
        chosen = parts
        said = [*said, f"batch {parts}: one sequence of {config.seq} for each of {parts} shards"]
    elif not batch and copies > 1:
        said = [*said, f"batch {chosen}: the preset's, {copies} times"]
    return dataclasses.replace(config, mesh=mesh_to_text(shape), batch=chosen), tuple(said)


def _fsdp_shapes(on: ClusterModel) -> Iterator[dict[str, int]]:
    """Yields FSDP over all devices, then over fewer and fewer, with copies of the parameters: across racks first."""
    racks = on.count // on.rack
    for copies in (n for n in range(1, on.count + 1) if on.count % n == 0):
        outer = math.gcd(copies, racks)
        if on.rack % (copies // outer) == 0:
            inner = copies // outer
            yield {f"{DCN}data": outer, f"{DCN}fsdp": racks // outer, "data": inner, "fsdp": on.rack // inner}


def layout_error(config: TrainConfig, on: ClusterModel) -> str:
    """Returns why `train` refuses the mesh or batch of `config` on `on`; "" if it does not."""
    sizes = total_axis_sizes(parse_mesh(config.mesh))
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    try:
        check_slice_crossing(parse_mesh(config.mesh), ALL_MESH_AXES, on.device.nvlink_domain)
        models.check_mesh(config.model, mesh, batch=config.batch // config.accumulate, seq=config.seq)
        by_kernel = {path for segment in phases(config)[0].resolved(config).segments
                     for path, recipe in segment.recipes.items() if recipe.fprop_w.format.name == "fp8"}  # fmt: skip
        for site in models.linear_shapes(config.model, 1, 1):
            for size, axis in zip((site.k, site.n), site.axes) if site.path in by_kernel else ():
                if axis is not None:
                    check_sharded(size, axis, mesh, what=f"dim {axis!r} of {site.path}", multiple=TILING.rows)
    except ValueError as error:
        return str(error)
    return ""


def batch_shards(shape: Mapping[str, int]) -> int:
    """How many parts a mesh of this shape cuts a batch into."""
    sizes = total_axis_sizes(shape)
    return prod(sizes.get(axis, 1) for axis in DEFAULT_RULES.mesh_axes("batch"))


def checked_mesh(text: str, on: ClusterModel) -> str:
    """A mesh that was asked for. ValueError if it is not over `on.count` devices."""
    shape = parse_mesh(text)
    size = prod(shape.values())
    if size != on.count:
        raise ValueError(
            f"mesh: {text} needs {size} devices, and --count is {on.count}; change an axis so that the product is "
            f"{on.count}"
        )
    return mesh_to_text(shape)


def axes_across_racks(mesh: str, on: ClusterModel) -> dict[str, tuple[int, int]]:
    """Axis -> (members within a rack, racks that it crosses), for axes of more than one device. An axis that leaves a
    rack without saying so crosses as few as it must, the outermost first.
    """
    shape = parse_mesh(mesh)
    left = prod(shape.values()) // on.rack // prod(shape.get(DCN + axis, 1) for axis in ALL_MESH_AXES)
    found: dict[str, tuple[int, int]] = {}
    for axis in ALL_MESH_AXES:
        inner, outer = shape.get(axis, 1), shape.get(DCN + axis, 1)
        while left > 1 and inner % 2 == 0:
            inner, outer, left = inner // 2, outer * 2, left // 2
        if inner * outer > 1:
            found[axis] = inner, outer
    return found


def group_span(axes: tuple[str, ...], over: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """(members of a group over `axes` within a rack, racks)."""
    return prod(over[axis][0] for axis in axes), prod(over[axis][1] for axis in axes)
