"""Memory traffic and FLOPs of a compiled step, summed by category, by kind of move and by kind of GEMM."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from halfbyte.hlo import (
    HloGemm,
    HloModule,
    WeightedInstruction,
    data_movement_kind,
    execution_counts,
    instruction_bytes,
    op_category,
)
from halfbyte.hlo.collective_ops import collective_kind
from halfbyte.hlo.memory_traffic import is_collective_done


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


def traffic(program: HloModule) -> dict[str, Traffic]:
    """Returns the bytes of a step by category, loops by their trip counts, without collectives."""
    total: dict[str, Traffic] = {}
    for launch, each in traffic_of_launches(program):
        name = op_category(program, launch.instruction) or "other"
        total[name] = total.get(name, Traffic()) + each
    return total


def moves(program: HloModule) -> dict[str, Traffic]:
    """Returns the bytes of instructions and fusions that compute nothing, by kind (`program.traffic.MOVES`)."""
    total: dict[str, Traffic] = {}
    for launch, each in traffic_of_launches(program):
        kind = data_movement_kind(program, launch.instruction)
        if kind is not None:
            total[kind] = total.get(kind, Traffic()) + each
    return total


def traffic_of_launches(program: HloModule) -> Iterator[tuple[WeightedInstruction, Traffic]]:
    """Yields (launch, its bytes in a step) for each launch that is neither a collective nor a wait."""
    for launch in execution_counts(program):
        instruction = launch.instruction
        if collective_kind(instruction) or is_collective_done(instruction) or instruction.opcode.endswith("-done"):
            continue
        read, written = instruction_bytes(program, instruction)
        yield launch, Traffic(read * launch.execution_count, written * launch.execution_count, launch.execution_count)


def flops_by_kind(gemms: Iterable[HloGemm]) -> dict[str, int]:
    """Returns the FLOPs of a step by kind of GEMM."""
    total: dict[str, int] = {}
    for gemm in gemms:
        total[gemm.kind] = total.get(gemm.kind, 0) + gemm.flops
    return total
