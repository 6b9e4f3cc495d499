"""The collectives of a program: what travels, between whom, how often, and which GEMMs it can hide behind.

`moved` is the size of the whole thing, as people say it: of the gathered array for an all-gather, of the array before
it is scattered for a reduce-scatter. `wire` is what one device sends in a ring.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .attention import Attention, attention_of
from .gemms import Gemm, gemms_of
from .groups import Groups, axes_along, axes_of, read_groups
from .schedule import Launch, launches, trips
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


@dataclass(frozen=True)
class Overlap:
    """A collective, and the GEMMs and fused attention that run between its start and its done (none for a synchronous
    one).
    """

    collective: Collective
    gemms: tuple[Gemm, ...] = ()
    attention: tuple[Attention, ...] = ()

    @property
    def flops(self) -> int:
        """FLOPs of the GEMMs between start and done of one call."""
        return sum(gemm.flops for gemm in self.gemms)


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


def overlap(program: Program, mesh: Mapping[str, int] | None = None) -> list[Overlap]:
    """Every collective of a step with what multiplies between its start and its done, in the order of the schedule.

    Calls are those of one turn of the loop around the collective; a loop between start and done counts whole.
    """
    if not program.scheduled:
        raise Unreadable("the program is not scheduled (is_scheduled=true): the order of its text says nothing")
    return [_overlap(program, found) for found in collectives(program, mesh)]


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


def _overlap(program: Program, collective: Collective) -> Overlap:
    if not collective.asynchronous:
        return Overlap(collective)
    beside = [launch for found in _between(program, collective.instruction) for launch in under(program, found, 1)]
    return Overlap(
        collective,
        gemms=tuple(gemm for launch in beside for gemm in gemms_of(program, launch)),
        attention=tuple(each for launch in beside for each in attention_of(program, launch)),
    )


def _between(program: Program, start: Instruction) -> list[Instruction]:
    """What stands in the schedule between a start and its done."""
    body = program.computations[start.computation]
    first = body.index(start)
    for last in range(first + 1, len(body)):
        if body[last].opcode.endswith("-done") and start.name in body[last].operands:
            return body[first + 1 : last]
    raise Unreadable(f"{start.name} ({start.opcode}) is not done in {start.computation}, where it starts")


def under(program: Program, found: Instruction, times: int) -> Iterable[Launch]:
    """One instruction, or what it calls, loops walked."""
    if found.opcode == "while":
        turns = times * trips(program, found)
        for part in program.computations[found.called("body")]:
            yield from under(program, part, turns)
    elif found.opcode in ("call", "conditional"):
        for part in (inner for name in found.calls for inner in program.computations[name]):
            yield from under(program, part, times)
    else:
        yield Launch(found, times)
