"""The collectives of a program: kind, bytes, devices, mesh axes and how often they run.

`array_bytes` is the size of the whole array: after an all-gather, before a reduce-scatter. `wire_bytes_per_call` is
what one device sends in a ring. Device numbers are positions in the program's device list, which is that of its mesh.

XLA writes replica groups in three forms:

- lists of device numbers: `{{0,1},{2,3}}`
- an iota that is reshaped, transposed and split into rows: `[2,4]<=[4,2]T(1,0)`
- axes of a mesh: `mesh['axis_0'=2,'axis_1'=4] {'axis_1'}`. `'axis_0':(2)4` is 4 of an axis, behind the first 2, and
  `device_ids=([4,2]T(1,0))` is a device order of the mesh's own.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from halfbyte.hlo.hlo_text import HloArray, HloInstruction, HloModule, HloParseError
from halfbyte.hlo.trip_counts import WeightedInstruction, execution_counts

ReplicaGroups = tuple[tuple[int, ...], ...]
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTS = re.compile(r"replica_groups=\{(\{[\d,{}]*\})?\}")
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{}]*)\}")
_DEVICES = re.compile(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
COLLECTIVE_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
)


@dataclass(frozen=True)
class Collective:
    """One collective of a step. `axes` are names of the mesh's axes, empty where no mesh was given."""

    instruction: HloInstruction
    kind: str
    arrays: tuple[HloArray, ...]
    """What each device hands in."""
    group_size: int
    """Devices that take part together."""
    axes: tuple[str, ...]
    asynchronous: bool
    execution_count: int

    @property
    def array_bytes_per_call(self) -> int:
        """Bytes of the whole array that one call gathers, scatters or reduces; of a ragged all-to-all, whose buffer is
        larger on one side, those of the smaller side.
        """
        if self.kind == "ragged-all-to-all":
            return min(array.bytes for array in self.arrays[:2])
        size = sum(array.bytes for array in self.arrays)
        return size * self.group_size if self.kind == "all-gather" else size

    @property
    def array_bytes(self) -> int:
        """The same, of a step."""
        return self.array_bytes_per_call * self.execution_count

    @property
    def wire_bytes_per_call(self) -> float:
        """Bytes that one device sends in one call, over a ring."""
        return wire_bytes(self.kind, self.array_bytes_per_call, self.group_size)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element types that are sent."""
        return tuple(sorted({array.dtype for array in self.arrays}))

    def __str__(self) -> str:
        over = "+".join(self.axes) or f"{self.group_size} devices"
        mode = "async" if self.asynchronous else "SYNC"
        size = f"{self.array_bytes_per_call / 1e6:,.1f} MB {'+'.join(self.dtypes)}"
        return f"{self.kind} of {size} over {over}, {self.execution_count} times, {mode}"


def wire_bytes(kind: str, array_bytes: float, group_size: int) -> float:
    """Returns the bytes that one device sends over a ring of `group_size`."""
    if kind in ("collective-permute", "collective-broadcast"):
        return float(array_bytes)
    return array_bytes * (group_size - 1) / group_size * (2 if kind == "all-reduce" else 1)


def network_bytes(kind: str, array_bytes: float, inner: int, outer: int) -> float:
    """Returns the bytes that one device's network card sends, with `inner` devices in each of `outer` NVLink domains.

    Each link of a ring carries as much, and a domain's cards share the ring's link to the next domain. In an all-to-all
    (or a permutation) a device sends its own rows, of which none is another device's, through its own card.
    """
    if kind in ("all-to-all", "ragged-all-to-all"):
        return array_bytes * (outer - 1) / outer
    return wire_bytes(kind, array_bytes, inner * outer) / (1 if kind == "collective-permute" else inner)


def parse_replica_groups(attributes: str) -> ReplicaGroups | None:
    """Returns the groups of a collective's attributes, empty if nothing is sent; None if all devices are one group of
    unstated size.
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
        return _connected_devices([tuple(_numbers(pair)) for pair in re.findall(r"\{([\d,]+)\}", found.group(1))])
    raise HloParseError(f"cannot read the replica groups of a collective: {attributes[:200]}")


def mesh_axes_of_groups(groups: ReplicaGroups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of `mesh` (name -> size, the last varies fastest) that the groups join. Raises HloParseError if none
    do.
    """
    sought = {frozenset(group) for group in groups}
    for axes, whole in _candidates(mesh):
        if sought == whole:
            return axes
    shape = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    raise HloParseError(
        f"a collective over {len(groups)} groups, the first {groups[0][:8]}, is over no axes of {shape}"
    )


def mesh_axes_of_permutation(groups: ReplicaGroups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The fewest axes of `mesh` within which a permutation sends, as a ring or a reflection of an axis does."""
    for axes, whole in _candidates(mesh):
        if all(any(one.issuperset(group) for one in whole) for group in groups):
            return axes
    raise HloParseError(f"a permutation that joins {groups[0][:8]} names devices that are not in the mesh")


def _candidates(mesh: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], set[frozenset[int]]]]:
    """Yields (axes, groups of devices that differ only along them), fewest axes first."""
    wide = [axis for axis, size in mesh.items() if size > 1]
    for count in range(1, len(wide) + 1):
        for axes in itertools.combinations(wide, count):
            yield axes, {frozenset(group) for group in replica_groups_over(axes, mesh)}


def replica_groups_over(axes: tuple[str, ...], mesh: Mapping[str, int]) -> ReplicaGroups:
    """Returns the groups of devices that differ only along `axes`."""
    names = list(mesh)
    numbers = np.arange(math.prod(mesh.values())).reshape([mesh[axis] for axis in names])
    order = [names.index(axis) for axis in names if axis not in axes] + [names.index(axis) for axis in axes]
    return _rows(numbers.transpose(order), math.prod(mesh[axis] for axis in axes))


def _of_mesh(mesh: str, between: str, axes: str) -> ReplicaGroups:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    parts = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in _AXIS.findall(axes)}
    dims: list[int] = []
    joined: list[int] = []
    for name, total in sizes.items():  # [before, size, behind] of each axis
        before, size = parts.get(name, (1, 1))
        if total % (before * size):
            raise HloParseError(f"axis {name} of {total} devices is not {before} x {size} x a whole number")
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
            raise HloParseError(f"cannot read the devices of a mesh: {text.strip()[:80]}")
        return np.arange(count)
    dims, order = _numbers(found.group(1)), _numbers(found.group(2) or "")
    if math.prod(dims) == count:
        return np.arange(count).reshape(dims).transpose(order or None).reshape(-1)
    if sorted(dims) != list(range(count)):
        raise HloParseError(f"cannot read the order of {count} devices: {text.strip()[:80]}")
    return np.array(dims)


def _connected_devices(pairs: list[tuple[int, ...]]) -> ReplicaGroups:
    """Devices that a permutation links, directly or through others."""
    group = {device: {device} for pair in pairs for device in pair}
    for a, b in pairs:
        if group[a] is not group[b]:
            group[a] |= group[b]
            group.update(dict.fromkeys(group[b], group[a]))
    return tuple(sorted({tuple(sorted(members)) for members in group.values()}))


def _rows(numbers: np.ndarray, size: int) -> ReplicaGroups:
    return tuple(tuple(row) for row in numbers.reshape(-1, size).tolist())


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def collective_kind(found: HloInstruction) -> str | None:
    """The kind of collective that an instruction is or starts; None for others and for a done."""
    return next((kind for kind in COLLECTIVE_KINDS if found.opcode in (kind, f"{kind}-start")), None)


def find_collectives(program: HloModule, mesh: Mapping[str, int] | None = None) -> list[Collective]:
    """Every collective of a step; with `mesh` (axis -> size, as the program was compiled for) also its axes.

    Those that send nothing are left out: groups of one device, and permutations without pairs, which XLA writes where a
    reshard moves nothing.
    """
    # An async-start may wrap a collective in a computation of its own.
    wrapping = [found for found in program.instructions.values() if found.opcode == "async-start"]
    starters = {name: found for found in wrapping for name in found.called_computations}
    walked = execution_counts(program, matters=lambda each: collective_kind(each) is not None)
    found = (launch for launch in walked if collective_kind(launch.instruction))
    described = (_describe(program, launch, mesh, starters) for launch in found)
    return [collective for collective in described if collective.group_size > 1]


def _describe(
    program: HloModule,
    launch: WeightedInstruction,
    mesh: Mapping[str, int] | None,
    starters: Mapping[str, HloInstruction],
) -> Collective:
    found = launch.instruction
    kind = collective_kind(found)
    assert kind is not None
    groups = parse_replica_groups(found.attributes)
    starter = starters.get(found.computation)
    waits = found.backend_config.get("collective_backend_config", {}).get("is_sync", False)
    return Collective(
        instruction=starter or found,
        kind=kind,
        arrays=tuple(program.operand_arrays(found)),
        group_size=_size(found, groups, mesh),
        axes=_axes(kind, groups, mesh),
        asynchronous=(starter is not None or found.opcode.endswith("-start")) and not waits,
        execution_count=launch.execution_count,
    )


def _axes(kind: str, groups: ReplicaGroups | None, mesh: Mapping[str, int] | None) -> tuple[str, ...]:
    if mesh is None or (groups is not None and all(len(group) == 1 for group in groups)):
        return ()
    if groups is None:
        return tuple(axis for axis, size in mesh.items() if size > 1)
    return (mesh_axes_of_permutation if kind == "collective-permute" else mesh_axes_of_groups)(groups, mesh)


def _size(found: HloInstruction, groups: ReplicaGroups | None, mesh: Mapping[str, int] | None) -> int:
    if groups is not None:
        return len(groups[0]) if groups else 0
    if mesh is None:
        raise HloParseError(f"{found.name} joins all devices, and nobody says how many; give the mesh")
    return math.prod(mesh.values())
