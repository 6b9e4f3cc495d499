"""Meshes: from `fsdp=4,tensor=2` to a `jax.sharding.Mesh` with all four axes, and `expert` where it is named. Slices:
`hybrid.py`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from halfbyte.sharding.hybrid import DCN, check_unseen, crossing, hybrid_devices, interleaved, within

# The last axis varies fastest over devices: `tensor` talks most, so its members are neighbours on the fast links.
AXES = ("data", "fsdp", "context", "tensor")
EXPERT = "expert"  # only in meshes that name it: those of models without experts stay as they are
EVERY = (*AXES[:2], EXPERT, *AXES[2:])
NAMED = (*(DCN + axis for axis in EVERY), *EVERY)


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes by axis, in the order of `EVERY`, from text such as `fsdp=4,tensor=2` or `dcn.data=2,fsdp=4`, parts between
    slices first; axes not named are left out. Empty text is one device.
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
    return {axis: sizes[axis] for axis in NAMED if axis in sizes}


def format_mesh(shape: Mapping[str, int]) -> str:
    """The text that `parse_mesh` reads; axes of size 1 are left out."""
    return ",".join(f"{axis}={shape[axis]}" for axis in NAMED if shape.get(axis, 1) > 1)


def whole_sizes(shape: Mapping[str, int]) -> dict[str, int]:
    """Sizes by axis, both parts of each multiplied; axes of size 1 are left out."""
    sizes = zip(EVERY, crossing(shape, EVERY), within(shape, EVERY), strict=True)
    return {axis: outer * inner for axis, outer, inner in sizes if outer * inner > 1}


def make_mesh(shape: Mapping[str, int], devices: Sequence[jax.Device] | np.ndarray | None = None) -> Mesh:
    """A mesh over `devices` (default: every device of every process) with all of `AXES`, each of type Auto; axes not
    named have size 1. `expert` is one of its axes where it is more than 1.

    The product of the sizes must be the number of devices: a device that would idle is an error. So is an axis that
    would leave a slice unseen. An array of devices is taken in its own order, slice after slice, and not asked.
    """
    for axis in shape:
        _check_axis(axis.removeprefix(DCN))
    if devices is None:
        devices = jax.devices()
    axes = EVERY if EXPERT in whole_sizes(shape) else AXES
    outer, inner = crossing(shape, axes), within(shape, axes)
    count, wanted = np.size(np.asarray(devices, dtype=object)), math.prod(outer + inner)
    if wanted != count:
        named = format_mesh(shape) or "one device"
        raise ValueError(
            f"mesh: {named} needs {wanted} devices, but there are {count}; "
            f"change an axis so that the product is {count}"
        )
    types = (AxisType.Auto,) * len(axes)
    if isinstance(devices, np.ndarray):
        return Mesh(interleaved(devices, outer, inner), axes, axis_types=types)
    check_unseen(shape, axes, devices)
    if math.prod(outer) > 1:
        return Mesh(hybrid_devices(shape, axes, devices), axes, axis_types=types)
    if devices[0].platform == "cpu":
        return Mesh(np.asarray(devices, dtype=object).reshape(inner), axes, axis_types=types)
    return jax.make_mesh(inner, axes, devices=devices, axis_types=types)


def axis_size(mesh: Mesh | None, axes: Sequence[str] | str) -> int:
    """The number of shards over `axes` of `mesh` (1 without a mesh)."""
    if mesh is None:
        return 1
    axes = (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape.get(axis, 1) for axis in axes)


def _check_axis(axis: str) -> None:
    if axis not in EVERY:
        near = difflib.get_close_matches(axis, EVERY, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"mesh: no axis {axis!r}; the axes are {', '.join(EVERY)}, each also as {DCN}AXIS{hint}")
