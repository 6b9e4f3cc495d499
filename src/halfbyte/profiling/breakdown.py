"""Where a step's time goes, from an xprof trace: GEMM, quantize, attention, communication, other, idle.

A trace names the HLO instruction of every event. The compiled program says what that instruction is: its opcode, what
its fusion contains, and the lines of source it came from. Time is counted on one device's timeline, each moment once:
computation first, then the communication that no computation hides, then idle. So the parts add up to the wall time.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from halfbyte.program import parse_program

CATEGORIES = ("gemm", "quantize", "attention", "other", "communication", "idle")
Interval = tuple[float, float]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals, in order, that cover the same points."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def covered(intervals: Iterable[Interval]) -> float:
    """Length of the union."""
    return sum(stop - start for start, stop in merge(intervals))


def shares(busy: Mapping[str, list[Interval]], window: Interval) -> dict[str, float]:
    """Part of `window` spent in each category, each moment counted once, in the order of CATEGORIES; they add up to
    1."""
    total, known, seen = window[1] - window[0], 0.0, []
    result = {}
    for category in CATEGORIES[:-1]:
        seen += busy.get(category, [])
        reached = covered(seen)
        result[category], known = (reached - known) / total, reached
    return {**result, "idle": max(0.0, 1 - known / total)}


def events_of(trace: Path) -> dict[str, list[tuple[str, float, float]]]:
    """(instruction, start, stop) in seconds, by device, of every event that names an HLO instruction."""
    from jax.profiler import ProfileData

    found: dict[str, list[tuple[str, float, float]]] = {}
    for plane in ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            for event in line.events:
                stats: dict[str, Any] = dict(event.stats)
                if "hlo_op" in stats:
                    device = f"{plane.name}:{stats.get('device_ordinal', 0)}"
                    span = (event.start_ns * 1e-9, (event.start_ns + event.duration_ns) * 1e-9)
                    found.setdefault(device, []).append((str(stats["hlo_op"]), *span))
    return found


def breakdown(trace: Path, program_text: str) -> dict[str, float]:
    """Shares of the traced steps' time on the first device of a trace; empty if the trace holds no device events."""
    by_device = events_of(trace)
    if not by_device:
        return {}
    events = by_device[min(by_device)]
    program = parse_program(program_text)
    busy: dict[str, list[Interval]] = {}
    for name, start, stop in events:
        category = program.category(name)
        if category is not None:
            busy.setdefault(category, []).append((start, stop))
    return shares(busy, (min(event[1] for event in events), max(event[2] for event in events)))
