"""List the collectives of a program: kind, bytes, group size, mesh axes and number of executions.

`array_bytes` is the size of the whole array: after an all-gather, before a reduce-scatter. `wire_bytes_per_call` is
what one device sends in a ring. Device numbers are indices into the program's device list, which is that of its mesh.

XLA writes replica groups in three forms:

- lists of device numbers: `{{0,1},{2,3}}`
- an iota that is reshaped, transposed and split into rows: `[2,4]<=[4,2]T(1,0)`
- axes of a mesh: `mesh['axis_0'=2,'axis_1'=4] {'axis_1'}`. `'axis_0':(2)4` is a sub-axis: `axis_0` is split into
  [2, 4, remainder], and the groups are over the dim of size 4. `device_ids=([4,2]T(1,0))` is the mesh's device order.
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
    "all-gather all-reduce reduce-scatter collective-permute all-to-all ragged-all-to-all collective-broadcast".split()
)


@dataclass(frozen=True)
class Collective:
    """One collective of a step. `axes` are the mesh axes that it communicates over, empty without a mesh."""

    instruction: HloInstruction
    kind: str
    arrays: tuple[HloArray, ...]
    """Operands of one device."""
    group_size: int
    """Devices per replica group."""
    axes: tuple[str, ...]
    asynchronous: bool
    execution_count: int

    @property
    def array_bytes_per_call(self) -> int:
        """Returns the bytes of the whole array that one call gathers, scatters or reduces.

        A ragged all-to-all has a larger buffer on one side; the smaller side counts.
        """
        if self.kind == "ragged-all-to-all":
            return min(array.bytes for array in self.arrays[:2])
        size = sum(array.bytes for array in self.arrays)
        return size * self.group_size if self.kind == "all-gather" else size

    @property
    def array_bytes(self) -> int:
        """Returns `array_bytes_per_call` times the executions in a step."""
        return self.array_bytes_per_call * self.execution_count

    @property
    def wire_bytes_per_call(self) -> float:
        """Returns the bytes that one device sends in one call, over a ring."""
        return wire_bytes(self.kind, self.array_bytes_per_call, self.group_size)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Returns the element types of the operands, sorted."""
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

    All links of a ring carry the same bytes, and the cards of a domain share the ring's link to the next domain. In an
    all-to-all (or a permutation) the rows of a device are its own, so that it sends all of them through its own card.
    """
    if kind in ("all-to-all", "ragged-all-to-all"):
        return array_bytes * (outer - 1) / outer
    return wire_bytes(kind, array_bytes, inner * outer) / (1 if kind == "collective-permute" else inner)


def parse_replica_groups(attributes: str) -> ReplicaGroups | None:
    """Returns the groups of a collective's attributes, empty if nothing is sent; None if all devices are one group of
    unstated size.
    """
    if match := _MESH.search(attributes):
        return _of_mesh(*match.groups())
    if match := _IOTA.search(attributes):
        rows, size, dims, order = match.groups()
        numbers = np.arange(int(rows) * int(size)).reshape(_numbers(dims))
        return _rows(numbers.transpose(_numbers(order)) if order else numbers, int(size))
    if match := _LISTS.search(attributes):
        return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,]+)\}", match.group(1) or "")) or None
    if match := _PAIRS.search(attributes):
        return _connected_devices([tuple(_numbers(pair)) for pair in re.findall(r"\{([\d,]+)\}", match.group(1))])
    raise HloParseError(f"cannot read the replica groups of a collective: {attributes[:200]}")


def mesh_axes_of_groups(groups: ReplicaGroups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes of `mesh` (name -> size, the last varies fastest) that the groups communicate over.

    Raises HloParseError if no combination of axes has these groups.
    """
    device_sets = {frozenset(group) for group in groups}
    for axes, candidate in _candidates(mesh):
        if device_sets == candidate:
            return axes
    shape = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    raise HloParseError(
        f"a collective over {len(groups)} groups, the first {groups[0][:8]}, is over no axes of {shape}"
    )


def mesh_axes_of_permutation(groups: ReplicaGroups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the fewest axes of `mesh` within which a permutation sends, as a ring or a reflection of an axis does."""
    for axes, candidate in _candidates(mesh):
        if all(any(axis_group.issuperset(group) for axis_group in candidate) for group in groups):
            return axes
    raise HloParseError(f"a permutation that joins {groups[0][:8]} names devices that are not in the mesh")


def _candidates(mesh: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], set[frozenset[int]]]]:
    """Yields (axes, groups of devices that differ only along them), fewest axes first."""
    nontrivial_axes = [axis for axis, size in mesh.items() if size > 1]
    for count in range(1, len(nontrivial_axes) + 1):
        for axes in itertools.combinations(nontrivial_axes, count):
            yield axes, {frozenset(group) for group in replica_groups_over(axes, mesh)}


def replica_groups_over(axes: tuple[str, ...], mesh: Mapping[str, int]) -> ReplicaGroups:
    """Returns the groups of devices that differ only along `axes`."""
    names = list(mesh)
    numbers = np.arange(math.prod(mesh.values())).reshape([mesh[axis] for axis in names])
    order = [names.index(axis) for axis in names if axis not in axes] + [names.index(axis) for axis in axes]
    return _rows(numbers.transpose(order), math.prod(mesh[axis] for axis in axes))


def _of_mesh(mesh: str, device_order: str, axes: str) -> ReplicaGroups:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    sub_axes = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in _AXIS.findall(axes)}
    dims: list[int] = []
    group_dims: list[int] = []
    for name, total in sizes.items():  # each axis becomes the dims [before, size, after]
        before, size = sub_axes.get(name, (1, 1))
        if total % (before * size):
            raise HloParseError(f"axis {name} of {total} devices is not {before} x {size} x a whole number")
        group_dims += [len(dims) + 1] if name in sub_axes else []
        dims += [before, size, total // (before * size)]
    other_dims = [dim for dim in range(len(dims)) if dim not in group_dims]
    numbers = _order(device_order, math.prod(dims)).reshape(dims).transpose(other_dims + group_dims)
    return _rows(numbers, math.prod(dims[dim] for dim in group_dims))


def _order(text: str, count: int) -> np.ndarray:
    """Returns the device order of a mesh, from `device_ids=([4,2]T(1,0))` or a list; 0, 1, 2, ... if there is none."""
    match = _DEVICES.search(text)
    if match is None:
        if text.strip():
            raise HloParseError(f"cannot read the devices of a mesh: {text.strip()[:80]}")
        return np.arange(count)
    dims, order = _numbers(match.group(1)), _numbers(match.group(2) or "")
    if math.prod(dims) == count:
        return np.arange(count).reshape(dims).transpose(order or None).reshape(-1)
    if sorted(dims) != list(range(count)):
        raise HloParseError(f"cannot read the order of {count} devices: {text.strip()[:80]}")
    return np.array(dims)


def _connected_devices(pairs: list[tuple[int, ...]]) -> ReplicaGroups:
    """Returns the groups of devices that a permutation links, directly or through others."""
    group = {device: {device} for pair in pairs for device in pair}
    for a, b in pairs:
        if group[a] is not group[b]:
            group[a] |= group[b]
            group.update(dict.fromkeys(group[b], group[a]))
    return tuple(sorted({tuple(sorted(members)) for members in group.values()}))


def _rows(numbers: np.ndarray, size: int) -> ReplicaGroups:
    return tuple(tuple(row) for row in numbers.reshape(-1, size).tolist())


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def collective_kind(instruction: HloInstruction) -> str | None:
    """Returns the kind of collective that an instruction is or starts; None for others and for its `-done`."""
    return next((kind for kind in COLLECTIVE_KINDS if instruction.opcode in (kind, f"{kind}-start")), None)


def find_collectives(program: HloModule, mesh: Mapping[str, int] | None = None) -> list[Collective]:
    """Returns every collective of a step, with its axes if `mesh` (axis -> size, of the compiled program) is given.

    Collectives that send nothing are left out: groups of one device, and permutations without pairs, which XLA writes
    where a reshard moves nothing.
    """
    # An async-start may wrap a collective in a computation of its own.
    wrappers = [instruction for instruction in program.instructions.values() if instruction.opcode == "async-start"]
    starters = {name: instruction for instruction in wrappers for name in instruction.called_computations}
    launches = execution_counts(program, matters=lambda instruction: collective_kind(instruction) is not None)
    collective_launches = (launch for launch in launches if collective_kind(launch.instruction))
    collectives = (_describe(program, launch, mesh, starters) for launch in collective_launches)
    return [collective for collective in collectives if collective.group_size > 1]


def _describe(
    program: HloModule,
    launch: WeightedInstruction,
    mesh: Mapping[str, int] | None,
    starters: Mapping[str, HloInstruction],
) -> Collective:
    instruction = launch.instruction
    kind = collective_kind(instruction)
    assert kind is not None
    groups = parse_replica_groups(instruction.attributes)
    starter = starters.get(instruction.computation)
    is_sync = instruction.backend_config.get("collective_backend_config", {}).get("is_sync", False)
    return Collective(
        instruction=starter or instruction,
        kind=kind,
        arrays=tuple(program.operand_arrays(instruction)),
        group_size=_size(instruction, groups, mesh),
        axes=_axes(kind, groups, mesh),
        asynchronous=(starter is not None or instruction.opcode.endswith("-start")) and not is_sync,
        execution_count=launch.execution_count,
    )


def _axes(kind: str, groups: ReplicaGroups | None, mesh: Mapping[str, int] | None) -> tuple[str, ...]:
    if mesh is None or (groups is not None and all(len(group) == 1 for group in groups)):
        return ()
    if groups is None:
        return tuple(axis for axis, size in mesh.items() if size > 1)
    return (mesh_axes_of_permutation if kind == "collective-permute" else mesh_axes_of_groups)(groups, mesh)


def _size(instruction: HloInstruction, groups: ReplicaGroups | None, mesh: Mapping[str, int] | None) -> int:
    if groups is not None:
        return len(groups[0]) if groups else 0
    if mesh is None:
        raise HloParseError(f"{instruction.name} joins all devices, and nobody says how many; give the mesh")
    return math.prod(mesh.values())
