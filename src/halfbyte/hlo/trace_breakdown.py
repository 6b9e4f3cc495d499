"""Where a step's time goes, from an xprof trace: GEMM, quantize, attention, communication, other, idle.

A trace names the HLO instruction of every event. The compiled program says what that instruction is: its opcode, what
its fusion contains, and the lines of source it came from. Time is counted on one device's timeline, each moment once:
computation first, then the communication that no computation hides, then idle. So the parts add up to the wall time.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.hlo.hlo_text import HloModule, parse_hlo
from halfbyte.hlo.memory_traffic import CONTAINERS, category_of_name, op_category

TIME_CATEGORIES = ("gemm", "quantize", "attention", "other", "communication", "idle")
DISPLAY_CATEGORY = {"mlp": "other", "optimizer": "other"}
STREAM = "Stream"  # lines of a GPU's plane that hold kernels; others repeat them, grouped by step or module
TimeInterval = tuple[float, float]


@dataclass(frozen=True)
class TraceEvent:
    """Something that a device did: the HLO instruction and its module if the trace names them, and the kernel's own
    name. Seconds."""

    instruction: str
    kernel: str
    start: float
    stop: float
    module: str = ""


class EventClassifier:
    """From an event to its category: by the instruction that the trace names, by the instruction that a kernel is
    named after (XLA writes `fusion.3` as `fusion_3`), or by what libraries call their kernels. Every program has a
    `fusion.3`: an event of another module is placed by its kernel alone."""

    def __init__(self, program: HloModule):
        self._program = program
        self._kernels = {_kernel_name(name): found for name, found in program.instructions.items()}
        self._known: dict[tuple[str, str, str], str | None] = {}

    def __call__(self, event: TraceEvent) -> str | None:
        """One of the program's categories; None for an event that only contains others."""
        key = event.module, event.instruction, event.kernel
        if key not in self._known:
            self._known[key] = self._classify(event)
        return self._known[key]

    def _classify(self, event: TraceEvent) -> str | None:
        module = event.module.partition("(")[0]  # some traces add the program's number
        if module and self._program.name and module != self._program.name:
            return category_of_name(event.kernel)
        named = self._program.instructions.get(event.instruction)
        if named is not None and named.opcode not in CONTAINERS:
            return op_category(self._program, named)
        found = self._kernels.get(_kernel_name(event.kernel))
        return op_category(self._program, found) if found else category_of_name(event.kernel)


def merge_intervals(intervals: Iterable[TimeInterval]) -> list[TimeInterval]:
    """Disjoint intervals, in order, that cover the same points."""
    merged: list[TimeInterval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def union_length(intervals: Iterable[TimeInterval]) -> float:
    """Length of the union."""
    return sum(stop - start for start, stop in merge_intervals(intervals))


def time_fractions(busy: Mapping[str, list[TimeInterval]], window: TimeInterval) -> dict[str, float]:
    """Part of `window` spent in each category, each moment counted once, in the order of TIME_CATEGORIES; they add up
    to 1.
    """
    total, known, seen = window[1] - window[0], 0.0, []
    result = {}
    for name in TIME_CATEGORIES[:-1]:
        seen += busy.get(name, [])
        reached = union_length(seen)
        result[name], known = (reached - known) / total, reached
    return {**result, "idle": max(0.0, 1 - known / total)}


def device_events(trace: Path) -> dict[str, list[TraceEvent]]:
    """What each device did. On a GPU every event of its streams; on a CPU the events that name an HLO instruction.

    Kernels that run inside a CUDA graph may name no instruction; they are found by their own names.
    """
    from jax.profiler import ProfileData

    found: dict[str, list[TraceEvent]] = {}
    profile = ProfileData.from_file(str(trace))  # held by name: its planes do not keep it alive
    for plane in profile.planes:
        for line in plane.lines:
            stream = plane.name.startswith("/device:") and line.name.startswith(STREAM)
            for event in line.events:
                stats: dict[str, Any] = dict(event.stats)
                if stream or ("hlo_op" in stats and not plane.name.startswith("/device:")):
                    device = plane.name if stream else f"{plane.name}:{stats.get('device_ordinal', 0)}"
                    span = (event.start_ns * 1e-9, (event.start_ns + event.duration_ns) * 1e-9)
                    name, module = (str(stats.get(field, "")) for field in ("hlo_op", "hlo_module"))
                    found.setdefault(device, []).append(TraceEvent(name, event.name, *span, module=module))
    return found


def step_time_breakdown(trace: Path, program_text: str) -> dict[str, float]:
    """Shares of the traced steps' time on the first device of a trace; empty if the trace holds no device events."""
    by_device = device_events(trace)
    if not by_device:
        return {}
    events = by_device[min(by_device)]
    place = EventClassifier(parse_hlo(program_text))
    busy: dict[str, list[TimeInterval]] = {}
    for event in events:
        name = place(event)
        if name is not None:
            busy.setdefault(DISPLAY_CATEGORY.get(name, name), []).append((event.start, event.stop))
    return time_fractions(busy, (min(event.start for event in events), max(event.stop for event in events)))


def _kernel_name(name: str) -> str:
    return re.sub(r"[.\-]", "_", name)
