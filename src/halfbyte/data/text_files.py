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

from halfbyte.data import compression, tabular_files
from halfbyte.data.compression import decompress_blocks
from halfbyte.io import expand_user, open_regular_file

JSONL = (".jsonl", ".ndjson")
TEXT_SUFFIXES = (".txt", ".text", ".md")
CHUNK_BYTES = 1 << 20
MAX_PIECE_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 20
"""Bytes of one line of jsonl, which is one document. A longer text belongs into a file of its own."""
MAX_SOURCE_CHARS = 200
"""Characters of a source's name."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
OUTPUT_FILE_PATTERN = re.compile(r"((train|validation)-\d{3,}-\d{5,}|(?P<part>(summary|tokens)-\d{6,}))\.array_record")


@dataclasses.dataclass(frozen=True)
class InputFile:
    """One file to read. `name` is what error messages and the manifest call it: no machine's folders in it."""

    path: Path
    name: str
    size: int
    unchecked: bool = False  # compressed without a checksum is accepted
    column: str = "text"  # the field of a record that holds its text
    text: tuple[str, ...] = ()  # further endings of plain text

    @property
    def kind(self) -> str:
        kind = file_kind(self.path, self.text)
        assert kind is not None
        return kind


@dataclasses.dataclass(frozen=True)
class InputChunk:
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


def file_kind(path: Path, text: Sequence[str] = ()) -> str | None:
    """'jsonl' (a table is read as one), 'text', or None if the name says neither; `text`: further endings of text."""
    if path.suffix.lower() in tabular_files.READERS:
        return "jsonl"
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in compression.SUFFIXES:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    return "jsonl" if suffix in JSONL else "text" if suffix in (*TEXT_SUFFIXES, *text) else None


def find_files(
    arguments: Sequence[str | Path], *, unchecked: bool = False, column: str = "text", text: Sequence[str] = ()
) -> list[InputFile]:
    """The files that paths, directories and globs name: arguments in the given order, names sorted within each. `text`:
    endings that are read as plain text, too."""
    endings = tuple(f".{ending.lstrip('.').lower()}" for ending in text)
    if bad := [ending for ending in endings if not re.fullmatch(r"\.[\w+-]+", ending)]:
        raise ValueError(f"--text: {bad[0]!r} is not the ending of a file name; give endings such as .py or .c")
    found: dict[Path, InputFile] = {}
    for argument in arguments:
        for path, name in _expand(str(argument), endings):
            found.setdefault(path.resolve(), InputFile(path, name, path.stat().st_size, unchecked, column, endings))
    return list(found.values())


def _expand(argument: str, text: tuple[str, ...]) -> list[tuple[Path, str]]:
    if not argument:
        raise ValueError("an input file has an empty name; name files, directories or patterns ('.' is this directory)")
    path = expand_user(argument)
    known = ", ".join((*JSONL, *TEXT_SUFFIXES, *text))
    accepted = f"{known} (also with .xz, .gz or .zst), {', '.join(tabular_files.READERS)}"
    other = "--text ENDING reads other files as plain text"
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.is_file() and not _written_by_us(p)]
        saved = tabular_files.find_saved_datasets(found)
        inside = sorted({p for p in found if file_kind(p, text) and p.parent not in saved}.union(*saved.values()))
        if not inside:
            raise ValueError(f"{argument}: no file in this directory ends in {accepted}; {other}")
        return [(p, p.relative_to(path).as_posix()) for p in inside]
    if path.is_file():
        if not file_kind(path, text):
            example = f"--text {path.suffix}" if path.suffix else "rename it to end in .txt"
            raise ValueError(
                f"{argument}: its name does not tell what it holds; read it as plain text ({example}), or name it "
                f"{accepted}"
            )
        return [(path, path.name)]
    matches = [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
    matches = [p for p in matches if p.is_file() and file_kind(p, text)]
    if not matches:
        raise ValueError(
            f"{argument}: no such file or directory, and as a pattern it matches no file that ends in {accepted}; "
            f"{other}"
        )
    return [(p, p.name) for p in matches]


def _written_by_us(path: Path) -> bool:
    """Whether a preparation has left it in a folder of texts: shards of a data set, or what its parts keep."""
    found = OUTPUT_FILE_PATTERN.fullmatch(path.name)
    return found is not None and path.with_name("request.json" if found["part"] else "manifest.json").is_file()


def sha256_of(path: Path) -> str:
    """Returns the sha256 of a regular file of any size, in hexadecimal."""
    with open(path, "rb", opener=open_regular_file) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def iter_chunks(file: InputFile) -> Iterator[InputChunk]:
    """The file as chunks: about 1 MiB of whole lines (jsonl), or at most 4 MiB cut after a line or a space (text). A
    blank text is an empty one."""
    if file.kind == "jsonl":
        return _line_chunks(file)
    return (
        iter([InputChunk(file.name, "text", b"", 0, True, True, file.size)]) if is_blank(file) else _text_chunks(file)
    )


def is_blank(file: InputFile) -> bool:
    """Whether a text file holds white space alone, or nothing; it is read up to the first block that has more."""
    return file.kind == "text" and not any(block.strip() for block, _ in _blocks(file))


def _line_chunks(file: InputFile) -> Iterator[InputChunk]:
    pending = b""
    line, position, first = 1, 0, True
    for block, position in _blocks(file):
        pending += block
        if len(pending) < CHUNK_BYTES or (cut := pending.rfind(b"\n") + 1) == 0:
            if len(pending) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{file.name}, line {line}: longer than {MAX_LINE_BYTES >> 20} MiB; a line is one document: "
                    "cut it, or make it a text file of its own"
                )
            continue
        data, pending = pending[:cut], pending[cut:]
        yield InputChunk(file.name, "jsonl", data, line, first, False, position, column=file.column)
        line, first = line + data.count(b"\n"), False
    yield InputChunk(file.name, "jsonl", pending, line, first, True, position, column=file.column)


def _text_chunks(file: InputFile) -> Iterator[InputChunk]:
    pending = b""
    start, position, first = 0, 0, True
    for block, position in _blocks(file):
        pending += block
        while len(pending) > MAX_PIECE_BYTES:
            cut = find_cut(pending, MAX_PIECE_BYTES)
            data, pending = pending[:cut], pending[cut:]
            yield InputChunk(file.name, "text", data, start, first, False, position)
            start, first = start + cut, False
    yield InputChunk(file.name, "text", pending, start, first, True, position)


def find_cut(data: bytes, limit: int) -> int:
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


def split_text(data: bytes) -> list[str]:
    """A document's text, a long one in pieces of at most 4 MiB, which bounds the tokenizer's memory."""
    pieces = []
    while len(data) > MAX_PIECE_BYTES:
        cut = find_cut(data, MAX_PIECE_BYTES)
        pieces.append(data[:cut].decode())
        data = data[cut:]
    return [*pieces, data.decode()]


def _blocks(file: InputFile) -> Iterator[tuple[bytes, int]]:
    """(decompressed bytes, position in the stored file) pairs."""
    if file.path.suffix.lower() in tabular_files.READERS:
        yield from tabular_files.table_lines(file.path, name=file.name, column=file.column)
        return
    head = True
    for block, position in decompress_blocks(file.path, name=file.name, unchecked=file.unchecked):
        yield (block.removeprefix(BYTE_ORDER_MARK) if head else block), position
        head = head and not block


def json_lines(chunk: InputChunk) -> Iterator[tuple[int, Any]]:
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


def json_records(chunk: InputChunk) -> Iterator[tuple[bytes, str | None]]:
    """(UTF-8 text, source or None) of each record of a jsonl chunk."""
    for number, record in json_lines(chunk):
        if not isinstance(record, dict) or not isinstance(record.get(chunk.column), str):
            raise ValueError(f"{chunk.name}, line {number}: no {chunk.column!r} field with a string in it")
        source = record.get("source")
        if source is not None and (not isinstance(source, str) or len(source) > MAX_SOURCE_CHARS):
            raise ValueError(
                f"{chunk.name}, line {number}: 'source' is {repr(source)[:80]}; "
                f"it must be a string of at most {MAX_SOURCE_CHARS} characters when present"
            )
        try:
            (source or "").encode()
            yield record[chunk.column].encode(), source
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{chunk.name}, line {number}: {chunk.column!r} or 'source' is not valid Unicode ({error.reason}); "
                "repair it"
            ) from error
