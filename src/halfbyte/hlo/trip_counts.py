"""Count how often each instruction runs in one execution of a program.

Trip counts of nested loops multiply. Iterations that the compiler peeled off are outside the loop and count once. A
loop without a known trip count, or a conditional of which several branches may run, raises HloParseError: every total
would be a guess.

XLA states the trip count of most loops, but not of some that it changes late: the loop over microbatches, after it has
peeled the layer loop inside. For those the trip count follows from the loop counter: an integer that starts at a
constant, grows by a constant per iteration and is compared with a constant.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from halfbyte.hlo.hlo_text import FUSIONS, HloInstruction, HloModule, HloParseError

VALUE_PRESERVING_OPCODES = ("copy", "bitcast", "convert", "opt-barrier")
# Comparison direction of a growing counter -> what to add to the limit to make the bound exclusive.
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
        body = next(
            instruction for instruction in program.computations[loop.called_computation("body")] if instruction.root
        )
        next_value = _carried(program, body, counter)
    except (HloParseError, StopIteration, KeyError, IndexError):
        return None
    if start is None or next_value is None:
        return None
    if start.carry_index is not None or next_value.carry_index != counter or next_value.offset < 1:
        return None
    return max(0, -(-(limit - start.offset) // next_value.offset))


def _limit(program: HloModule, condition: Sequence[HloInstruction]) -> tuple[int, int]:
    """Returns (index of the counter in the loop carry, first value of the counter at which the loop ends)."""
    root, arguments = next(instruction for instruction in condition if instruction.root), {}
    if root.opcode in FUSIONS:
        arguments = _arguments(program, root, {})
        root = next(
            instruction for instruction in program.computations[root.called_computations[0]] if instruction.root
        )
    direction = root.attributes.partition("direction=")[2][:2]
    lhs, rhs = (affine_value(program, program.operand(root, index), arguments) for index in (0, 1))
    if root.opcode != "compare" or direction not in COMPARISON_OFFSETS or lhs is None or rhs is None:
        raise HloParseError(f"{root.name} compares no counter")
    if lhs.carry_index is None or rhs.carry_index is not None:
        raise HloParseError(f"{root.name} compares no counter with a constant")
    return lhs.carry_index, rhs.offset - lhs.offset + COMPARISON_OFFSETS[direction]


def _carried(program: HloModule, carry: HloInstruction, index: int) -> AffineValue | None:
    """Returns element `index` of the carry that enters a loop or leaves its body; None if it is not affine."""
    while carry.opcode in VALUE_PRESERVING_OPCODES:
        carry = program.operand(carry, 0)
    return affine_value(program, program.operand(carry, index), {}) if carry.opcode == "tuple" else None


def affine_value(program: HloModule, instruction: HloInstruction, arguments: Arguments) -> AffineValue | None:
    """Returns an integer scalar as a constant, or as a carried value plus a constant; None if it is neither."""
    if instruction.opcode == "constant":
        return AffineValue(None, instruction.constant) if instruction.constant is not None else None
    if instruction.opcode == "parameter":
        return arguments.get(int(instruction.operands[0]))
    if instruction.opcode in VALUE_PRESERVING_OPCODES:
        return affine_value(program, program.operand(instruction, 0), arguments)
    if instruction.opcode == "get-tuple-element" and program.operand(instruction, 0).opcode == "parameter":
        return AffineValue(int(instruction.attributes.partition("index=")[2].split(",")[0]), 0)
    if instruction.opcode in FUSIONS:
        root = next(fused for fused in program.computations[instruction.called_computations[0]] if fused.root)
        return affine_value(program, root, _arguments(program, instruction, arguments))
    if instruction.opcode in ("add", "subtract"):
        return _sum(
            instruction.opcode,
            *(affine_value(program, program.operand(instruction, index), arguments) for index in (0, 1)),
        )
    return None


def _arguments(program: HloModule, fusion: HloInstruction, outer: Arguments) -> dict[int, AffineValue | None]:
    return {
        index: affine_value(program, program.operand(fusion, index), outer) for index in range(len(fusion.operands))
    }


def _sum(opcode: str, lhs: AffineValue | None, rhs: AffineValue | None) -> AffineValue | None:
    if lhs is None or rhs is None or (lhs.carry_index is not None and rhs.carry_index is not None):
        return None
    if opcode == "subtract":
        return None if rhs.carry_index is not None else AffineValue(lhs.carry_index, lhs.offset - rhs.offset)
    return AffineValue(rhs.carry_index if lhs.carry_index is None else lhs.carry_index, lhs.offset + rhs.offset)


def every_branch(program: HloModule, conditional: HloInstruction) -> Sequence[str]:
    """Returns all computations of a conditional."""
    return conditional.called_computations


def trip_count(program: HloModule, loop: HloInstruction) -> int:
    """Returns the trip count of a loop. Raises HloParseError if it is unknown and the loop body does anything."""
    count = loop.known_trip_count if loop.known_trip_count is not None else counted_trip_count(program, loop)
    if count is not None:
        return count
    body = program.computations[loop.called_computation("body")]
    if all(instruction.opcode in NO_OP_OPCODES for instruction in body):
        return 0
    raise HloParseError(
        f"the loop {loop.name} ({loop.origin or 'no source'}) has no known trip count, so that nothing inside it can "
        "be counted; give it a static length (lax.scan, lax.fori_loop with static bounds)"
    )


@dataclass(frozen=True)
class _WalkOptions:
    """Arguments of `execution_counts`: relevant instructions, trip counts of loops, and possible branches."""

    is_relevant: Callable[[HloInstruction], bool]
    trip_count: TripCountFn
    branches: BranchFn


def execution_counts(
    program: HloModule, *, matters: Callable[[HloInstruction], bool] = lambda _: True, turns: TripCountFn = trip_count,
    branches: BranchFn = every_branch,
) -> Iterator[WeightedInstruction]:  # fmt: skip
    """Yields every instruction that is not a no-op, in schedule order, with its number of executions.

    Args:
      matters: a loop without such an instruction is skipped, so that its trip count need not be known.
      turns: returns the trip count of a loop.
      branches: returns the branch computations of a conditional that may run.
    """
    yield from _walk(program, program.entry, 1, _WalkOptions(matters, turns, branches))


def _walk(program: HloModule, computation: str, times: int, options: _WalkOptions) -> Iterator[WeightedInstruction]:
    for instruction in program.computations[computation]:
        if instruction.opcode == "while":
            body = instruction.called_computation("body")
            if not any(options.is_relevant(nested) for nested in _nested(program, body)):
                continue
            yield from _walk(program, body, times * options.trip_count(program, instruction), options)
        elif instruction.opcode == "conditional":
            yield from _branches(program, instruction, times, options)
        elif instruction.opcode in CALL_OPCODES:
            for called in instruction.called_computations:
                yield from _walk(program, called, times, options)
        elif instruction.opcode not in NO_OP_OPCODES:
            yield WeightedInstruction(instruction, times)


def _nested(program: HloModule, computation: str) -> Iterator[HloInstruction]:
    """Yields the instructions of a computation and of those that it calls, each once."""
    for instruction in program.computations[computation]:
        yield instruction
        called = instruction.called_computations if instruction.opcode in CALL_AND_BRANCH_OPCODES else ()
        for name in (instruction.called_computation("body"),) if instruction.opcode == "while" else called:
            yield from _nested(program, name)


def _branches(
    program: HloModule, conditional: HloInstruction, times: int, options: _WalkOptions
) -> Iterator[WeightedInstruction]:
    """Yields the launches of a conditional. Raises HloParseError if several branches do something relevant."""
    relevant = [
        name for name in options.branches(program, conditional) if any(map(options.is_relevant, _nested(program, name)))
    ]
    branches = [list(_walk(program, name, times, options)) for name in relevant]
    branches = [branch for branch in branches if branch]  # `matters` may hold for no-ops, which `_walk` skips
    if len(branches) > 1:
        raise HloParseError(
            f"the branch {conditional.name} ({conditional.origin or 'no source'}) may run either of "
            f"{len(branches)} computations; nobody can say which a step takes"
        )
    for branch in branches:
        yield from branch
