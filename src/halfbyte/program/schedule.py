"""How often each instruction runs in one execution of a program.

Loops are walked with their trip counts (as XLA says, or their counter: `turns`), nested loops multiply, iterations that
the compiler peeled off stand outside the loop and count once. A loop whose trip count nobody knows, or a branch, makes
every figure a guess: Unreadable.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .text import Instruction, Program, Unreadable
from .turns import counted_turns

CALLS = ("call", "async-start")
CALLING = (*CALLS, "conditional")
NOTHING = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all partition-id replica-id opt-barrier domain "
    "add-dependency async-update async-done".split()
)
"""Opcodes that move no data and start nothing on a device."""


@dataclass(frozen=True)
class Launch:
    """An instruction and how often a step runs it."""

    instruction: Instruction
    times: int


Turns = Callable[[Program, Instruction], int]
Branches = Callable[[Program, Instruction], Sequence[str]]


def every_branch(program: Program, found: Instruction) -> Sequence[str]:
    """The computations of a branch."""
    return found.calls


def trips(program: Program, loop: Instruction) -> int:
    """Turns of a loop. Raises Unreadable where the compiler does not know and the loop does anything."""
    turns = loop.trips if loop.trips is not None else counted_turns(program, loop)
    if turns is not None:
        return turns
    body = program.computations[loop.called("body")]
    if all(found.opcode in NOTHING for found in body):
        return 0
    raise Unreadable(
        f"the loop {loop.name} ({loop.origin or 'no source'}) has no known trip count, so that nothing inside it can "
        "be counted; give it a static length (lax.scan, lax.fori_loop with static bounds)"
    )


@dataclass(frozen=True)
class _Asked:
    """Which instructions matter, how loops are counted, and which branches may be taken."""

    matters: Callable[[Instruction], bool]
    turns: Turns
    branches: Branches


def launches(
    program: Program, *, matters: Callable[[Instruction], bool] = lambda _: True, turns: Turns = trips,
    branches: Branches = every_branch,
) -> Iterator[Launch]:  # fmt: skip
    """Every instruction that does something, loops walked by their `turns`, in the order of the schedule.

    A loop in which nothing `matters` is passed over, whether or not its turns are known.
    """
    yield from _walk(program, program.entry, 1, _Asked(matters, turns, branches))


def _walk(program: Program, computation: str, times: int, asked: _Asked) -> Iterator[Launch]:
    for found in program.computations[computation]:
        if found.opcode == "while":
            body = found.called("body")
            if not any(asked.matters(part) for part in _inside(program, body)):
                continue
            yield from _walk(program, body, times * asked.turns(program, found), asked)
        elif found.opcode == "conditional":
            yield from _branches(program, found, times, asked)
        elif found.opcode in CALLS:
            for called in found.calls:
                yield from _walk(program, called, times, asked)
        elif found.opcode not in NOTHING:
            yield Launch(found, times)


def _inside(program: Program, computation: str) -> Iterator[Instruction]:
    """What a computation holds and calls, turns aside."""
    for found in program.computations[computation]:
        yield found
        called = (found.called("body"),) if found.opcode == "while" else found.calls if found.opcode in CALLING else ()
        for name in called:
            yield from _inside(program, name)


def _branches(program: Program, found: Instruction, times: int, asked: _Asked) -> Iterator[Launch]:
    """One branch runs: fine if at most one does anything that matters, else unknown which."""
    sides = [name for name in asked.branches(program, found) if any(map(asked.matters, _inside(program, name)))]
    busy = [list(_walk(program, name, times, asked)) for name in sides]
    busy = [branch for branch in busy if branch]
    if len(busy) > 1:
        raise Unreadable(
            f"the branch {found.name} ({found.origin or 'no source'}) may run either of {len(busy)} computations; "
            "nobody can say which a step takes"
        )
    for branch in busy:
        yield from branch
