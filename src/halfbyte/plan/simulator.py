"""Simulate a step: its events in order, on one compute stream with concurrent collectives.

`events_of_program` reads the events from a compiled program, `analytic_step` from a config: what runs, in which order,
how often, over how many FLOPs and bytes. They are plain data without times, and are cached as JSON.

How NCCL shares a link between concurrent collectives is not known, so there are two estimates: an even share of the
link each, or first come first served (`queued`). A loop body is simulated once and counted by its trip count;
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
"""Part of a source line and the linears whose GEMMs come from it; the first that matches."""
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
    body: tuple["StepEvent", ...] = ()


@dataclass(frozen=True)
class ProgramFacts:
    """What is known of a program beside its text: its collectives by name, who talks to whom, the load of experts."""

    sent: Mapping[str, Collective]
    over: AxisCrossing
    load: ExpertRowLoad


@dataclass(frozen=True)
class TimelineSpan:
    """Something on the timeline, in seconds from the start of the (first turn of the) loops around it."""

    event: StepEvent
    start: float
    seconds: float
    waited: bool = False
    """Whether computation stood still for it."""


@dataclass(frozen=True)
class TimelineLoop:
    """A loop on the timeline."""

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
    """Seconds that computation stood still for communication."""
    link: dict[str, float] = field(default_factory=dict)
    """Seconds that each link was needed for."""
    spans: list[TimelineSpan | TimelineLoop] = field(default_factory=list)


@dataclass
class _InFlightCollective:
    left: float
    link: str


def event_from_json(found: Mapping[str, Any]) -> StepEvent:
    """The event that `dataclasses.asdict` has written."""
    body = tuple(event_from_json(each) for each in found["body"])
    return StepEvent(**{**found, "axes": tuple(found["axes"]), "dtypes": tuple(found["dtypes"]), "body": body})


def iter_events(events: Sequence[StepEvent], times: int = 1) -> Iterator[tuple[StepEvent, int]]:
    """(event, how often a step has it), loops opened."""
    for event in events:
        if event.what == "loop":
            yield from iter_events(event.body, times * event.times)
        else:
            yield event, times


def events_of_program(
    program: HloModule, mesh: Mapping[str, int], over: Mapping[str, tuple[int, int]], load: ExpertRowLoad = NO_EXPERTS
) -> tuple[StepEvent, ...]:
    """The entries of a compiled step on `mesh` (axis -> size); `over` as in `axes_across_racks`, `load` that of
    its experts. Raises HloParseError for an instruction that cannot be interpreted.
    """
    if not program.scheduled:
        raise HloParseError("the program is not scheduled (is_scheduled=true): the order of its text says nothing")
    sent = {each.instruction.name: each for each in find_collectives(program, mesh)}
    return tuple(_of_computation(program, program.entry, ProgramFacts(sent, over, load)))


def _of_computation(program: HloModule, name: str, known: ProgramFacts) -> Iterator[StepEvent]:
    for found in program.computations[name]:
        if found.opcode == "while":
            body = tuple(_of_computation(program, found.called_computation("body"), known))
            yield StepEvent("loop", found.name, times=known.load.trip_count(program, found) if body else 0, body=body)
        elif found.name in known.sent:
            yield _send(known.sent[found.name], known.over)
        elif found.opcode in (*CALL_OPCODES, "conditional"):
            for called in known.load.branches(program, found):
                yield from _of_computation(program, called, known)
        elif found.opcode.endswith("-done"):
            if found.operands[0] in known.sent:
                yield StepEvent("wait", found.operands[0])
        elif found.opcode not in NO_OP_OPCODES and not collective_kind(found):
            yield _event_work(program, found, known.load)


def _send(found: Collective, over: AxisCrossing) -> StepEvent:
    inner, outer = group_span(found.axes, over)
    source = str(found.instruction.source)
    return StepEvent(
        "send", found.instruction.name, "communication", source, found.kind, moved=found.array_bytes_per_call,
        axes=found.axes, dtypes=found.dtypes, inner=inner, outer=outer, asynchronous=found.asynchronous,
    )  # fmt: skip


def _event_work(program: HloModule, found: HloInstruction, load: ExpertRowLoad) -> StepEvent:
    """What one launch does: at most one of multiplying, attending and moving."""
    launch, source = WeightedInstruction(found, 1), _source(program, found)
    moved = float(sum(instruction_bytes(program, found)))
    for each in attention_call_of(program, launch):
        pass_ = "backward" if each.num_gemms == BACKWARD_GEMMS else "forward"
        return StepEvent("attention", found.name, "attention", source, pass_, each.flops_per_call, moved, each.head_dim)
    multiplied = list(gemms_of_instruction(program, launch))
    if multiplied:
        flops = float(sum(load.share(gemm) * gemm.flops_per_call for gemm in multiplied))
        moved -= sum(load.skipped_bytes(gemm) for gemm in multiplied)
        first = multiplied[0]
        format = f"{GROUPED_PREFIX}{first.format}" if first.rows else first.format
        return StepEvent("gemm", found.name, linear_of_source(source), source, format, flops, moved)
    own = "kernel" if PALLAS_KERNEL_TARGETS.search(found.custom_call_target) else ""
    return StepEvent("pass", found.name, pass_purpose(program, found, source), source, own, moved=moved)


def linear_of_source(source: str) -> str:
    """Which linears a GEMM belongs to, by its source line in this package. Raises HloParseError for any other line."""
    for pattern, name in LINEAR_OF_SOURCE:
        if pattern in source:
            return name
    raise HloParseError(f"a GEMM from {source or 'no source'} belongs to no linear; name its file in plan/simulator.py")


def pass_purpose(program: HloModule, found: HloInstruction, source: str) -> str:
    """What a pass that does not multiply is for."""
    kind = op_category(program, found)
    if kind == "quantize":
        return "operands"
    moved = data_movement_kind(program, found)
    if moved is not None:
        return DATA_MOVEMENT_PURPOSE[moved]
    if kind == "mlp":
        return "operands"
    return next((name for name, pattern in PURPOSES if pattern.search(source)), kind or "other")


def _source(program: HloModule, found: HloInstruction) -> str:
    """The instruction's own line, or the last of those that were fused into it."""
    lines = [str(part.source) for part in (*program.nested_instructions(found), found) if str(part.source)]
    return str(found.source) or (lines[-1] if lines else "")


def simulate_step(events: Sequence[StepEvent], rates: DeviceRates, *, queued: bool) -> Timeline:
    """One step."""
    found = Timeline()
    found.seconds, spans = _run(events, rates, queued, found, 1)
    found.spans = list(spans)
    return found


def event_seconds(event: StepEvent, rates: DeviceRates) -> float:
    """How long one entry of computation takes."""
    if event.what == "gemm":
        return rates.gemm_seconds(event.flops, event.moved, event.format)
    if event.what == "attention":
        return rates.attention_seconds(event.flops, backward=event.format == "backward", head_dim=event.head_dim)
    return rates.memory_seconds(event.moved, ours=event.format == "kernel")


def _run(
    events: Sequence[StepEvent], rates: DeviceRates, queued: bool, total: Timeline, times: int
) -> tuple[float, list[TimelineSpan | TimelineLoop]]:
    """(seconds of one run of these events, what they are on the timeline)."""
    now, flying, began = 0.0, dict[str, _InFlightCollective](), dict[str, tuple[StepEvent, float]]()
    spans: list[TimelineSpan | TimelineLoop] = []

    def wait(name: str) -> float:
        waited = _advance_collectives(flying, float("inf"), queued, until=name)
        total.exposed_communication += times * waited
        event, start = began.pop(name)
        spans.append(TimelineSpan(event, start, now + waited - start, waited > EPSILON_S))
        return waited

    for event in events:
        if event.what == "loop":
            if not event.times:
                continue
            each, inside = _run(event.body, rates, queued, total, times * event.times)
            spans.append(TimelineLoop(event.name, now, each, event.times, tuple(inside)))
            lasts = each * event.times
        elif event.what == "send":
            needs, link = rates.collective_seconds(event.format, event.moved, event.inner, event.outer)
            total.link[link] = total.link.get(link, 0.0) + times * needs
            flying[event.name] = _InFlightCollective(
                needs, "latency" if event.moved < SMALL_GEMM_FLOPS and not queued else link
            )
            began[event.name] = event, now
            now += 0.0 if event.asynchronous else wait(event.name)
            continue
        elif event.what == "wait":
            now += wait(event.name) if event.name in began else 0.0
            continue
        else:
            lasts = event_seconds(event, rates)
            spans.append(TimelineSpan(event, now, lasts))
        _advance_collectives(flying, lasts, queued)
        now += lasts
    return now, spans


def _advance_collectives(
    flying: dict[str, _InFlightCollective], seconds: float, queued: bool, *, until: str = ""
) -> float:
    """Lets collectives go on for `seconds`, or until one has arrived; the seconds that this took."""
    spent = 0.0
    while flying and spent < seconds - EPSILON_S and (not until or until in flying):
        lanes: dict[str, list[str]] = {}
        for name, each in flying.items():
            lanes.setdefault(each.link, []).append(name)
        going = {link: names[:1] if queued else names for link, names in lanes.items() if link != "latency"}
        alone = [[name] for name in lanes.get("latency", ())]
        sharing = [*going.values(), *alone]
        step = min(min(flying[name].left for name in names) * len(names) for names in sharing)
        step = min(step, seconds - spent)
        for names in sharing:
            for name in names:
                flying[name].left -= step / len(names)
        for name in [name for name, each in flying.items() if each.left <= EPSILON_S]:
            del flying[name]
        spent += step
    return spent
