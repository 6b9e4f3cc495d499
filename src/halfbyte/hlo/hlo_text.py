"""Parse the text of a compiled HLO module into instructions, in execution order, each with its source line.

A compiled module's text is scheduled: within a computation, instructions run in the order in which they are written.
Each line is `NAME = RESULTS OPCODE(OPERANDS), ATTRIBUTES`. Parentheses and braces are counted to find the end of a
part, because attributes hold JSON and whole kernels. Source lines are read from the tables of stack frames at the head
of the text, or from `source_file` in an instruction's metadata.
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
DEEPEST = 200  # frames: a stack that is longer is a circle
BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128} | {
    name: int(re.findall(r"\d+", name)[0])
    for name in "s1 u1 s2 u2 s4 u4 s8 u8 s16 u16 s32 u32 s64 u64 f16 f32 f64 f4e2m1fn f8e4m3 f8e4m3fn f8e5m2 f8e8m0fnu "
    "f8e4m3b11fnuz f8e4m3fnuz f8e5m2fnuz f8e3m4".split()
}
FUSIONS = ("fusion", "fusion-start")  # one that is waited for, and one beside which others run
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
    """A line of source. Files of our package are named from inside it (`ops/mlp.py`), others in full."""

    file: str = ""
    line: int = 0
    function: str = ""

    @classmethod
    def of(cls, path: str, line: int, function: str = "") -> "SourceLine":
        """The source at `path`."""
        return cls(path.rpartition(f"/{PACKAGE}/")[2], line, function)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.function}" if self.file else ""


UNKNOWN_SOURCE = SourceLine()


class HloParseError(ValueError):
    """The program has an instruction that cannot be interpreted; any figure would be wrong."""


@dataclass(frozen=True)
class HloArray:
    """One array of a program: its element type, as HLO writes it, and its dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes in memory; elements of less than a byte are packed."""
        return -(-self.elements * BITS[self.dtype] // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class HloInstruction:
    """One line of a program. `operands` are names in the same computation; `results` are flat, tuples opened."""

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
    """Of a loop, if XLA knows it."""
    constant: int | None = None
    """The value of a constant that is one whole number."""
    attributes: str = field(default="", repr=False, compare=False)

    @property
    def origin(self) -> str:
        """The operation's name and the line of ours that it came from."""
        return f"{self.op_name} {self.source}".strip()

    @cached_property
    def backend_config(self) -> dict[str, Any]:
        """XLA's own settings of the instruction; empty where there are none or they are a kernel's."""
        at = self.attributes.find("backend_config=")
        if at < 0 or not self.attributes.startswith('{"', at + len("backend_config=")):
            return {}
        found: dict[str, Any] = json.JSONDecoder().raw_decode(self.attributes[at + len("backend_config=") :])[0]
        return found

    def called_computation(self, attribute: str) -> str:
        """The computation that `attribute` (body, condition, ...) names."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        if found is None:
            raise HloParseError(f"{self.name} ({self.opcode}) has no {attribute}")
        return found.group(1)


@dataclass
class HloModule:
    """A compiled module, by its name: computations by name, each its instructions in the order in which they run."""

    computations: dict[str, list[HloInstruction]] = field(default_factory=dict)
    entry: str = ""
    scheduled: bool = False
    name: str = ""

    @cached_property
    def instructions(self) -> dict[str, HloInstruction]:
        """Every instruction by its name."""
        return {found.name: found for body in self.computations.values() for found in body}

    @cached_property
    def _local(self) -> dict[str, dict[str, HloInstruction]]:
        return {name: {found.name: found for found in body} for name, body in self.computations.items()}

    def operand(self, of: HloInstruction, index: int) -> HloInstruction:
        """Returns the instruction that computes operand `index` of `of`."""
        try:
            return self._local[of.computation][of.operands[index]]
        except (KeyError, IndexError):
            raise HloParseError(f"{of.name} ({of.opcode}) has no operand {index} in {of.computation}") from None

    def operand_arrays(self, of: HloInstruction) -> list[HloArray]:
        """All operands of `of`, tuples opened."""
        return [array for at in range(len(of.operands)) for array in self.operand(of, at).results]

    def nested_instructions(self, of: HloInstruction) -> Iterator[HloInstruction]:
        """Every instruction of the computations that `of` calls, and of those that they call."""
        for computation in of.called_computations:
            for found in self.computations.get(computation, ()):
                yield found
                yield from self.nested_instructions(found)


def parse_stack_frames(text: str) -> dict[int, SourceLine]:
    """Frame number -> the innermost line of our package on its stack.

    Only the innermost: callers further out would make everything `attention` or `quantize`.
    """
    tables = _tables(text)
    frames = tables.get("StackFrames", {})
    sources = {number: _location(entry, tables) for number, entry in tables.get("FileLocations", {}).items()}
    return {
        number: found for number in frames if (found := _innermost_package_frame(number, frames, sources)) is not None
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
        number = _field(frames[number], "parent_frame_id") - 1  # written one too high; 0 is no parent
    return None


def _location(entry: str, tables: dict[str, dict[int, str]]) -> tuple[str, SourceLine]:
    path = tables["FileNames"].get(_field(entry, "file_name_id"), "").strip('"')
    function = tables["FunctionNames"].get(_field(entry, "function_name_id"), "").strip('"')
    return path, SourceLine.of(path, _field(entry, "line"), function)


def _tables(text: str) -> dict[str, dict[int, str]]:
    """The four tables, each number -> entry; they end where the first computation begins."""
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
    found = re.search(rf"\b{key}=(\d+)", entry)
    return int(found.group(1)) if found else 0


def parse_hlo(text: str) -> HloModule:
    """Parses the text of an HLO module. Raises HloParseError for a line or type that it cannot read."""
    module = _MODULE.match(text)
    program = HloModule(
        scheduled="is_scheduled=true" in text[: text.find("\n")], name=module.group(1) if module else ""
    )
    frames, computation = parse_stack_frames(text), ""
    for line in text.splitlines():
        if not line.startswith(" ") and (head := _HEAD.match(line)):
            computation = head.group(2)
            program.entry = computation if head.group(1) else program.entry
            program.computations[computation] = []
        elif line.startswith("}"):
            computation = ""
        elif computation and (found := _LINE.match(line)):
            program.computations[computation].append(_instruction(found, computation, frames))
    if not program.entry:
        raise HloParseError(
            "the text holds no ENTRY computation; give the text of a compiled module (compiled.as_text())"
        )
    return program


def _instruction(found: re.Match[str], computation: str, frames: dict[int, SourceLine]) -> HloInstruction:
    name = found.group(2)
    results, opcode, operands, attributes = _split_instruction(name, found.group(3))
    target, op_name, trips = (pattern.search(attributes) for pattern in (_TARGET, _OP_NAME, _TRIPS))
    names = [operands] if opcode == "parameter" else [] if opcode == "constant" else _operand_names(operands)
    whole = opcode == "constant" and re.fullmatch(r"-?\d+", operands)
    return HloInstruction(
        name=name,
        opcode=opcode,
        computation=computation,
        results=parse_arrays(results),
        operands=tuple(names),
        root=bool(found.group(1)),
        custom_call_target=target.group(1) if target else "",
        called_computations=tuple(_called(attributes)),
        op_name=op_name.group(1) if op_name else "",
        source=_source(attributes, frames),
        known_trip_count=int(trips.group(1)) if trips else None,
        constant=int(operands) if whole else None,
        attributes=attributes,
    )


def _split_instruction(name: str, line: str) -> tuple[str, str, str, str]:
    """(results, opcode, operands, attributes) of what stands behind `NAME = `."""
    end = _closing(line, 0) + 1 if line.startswith("(") else line.index(" ")
    opcode, bracket, _ = line[end:].partition("(")
    if not bracket:
        raise HloParseError(f"cannot read the line of {name}: {line[:120]}")
    if opcode.strip() == "constant":  # a large one is written over several lines
        return line[:end], "constant", line[end + len(opcode) + 1 :].partition(")")[0], ""
    start = end + len(opcode)
    stop = _closing(line, start)
    return line[:end], opcode.strip(), line[start + 1 : stop], line[stop + 1 :]


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes. Strings do not occur before attributes."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    raise HloParseError(f"a parenthesis is not closed: {text[start : start + 120]}")


def _operand_names(text: str) -> list[str]:
    """Names of operands: `%a, f32[8]{0} %b` and, without the sigil, `a, b`."""
    if "%" in text:
        return re.findall(r"%([\w.\-]+)", text)
    return [part.split()[-1] for part in re.sub(r"/\*.*?\*/", "", text).split(",") if part.strip()]


def _called(attributes: str) -> Iterable[str]:
    head = attributes.partition("backend_config=")[0]
    for single, several in _CALLS.findall(head):
        yield from re.findall(r"[\w.\-]+", single or several)


def parse_arrays(text: str) -> tuple[HloArray, ...]:
    """The arrays of a type, tuples opened."""
    found = []
    for dtype, dims in _ARRAY.findall(re.sub(r"/\*.*?\*/", "", text)):
        if dtype not in BITS:
            raise HloParseError(
                f"unknown element type {dtype!r} in {text[:80]}; add its width to halfbyte.hlo.hlo_text.BITS"
            )
        found.append(HloArray(dtype, tuple(int(size.lstrip("<=")) for size in dims.split(",") if size)))
    return tuple(found)


def _source(attributes: str, frames: dict[int, SourceLine]) -> SourceLine:
    frame, file = _FRAME.search(attributes), _SOURCE.search(attributes)
    if frame and int(frame.group(1)) in frames:
        return frames[int(frame.group(1))]
    return SourceLine.of(file.group(1), int(file.group(2) or 0)) if file else UNKNOWN_SOURCE
