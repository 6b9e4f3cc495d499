"""Which line of ours an instruction came from: the tables of stack frames at the head of a module's text."""

import re
from dataclasses import dataclass

PACKAGE = "halfbyte"
TITLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
DEEPEST = 200  # frames: a stack that is longer is a circle


@dataclass(frozen=True)
class Source:
    """A line of source. Files of our package are named from inside it (`ops/mlp.py`), others in full."""

    file: str = ""
    line: int = 0
    function: str = ""

    @classmethod
    def of(cls, path: str, line: int, function: str = "") -> "Source":
        """The source at `path`."""
        return cls(path.rpartition(f"/{PACKAGE}/")[2], line, function)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.function}" if self.file else ""


NOWHERE = Source()


def read_frames(text: str) -> dict[int, Source]:
    """Frame number -> the innermost line of our package on its stack.

    Only the innermost: callers further out would make everything `attention` or `quantize`.
    """
    tables = _tables(text)
    frames = tables.get("StackFrames", {})
    sources = {number: _location(entry, tables) for number, entry in tables.get("FileLocations", {}).items()}
    return {number: found for number in frames if (found := _ours(number, frames, sources)) is not None}


def _ours(number: int, frames: dict[int, str], sources: dict[int, tuple[str, Source]]) -> Source | None:
    for _ in range(DEEPEST):
        if number not in frames:
            return None
        path, source = sources.get(_field(frames[number], "file_location_id"), ("", NOWHERE))
        if f"/{PACKAGE}/" in path:
            return source
        number = _field(frames[number], "parent_frame_id") - 1  # written one too high; 0 is no parent
    return None


def _location(entry: str, tables: dict[str, dict[int, str]]) -> tuple[str, Source]:
    path = tables["FileNames"].get(_field(entry, "file_name_id"), "").strip('"')
    function = tables["FunctionNames"].get(_field(entry, "function_name_id"), "").strip('"')
    return path, Source.of(path, _field(entry, "line"), function)


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
