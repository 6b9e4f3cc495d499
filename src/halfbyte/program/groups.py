"""Which devices a collective joins, and which axes of a mesh that is.

XLA writes replica groups in three ways: lists of device numbers, `{{0,1},{2,3}}`; an iota, reshaped, transposed and cut
into rows, `[2,4]<=[4,2]T(1,0)`; and axes of a mesh, `mesh['axis_0'=2,'axis_1'=4] {'axis_1'}`, an axis perhaps in part
(`'axis_0':(2)4` is 4 of it, behind the first 2), the mesh perhaps with an order of devices of its own
(`device_ids=([4,2]T(1,0))`). Numbers are positions in the program's list of devices, which is that of the mesh it was
compiled for.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from .text import Unreadable

Groups = tuple[tuple[int, ...], ...]

_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTS = re.compile(r"replica_groups=\{(\{[\d,{}]*\})?\}")
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{}]*)\}")
_DEVICES = re.compile(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def read_groups(attributes: str) -> Groups | None:
    """The groups of a collective's attributes, empty if nobody sends; None if all devices are one group and nobody says
    how many there are.
    """
    if found := _MESH.search(attributes):
        return _of_mesh(*found.groups())
    if found := _IOTA.search(attributes):
        rows, size, dims, order = found.groups()
        numbers = np.arange(int(rows) * int(size)).reshape(_numbers(dims))
        return _rows(numbers.transpose(_numbers(order)) if order else numbers, int(size))
    if found := _LISTS.search(attributes):
        return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,]+)\}", found.group(1) or "")) or None
    if found := _PAIRS.search(attributes):
        return _joined([tuple(_numbers(pair)) for pair in re.findall(r"\{([\d,]+)\}", found.group(1))])
    raise Unreadable(f"cannot read the replica groups of a collective: {attributes[:200]}")


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of `mesh` (name -> size, the last varies fastest) that the groups join. Unreadable if none do."""
    sought = {frozenset(group) for group in groups}
    for axes, whole in _candidates(mesh):
        if sought == whole:
            return axes
    shape = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    raise Unreadable(f"a collective over {len(groups)} groups, the first {groups[0][:8]}, is over no axes of {shape}")


def axes_along(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The fewest axes of `mesh` within which a permutation sends, as a ring or a reflection of an axis does."""
    for axes, whole in _candidates(mesh):
        if all(any(one.issuperset(group) for one in whole) for group in groups):
            return axes
    raise Unreadable(f"a permutation that joins {groups[0][:8]} names devices that are not in the mesh")


def _candidates(mesh: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], set[frozenset[int]]]]:
    """(axes, the groups that differ along them alone), fewest axes first."""
    wide = [axis for axis, size in mesh.items() if size > 1]
    for count in range(1, len(wide) + 1):
        for axes in itertools.combinations(wide, count):
            yield axes, {frozenset(group) for group in groups_over(axes, mesh)}


def groups_over(axes: tuple[str, ...], mesh: Mapping[str, int]) -> Groups:
    """Devices that differ along `axes` alone."""
    names = list(mesh)
    numbers = np.arange(math.prod(mesh.values())).reshape([mesh[axis] for axis in names])
    order = [names.index(axis) for axis in names if axis not in axes] + [names.index(axis) for axis in axes]
    return _rows(numbers.transpose(order), math.prod(mesh[axis] for axis in axes))


def _of_mesh(mesh: str, between: str, axes: str) -> Groups:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    parts = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in _AXIS.findall(axes)}
    dims: list[int] = []
    joined: list[int] = []
    for name, total in sizes.items():  # [before, size, behind] of each axis
        before, size = parts.get(name, (1, 1))
        if total % (before * size):
            raise Unreadable(f"axis {name} of {total} devices is not {before} x {size} x a whole number")
        joined += [len(dims) + 1] if name in parts else []
        dims += [before, size, total // (before * size)]
    rest = [at for at in range(len(dims)) if at not in joined]
    numbers = _order(between, math.prod(dims)).reshape(dims).transpose(rest + joined)
    return _rows(numbers, math.prod(dims[at] for at in joined))


def _order(text: str, count: int) -> np.ndarray:
    """A mesh's own order of devices, `device_ids=([4,2]T(1,0))` or a list; 0, 1, 2, ... where none is written."""
    found = _DEVICES.search(text)
    if found is None:
        if text.strip():
            raise Unreadable(f"cannot read the devices of a mesh: {text.strip()[:80]}")
        return np.arange(count)
    dims, order = _numbers(found.group(1)), _numbers(found.group(2) or "")
    if math.prod(dims) == count:
        return np.arange(count).reshape(dims).transpose(order or None).reshape(-1)
    if sorted(dims) != list(range(count)):
        raise Unreadable(f"cannot read the order of {count} devices: {text.strip()[:80]}")
    return np.array(dims)


def _joined(pairs: list[tuple[int, ...]]) -> Groups:
    """Devices that a permutation links, directly or through others."""
    group = {device: {device} for pair in pairs for device in pair}
    for a, b in pairs:
        if group[a] is not group[b]:
            group[a] |= group[b]
            group.update(dict.fromkeys(group[b], group[a]))
    return tuple(sorted({tuple(sorted(members)) for members in group.values()}))


def _rows(numbers: np.ndarray, size: int) -> Groups:
    return tuple(tuple(row) for row in numbers.reshape(-1, size).tolist())


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
