"""How often a loop turns, where XLA does not say: found from its counter, as a person would.

A counted loop carries a whole number that starts at a constant, grows by a constant each turn, and is compared with a
constant. XLA notes the turns of most loops, and forgets those of some that it has changed late: the loop over
microbatches, after it has peeled the layers' loop inside.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .text import FUSIONS, Instruction, Program, Unreadable

SAME = ("copy", "bitcast", "convert", "opt-barrier")
ON = {"LT": 0, "LE": 1}  # directions in which a counter that grows goes on, and what the limit itself adds


@dataclass(frozen=True)
class Number:
    """`carried[at] + plus`; a constant if `at` is None."""

    at: int | None
    plus: int


Arguments = Mapping[int, Number | None]


def counted_turns(program: Program, loop: Instruction) -> int | None:
    """Turns of a loop with a counter; None where it has none that can be followed."""
    try:
        counter, limit = _limit(program, program.computations[loop.called("condition")])
        start = _carried(program, program.operand(loop, 0), counter)
        body = next(found for found in program.computations[loop.called("body")] if found.root)
        after = _carried(program, body, counter)
    except (Unreadable, StopIteration, KeyError, IndexError):
        return None
    if start is None or start.at is not None or after is None or after.at != counter or after.plus < 1:
        return None
    return max(0, -(-(limit - start.plus) // after.plus))


def _limit(program: Program, condition: Sequence[Instruction]) -> tuple[int, int]:
    """(the place of the counter in what the loop carries, the first number at which it ends)."""
    root, arguments = next(found for found in condition if found.root), {}
    if root.opcode in FUSIONS:
        arguments = _arguments(program, root, {})
        root = next(found for found in program.computations[root.calls[0]] if found.root)
    direction = root.attributes.partition("direction=")[2][:2]
    left, right = (number_of(program, program.operand(root, at), arguments) for at in (0, 1))
    if root.opcode != "compare" or direction not in ON or left is None or right is None:
        raise Unreadable(f"{root.name} compares no counter")
    if left.at is None or right.at is not None:
        raise Unreadable(f"{root.name} compares no counter with a constant")
    return left.at, right.plus - left.plus + ON[direction]


def _carried(program: Program, made: Instruction, at: int) -> Number | None:
    """Element `at` of the tuple that goes into a loop or comes out of its body."""
    while made.opcode in SAME:
        made = program.operand(made, 0)
    return number_of(program, program.operand(made, at), {}) if made.opcode == "tuple" else None


def number_of(program: Program, found: Instruction, arguments: Arguments) -> Number | None:
    """A whole number as a constant, or as one that a loop carries and a constant; None if it is neither."""
    if found.opcode == "constant":
        return Number(None, found.constant) if found.constant is not None else None
    if found.opcode == "parameter":
        return arguments.get(int(found.operands[0]))
    if found.opcode in SAME:
        return number_of(program, program.operand(found, 0), arguments)
    if found.opcode == "get-tuple-element" and program.operand(found, 0).opcode == "parameter":
        return Number(int(found.attributes.partition("index=")[2].split(",")[0]), 0)
    if found.opcode in FUSIONS:
        root = next(part for part in program.computations[found.calls[0]] if part.root)
        return number_of(program, root, _arguments(program, found, arguments))
    if found.opcode in ("add", "subtract"):
        return _sum(found.opcode, *(number_of(program, program.operand(found, at), arguments) for at in (0, 1)))
    return None


def _arguments(program: Program, fusion: Instruction, outer: Arguments) -> dict[int, Number | None]:
    return {at: number_of(program, program.operand(fusion, at), outer) for at in range(len(fusion.operands))}


def _sum(opcode: str, left: Number | None, right: Number | None) -> Number | None:
    if left is None or right is None or (left.at is not None and right.at is not None):
        return None
    if opcode == "subtract":
        return None if right.at is not None else Number(left.at, left.plus - right.plus)
    return Number(right.at if left.at is None else left.at, left.plus + right.plus)
