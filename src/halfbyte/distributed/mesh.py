"""Device meshes: from `fsdp=4,tensor=2` to a `jax.sharding.Mesh`, over one slice or several, or with mocked GPUs.

A *slice* is the set of devices that fast links join: a rack of 72 GPUs, a board of 8. `dcn.AXIS=SIZE` is the part of an
axis that crosses slices, AXIS=SIZE the part within one. `dcn.data=128,fsdp=16,tensor=4` is 128 slices of 64 devices,
whose gradients are summed over the slow network once per step. An axis that leaves a slice must be named with `dcn.`.

JAX knows slices (`slice_index`) or at least processes, and orders their devices (`create_hybrid_device_mesh`). If the
slices that it knows are smaller than those of the mesh, neighbors are joined.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from halfbyte.devices import lookup

DCN = "dcn."
# The last axis varies fastest over devices: `tensor` communicates most, so its devices are neighbors on fast links.
DEFAULT_MESH_AXES = ("data", "fsdp", "context", "tensor")
EXPERT_AXIS = "expert"  # only in meshes that name it, so that meshes of models without experts do not have the axis
ALL_MESH_AXES = (*DEFAULT_MESH_AXES[:2], EXPERT_AXIS, *DEFAULT_MESH_AXES[2:])
NAMED_MESH_AXES = (*(DCN + axis for axis in ALL_MESH_AXES), *ALL_MESH_AXES)
MeshShape = tuple[int, ...]
MOCK_NOTE = "arrays that collectives would have filled are mostly zeros, over which GEMMs run up to 1.3x faster (H200)"
NO_SHARED_AUTOTUNING = "--xla_gpu_shard_autotuning=false"


def parse_mesh(text: str) -> dict[str, int]:
    """Parses text such as `fsdp=4,tensor=2` or `dcn.data=2,fsdp=4` to sizes by axis. Empty text is one device.

    The sizes are in the order of NAMED_MESH_AXES, `dcn.` axes first; axes that are not named are left out.
    """
    sizes: dict[str, int] = {}
    for part in (piece.strip() for piece in text.split(",")):
        if not part:
            continue
        axis, equals, size = (field.strip() for field in part.partition("="))
        if not equals or not re.fullmatch("[0-9]{1,9}", size) or int(size) < 1:
            raise ValueError(f"mesh: {part!r} is not AXIS=SIZE with a size of at least 1, as in fsdp=4,tensor=2")
        if axis in sizes:
            raise ValueError(f"mesh: axis {axis!r} is given twice in {text!r}; name each axis once")
        _check_axis(axis.removeprefix(DCN))
        sizes[axis] = int(size)
    return {axis: sizes[axis] for axis in NAMED_MESH_AXES if axis in sizes}


def mesh_to_text(shape: Mapping[str, int]) -> str:
    """Returns the text that `parse_mesh` reads; axes of size 1 are left out."""
    return ",".join(f"{axis}={shape[axis]}" for axis in NAMED_MESH_AXES if shape.get(axis, 1) > 1)


def total_axis_sizes(shape: Mapping[str, int]) -> dict[str, int]:
    """Returns the size of each axis over all slices (DCN size x ICI size); axes of size 1 are left out."""
    sizes = zip(ALL_MESH_AXES, dcn_shape(shape, ALL_MESH_AXES), ici_shape(shape, ALL_MESH_AXES), strict=True)
    return {axis: outer * inner for axis, outer, inner in sizes if outer * inner > 1}


def make_mesh(shape: Mapping[str, int], devices: Sequence[jax.Device] | np.ndarray | None = None) -> Mesh:
    """Returns a mesh over `devices` (default: all devices of all processes) with all axes of DEFAULT_MESH_AXES.

    The axes have type Auto; those that are not named have size 1. The mesh has the axis `expert` if it is larger than
    1. Raises ValueError if the product of the sizes is not the number of devices, or if an axis leaves a slice without
    `dcn.`. An array of devices is used in its order, slice after slice, without the second check.
    """
    for axis in shape:
        _check_axis(axis.removeprefix(DCN))
    if devices is None:
        devices = jax.devices()
    axes = ALL_MESH_AXES if EXPERT_AXIS in total_axis_sizes(shape) else DEFAULT_MESH_AXES
    outer, inner = dcn_shape(shape, axes), ici_shape(shape, axes)
    count, needed = np.size(np.asarray(devices, dtype=object)), prod(outer + inner)
    if needed != count:
        named = mesh_to_text(shape) or "one device"
        raise ValueError(
            f"mesh: {named} needs {needed} devices, but there are {count}; "
            f"change an axis so that the product is {count}"
        )
    types = (AxisType.Auto,) * len(axes)
    if isinstance(devices, np.ndarray):
        return Mesh(interleave_slices(devices, outer, inner), axes, axis_types=types)
    check_slice_crossing(shape, axes, slice_size(devices))
    if prod(outer) > 1:
        return Mesh(create_hybrid_device_order(shape, axes, devices), axes, axis_types=types)
    if devices[0].platform == "cpu":
        return Mesh(np.asarray(devices, dtype=object).reshape(inner), axes, axis_types=types)
    return jax.make_mesh(inner, axes, devices=devices, axis_types=types)


def axis_size(mesh: Mesh | AbstractMesh | None, axes: Sequence[str] | str) -> int:
    """Returns the number of shards over `axes` of `mesh` (1 without a mesh)."""
    if mesh is None:
        return 1
    axes = (axes,) if isinstance(axes, str) else axes
    return prod(mesh.shape.get(axis, 1) for axis in axes)


def default_shape(devices: Sequence[Any]) -> dict[str, int]:
    """Returns FSDP over all devices, with `dcn.fsdp` over several slices."""
    size, count = slice_size(devices), len(devices)
    if size is None or count <= size or count % size:
        return {"fsdp": count}
    return {f"{DCN}fsdp": count // size, "fsdp": size}


def slice_size(devices: Sequence[Any]) -> int | None:
    """Returns the number of devices that fast links join; None if it is not known.

    The device table takes precedence over JAX, which may report a host as a slice.
    """
    known = lookup(devices[0]).nvlink_domain
    if known is not None:
        return known
    slices = _count(devices, "slice_index")
    return len(devices) // slices if slices > 1 else None


def dcn_shape(shape: Mapping[str, int], axes: Sequence[str]) -> MeshShape:
    """Returns the size of each axis across slices."""
    return tuple(int(shape.get(DCN + axis, 1)) for axis in axes)


def ici_shape(shape: Mapping[str, int], axes: Sequence[str]) -> MeshShape:
    """Returns the size of each axis within a slice."""
    return tuple(int(shape.get(axis, 1)) for axis in axes)


def check_slice_crossing(shape: Mapping[str, int], axes: Sequence[str], size: int | None) -> None:
    """Raises ValueError, with the mesh to write, if an axis without `dcn.` leaves a slice of `size` devices."""
    ici_size = prod(ici_shape(shape, axes))
    if size is None or ici_size <= size:
        return
    crosses = next(axis for axis in axes if shape.get(axis, 1) > 1)
    outer = -(-ici_size // size)
    while shape[crosses] % outer:
        outer += 1
    others = "".join(f",{axis}={shape[axis]}" for axis in axes if axis != crosses and shape.get(axis, 1) > 1)
    inner = f",{crosses}={shape[crosses] // outer}" if shape[crosses] > outer else ""
    raise ValueError(
        f"mesh: {crosses}={shape[crosses]} would leave a slice of {size} devices, which fast links join, unseen; say "
        f"which part does: {DCN}{crosses}={outer}{inner}{others} is the same layout, {DCN}data={outer}{inner}{others} "
        "copies parameters instead and talks once a step"
    )


def create_hybrid_device_order(shape: Mapping[str, int], axes: Sequence[str], devices: Sequence[Any]) -> np.ndarray:
    """Returns `devices` in the order of a mesh whose `dcn.` axes cross slices.

    Raises ValueError if the devices do not have as many slices.
    """
    outer, inner = dcn_shape(shape, axes), ici_shape(shape, axes)
    for name in ("slice_index", "process_index"):
        if _count(devices, name) == prod(outer):
            return mesh_utils.create_hybrid_device_mesh(
                inner, outer, devices, process_is_granule=name == "process_index"
            )
    smaller = max(_count(devices, "slice_index"), _count(devices, "process_index"))
    if smaller % prod(outer):
        named = ",".join(f"{DCN}{axis}={size}" for axis, size in zip(axes, outer, strict=True) if size > 1)
        raise ValueError(
            f"mesh: {named} needs {prod(outer)} slices, and these devices are {_slices(devices)}; "
            f"use a number that divides {smaller}, or leave out {DCN} to put all of them into one slice"
        )
    ordered = np.array(sorted(devices, key=_device_sort_key), dtype=object)
    return interleave_slices(ordered, outer, inner)


def interleave_slices(devices: np.ndarray, outer: MeshShape, inner: MeshShape) -> np.ndarray:
    """Reshapes devices, slice after slice, to [outer * inner for each axis]."""
    blocks = devices.reshape(*outer, *inner)
    dims = [dim for axis in range(len(outer)) for dim in (axis, len(outer) + axis)]
    return blocks.transpose(dims).reshape([a * b for a, b in zip(outer, inner, strict=True)])


@dataclass(frozen=True)
class MockedDevices:
    """Devices that this process sees. Every figure that is measured on them must be given with `label`."""

    devices: int
    label: str
    mocked: bool


def mock_gpu_topology(count: int, environ: MutableMapping[str, str], *, gpu: bool) -> MockedDevices:
    """Makes this process see `count` devices, to time a mesh without its hardware. Must run before any device is used.

    With a `gpu` the devices are mocked, else they are real CPU devices. JAX's CUDA client is configured as one of
    `count` processes with one GPU each. A step is partitioned, autotuned and scheduled for all of them, but at run time
    every collective is skipped, which leaves the compute time of one device. All-gathered arrays have uninitialized
    memory, mostly zeros: results are garbage, and GEMMs over zeros draw less power and run faster.

    Arrays must be created inside jit or by `jax.make_array_from_callback`: `device_put` would wait for the other
    processes forever. Sharded autotuning would wait too (`--xla_gpu_shard_autotuning=false`).
    """
    if count < 2:
        raise ValueError(f"mock-gpus must be at least 2, the devices of the mesh to stand for, got {count}")
    if gpu:
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {NO_SHARED_AUTOTUNING}".strip()
        jax.config.update("jax_cuda_visible_devices", "0")
        # slices x hosts x devices of a host, of which this process has one
        jax.config.update("jax_mock_gpu_topology", f"1x{count}x1")
        return MockedDevices(count, "compute only", mocked=True)
    if getattr(jax.config, "jax_num_cpu_devices") != count:  # noqa: B009  JAX makes its settings at run time
        jax.config.update("jax_num_cpu_devices", count)
    return MockedDevices(count, f"{count} CPU devices, nothing mocked", mocked=False)


def check_mock(mock: MockedDevices) -> None:
    """Raises RuntimeError if JAX does not see the devices of `mock`: a figure would be of another mesh."""
    local = 1 if mock.mocked else mock.devices
    seen = jax.device_count(), jax.local_device_count()
    if seen != (mock.devices, local):
        raise RuntimeError(
            f"asked for {mock.devices} devices, {local} of them in this process, but JAX has {seen[0]} and {seen[1]}; "
            "the mock must be set up before JAX touches a device"
        )


def _check_axis(axis: str) -> None:
    if axis not in ALL_MESH_AXES:
        near = difflib.get_close_matches(axis, ALL_MESH_AXES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"mesh: no axis {axis!r}; the axes are {', '.join(ALL_MESH_AXES)}, each also as {DCN}AXIS{hint}"
        )


def _count(devices: Sequence[Any], name: str) -> int:
    return len({getattr(device, name, 0) for device in devices})


def _device_sort_key(device: Any) -> tuple[int, int, int]:
    return getattr(device, "slice_index", 0) or 0, device.process_index, device.id


def _slices(devices: Sequence[Any]) -> str:
    slices, processes = _count(devices, "slice_index"), _count(devices, "process_index")
    return f"{slices} slice{'s' * (slices > 1)} and {processes} process{'es' * (processes > 1)}"
