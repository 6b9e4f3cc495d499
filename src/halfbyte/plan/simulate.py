"""How long a schedule takes: one stream computes, collectives go on beside it, and whoever waits for one stands still.

How NCCL shares a link between collectives under way is not known, so there are two figures: they divide it evenly, or
the one that began first has it (`queued`). A loop is run once and counted as often as it turns; what was under way when
it began goes on meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .rates import SMALL, Rates
from .schedule import Event

TINY = 1e-12


@dataclass(frozen=True)
class Span:
    """Something on the timeline, in seconds from the start of the (first turn of the) loops around it."""

    event: Event
    start: float
    seconds: float
    waited: bool = False
    """Whether computation stood still for it."""


@dataclass(frozen=True)
class Turns:
    """A loop on the timeline."""

    name: str
    start: float
    each: float
    times: int
    spans: tuple["Span | Turns", ...]


@dataclass
class Timeline:
    """What simulating found, of a step."""

    seconds: float = 0.0
    exposed: float = 0.0
    """Seconds that computation stood still for communication."""
    link: dict[str, float] = field(default_factory=dict)
    """Seconds that each link was needed for."""
    spans: list[Span | Turns] = field(default_factory=list)


@dataclass
class _Flying:
    left: float
    link: str


def simulate(events: Sequence[Event], rates: Rates, *, queued: bool) -> Timeline:
    """One step."""
    found = Timeline()
    found.seconds, spans = _run(events, rates, queued, found, 1)
    found.spans = list(spans)
    return found


def seconds_of(event: Event, rates: Rates) -> float:
    """How long one entry of computation takes."""
    if event.what == "gemm":
        return rates.multiply(event.flops, event.moved, event.format)
    if event.what == "attention":
        return rates.attend(event.flops, backward=event.format == "backward", head_dim=event.head_dim)
    return rates.move(event.moved, ours=event.format == "kernel")


def _run(
    events: Sequence[Event], rates: Rates, queued: bool, total: Timeline, times: int
) -> tuple[float, list[Span | Turns]]:
    """(seconds of one run of these events, what they are on the timeline)."""
    now, flying, began = 0.0, dict[str, _Flying](), dict[str, tuple[Event, float]]()
    spans: list[Span | Turns] = []

    def wait(name: str) -> float:
        waited = _pass(flying, float("inf"), queued, until=name)
        total.exposed += times * waited
        event, start = began.pop(name)
        spans.append(Span(event, start, now + waited - start, waited > TINY))
        return waited

    for event in events:
        if event.what == "loop":
            if not event.times:
                continue
            each, inside = _run(event.body, rates, queued, total, times * event.times)
            spans.append(Turns(event.name, now, each, event.times, tuple(inside)))
            lasts = each * event.times
        elif event.what == "send":
            needs, link = rates.send(event.format, event.moved, event.inner, event.outer)
            total.link[link] = total.link.get(link, 0.0) + times * needs
            flying[event.name] = _Flying(needs, "latency" if event.moved < SMALL and not queued else link)
            began[event.name] = event, now
            now += 0.0 if event.asynchronous else wait(event.name)
            continue
        elif event.what == "wait":
            now += wait(event.name) if event.name in began else 0.0
            continue
        else:
            lasts = seconds_of(event, rates)
            spans.append(Span(event, now, lasts))
        _pass(flying, lasts, queued)
        now += lasts
    return now, spans


def _pass(flying: dict[str, _Flying], seconds: float, queued: bool, *, until: str = "") -> float:
    """Lets collectives go on for `seconds`, or until one has arrived; the seconds that this took."""
    spent = 0.0
    while flying and spent < seconds - TINY and (not until or until in flying):
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
        for name in [name for name, each in flying.items() if each.left <= TINY]:
            del flying[name]
        spent += step
    return spent
