"""Simulate a step: its events in order, on one compute stream with concurrent collectives.

`events_of_program` reads the events from a compiled program, `analytic_step` from a config: what runs, in which order,
how often, over how many FLOPs and bytes. Events are plain data without times, and are cached as JSON.

How NCCL shares a link between concurrent collectives is not known, so there are two estimates: an equal share of the
link for each, or first come, first served (`queued`). A loop body is simulated once and counted by its trip count;
collectives that are in flight when the loop begins continue during it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfbyte.hlo import (
    Collective,
    HloInstruction,
    HloModule,
    HloParseError,
    WeightedInstruction,
    data_movement_kind,
    find_collectives,
    op_category,
)
from halfbyte.hlo.collective_ops import collective_kind
from halfbyte.hlo.gemm_ops import BACKWARD_GEMMS, attention_call_of, gemms_of_instruction
from halfbyte.hlo.memory_traffic import PALLAS_KERNEL_TARGETS, instruction_bytes
from halfbyte.hlo.trip_counts import CALL_OPCODES, NO_OP_OPCODES
from halfbyte.plan.cluster_model import GROUPED_PREFIX, SMALL_GEMM_FLOPS, DeviceRates, group_span
from halfbyte.plan.step_placement import NO_EXPERTS, ExpertRowLoad

PURPOSES = (
    ("loss", re.compile(r"ops/cross_entropy")),
    ("optimizer", re.compile(r"\btrain/")),
    ("embedding", re.compile(r"models/embedding")),
    ("rope", re.compile(r"ops/rope")),
    ("norm and residual", re.compile(r"ops/rms_norm_vjp|models/llama")),
)
LINEAR_OF_SOURCE = (
    ("ops/mlp", "mlp"),
    ("ops/grouped_linear", "experts"),
    ("ops/expert_tiles", "experts"),
    ("kernels/hopper_grouped_gemm", "experts"),
    ("kernels/blackwell_grouped_gemm", "experts"),
    ("models/moe", "experts"),
    ("ops/moe_dispatch", "router"),
    ("ops/qdot", "attention linears"),
    ("kernels/", "linears"),  # a kernel that is lowered once for all linears of a shape
    ("cross_entropy", "head"),
    ("loss", "head"),
    ("attention", "attention"),
)
"""(substring of a source line, linears whose GEMMs come from it); the first match decides."""
DATA_MOVEMENT_PURPOSE = {
    "update": "stacks",
    "slice": "stacks",
    "fill": "fills",
    "copy": "copies",
    "transpose": "transposes",
}
AxisCrossing = Mapping[str, tuple[int, int]]
EPSILON_S = 1e-12


@dataclass(frozen=True)
class StepEvent:
    """One event of a step. `what` is gemm, attention, pass, send (start of a collective), wait or loop."""

    what: str
    name: str = ""
    purpose: str = ""
    source: str = ""
    format: str = ""
    """GEMM format; direction of attention; kind of a collective; `kernel` for a pass of this package's kernels."""
    flops: float = 0.0
    moved: float = 0.0
    """Bytes of memory traffic; for a collective, bytes of the whole array."""
    head_dim: int = 0
    """Head width of attention."""
    axes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    inner: int = 1
    outer: int = 1
    asynchronous: bool = True
    times: int = 1
    """Trip count of a loop."""
    body: tuple["StepEvent", ...] = ()


@dataclass(frozen=True)
class ProgramFacts:
    """Facts about a program besides its text: its collectives by name, mesh axes across racks, and the expert load."""

    sent: Mapping[str, Collective]
    over: AxisCrossing
    load: ExpertRowLoad


@dataclass(frozen=True)
class TimelineSpan:
    """An event on the timeline. `start` is in seconds from the start of the step, or of the enclosing loop's body."""

    event: StepEvent
    start: float
    seconds: float
    waited: bool = False
    """True if computation waited for it."""


@dataclass(frozen=True)
class TimelineLoop:
    """A loop on the timeline, with the spans of one iteration."""

    name: str
    start: float
    seconds_per_iteration: float
    trip_count: int
    spans: tuple["TimelineSpan | TimelineLoop", ...]


@dataclass
class Timeline:
    """The simulated step."""

    seconds: float = 0.0
    exposed_communication: float = 0.0
    """Seconds that computation waited for communication."""
    link: dict[str, float] = field(default_factory=dict)
    """Link -> sum of the seconds of its collectives."""
    spans: list[TimelineSpan | TimelineLoop] = field(default_factory=list)


@dataclass
class _InFlightCollective:
    seconds_left: float
    link: str


def event_from_json(fields: Mapping[str, Any]) -> StepEvent:
    """Returns the event of a dict that `dataclasses.asdict` wrote."""
    body = tuple(event_from_json(event) for event in fields["body"])
    return StepEvent(**{**fields, "axes": tuple(fields["axes"]), "dtypes": tuple(fields["dtypes"]), "body": body})


def iter_events(events: Sequence[StepEvent], times: int = 1) -> Iterator[tuple[StepEvent, int]]:
    """Yields (event, executions per step), with loops flattened."""
    for event in events:
        if event.what == "loop":
            yield from iter_events(event.body, times * event.times)
        else:
            yield event, times


def events_of_program(
    program: HloModule, mesh: Mapping[str, int], over: Mapping[str, tuple[int, int]], load: ExpertRowLoad = NO_EXPERTS
) -> tuple[StepEvent, ...]:
    """Returns the events of a compiled step on `mesh` (axis -> size).

    `over` is that of `axes_across_racks`, `load` the row load of the experts. Raises HloParseError for an instruction
    that cannot be interpreted.
    """
    if not program.scheduled:
        raise HloParseError("the program is not scheduled (is_scheduled=true): the order of its text says nothing")
    sent = {collective.instruction.name: collective for collective in find_collectives(program, mesh)}
    return tuple(_of_computation(program, program.entry, ProgramFacts(sent, over, load)))


def _of_computation(program: HloModule, name: str, facts: ProgramFacts) -> Iterator[StepEvent]:
    for instruction in program.computations[name]:
        if instruction.opcode == "while":
            body = tuple(_of_computation(program, instruction.called_computation("body"), facts))
            yield StepEvent(
                "loop", instruction.name, times=facts.load.trip_count(program, instruction) if body else 0, body=body
            )
        elif instruction.name in facts.sent:
            yield _send(facts.sent[instruction.name], facts.over)
        elif instruction.opcode in (*CALL_OPCODES, "conditional"):
            for called in facts.load.branches(program, instruction):
                yield from _of_computation(program, called, facts)
        elif instruction.opcode.endswith("-done"):
            if instruction.operands[0] in facts.sent:
                yield StepEvent("wait", instruction.operands[0])
        elif instruction.opcode not in NO_OP_OPCODES and not collective_kind(instruction):
            yield _event_work(program, instruction, facts.load)


def _send(collective: Collective, over: AxisCrossing) -> StepEvent:
    inner, outer = group_span(collective.axes, over)
    source = str(collective.instruction.source)
    return StepEvent(
        "send", collective.instruction.name, "communication", source, collective.kind,
        moved=collective.array_bytes_per_call, axes=collective.axes, dtypes=collective.dtypes,
        inner=inner, outer=outer, asynchronous=collective.asynchronous,
    )  # fmt: skip


def _event_work(program: HloModule, instruction: HloInstruction, load: ExpertRowLoad) -> StepEvent:
    """Returns the event of one launch: an attention call, one or more GEMMs, or a pass."""
    launch, source = WeightedInstruction(instruction, 1), _source(program, instruction)
    bytes_moved = float(sum(instruction_bytes(program, instruction)))
    for call in attention_call_of(program, launch):
        direction = "backward" if call.num_gemms == BACKWARD_GEMMS else "forward"
        return StepEvent(
            "attention", instruction.name, "attention", source, direction, call.flops_per_call, bytes_moved,
            call.head_dim,
        )  # fmt: skip
    gemms = list(gemms_of_instruction(program, launch))
    if gemms:
        flops = float(sum(load.share(gemm) * gemm.flops_per_call for gemm in gemms))
        bytes_moved -= sum(load.skipped_bytes(gemm) for gemm in gemms)
        first = gemms[0]
        format = f"{GROUPED_PREFIX}{first.format}" if first.rows else first.format
        return StepEvent("gemm", instruction.name, linear_of_source(source), source, format, flops, bytes_moved)
    pass_format = "kernel" if PALLAS_KERNEL_TARGETS.search(instruction.custom_call_target) else ""
    return StepEvent(
        "pass", instruction.name, pass_purpose(program, instruction, source), source, pass_format, moved=bytes_moved
    )


def linear_of_source(source: str) -> str:
    """Returns the linears of a GEMM by its source line in this package. Raises HloParseError for any other line."""
    for pattern, name in LINEAR_OF_SOURCE:
        if pattern in source:
            return name
    raise HloParseError(f"a GEMM from {source or 'no source'} belongs to no linear; name its file in plan/simulator.py")


def pass_purpose(program: HloModule, instruction: HloInstruction, source: str) -> str:
    """Returns the purpose of a pass, by its category, data movement or source line."""
    category = op_category(program, instruction)
    if category == "quantize":
        return "operands"
    movement = data_movement_kind(program, instruction)
    if movement is not None:
        return DATA_MOVEMENT_PURPOSE[movement]
    if category == "mlp":
        return "operands"
    return next((name for name, pattern in PURPOSES if pattern.search(source)), category or "other")


def _source(program: HloModule, instruction: HloInstruction) -> str:
    """Returns the source line of an instruction, or else the last one of the instructions fused into it."""
    lines = [
        str(fused.source) for fused in (*program.nested_instructions(instruction), instruction) if str(fused.source)
    ]
    return str(instruction.source) or (lines[-1] if lines else "")


def simulate_step(events: Sequence[StepEvent], rates: DeviceRates, *, queued: bool) -> Timeline:
    """Simulate one step. Concurrent collectives share a link equally, or use it in order if `queued`."""
    timeline = Timeline()
    timeline.seconds, spans = _run(events, rates, queued, timeline, 1)
    timeline.spans = list(spans)
    return timeline


def event_seconds(event: StepEvent, rates: DeviceRates) -> float:
    """Returns the seconds of a gemm, attention or pass event."""
    if event.what == "gemm":
        return rates.gemm_seconds(event.flops, event.moved, event.format)
    if event.what == "attention":
        return rates.attention_seconds(event.flops, backward=event.format == "backward", head_dim=event.head_dim)
    return rates.memory_seconds(event.moved, ours=event.format == "kernel")


def _run(
    events: Sequence[StepEvent], rates: DeviceRates, queued: bool, total: Timeline, times: int
) -> tuple[float, list[TimelineSpan | TimelineLoop]]:
    """Returns (seconds of one run of these events, their spans) and adds `times` runs to `total`."""
    now, in_flight, started = 0.0, dict[str, _InFlightCollective](), dict[str, tuple[StepEvent, float]]()
    spans: list[TimelineSpan | TimelineLoop] = []

    def wait(name: str) -> float:
        waited = _advance_collectives(in_flight, float("inf"), queued, until=name)
        total.exposed_communication += times * waited
        event, start = started.pop(name)
        spans.append(TimelineSpan(event, start, now + waited - start, waited > EPSILON_S))
        return waited

    for event in events:
        if event.what == "loop":
            if not event.times:
                continue
            iteration_seconds, body_spans = _run(event.body, rates, queued, total, times * event.times)
            spans.append(TimelineLoop(event.name, now, iteration_seconds, event.times, tuple(body_spans)))
            duration = iteration_seconds * event.times
        elif event.what == "send":
            link_seconds, link = rates.collective_seconds(event.format, event.moved, event.inner, event.outer)
            total.link[link] = total.link.get(link, 0.0) + times * link_seconds
            in_flight[event.name] = _InFlightCollective(
                link_seconds, "latency" if event.moved < SMALL_GEMM_FLOPS and not queued else link
            )
            started[event.name] = event, now
            now += 0.0 if event.asynchronous else wait(event.name)
            continue
        elif event.what == "wait":
            now += wait(event.name) if event.name in started else 0.0
            continue
        else:
            duration = event_seconds(event, rates)
            spans.append(TimelineSpan(event, now, duration))
        _advance_collectives(in_flight, duration, queued)
        now += duration
    return now, spans


def _advance_collectives(
    in_flight: dict[str, _InFlightCollective], seconds: float, queued: bool, *, until: str = ""
) -> float:
    """Advance the collectives in flight by `seconds`, or until `until` has ended. Returns the seconds that passed."""
    spent = 0.0
    while in_flight and spent < seconds - EPSILON_S and (not until or until in in_flight):
        names_by_link: dict[str, list[str]] = {}
        for name, collective in in_flight.items():
            names_by_link.setdefault(collective.link, []).append(name)
        served = {link: names[:1] if queued else names for link, names in names_by_link.items() if link != "latency"}
        unshared = [[name] for name in names_by_link.get("latency", ())]
        groups = [*served.values(), *unshared]
        step = min(min(in_flight[name].seconds_left for name in names) * len(names) for names in groups)
        step = min(step, seconds - spent)
        for names in groups:
            for name in names:
                in_flight[name].seconds_left -= step / len(names)
        for name in [name for name, collective in in_flight.items() if collective.seconds_left <= EPSILON_S]:
            del in_flight[name]
        spent += step
    return spent
