"""How often each instruction runs in one execution of a program.

Trip counts of nested loops multiply. Iterations that the compiler peeled off are outside the loop and count once. A
loop without a known trip count, or a branch of which either side may run, raises HloParseError: every figure would be a
guess.

XLA notes the trip count of most loops, but not of some that it changes late: the loop over microbatches, after it has
peeled the layer loop inside. Those are counted from their counter: an integer that starts at a constant, grows by a
constant per iteration and is compared with a constant.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from halfbyte.hlo.hlo_text import FUSIONS, HloInstruction, HloModule, HloParseError

VALUE_PRESERVING_OPCODES = ("copy", "bitcast", "convert", "opt-barrier")
# Comparisons under which a growing counter continues, and what is added to its limit.
COMPARISON_OFFSETS = {"LT": 0, "LE": 1}
CALL_OPCODES = ("call", "async-start")
CALL_AND_BRANCH_OPCODES = (*CALL_OPCODES, "conditional")
NO_OP_OPCODES = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all partition-id replica-id opt-barrier domain "
    "add-dependency async-update async-done".split()
)
"""Opcodes that move no data and start nothing on a device."""
TripCountFn = Callable[[HloModule, HloInstruction], int]
BranchFn = Callable[[HloModule, HloInstruction], Sequence[str]]


@dataclass(frozen=True)
class AffineValue:
    """`carry[carry_index] + offset`; a constant if `carry_index` is None."""

    carry_index: int | None
    offset: int


Arguments = Mapping[int, AffineValue | None]


@dataclass(frozen=True)
class WeightedInstruction:
    """An instruction and how often a step runs it."""

    instruction: HloInstruction
    execution_count: int


def counted_trip_count(program: HloModule, loop: HloInstruction) -> int | None:
    """Returns the trip count of a loop from its counter, or None if it has no counter of that form."""
    try:
        counter, limit = _limit(program, program.computations[loop.called_computation("condition")])
        start = _carried(program, program.operand(loop, 0), counter)
        body = next(found for found in program.computations[loop.called_computation("body")] if found.root)
        after = _carried(program, body, counter)
    except (HloParseError, StopIteration, KeyError, IndexError):
        return None
    if (
        start is None
        or start.carry_index is not None
        or after is None
        or after.carry_index != counter
        or after.offset < 1
    ):
        return None
    return max(0, -(-(limit - start.offset) // after.offset))


def _limit(program: HloModule, condition: Sequence[HloInstruction]) -> tuple[int, int]:
    """(the place of the counter in what the loop carries, the first number at which it ends)."""
    root, arguments = next(found for found in condition if found.root), {}
    if root.opcode in FUSIONS:
        arguments = _arguments(program, root, {})
        root = next(found for found in program.computations[root.called_computations[0]] if found.root)
    direction = root.attributes.partition("direction=")[2][:2]
    left, right = (affine_value(program, program.operand(root, at), arguments) for at in (0, 1))
    if root.opcode != "compare" or direction not in COMPARISON_OFFSETS or left is None or right is None:
        raise HloParseError(f"{root.name} compares no counter")
    if left.carry_index is None or right.carry_index is not None:
        raise HloParseError(f"{root.name} compares no counter with a constant")
    return left.carry_index, right.offset - left.offset + COMPARISON_OFFSETS[direction]


def _carried(program: HloModule, made: HloInstruction, at: int) -> AffineValue | None:
    """Element `at` of the tuple that goes into a loop or comes out of its body."""
    while made.opcode in VALUE_PRESERVING_OPCODES:
        made = program.operand(made, 0)
    return affine_value(program, program.operand(made, at), {}) if made.opcode == "tuple" else None


def affine_value(program: HloModule, found: HloInstruction, arguments: Arguments) -> AffineValue | None:
    """A whole number as a constant, or as one that a loop carries and a constant; None if it is neither."""
    if found.opcode == "constant":
        return AffineValue(None, found.constant) if found.constant is not None else None
    if found.opcode == "parameter":
        return arguments.get(int(found.operands[0]))
    if found.opcode in VALUE_PRESERVING_OPCODES:
        return affine_value(program, program.operand(found, 0), arguments)
    if found.opcode == "get-tuple-element" and program.operand(found, 0).opcode == "parameter":
        return AffineValue(int(found.attributes.partition("index=")[2].split(",")[0]), 0)
    if found.opcode in FUSIONS:
        root = next(part for part in program.computations[found.called_computations[0]] if part.root)
        return affine_value(program, root, _arguments(program, found, arguments))
    if found.opcode in ("add", "subtract"):
        return _sum(found.opcode, *(affine_value(program, program.operand(found, at), arguments) for at in (0, 1)))
    return None


def _arguments(program: HloModule, fusion: HloInstruction, outer: Arguments) -> dict[int, AffineValue | None]:
    return {at: affine_value(program, program.operand(fusion, at), outer) for at in range(len(fusion.operands))}


def _sum(opcode: str, left: AffineValue | None, right: AffineValue | None) -> AffineValue | None:
    if left is None or right is None or (left.carry_index is not None and right.carry_index is not None):
        return None
    if opcode == "subtract":
        return None if right.carry_index is not None else AffineValue(left.carry_index, left.offset - right.offset)
    return AffineValue(right.carry_index if left.carry_index is None else left.carry_index, left.offset + right.offset)


def every_branch(program: HloModule, found: HloInstruction) -> Sequence[str]:
    """The computations of a branch."""
    return found.called_computations


def trip_count(program: HloModule, loop: HloInstruction) -> int:
    """Returns the trip count of a loop. Raises HloParseError if it is unknown and the loop body does anything."""
    turns = loop.known_trip_count if loop.known_trip_count is not None else counted_trip_count(program, loop)
    if turns is not None:
        return turns
    body = program.computations[loop.called_computation("body")]
    if all(found.opcode in NO_OP_OPCODES for found in body):
        return 0
    raise HloParseError(
        f"the loop {loop.name} ({loop.origin or 'no source'}) has no known trip count, so that nothing inside it can "
        "be counted; give it a static length (lax.scan, lax.fori_loop with static bounds)"
    )


@dataclass(frozen=True)
class _WalkOptions:
    """Which instructions matter, how loops are counted, and which branches may be taken."""

    is_relevant: Callable[[HloInstruction], bool]
    trip_count: TripCountFn
    branches: BranchFn


def execution_counts(
    program: HloModule, *, matters: Callable[[HloInstruction], bool] = lambda _: True, turns: TripCountFn = trip_count,
    branches: BranchFn = every_branch,
) -> Iterator[WeightedInstruction]:  # fmt: skip
    """Yields every instruction that does something, in schedule order, with its number of executions.

    `turns` gives the trip count of a loop. A loop in which nothing `matters` is skipped, known trip count or not.
    """
    yield from _walk(program, program.entry, 1, _WalkOptions(matters, turns, branches))


def _walk(program: HloModule, computation: str, times: int, asked: _WalkOptions) -> Iterator[WeightedInstruction]:
    for found in program.computations[computation]:
        if found.opcode == "while":
            body = found.called_computation("body")
            if not any(asked.is_relevant(part) for part in _nested(program, body)):
                continue
            yield from _walk(program, body, times * asked.trip_count(program, found), asked)
        elif found.opcode == "conditional":
            yield from _branches(program, found, times, asked)
        elif found.opcode in CALL_OPCODES:
            for called in found.called_computations:
                yield from _walk(program, called, times, asked)
        elif found.opcode not in NO_OP_OPCODES:
            yield WeightedInstruction(found, times)


def _nested(program: HloModule, computation: str) -> Iterator[HloInstruction]:
    """Yields the instructions of a computation and of those that it calls, each once."""
    for found in program.computations[computation]:
        yield found
        called = (
            (found.called_computation("body"),)
            if found.opcode == "while"
            else found.called_computations
            if found.opcode in CALL_AND_BRANCH_OPCODES
            else ()
        )
        for name in called:
            yield from _nested(program, name)


def _branches(
    program: HloModule, found: HloInstruction, times: int, asked: _WalkOptions
) -> Iterator[WeightedInstruction]:
    """One branch runs: fine if at most one does anything that matters, else unknown which."""
    sides = [name for name in asked.branches(program, found) if any(map(asked.is_relevant, _nested(program, name)))]
    busy = [list(_walk(program, name, times, asked)) for name in sides]
    busy = [branch for branch in busy if branch]
    if len(busy) > 1:
        raise HloParseError(
            f"the branch {found.name} ({found.origin or 'no source'}) may run either of {len(busy)} computations; "
            "nobody can say which a step takes"
        )
    for branch in busy:
        yield from branch
