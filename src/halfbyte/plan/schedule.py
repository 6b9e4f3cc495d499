"""A step as a plan sees it: what runs, in which order, how often, over how many FLOPs and bytes.

`schedule` makes it from a compiled program, `analytic` from a config. It is plain data, so that it can be kept between
calls. Nothing here knows how fast anything is.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.bench.load import NONE, Load
from halfbyte.program import Collective, Instruction, Launch, Program, Unreadable, category, collectives, move_of
from halfbyte.program.attention import BACKWARD, attention_of
from halfbyte.program.categories import OWN_KERNEL
from halfbyte.program.collectives import kind_of
from halfbyte.program.gemms import gemms_of
from halfbyte.program.schedule import CALLS, NOTHING
from halfbyte.program.traffic import bytes_of

from .cluster import span
from .rates import GROUPED

PURPOSES = (
    ("loss", re.compile(r"nn/loss")),
    ("optimizer", re.compile(r"\boptim/|train/")),
    ("embedding", re.compile(r"models/embedding")),
    ("rope", re.compile(r"nn/rope")),
    ("norm and residual", re.compile(r"nn/norm|models/llama")),
)
MOVED = {"update": "stacks", "slice": "stacks", "fill": "fills", "copy": "copies", "transpose": "transposes"}


@dataclass(frozen=True)
class Event:
    """One entry. `what` is gemm, attention, pass, send, wait or loop."""

    what: str
    name: str = ""
    purpose: str = ""
    source: str = ""
    format: str = ""
    """Of a GEMM; forward or backward of attention; the kind of a collective; `kernel` where a pass is ours."""
    flops: float = 0.0
    moved: float = 0.0
    """Bytes of memory; of a collective, the whole array."""
    head_dim: int = 0
    """Of attention."""
    axes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    inner: int = 1
    outer: int = 1
    asynchronous: bool = True
    times: int = 1
    """Turns of a loop."""
    body: tuple["Event", ...] = ()


def from_json(found: Mapping[str, Any]) -> Event:
    """The event that `dataclasses.asdict` has written."""
    body = tuple(from_json(each) for each in found["body"])
    return Event(**{**found, "axes": tuple(found["axes"]), "dtypes": tuple(found["dtypes"]), "body": body})


def walk(events: Sequence[Event], times: int = 1) -> Iterator[tuple[Event, int]]:
    """(event, how often a step has it), loops opened."""
    for event in events:
        if event.what == "loop":
            yield from walk(event.body, times * event.times)
        else:
            yield event, times


def schedule(
    program: Program, mesh: Mapping[str, int], over: Mapping[str, tuple[int, int]], load: Load = NONE
) -> tuple[Event, ...]:
    """The entries of a compiled step on `mesh` (axis -> size); `over` as in `cluster.crossing`, `load` that of its
    experts. Unreadable where an instruction cannot be placed.
    """
    if not program.scheduled:
        raise Unreadable("the program is not scheduled (is_scheduled=true): the order of its text says nothing")
    sent = {each.instruction.name: each for each in collectives(program, mesh)}
    return tuple(_of_computation(program, program.entry, Known(sent, over, load)))


Over = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Known:
    """What is known of a program beside its text: its collectives by name, who talks to whom, the load of experts."""

    sent: Mapping[str, Collective]
    over: Over
    load: Load


def _of_computation(program: Program, name: str, known: Known) -> Iterator[Event]:
    for found in program.computations[name]:
        if found.opcode == "while":
            body = tuple(_of_computation(program, found.called("body"), known))
            yield Event("loop", found.name, times=known.load.turns(program, found) if body else 0, body=body)
        elif found.name in known.sent:
            yield _send(known.sent[found.name], known.over)
        elif found.opcode in (*CALLS, "conditional"):
            for called in known.load.branches(program, found):
                yield from _of_computation(program, called, known)
        elif found.opcode.endswith("-done"):
            if found.operands[0] in known.sent:
                yield Event("wait", found.operands[0])
        elif found.opcode not in NOTHING and not kind_of(found):
            yield _work(program, found, known.load)


def _send(found: Collective, over: Over) -> Event:
    inner, outer = span(found.axes, over)
    source = str(found.instruction.source)
    return Event(
        "send", found.instruction.name, "communication", source, found.kind, moved=found.moved_each, axes=found.axes,
        dtypes=found.dtypes, inner=inner, outer=outer, asynchronous=found.asynchronous,
    )  # fmt: skip


def _work(program: Program, found: Instruction, load: Load) -> Event:
    """What one launch does: at most one of multiplying, attending and moving."""
    launch, moved, source = Launch(found, 1), float(sum(bytes_of(program, found))), _source(program, found)
    for each in attention_of(program, launch):
        pass_ = "backward" if each.products == BACKWARD else "forward"
        return Event("attention", found.name, "attention", source, pass_, each.each, moved, each.head_dim)
    multiplied = list(gemms_of(program, launch))
    if multiplied:
        flops = float(sum(load.share(gemm) * gemm.each for gemm in multiplied))
        moved -= sum(load.unread(gemm) for gemm in multiplied)
        first = multiplied[0]
        format = f"{GROUPED}{first.format}" if first.rows else first.format
        return Event("gemm", found.name, site(source), source, format, flops, moved)
    own = "kernel" if OWN_KERNEL.search(found.target) else ""
    return Event("pass", found.name, purpose(program, found, source), source, own, moved=moved)


def site(source: str) -> str:
    """Which linears a GEMM belongs to, by the line of ours that it came from. Unreadable for any other line."""
    for pattern, name in (
        ("ops/mlp", "mlp"),
        ("ops/grouped_linear", "experts"),
        ("ops/tiles", "experts"),
        ("kernels/grouped", "experts"),
        ("kernels/block_scaled", "experts"),
        ("models/experts", "experts"),
        ("nn/routing", "router"),
        ("ops/qdot", "attention linears"),
        ("kernels/", "linears"),  # a kernel that is lowered once for all linears of a shape
        ("loss", "head"),
        ("attention", "attention"),
    ):
        if pattern in source:
            return name
    raise Unreadable(f"a GEMM from {source or 'no source'} belongs to no linear; name its file in plan/schedule.py")


def purpose(program: Program, found: Instruction, source: str) -> str:
    """What a pass that does not multiply is for."""
    kind = category(program, found)
    if kind == "quantize":
        return "operands"
    moved = move_of(program, found)
    if moved is not None:
        return MOVED[moved]
    if kind == "mlp":
        return "operands"
    return next((name for name, pattern in PURPOSES if pattern.search(source)), kind or "other")


def _source(program: Program, found: Instruction) -> str:
    """The instruction's own line, or the last of those that were fused into it."""
    lines = [str(part.source) for part in (*program.inside(found), found) if str(part.source)]
    return str(found.source) or (lines[-1] if lines else "")
