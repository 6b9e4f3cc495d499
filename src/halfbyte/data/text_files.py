"""Input files as a stream of chunks: found in a fixed order, decompressed, cut where no line or character breaks.

A chunk is the unit of parallel work. Where chunks are cut depends on the bytes of the file alone, never on the number
of workers, so everything made from them is the same on any machine.
"""

import dataclasses
import glob
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from halfbyte.data import compression, tables
from halfbyte.data.compression import decompressed
from halfbyte.inputs import home_expanded, regular

JSONL = (".jsonl", ".ndjson")
TEXT = (".txt", ".text", ".md")
CHUNK = 1 << 20
PIECE = 4 << 20
MOST_LINE = 64 << 20
"""Bytes of one line of jsonl, which is one document. A longer text belongs into a file of its own."""
MOST_SOURCE = 200
"""Characters of a source's name."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
OURS = re.compile(r"((train|validation)-\d{3,}-\d{5,}|(?P<part>(summary|tokens)-\d{6,}))\.array_record")


@dataclasses.dataclass(frozen=True)
class InputFile:
    """One file to read. `name` is what error messages and the manifest call it: no machine's folders in it."""

    path: Path
    name: str
    size: int
    unchecked: bool = False  # compressed without a checksum is accepted
    column: str = "text"  # the field of a record that holds its text

    @property
    def kind(self) -> str:
        kind = kind_of(self.path)
        assert kind is not None
        return kind


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Whole lines of a jsonl file (or of a table, as such), or a piece of a plain text file; `start` is its first line
    or its first byte."""

    name: str
    kind: str
    data: bytes
    start: int
    first: bool
    last: bool
    position: int  # bytes of the file read so far, as stored (for progress)
    key: int = 0  # of the whole text file, once known
    column: str = "text"


def kind_of(path: Path) -> str | None:
    """'jsonl' (a table is read as one), 'text', or None if the name says neither."""
    if path.suffix.lower() in tables.KINDS:
        return "jsonl"
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in compression.SUFFIXES:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    return "jsonl" if suffix in JSONL else "text" if suffix in TEXT else None


def find_files(arguments: Sequence[str | Path], *, unchecked: bool = False, column: str = "text") -> list[InputFile]:
    """The files that paths, directories and globs name: arguments in the given order, names sorted within each."""
    found: dict[Path, InputFile] = {}
    for argument in arguments:
        for path, name in _expand(str(argument)):
            found.setdefault(path.resolve(), InputFile(path, name, path.stat().st_size, unchecked, column))
    return list(found.values())


def _expand(argument: str) -> list[tuple[Path, str]]:
    path = home_expanded(argument)
    accepted = f"{', '.join(JSONL + TEXT)} (also with .xz, .gz or .zst), {', '.join(tables.KINDS)}"
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.is_file() and not _written_by_us(p)]
        saved = tables.saved_in(found)
        inside = sorted({p for p in found if kind_of(p) and p.parent not in saved}.union(*saved.values()))
        if not inside:
            raise ValueError(f"{argument}: no file in this directory ends in {accepted}")
        return [(p, p.relative_to(path).as_posix()) for p in inside]
    if path.is_file():
        if not kind_of(path):
            raise ValueError(f"{argument}: cannot tell what it holds; name it {accepted}")
        return [(path, path.name)]
    matches = [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
    matches = [p for p in matches if p.is_file() and kind_of(p)]
    if not matches:
        raise ValueError(f"{argument}: no such file or directory, and as a pattern it matches nothing readable")
    return [(p, p.name) for p in matches]


def _written_by_us(path: Path) -> bool:
    """Whether a preparation has left it in a folder of texts: shards of a data set, or what its parts keep."""
    found = OURS.fullmatch(path.name)
    return found is not None and path.with_name("request.json" if found["part"] else "manifest.json").is_file()


def sha256_of(path: Path) -> str:
    """Returns the sha256 of a regular file of any size, in hexadecimal."""
    with open(path, "rb", opener=regular) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def chunks(file: InputFile) -> Iterator[Chunk]:
    """The file as chunks: about 1 MiB of whole lines (jsonl), or at most 4 MiB cut after a line or a space (text). A
    blank text is an empty one."""
    if file.kind == "jsonl":
        return _line_chunks(file)
    return iter([Chunk(file.name, "text", b"", 0, True, True, file.size)]) if is_blank(file) else _text_chunks(file)


def is_blank(file: InputFile) -> bool:
    """Whether a text file holds white space alone, or nothing; it is read up to the first block that has more."""
    return file.kind == "text" and not any(block.strip() for block, _ in _blocks(file))


def _line_chunks(file: InputFile) -> Iterator[Chunk]:
    pending = b""
    line, position, first = 1, 0, True
    for block, position in _blocks(file):
        pending += block
        if len(pending) < CHUNK or (cut := pending.rfind(b"\n") + 1) == 0:
            if len(pending) > MOST_LINE:
                raise ValueError(
                    f"{file.name}, line {line}: longer than {MOST_LINE >> 20} MiB; a line is one document: "
                    "cut it, or make it a text file of its own"
                )
            continue
        data, pending = pending[:cut], pending[cut:]
        yield Chunk(file.name, "jsonl", data, line, first, False, position, column=file.column)
        line, first = line + data.count(b"\n"), False
    yield Chunk(file.name, "jsonl", pending, line, first, True, position, column=file.column)


def _text_chunks(file: InputFile) -> Iterator[Chunk]:
    pending = b""
    start, position, first = 0, 0, True
    for block, position in _blocks(file):
        pending += block
        while len(pending) > PIECE:
            cut = cut_before(pending, PIECE)
            data, pending = pending[:cut], pending[cut:]
            yield Chunk(file.name, "text", data, start, first, False, position)
            start, first = start + cut, False
    yield Chunk(file.name, "text", pending, start, first, True, position)


def cut_before(data: bytes, limit: int) -> int:
    """Where to cut UTF-8 `data`: after the last newline in the eighth before `limit`, else before the last space there,
    else at `limit`, or up to three bytes later where a character ends."""
    near = max(1, limit - limit // 8)
    if (newline := data.rfind(b"\n", near, limit)) >= 0:
        return newline + 1
    if (space := data.rfind(b" ", near, limit)) >= 0:
        return space
    cut = limit
    while cut < len(data) and data[cut] & 0xC0 == 0x80:
        cut += 1
    return cut


def pieces_of(data: bytes) -> list[str]:
    """A document's text, a long one in pieces of at most 4 MiB, which bounds the tokenizer's memory."""
    pieces = []
    while len(data) > PIECE:
        cut = cut_before(data, PIECE)
        pieces.append(data[:cut].decode())
        data = data[cut:]
    return [*pieces, data.decode()]


def _blocks(file: InputFile) -> Iterator[tuple[bytes, int]]:
    """(decompressed bytes, position in the stored file) pairs."""
    if file.path.suffix.lower() in tables.KINDS:
        yield from tables.lines(file.path, name=file.name, column=file.column)
        return
    head = True
    for block, position in decompressed(file.path, name=file.name, unchecked=file.unchecked):
        yield (block.removeprefix(BYTE_ORDER_MARK) if head else block), position
        head = head and not block


def json_lines(chunk: Chunk) -> Iterator[tuple[int, Any]]:
    """(number, value) of each line of a jsonl chunk; blank lines are passed over."""
    for number, line in enumerate(chunk.data.split(b"\n"), start=chunk.start):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{chunk.name}, line {number}: not JSON ({error}); every line must be one JSON object"
            ) from error


def json_records(chunk: Chunk) -> Iterator[tuple[bytes, str | None]]:
    """(UTF-8 text, source or None) of each record of a jsonl chunk."""
    for number, record in json_lines(chunk):
        if not isinstance(record, dict) or not isinstance(record.get(chunk.column), str):
            raise ValueError(f"{chunk.name}, line {number}: no {chunk.column!r} field with a string in it")
        source = record.get("source")
        if source is not None and (not isinstance(source, str) or len(source) > MOST_SOURCE):
            raise ValueError(
                f"{chunk.name}, line {number}: 'source' is {repr(source)[:80]}; "
                f"it must be a string of at most {MOST_SOURCE} characters when present"
            )
        try:
            (source or "").encode()
            yield record[chunk.column].encode(), source
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{chunk.name}, line {number}: {chunk.column!r} or 'source' is not valid Unicode ({error.reason}); "
                "repair it"
            ) from error
