"""What a compiled program is made of, read from its HLO text.

Each instruction has an opcode, perhaps a custom-call target, the computations it calls, and an origin: the
operation's name and the file of ours that it
came from. From these follow its kind (GEMM, quantize, attention, ...) and how often it runs: a call inside a loop
counts as often as the loop turns.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

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
    trips: int | None = None
    """Turns of a loop, where the compiler knows."""


@dataclass
class Program:
    """Instructions by name, and by computation."""

    instructions: dict[str, Instruction] = field(default_factory=dict)
    computations: dict[str, list[str]] = field(default_factory=dict)
    entry: str = ""

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
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
FRAME = re.compile(r"stack_frame_id=(\d+)")


def parse_program(text: str) -> Program:
    """The instructions of an HLO module's text, with their origins."""
    program, computation = Program(), ""
    frames = _stack_frames(text)
    for line in text.splitlines():
        head = HEAD.match(line)
        if head:
            computation = head.group(1)
            program.entry = computation if line.startswith("ENTRY") else program.entry
            program.computations[computation] = []
            continue
        found = LINE.match(line)
        if not found or not computation:
            continue
        name, opcode = found.groups()
        target, frame = TARGET.search(line), FRAME.search(line)
        texts = [match.group(1) for match in (OP_NAME.search(line), SOURCE.search(line)) if match]
        origin = " ".join(texts) + (" " + frames.get(int(frame.group(1)), "") if frame else "")
        trips = TRIPS.search(line)
        program.instructions[name] = Instruction(
            opcode,
            target.group(1) if target else "",
            tuple(CALLS.findall(line)),
            origin,
            int(trips.group(1)) if trips else None,
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


def weighted_calls(program: Program, target: str) -> int:
    """How often a step runs custom calls whose target contains `target`, loops counted by their trip counts.

    Raises ValueError for a loop around such a call whose trip count the compiler does not know.
    """
    memory: dict[str, int] = {}

    def of_computation(name: str) -> int:
        if name not in memory:
            memory[name] = 0
            memory[name] = sum(
                of_instruction(program.instructions[part]) for part in program.computations.get(name, ())
            )
        return memory[name]

    def of_instruction(found: Instruction) -> int:
        inside = sum(map(of_computation, found.calls))
        if found.opcode == "while" and inside:
            if found.trips is None:
                raise ValueError(f"a loop around {target} has no known trip count")
            inside *= found.trips
        return inside + (target in found.target)

    return of_computation(program.entry)
