"""Model of a cluster: hosts and racks of GPUs, the mesh of a run on them, and the rates of a device.

GB200 and GB300 come as trays of four GPUs, at most eighteen trays per rack, all connected by NVLink; Hopper, B200 and
B300 come as boards of eight. All racks of a cluster have the same number of GPUs.

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
KERNEL_LAUNCH_S = 2e-6  # shortest kernel
COLLECTIVE_LATENCY_S = {"nvlink": 15e-6, "network": 40e-6}
ACHIEVED_FRACTION = 0.78  # of a network card's bandwidth
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
# FLOP/s of causal cuDNN attention by head_dim, forward and backward: with 64 there are twice as many exponentials per
# FLOP as with 128. Measured on an H200 (docs/evidence/plan_rates_h200.json). Those of Blackwell are vendor figures that
# were not measured here, with one value for both head_dims.
ATTENTION_RATES = {
    "h": {64: (409e12, 347e12), 128: (547e12, 485e12)},
    "b2": dict.fromkeys((64, 128), (1500e12, 1100e12)),
    "b3": dict.fromkeys((64, 128), (1750e12, 1250e12)),
}
GROUPED_PREFIX = "grouped "  # before the format of a grouped GEMM
SMALL_GEMM_FLOPS = 4e6  # bytes: smaller collectives cost only latency and no bandwidth of their link


@dataclasses.dataclass(frozen=True)
class ClusterModel:
    """A cluster of `count` equal GPUs: `per_host` in a host, `rack` in an NVLink domain."""

    device: Device
    count: int
    per_host: int
    rack: int

    @property
    def hosts(self) -> int:
        """Returns the number of hosts."""
        return self.count // self.per_host

    @property
    def usable_bytes(self) -> float:
        """Returns the bytes per device that `train` lets XLA use: a larger fraction if there is only one device."""
        return (0.97 if self.count == 1 else 0.92) * (self.device.memory_bytes or 0)


@dataclass(frozen=True)
class DeviceRates:
    """Achieved rates of one device of a cluster."""

    device: Device
    gemm: Mapping[str, float]
    """FLOP/s by format: bf16, fp8, fp4."""
    memory: float
    """Bytes/s of a pass that XLA generates."""
    own_kernel_bandwidth: float
    """Bytes/s of a pass of this package's kernels."""
    gains: Mapping[str, float] = field(default_factory=dict)
    """Speedup over these rates of GEMMs by format, and of `attention`, if the power limit does not lower the clock."""

    def gemm_seconds(self, flops: float, bytes_moved: float, format: str) -> float:
        """Returns the seconds of one GEMM."""
        rate = self.gains.get(format, 1.0) * self.achieved_flops(format)
        return max(flops / rate, bytes_moved / self.memory, KERNEL_LAUNCH_S)

    def achieved_flops(self, format: str) -> float:
        """Returns the FLOP/s of GEMMs of `format`. A grouped GEMM that was not timed has the rate of a dense one."""
        return self.gemm.get(format) or self.gemm.get(format.removeprefix(GROUPED_PREFIX), self.gemm["bf16"])

    def memory_seconds(self, bytes_moved: float, *, ours: bool = False) -> float:
        """Returns the seconds of one pass over memory; `ours` for a kernel of this package."""
        return max(bytes_moved / (self.own_kernel_bandwidth if ours else self.memory), KERNEL_LAUNCH_S)

    def attention_seconds(self, flops: float, *, backward: bool, head_dim: int) -> float:
        """Returns the seconds of one fused attention call."""
        chip = self.device.name.removeprefix("g")
        rates_by_head_dim = next(
            rates_by_head_dim for start, rates_by_head_dim in ATTENTION_RATES.items() if chip.startswith(start)
        )
        rate = self.gains.get("attention", 1.0) * rates_by_head_dim[64 if head_dim <= 64 else 128][backward]
        return max(flops / rate, KERNEL_LAUNCH_S)

    def collective_seconds(self, kind: str, array_bytes: float, inner: int, outer: int) -> tuple[float, str]:
        """Returns (seconds, link) of a collective of `array_bytes` over `inner` devices in each of `outer` racks."""
        nvlink = array_bytes / self._nvlink(kind, inner * outer) if inner > 1 else 0.0
        if outer == 1:
            return nvlink + COLLECTIVE_LATENCY_S["nvlink"], "nvlink"
        network_sent = network_bytes(kind, array_bytes, inner, outer)
        hops = 1 + math.log2(outer) / 4
        return max(
            nvlink, network_sent / (NETWORK_BANDWIDTH[self.device.name] * ACHIEVED_FRACTION)
        ) + COLLECTIVE_LATENCY_S["network"] * hops, "network"

    def _nvlink(self, kind: str, group_size: int) -> float:
        """Returns bytes/s of the whole array, interpolated between 8 and 72 GPUs in the logarithm of their number.

        Groups of fewer than 8 have the link rate of 8, and each GPU sends a smaller fraction of the array.
        """
        table = NVLINK[self.device.name]
        bandwidth_of_8, bandwidth_of_72 = table.get(kind, table["all-to-all"])
        fraction = min(max(math.log(group_size / 8) / math.log(72 / 8), 0.0), 1.0)
        return (
            1e9
            * (bandwidth_of_8 + (bandwidth_of_72 - bandwidth_of_8) * fraction)
            * max(wire_bytes(kind, 1, 8) / wire_bytes(kind, 1, group_size), 1.0)
        )


def make_cluster(device: Device, count: int) -> ClusterModel:
    """Returns the cluster of `count` devices.

    Raises ValueError for a device without links in the table, and for a count that trays and racks cannot have.
    """
    if device.nvlink_domain is None or device.nvlink_bandwidth is None:
        linked = [name for name, entry in DEVICES.items() if entry.nvlink_domain]
        raise ValueError(f"device: {device.name} has no links in the table; plan for one of {', '.join(linked)}")
    board, domain = GPUS_PER_TRAY.get(device.name, GPUS_PER_BOARD), device.nvlink_domain
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if count <= board:
        if board % count:
            raise ValueError(_no_rack(device, count, [size for size in (1, 2, 4, 8) if size <= board]))
        return ClusterModel(device, count, count, count)
    racks = _rack_sizes(count, board, domain)
    if not racks:
        buildable = (
            candidate
            for distance in range(count)
            for candidate in (count - distance, count + distance)
            if _rack_sizes(candidate, board, domain)
        )
        raise ValueError(_no_rack(device, count, sorted({next(buildable), next(buildable)})))
    powers_of_two = [size for size in racks if size & (size - 1) == 0]
    return ClusterModel(device, count, board, (powers_of_two or racks)[0])


def _rack_sizes(count: int, board: int, domain: int) -> list[int]:
    """Returns the sizes of equally full NVLink domains that make `count` devices on whole boards, largest first."""
    if count <= domain:
        return [count] if count > 0 and count % board == 0 else []
    return [size for size in range(domain, domain // 2 - 1, -board) if count % size == 0 and size % board == 0]


def _no_rack(device: Device, count: int, alternatives: list[int]) -> str:
    gpus_per_host = GPUS_PER_TRAY.get(device.name, GPUS_PER_BOARD)
    return (
        f"count: no cluster has {count} {device.name}: they come {gpus_per_host} to a host and at most "
        f"{device.nvlink_domain} to a domain of NVLink, racks equally full; take {' or '.join(map(str, alternatives))}"
    )


def place_run(
    config: TrainConfig, cluster: ClusterModel, *, mesh: str = "", batch: int = 0
) -> tuple[TrainConfig, tuple[str, ...]]:
    """Returns the config with mesh and batch for `cluster`, and the assumptions that were made.

    Without `mesh`: the mesh of the config if it has as many devices; replicas of it if the cluster is a multiple; else
    FSDP over as many devices as the model divides over. Without `batch`: the batch of the config times the number of
    replicas, or one sequence per shard if the shards do not divide that. Raises ValueError for a `mesh` that `train`
    refuses; the message has one that it accepts.
    """
    shape, notes, copies, refusal = parse_mesh(checked_mesh(mesh, cluster) if mesh else config.mesh), list[str](), 1, ""
    size = prod(shape.values())
    if size > 1 and cluster.count != size and cluster.count % size == 0:
        copies = cluster.count // size
        shape[f"{DCN}data"] = shape.get(f"{DCN}data", 1) * copies
        notes.append(f"mesh of the preset, {copies} times over `{DCN}data`")
    if prod(shape.values()) == cluster.count:
        placed = _with_batch(config, shape, batch, copies, notes)
        refusal = layout_error(placed[0], cluster)
        if not refusal:
            return placed
    for shape in _fsdp_shapes(cluster):
        copies = shape[f"{DCN}data"] * shape["data"]
        span = (
            f"{cluster.count // copies} devices, {copies} times: no shard may be smaller"
            if copies > 1
            else "all devices"
        )
        placed = _with_batch(config, shape, 0 if mesh else batch, 1, [f"mesh: FSDP over {span}"])
        if not layout_error(placed[0], cluster):
            if mesh:
                raise ValueError(f"{refusal}; --mesh {placed[0].mesh or 'fsdp=1'} works")
            return placed
    raise ValueError(
        refusal or f"count: {config.model.name} divides over no mesh of {cluster.count} devices; take another"
    )


def _with_batch(
    config: TrainConfig, shape: Mapping[str, int], batch: int, copies: int, notes: list[str]
) -> tuple[TrainConfig, tuple[str, ...]]:
    """Returns the config with a mesh and a batch that its shards divide, and `notes` with further assumptions."""
    shards = batch_shards(shape) * config.accumulate
    if batch and batch % shards:
        raise ValueError(f"batch: {batch} sequences are no multiple of {shards}, the shards of {mesh_to_text(shape)}")
    new_batch = batch or config.batch * copies
    if new_batch % shards:
        new_batch = shards
        notes = [*notes, f"batch {shards}: one sequence of {config.seq} for each of {shards} shards"]
    elif not batch and copies > 1:
        notes = [*notes, f"batch {new_batch}: the preset's, {copies} times"]
    return dataclasses.replace(config, mesh=mesh_to_text(shape), batch=new_batch), tuple(notes)


def _fsdp_shapes(cluster: ClusterModel) -> Iterator[dict[str, int]]:
    """Yields meshes of FSDP over all devices, then with ever more replicas of the parameters, across racks first."""
    racks = cluster.count // cluster.rack
    for copies in (n for n in range(1, cluster.count + 1) if cluster.count % n == 0):
        outer = math.gcd(copies, racks)
        if cluster.rack % (copies // outer) == 0:
            inner = copies // outer
            yield {f"{DCN}data": outer, f"{DCN}fsdp": racks // outer, "data": inner, "fsdp": cluster.rack // inner}


def layout_error(config: TrainConfig, cluster: ClusterModel) -> str:
    """Returns why `train` refuses the mesh or batch of `config` on `cluster`; "" if it does not."""
    sizes = total_axis_sizes(parse_mesh(config.mesh))
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    try:
        check_slice_crossing(parse_mesh(config.mesh), ALL_MESH_AXES, cluster.device.nvlink_domain)
        models.check_mesh(config.model, mesh, batch=config.batch // config.accumulate, seq=config.seq)
        fp8_paths = {path for segment in phases(config)[0].resolved(config).segments
                     for path, recipe in segment.recipes.items() if recipe.fprop_w.format.name == "fp8"}  # fmt: skip
        for site in models.linear_shapes(config.model, 1, 1):
            for size, axis in zip((site.k, site.n), site.axes) if site.path in fp8_paths else ():
                if axis is not None:
                    check_sharded(size, axis, mesh, what=f"dim {axis!r} of {site.path}", multiple=TILING.rows)
    except ValueError as error:
        return str(error)
    return ""


def batch_shards(shape: Mapping[str, int]) -> int:
    """Returns the number of batch shards on a mesh of this shape."""
    sizes = total_axis_sizes(shape)
    return prod(sizes.get(axis, 1) for axis in DEFAULT_RULES.mesh_axes("batch"))


def checked_mesh(text: str, cluster: ClusterModel) -> str:
    """Returns the mesh `text` in normal form. Raises ValueError if it is not over `cluster.count` devices."""
    shape = parse_mesh(text)
    size = prod(shape.values())
    if size != cluster.count:
        raise ValueError(
            f"mesh: {text} needs {size} devices, and --count is {cluster.count}; change an axis so that the product is "
            f"{cluster.count}"
        )
    return mesh_to_text(shape)


def axes_across_racks(mesh: str, cluster: ClusterModel) -> dict[str, tuple[int, int]]:
    """Returns axis -> (members within a rack, racks that it crosses), for axes of more than one device.

    Racks that the `dcn.` axes do not account for are assigned to the other axes, the outermost first, by powers of two.
    """
    shape = parse_mesh(mesh)
    racks_left = prod(shape.values()) // cluster.rack // prod(shape.get(DCN + axis, 1) for axis in ALL_MESH_AXES)
    crossings: dict[str, tuple[int, int]] = {}
    for axis in ALL_MESH_AXES:
        inner, outer = shape.get(axis, 1), shape.get(DCN + axis, 1)
        while racks_left > 1 and inner % 2 == 0:
            inner, outer, racks_left = inner // 2, outer * 2, racks_left // 2
        if inner * outer > 1:
            crossings[axis] = inner, outer
    return crossings


def group_span(axes: tuple[str, ...], over: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Returns (members within a rack, racks) of a group over `axes`."""
    return prod(over[axis][0] for axis in axes), prod(over[axis][1] for axis in axes)
