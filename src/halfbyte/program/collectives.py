"""The collectives of a program: what travels, between whom and how often.

`moved` is the size of the whole thing, as people say it: of the gathered array for an all-gather, of the array before
it is scattered for a reduce-scatter. `wire` is what one device sends in a ring.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .groups import Groups, axes_along, axes_of, read_groups
from .schedule import Launch, launches
from .text import Array, Instruction, Program, Unreadable

KINDS = (
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

    instruction: Instruction
    kind: str
    arrays: tuple[Array, ...]
    """What each device hands in."""
    group: int
    """Devices that take part together."""
    axes: tuple[str, ...]
    asynchronous: bool
    times: int

    @property
    def moved_each(self) -> int:
        """Bytes of the whole array that one call gathers, scatters or reduces; of a ragged all-to-all, whose rows lie
        in room for more on one side, those of the smaller side.
        """
        if self.kind == "ragged-all-to-all":
            return min(array.bytes for array in self.arrays[:2])
        size = sum(array.bytes for array in self.arrays)
        return size * self.group if self.kind == "all-gather" else size

    @property
    def moved(self) -> int:
        """The same, of a step."""
        return self.moved_each * self.times

    @property
    def wire_each(self) -> float:
        """Bytes that one device sends in one call, over a ring."""
        share = (self.group - 1) / self.group
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.moved_each)
        return self.moved_each * share * (2 if self.kind == "all-reduce" else 1)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element types that travel."""
        return tuple(sorted({array.dtype for array in self.arrays}))

    def __str__(self) -> str:
        over = "+".join(self.axes) or f"{self.group} devices"
        mode = "async" if self.asynchronous else "SYNC"
        size = f"{self.moved_each / 1e6:,.1f} MB {'+'.join(self.dtypes)}"
        return f"{self.kind} of {size} over {over}, {self.times} times, {mode}"


def kind_of(found: Instruction) -> str | None:
    """The kind of collective that an instruction is or starts; None for others and for a done."""
    return next((kind for kind in KINDS if found.opcode in (kind, f"{kind}-start")), None)


def collectives(program: Program, mesh: Mapping[str, int] | None = None) -> list[Collective]:
    """Every collective of a step; with `mesh` (axis -> size, as the program was compiled for) also its axes.

    Those in which nothing travels are left out: groups of one device, and permutations in which nobody sends, which XLA
    writes where a reshard moves nothing.
    """
    # An async-start may wrap a collective in a computation of its own.
    wrapping = [found for found in program.instructions.values() if found.opcode == "async-start"]
    starters = {name: found for found in wrapping for name in found.calls}
    walked = launches(program, matters=lambda each: kind_of(each) is not None)
    found = (launch for launch in walked if kind_of(launch.instruction))
    described = (_describe(program, launch, mesh, starters) for launch in found)
    return [collective for collective in described if collective.group > 1]


def _describe(
    program: Program, launch: Launch, mesh: Mapping[str, int] | None, starters: Mapping[str, Instruction]
) -> Collective:
    found = launch.instruction
    kind = kind_of(found)
    assert kind is not None
    groups = read_groups(found.attributes)
    starter = starters.get(found.computation)
    waits = found.config.get("collective_backend_config", {}).get("is_sync", False)
    return Collective(
        instruction=starter or found,
        kind=kind,
        arrays=tuple(program.operand_arrays(found)),
        group=_size(found, groups, mesh),
        axes=_axes(kind, groups, mesh),
        asynchronous=(starter is not None or found.opcode.endswith("-start")) and not waits,
        times=launch.times,
    )


def _axes(kind: str, groups: Groups | None, mesh: Mapping[str, int] | None) -> tuple[str, ...]:
    if mesh is None or (groups is not None and all(len(group) == 1 for group in groups)):
        return ()
    if groups is None:
        return tuple(axis for axis, size in mesh.items() if size > 1)
    return (axes_along if kind == "collective-permute" else axes_of)(groups, mesh)


def _size(found: Instruction, groups: Groups | None, mesh: Mapping[str, int] | None) -> int:
    if groups is not None:
        return len(groups[0]) if groups else 0
    if mesh is None:
        raise Unreadable(f"{found.name} joins all devices, and nobody says how many; give the mesh")
    return math.prod(mesh.values())
