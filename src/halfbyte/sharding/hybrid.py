"""Meshes over more devices than fast links join: which axes leave a rack is said, never found out from a step's time.

`dcn.AXIS=SIZE` is the part of an axis that crosses the slow network, AXIS=SIZE the part within one *slice*: a rack of
72 GPUs, a board of 8, whatever NVLink joins. `dcn.data=128,fsdp=16,tensor=4` is 128 slices of 64 devices, whose
gradients meet once a step. JAX knows slices (`slice_index`) or at least processes, and places them
(`create_hybrid_device_mesh`). Where it knows smaller ones than the mesh names, neighbours make one.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

from halfbyte.devices import lookup

DCN = "dcn."
Sizes = tuple[int, ...]


def crossing(shape: Mapping[str, int], axes: Sequence[str]) -> Sizes:
    """The part of each axis that crosses slices."""
    return tuple(int(shape.get(DCN + axis, 1)) for axis in axes)


def within(shape: Mapping[str, int], axes: Sequence[str]) -> Sizes:
    """The part of each axis within a slice."""
    return tuple(int(shape.get(axis, 1)) for axis in axes)


def hybrid_devices(shape: Mapping[str, int], axes: Sequence[str], devices: Sequence[Any]) -> np.ndarray:
    """`devices` in the order of a mesh whose `dcn.` parts lie between slices. Slices that the devices do not have are a
    ValueError.
    """
    outer, inner = crossing(shape, axes), within(shape, axes)
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
    ordered = np.array(sorted(devices, key=_place), dtype=object)
    return interleaved(ordered, outer, inner)


def interleaved(devices: np.ndarray, outer: Sizes, inner: Sizes) -> np.ndarray:
    """Devices in order, slice after slice -> [outer * inner for each axis]."""
    blocks = devices.reshape(*outer, *inner)
    dims = [dim for axis in range(len(outer)) for dim in (axis, len(outer) + axis)]
    return blocks.transpose(dims).reshape([a * b for a, b in zip(outer, inner, strict=True)])


def check_unseen(shape: Mapping[str, int], axes: Sequence[str], devices: Sequence[Any]) -> None:
    """Nothing if no axis leaves a slice without saying so; else a ValueError with what to write."""
    size = slice_size(devices)
    inside = prod(within(shape, axes))
    if size is None or inside <= size:
        return
    crosses = next(axis for axis in axes if shape.get(axis, 1) > 1)
    outer = -(-inside // size)
    while shape[crosses] % outer:
        outer += 1
    rest = "".join(f",{axis}={shape[axis]}" for axis in axes if axis != crosses and shape.get(axis, 1) > 1)
    inner = f",{crosses}={shape[crosses] // outer}" if shape[crosses] > outer else ""
    raise ValueError(
        f"mesh: {crosses}={shape[crosses]} would leave a slice of {size} devices, which fast links join, unseen; say "
        f"which part does: {DCN}{crosses}={outer}{inner}{rest} is the same layout, {DCN}data={outer}{inner}{rest} "
        "copies parameters instead and talks once a step"
    )


def default_shape(devices: Sequence[Any]) -> dict[str, int]:
    """FSDP over all devices; over several slices, said so."""
    size, count = slice_size(devices), len(devices)
    if size is None or count <= size or count % size:
        return {"fsdp": count}
    return {f"{DCN}fsdp": count // size, "fsdp": size}


def slice_size(devices: Sequence[Any]) -> int | None:
    """How many of these devices reach each other over fast links; None where nobody knows. The table's word comes
    before JAX's, which may take a host for a slice.
    """
    known = lookup(devices[0]).nvlink_domain
    if known is not None:
        return known
    slices = _count(devices, "slice_index")
    return len(devices) // slices if slices > 1 else None


def _count(devices: Sequence[Any], name: str) -> int:
    return len({getattr(device, name, 0) for device in devices})


def _place(device: Any) -> tuple[int, int, int]:
    return getattr(device, "slice_index", 0) or 0, device.process_index, device.id


def _slices(devices: Sequence[Any]) -> str:
    slices, processes = _count(devices, "slice_index"), _count(devices, "process_index")
    return f"{slices} slice{'s' * (slices > 1)} and {processes} process{'es' * (processes > 1)}"
