"""GEMMs and fused attention between the start and the done of each collective."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from halfbyte.hlo import (
    AttentionCall,
    Collective,
    HloGemm,
    HloInstruction,
    HloModule,
    HloParseError,
    WeightedInstruction,
    find_collectives,
)
from halfbyte.hlo.gemm_ops import attention_call_of, gemms_of_instruction
from halfbyte.hlo.trip_counts import trip_count


@dataclass(frozen=True)
class Overlap:
    """A collective with what multiplies between its start and its done: nothing for a synchronous collective."""

    collective: Collective
    gemms: tuple[HloGemm, ...] = ()
    attention: tuple[AttentionCall, ...] = ()

    @property
    def flops(self) -> int:
        """FLOPs of the GEMMs between start and done of one call."""
        return sum(gemm.flops for gemm in self.gemms)


def overlap(program: HloModule, mesh: Mapping[str, int] | None = None) -> list[Overlap]:
    """Returns the overlap of each collective of a step, in the order of the schedule.

    Calls are those of one iteration of the loop around the collective; a loop between start and done counts whole.
    """
    if not program.scheduled:
        raise HloParseError("the program is not scheduled (is_scheduled=true), so the order of its text has no meaning")
    return [_overlap(program, each) for each in find_collectives(program, mesh)]


def _overlap(program: HloModule, collective: Collective) -> Overlap:
    if not collective.asynchronous:
        return Overlap(collective)
    inner = [launch for each in _between(program, collective.instruction) for launch in _walked(program, each, 1)]
    return Overlap(
        collective,
        gemms=tuple(gemm for launch in inner for gemm in gemms_of_instruction(program, launch)),
        attention=tuple(call for launch in inner for call in attention_call_of(program, launch)),
    )


def _between(program: HloModule, start: HloInstruction) -> list[HloInstruction]:
    """Returns the instructions that the schedule has between a start and its done."""
    body = program.computations[start.computation]
    first = body.index(start)
    for last in range(first + 1, len(body)):
        if body[last].opcode.endswith("-done") and start.name in body[last].operands:
            return body[first + 1 : last]
    raise HloParseError(f"{start.name} ({start.opcode}) has no done in {start.computation}, where it starts")


def _walked(program: HloModule, instruction: HloInstruction, times: int) -> Iterator[WeightedInstruction]:
    """Yields an instruction, or the instructions that it calls, loops by their trip counts."""
    if instruction.opcode == "while":
        for part in program.computations[instruction.called_computation("body")]:
            yield from _walked(program, part, times * trip_count(program, instruction))
    elif instruction.opcode in ("call", "conditional"):
        for part in (inner for name in instruction.called_computations for inner in program.computations[name]):
            yield from _walked(program, part, times)
    else:
        yield WeightedInstruction(instruction, times)
