"""GEMMs and fused attention between the start and the done of each collective."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from halfbyte.program import Attention, Collective, Gemm, Instruction, Launch, Program, Unreadable, collectives
from halfbyte.program.attention import attention_of
from halfbyte.program.gemms import gemms_of
from halfbyte.program.schedule import trips


@dataclass(frozen=True)
class Overlap:
    """A collective with what multiplies between its start and its done: nothing for a synchronous collective."""

    collective: Collective
    gemms: tuple[Gemm, ...] = ()
    attention: tuple[Attention, ...] = ()

    @property
    def flops(self) -> int:
        """FLOPs of the GEMMs between start and done of one call."""
        return sum(gemm.flops for gemm in self.gemms)


def overlap(program: Program, mesh: Mapping[str, int] | None = None) -> list[Overlap]:
    """Returns the overlap of each collective of a step, in the order of the schedule.

    Calls are those of one iteration of the loop around the collective; a loop between start and done counts whole.
    """
    if not program.scheduled:
        raise Unreadable("the program is not scheduled (is_scheduled=true), so the order of its text has no meaning")
    return [_overlap(program, each) for each in collectives(program, mesh)]


def _overlap(program: Program, collective: Collective) -> Overlap:
    if not collective.asynchronous:
        return Overlap(collective)
    inner = [launch for each in _between(program, collective.instruction) for launch in _walked(program, each, 1)]
    return Overlap(
        collective,
        gemms=tuple(gemm for launch in inner for gemm in gemms_of(program, launch)),
        attention=tuple(call for launch in inner for call in attention_of(program, launch)),
    )


def _between(program: Program, start: Instruction) -> list[Instruction]:
    """Returns the instructions that the schedule has between a start and its done."""
    body = program.computations[start.computation]
    first = body.index(start)
    for last in range(first + 1, len(body)):
        if body[last].opcode.endswith("-done") and start.name in body[last].operands:
            return body[first + 1 : last]
    raise Unreadable(f"{start.name} ({start.opcode}) has no done in {start.computation}, where it starts")


def _walked(program: Program, instruction: Instruction, times: int) -> Iterator[Launch]:
    """Yields an instruction, or the instructions that it calls, loops by their trip counts."""
    if instruction.opcode == "while":
        for part in program.computations[instruction.called("body")]:
            yield from _walked(program, part, times * trips(program, instruction))
    elif instruction.opcode in ("call", "conditional"):
        for part in (inner for name in instruction.calls for inner in program.computations[name]):
            yield from _walked(program, part, times)
    else:
        yield Launch(instruction, times)
