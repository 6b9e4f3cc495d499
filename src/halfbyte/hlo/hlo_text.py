"""Parse the text of a compiled HLO module into instructions, in execution order, each with its source line.

A compiled module's text is scheduled: within a computation, instructions run in the order in which they are written.
Each line is `NAME = RESULTS OPCODE(OPERANDS), ATTRIBUTES`. Parentheses are counted to find the end of a part, because
attributes hold JSON and whole kernels. Source lines are read from the tables of stack frames at the head of the text,
or from `source_file` in an instruction's metadata.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

PACKAGE = "halfbyte"
TITLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
DEEPEST = 200  # frames: a longer stack is a cycle of parent ids
BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128} | {
    name: int(re.findall(r"\d+", name)[0])
    for name in "s1 u1 s2 u2 s4 u4 s8 u8 s16 u16 s32 u32 s64 u64 f16 f32 f64 f4e2m1fn f8e4m3 f8e4m3fn f8e5m2 f8e8m0fnu "
    "f8e4m3b11fnuz f8e4m3fnuz f8e5m2fnuz f8e3m4".split()
}
FUSIONS = ("fusion", "fusion-start")  # synchronous and asynchronous
BRANCHES = ("branch_computations", "true_computation", "false_computation")
CALLED_COMPUTATION_ATTRS = ("calls", "to_apply", "body", "condition", "called_computations", *BRANCHES)
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_MODULE = re.compile(r"^HloModule ([\w.\-]+)")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_LINE = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_CALLS = re.compile(rf"\b(?:{'|'.join(CALLED_COMPUTATION_ATTRS)})=(?:%?([\w.\-]+)|\{{([^}}]*)\}})")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_SOURCE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True)
class SourceLine:
    """A line of source. Paths of this package are relative to it (`ops/mlp.py`), all others are complete."""

    file: str = ""
    line: int = 0
    function: str = ""

    @classmethod
    def of(cls, path: str, line: int, function: str = "") -> "SourceLine":
        """Returns the source line of `path`, relative to this package if it is inside."""
        return cls(path.rpartition(f"/{PACKAGE}/")[2], line, function)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.function}" if self.file else ""


UNKNOWN_SOURCE = SourceLine()


class HloParseError(ValueError):
    """An instruction of the program cannot be interpreted, so that every total would be wrong."""


@dataclass(frozen=True)
class HloArray:
    """One array of a program: element type in HLO's spelling, and dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Returns the bytes in memory, rounded up; elements of less than a byte are packed."""
        return -(-self.elements * BITS[self.dtype] // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class HloInstruction:
    """One line of a program. `operands` are names in the same computation; tuples in `results` are flattened."""

    name: str
    opcode: str
    computation: str
    results: tuple[HloArray, ...] = ()
    operands: tuple[str, ...] = ()
    root: bool = False
    custom_call_target: str = ""
    called_computations: tuple[str, ...] = ()
    op_name: str = ""
    source: SourceLine = UNKNOWN_SOURCE
    known_trip_count: int | None = None
    """Trip count of a while loop; None if XLA does not state one."""
    constant: int | None = None
    """Value of an integer scalar constant; None for every other instruction."""
    attributes: str = field(default="", repr=False, compare=False)

    @property
    def origin(self) -> str:
        """Returns the op name and the source line in this package."""
        return f"{self.op_name} {self.source}".strip()

    @cached_property
    def backend_config(self) -> dict[str, Any]:
        """Returns XLA's backend config of the instruction; empty if there is none or it is not JSON (a kernel's)."""
        start = self.attributes.find("backend_config=")
        if start < 0 or not self.attributes.startswith('{"', start + len("backend_config=")):
            return {}
        config: dict[str, Any] = json.JSONDecoder().raw_decode(self.attributes[start + len("backend_config=") :])[0]
        return config

    def called_computation(self, attribute: str) -> str:
        """Returns the name of the computation in `attribute` (body, condition, ...)."""
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        if match is None:
            raise HloParseError(f"{self.name} ({self.opcode}) has no {attribute}")
        return match.group(1)


@dataclass
class HloModule:
    """A compiled module: for each computation its instructions, in execution order if `scheduled`."""

    computations: dict[str, list[HloInstruction]] = field(default_factory=dict)
    entry: str = ""
    scheduled: bool = False
    name: str = ""

    @cached_property
    def instructions(self) -> dict[str, HloInstruction]:
        """Returns every instruction by name."""
        return {instruction.name: instruction for body in self.computations.values() for instruction in body}

    @cached_property
    def _local(self) -> dict[str, dict[str, HloInstruction]]:
        return {
            name: {instruction.name: instruction for instruction in body} for name, body in self.computations.items()
        }

    def operand(self, instruction: HloInstruction, index: int) -> HloInstruction:
        """Returns the instruction that computes operand `index` of `instruction`."""
        try:
            return self._local[instruction.computation][instruction.operands[index]]
        except (KeyError, IndexError):
            raise HloParseError(
                f"{instruction.name} ({instruction.opcode}) has no operand {index} in {instruction.computation}"
            ) from None

    def operand_arrays(self, instruction: HloInstruction) -> list[HloArray]:
        """Returns the arrays of all operands of `instruction`, tuples flattened."""
        return [
            array for index in range(len(instruction.operands)) for array in self.operand(instruction, index).results
        ]

    def nested_instructions(self, instruction: HloInstruction) -> Iterator[HloInstruction]:
        """Yields every instruction of the computations that `instruction` calls, directly or through others."""
        for computation in instruction.called_computations:
            for nested in self.computations.get(computation, ()):
                yield nested
                yield from self.nested_instructions(nested)


def parse_stack_frames(text: str) -> dict[int, SourceLine]:
    """Returns frame number -> the innermost source line of this package on its stack.

    Callers further out are ignored: they would put every operation into `attention` or `quantize`.
    """
    tables = _tables(text)
    frames = tables.get("StackFrames", {})
    sources = {number: _location(entry, tables) for number, entry in tables.get("FileLocations", {}).items()}
    return {
        number: source for number in frames if (source := _innermost_package_frame(number, frames, sources)) is not None
    }


def _innermost_package_frame(
    number: int, frames: dict[int, str], sources: dict[int, tuple[str, SourceLine]]
) -> SourceLine | None:
    for _ in range(DEEPEST):
        if number not in frames:
            return None
        path, source = sources.get(_field(frames[number], "file_location_id"), ("", UNKNOWN_SOURCE))
        if f"/{PACKAGE}/" in path:
            return source
        number = _field(frames[number], "parent_frame_id") - 1  # written as number + 1, so that 0 means no parent
    return None


def _location(entry: str, tables: dict[str, dict[int, str]]) -> tuple[str, SourceLine]:
    path = tables["FileNames"].get(_field(entry, "file_name_id"), "").strip('"')
    function = tables["FunctionNames"].get(_field(entry, "function_name_id"), "").strip('"')
    return path, SourceLine.of(path, _field(entry, "line"), function)


def _tables(text: str) -> dict[str, dict[int, str]]:
    """Returns the four tables as title -> number -> entry. They end at the first computation."""
    tables: dict[str, dict[int, str]] = {}
    title = ""
    for line in text.splitlines():
        if line in TITLES:
            title = line
            tables[title] = {}
        elif title and (entry := re.match(r"^(\d+) (.*)$", line)):
            tables[title][int(entry.group(1))] = entry.group(2)
        elif title and line.startswith(("%", "ENTRY")):
            break
    return tables


def _field(entry: str, key: str) -> int:
    match = re.search(rf"\b{key}=(\d+)", entry)
    return int(match.group(1)) if match else 0


def parse_hlo(text: str) -> HloModule:
    """Parse the text of an HLO module. Raises HloParseError for a line or element type that it cannot read."""
    header = _MODULE.match(text)
    program = HloModule(
        scheduled="is_scheduled=true" in text[: text.find("\n")], name=header.group(1) if header else ""
    )
    frames, computation = parse_stack_frames(text), ""
    for line in text.splitlines():
        if not line.startswith(" ") and (head := _HEAD.match(line)):
            computation = head.group(2)
            program.entry = computation if head.group(1) else program.entry
            program.computations[computation] = []
        elif line.startswith("}"):
            computation = ""
        elif computation and (match := _LINE.match(line)):
            program.computations[computation].append(_instruction(match, computation, frames))
    if not program.entry:
        raise HloParseError(
            "the text holds no ENTRY computation; give the text of a compiled module (compiled.as_text())"
        )
    return program


def _instruction(match: re.Match[str], computation: str, frames: dict[int, SourceLine]) -> HloInstruction:
    name = match.group(2)
    results, opcode, operands, attributes = _split_instruction(name, match.group(3))
    target, op_name, trips = (pattern.search(attributes) for pattern in (_TARGET, _OP_NAME, _TRIPS))
    names = [operands] if opcode == "parameter" else [] if opcode == "constant" else _operand_names(operands)
    is_integer = opcode == "constant" and re.fullmatch(r"-?\d+", operands)
    return HloInstruction(
        name=name,
        opcode=opcode,
        computation=computation,
        results=parse_arrays(results),
        operands=tuple(names),
        root=bool(match.group(1)),
        custom_call_target=target.group(1) if target else "",
        called_computations=tuple(_called(attributes)),
        op_name=op_name.group(1) if op_name else "",
        source=_source(attributes, frames),
        known_trip_count=int(trips.group(1)) if trips else None,
        constant=int(operands) if is_integer else None,
        attributes=attributes,
    )


def _split_instruction(name: str, line: str) -> tuple[str, str, str, str]:
    """Returns (results, opcode, operands, attributes) of the text after `NAME = `."""
    end = _closing(line, 0) + 1 if line.startswith("(") else line.index(" ")
    opcode, bracket, _ = line[end:].partition("(")
    if not bracket:
        raise HloParseError(f"cannot read the line of {name}: {line[:120]}")
    if opcode.strip() == "constant":  # a large constant is written over several lines, without a closing parenthesis
        return line[:end], "constant", line[end + len(opcode) + 1 :].partition(")")[0], ""
    start = end + len(opcode)
    stop = _closing(line, start)
    return line[:end], opcode.strip(), line[start + 1 : stop], line[stop + 1 :]


def _closing(text: str, start: int) -> int:
    """Returns the index of the parenthesis that closes the one at `start`. No string occurs before the attributes."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    raise HloParseError(f"a parenthesis is not closed: {text[start : start + 120]}")


def _operand_names(text: str) -> list[str]:
    """Returns the names in an operand list, with the sigil (`%a, f32[8]{0} %b`) or without (`a, b`)."""
    if "%" in text:
        return re.findall(r"%([\w.\-]+)", text)
    return [part.split()[-1] for part in re.sub(r"/\*.*?\*/", "", text).split(",") if part.strip()]


def _called(attributes: str) -> Iterable[str]:
    head = attributes.partition("backend_config=")[0]
    for single, several in _CALLS.findall(head):
        yield from re.findall(r"[\w.\-]+", single or several)


def parse_arrays(text: str) -> tuple[HloArray, ...]:
    """Returns the arrays of an HLO type, tuples flattened."""
    arrays = []
    for dtype, dims in _ARRAY.findall(re.sub(r"/\*.*?\*/", "", text)):
        if dtype not in BITS:
            raise HloParseError(
                f"unknown element type {dtype!r} in {text[:80]}; add its width to halfbyte.hlo.hlo_text.BITS"
            )
        arrays.append(HloArray(dtype, tuple(int(size.lstrip("<=")) for size in dims.split(",") if size)))
    return tuple(arrays)


def _source(attributes: str, frames: dict[int, SourceLine]) -> SourceLine:
    frame, file = _FRAME.search(attributes), _SOURCE.search(attributes)
    if frame and int(frame.group(1)) in frames:
        return frames[int(frame.group(1))]
    return SourceLine.of(file.group(1), int(file.group(2) or 0)) if file else UNKNOWN_SOURCE
