"""Where a step's time goes, from an xprof trace: GEMM, quantize, attention, communication, other, idle.

A trace names the HLO instruction of every event. The compiled program says what that instruction is: its opcode, what
its fusion contains, and the lines
of source it came from. Time is counted on one device's timeline, each moment once: computation first, then the
communication that no computation
hides, then idle. So the parts add up to the wall time.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CATEGORIES = ("gemm", "quantize", "attention", "other", "communication", "idle")
COLLECTIVE = re.compile(r"^(all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all|collective-broadcast)")
GEMM_CALL = re.compile(r"cublas|blockScaledDot|gemm|matmul|onednn", re.IGNORECASE)
ATTENTION_CALL = re.compile(r"fmha|flash", re.IGNORECASE)
CONTAINERS = ("while", "conditional", "call", "async-start", "async-done")
ATTENTION_SOURCE = re.compile(r"attention")
QUANTIZE_SOURCE = re.compile(r"halfbyte/(formats|ops/kernels)/|ops/(operand|weight)\.py|quantize|hadamard")


@dataclass
class Instruction:
    """One HLO instruction: opcode, custom-call target, called computations, and text that tells its origin."""

    opcode: str
    target: str = ""
    calls: tuple[str, ...] = ()
    origin: str = ""


@dataclass
class Program:
    """Instructions by name, and by computation."""

    instructions: dict[str, Instruction] = field(default_factory=dict)
    computations: dict[str, list[str]] = field(default_factory=dict)

    def category(self, name: str) -> str | None:
        """One of CATEGORIES; None for an instruction that only contains others."""
        found = self.instructions.get(name)
        if found is None:
            return _category_of_unknown(name)
        if found.opcode in CONTAINERS:
            return None
        if COLLECTIVE.match(found.opcode):
            return "communication"
        inside = [found, *self._inside(found)]
        origins = " ".join(part.origin for part in inside)
        multiplies = any(part.opcode in ("dot", "scaled-dot") or GEMM_CALL.search(part.target) for part in inside)
        if ATTENTION_SOURCE.search(found.origin) or any(ATTENTION_CALL.search(part.target) for part in inside):
            return "attention"
        if multiplies:
            return "attention" if ATTENTION_SOURCE.search(origins) else "gemm"
        return "quantize" if QUANTIZE_SOURCE.search(origins) else "other"

    def _inside(self, instruction: Instruction) -> Iterable[Instruction]:
        for computation in instruction.calls:
            for name in self.computations.get(computation, ()):
                part = self.instructions[name]
                yield part
                yield from self._inside(part)


def _category_of_unknown(name: str) -> str:
    if COLLECTIVE.match(name) or "nccl" in name.lower():
        return "communication"
    return "gemm" if GEMM_CALL.search(name) else "other"


HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\(")
CALLS = re.compile(r"(?:calls|to_apply|body|condition|called_computations)=\{?%?([\w.\-]+)")
TARGET = re.compile(r'custom_call_target="([^"]+)"')
OP_NAME = re.compile(r'op_name="([^"]*)"')
SOURCE = re.compile(r'source_file="([^"]*)"')
FRAME = re.compile(r"stack_frame_id=(\d+)")


def parse_program(text: str) -> Program:
    """The instructions of an HLO module's text, with their origins."""
    program, computation = Program(), ""
    frames = _stack_frames(text)
    for line in text.splitlines():
        head = HEAD.match(line)
        if head:
            computation = head.group(1)
            program.computations[computation] = []
            continue
        found = LINE.match(line)
        if not found or not computation:
            continue
        name, opcode = found.groups()
        target, frame = TARGET.search(line), FRAME.search(line)
        texts = [match.group(1) for match in (OP_NAME.search(line), SOURCE.search(line)) if match]
        origin = " ".join(texts) + (" " + frames.get(int(frame.group(1)), "") if frame else "")
        program.instructions[name] = Instruction(
            opcode, target.group(1) if target else "", tuple(CALLS.findall(line)), origin
        )
        program.computations[computation].append(name)
    return program


def _stack_frames(text: str) -> dict[int, str]:
    """Frame number -> the source files on its stack, innermost first, from the tables at the head of a module."""
    tables: dict[str, dict[int, str]] = {}
    title = ""
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            title = line
            tables[title] = {}
        elif title and (entry := re.match(r"^(\d+) (.*)$", line)):
            tables[title][int(entry.group(1))] = entry.group(2)
        elif title and line.startswith(("%", "ENTRY")):
            break

    def number(entry: str, key: str) -> int:
        match = re.search(rf"{key}=(\d+)", entry)
        return int(match.group(1)) if match else 0

    def files(frame: int, depth: int = 0) -> list[str]:
        entry = tables.get("StackFrames", {}).get(frame)
        if entry is None or depth > 40:
            return []
        location = tables["FileLocations"].get(number(entry, "file_location_id"), "")
        file = tables["FileNames"].get(number(location, "file_name_id"), "")
        return [file, *files(number(entry, "parent_frame_id") - 1, depth + 1)]  # written one too high; 0 is no parent

    # Only the innermost frame of our own package: callers further out would make everything `attention` or `quantize`.
    return {
        frame: next((file for file in files(frame) if "halfbyte" in file), "")
        for frame in tables.get("StackFrames", {})
    }


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
