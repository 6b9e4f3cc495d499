"""Memory traffic and FLOPs of a compiled step, summed by category, by kind of move and by kind of GEMM."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from halfbyte.program import Gemm, Launch, Program, bytes_of, category, launches, move_of
from halfbyte.program.categories import kind_of_done
from halfbyte.program.collectives import kind_of


@dataclass(frozen=True)
class Traffic:
    """Bytes of a step."""

    read: int = 0
    written: int = 0
    launches: int = 0

    @property
    def total(self) -> int:
        return self.read + self.written

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.read + other.read, self.written + other.written, self.launches + other.launches)


def traffic(program: Program) -> dict[str, Traffic]:
    """Returns the bytes of a step by category, loops by their trip counts, without collectives."""
    total: dict[str, Traffic] = {}
    for launch, each in traffic_of_launches(program):
        name = category(program, launch.instruction) or "other"
        total[name] = total.get(name, Traffic()) + each
    return total


def moves(program: Program) -> dict[str, Traffic]:
    """Returns the bytes of instructions and fusions that compute nothing, by kind (`program.traffic.MOVES`)."""
    total: dict[str, Traffic] = {}
    for launch, each in traffic_of_launches(program):
        kind = move_of(program, launch.instruction)
        if kind is not None:
            total[kind] = total.get(kind, Traffic()) + each
    return total


def traffic_of_launches(program: Program) -> Iterator[tuple[Launch, Traffic]]:
    """Yields (launch, its bytes in a step) for each launch that is neither a collective nor a wait."""
    for launch in launches(program):
        instruction = launch.instruction
        if kind_of(instruction) or kind_of_done(instruction) or instruction.opcode.endswith("-done"):
            continue
        read, written = bytes_of(program, instruction)
        yield launch, Traffic(read * launch.times, written * launch.times, launch.times)


def flops_by_kind(gemms: Iterable[Gemm]) -> dict[str, int]:
    """Returns the FLOPs of a step by kind of GEMM."""
    total: dict[str, int] = {}
    for gemm in gemms:
        total[gemm.kind] = total.get(gemm.kind, 0) + gemm.flops
    return total
