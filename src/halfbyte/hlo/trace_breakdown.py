"""Break the step time of an xprof trace down into GEMM, quantize, attention, other, communication and idle.

A trace names the HLO instruction of every event. The compiled program has the rest: its opcode, the instructions of
its fusion, and the source lines. Each moment of one device's timeline counts once: as computation, else as exposed
communication, else as idle. The fractions therefore add up to the wall time.
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
STREAM = "Stream"  # prefix of a GPU plane's lines that hold kernels; the other lines repeat them by step or module
TimeInterval = tuple[float, float]


@dataclass(frozen=True)
class TraceEvent:
    """One event of a device: HLO instruction and module if the trace names them, kernel name, start and stop in s."""

    instruction: str
    kernel: str
    start: float
    stop: float
    module: str = ""


class EventClassifier:
    """Map an event to the category of its HLO instruction.

    The instruction is the one that the trace names, else the one that the kernel is named after (XLA writes `fusion.3`
    as `fusion_3`), else the names of library kernels decide. An event of another module is classified only by its
    kernel name, because every program has a `fusion.3`.
    """

    def __init__(self, program: HloModule):
        self._program = program
        self._kernels = {_kernel_name(name): instruction for name, instruction in program.instructions.items()}
        self._known: dict[tuple[str, str, str], str | None] = {}

    def __call__(self, event: TraceEvent) -> str | None:
        """Returns one of OP_CATEGORIES; None for an event that only contains others."""
        key = event.module, event.instruction, event.kernel
        if key not in self._known:
            self._known[key] = self._classify(event)
        return self._known[key]

    def _classify(self, event: TraceEvent) -> str | None:
        module = event.module.partition("(")[0]  # some traces append the program id
        if module and self._program.name and module != self._program.name:
            return category_of_name(event.kernel)
        instruction = self._program.instructions.get(event.instruction)
        if instruction is not None and instruction.opcode not in CONTAINERS:
            return op_category(self._program, instruction)
        namesake = self._kernels.get(_kernel_name(event.kernel))
        return op_category(self._program, namesake) if namesake else category_of_name(event.kernel)


def merge_intervals(intervals: Iterable[TimeInterval]) -> list[TimeInterval]:
    """Returns the union as disjoint intervals in ascending order."""
    merged: list[TimeInterval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def time_fractions(busy: Mapping[str, list[TimeInterval]], window: TimeInterval) -> dict[str, float]:
    """Returns the fraction of `window` spent in each category; the fractions add up to 1.

    A moment that several categories cover counts for the first of them in TIME_CATEGORIES.
    """
    total, covered, intervals = window[1] - window[0], 0.0, []
    fractions = {}
    for category in TIME_CATEGORIES[:-1]:
        intervals += busy.get(category, [])
        now_covered = sum(stop - start for start, stop in merge_intervals(intervals))
        fractions[category], covered = (now_covered - covered) / total, now_covered
    return {**fractions, "idle": max(0.0, 1 - covered / total)}


def device_events(trace: Path) -> dict[str, list[TraceEvent]]:
    """Returns the events of each device: on a GPU those of its streams, on a CPU those that name an HLO instruction.

    Kernels inside a CUDA graph may name no instruction; they are classified by their kernel names.
    """
    from jax.profiler import ProfileData

    events: dict[str, list[TraceEvent]] = {}
    profile = ProfileData.from_file(str(trace))  # a variable, because the planes do not keep the profile alive
    for plane in profile.planes:
        for line in plane.lines:
            stream = plane.name.startswith("/device:") and line.name.startswith(STREAM)
            for event in line.events:
                stats: dict[str, Any] = dict(event.stats)
                if stream or ("hlo_op" in stats and not plane.name.startswith("/device:")):
                    device = plane.name if stream else f"{plane.name}:{stats.get('device_ordinal', 0)}"
                    span = (event.start_ns * 1e-9, (event.start_ns + event.duration_ns) * 1e-9)
                    name, module = (str(stats.get(field, "")) for field in ("hlo_op", "hlo_module"))
                    events.setdefault(device, []).append(TraceEvent(name, event.name, *span, module=module))
    return events


def step_time_breakdown(trace: Path, program_text: str) -> dict[str, float]:
    """Returns the time fractions of the traced steps on the first device; empty if the trace has no device events."""
    by_device = device_events(trace)
    if not by_device:
        return {}
    events = by_device[min(by_device)]
    classify = EventClassifier(parse_hlo(program_text))
    busy: dict[str, list[TimeInterval]] = {}
    for event in events:
        category = classify(event)
        if category is not None:
            busy.setdefault(DISPLAY_CATEGORY.get(category, category), []).append((event.start, event.stop))
    return time_fractions(busy, (min(event.start for event in events), max(event.stop for event in events)))


def _kernel_name(name: str) -> str:
    return re.sub(r"[.\-]", "_", name)
