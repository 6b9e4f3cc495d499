"""Rows of tables as lines of JSON: Parquet, Arrow (what Hugging Face `datasets` saves), ArrayRecord (what Grain reads).

A row becomes the line that the same document has in a jsonl file, so everything behind it is the same too: where chunks
are cut, which documents are held out, which tokens come out. Memory is bounded by a page of Parquet, a record batch of
Arrow, or a record.
"""

import contextlib
import importlib
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from array_record.python import array_record_module

from halfbyte.io import read_json
from halfbyte.io.install_command import install_command

MAX_TEXT_BYTES = 64 << 20
"""Bytes of one row's text, as of a line of jsonl."""
BATCH = 1 << 20
MAX_BATCH_ROWS = 1024
SOURCE = "source"

TextBlock = tuple[bytes, int]


def table_lines(path: Path, *, name: str, column: str) -> Iterator[TextBlock]:
    """(lines of JSON with the fields `column` and `source`, position in the stored file) pairs. What is no such table,
    damaged or without the column is a ValueError that names the file."""
    return READERS[path.suffix.lower()](path, name, column)


def _parquet(path: Path, name: str, column: str) -> Iterator[TextBlock]:
    parquet = _pyarrow("pyarrow.parquet")
    with _arrow_errors_as_value_error(name):
        wanted = _columns(parquet.read_schema(path), name, column)
        # What a file stores once for many rows stays one text in memory too.
        with parquet.ParquetFile(path, page_checksum_verification=True, read_dictionary=wanted) as file:
            number, groups = 1, file.metadata.num_row_groups
            for group in range(groups):
                rows = _batch_rows(file.metadata.row_group(group), wanted)
                for batch in file.iter_batches(rows, row_groups=[group], columns=wanted):
                    for written in _batch_lines(batch, name, column, number):
                        yield written, path.stat().st_size * (group + 1) // groups
                    number += batch.num_rows


def _batch_rows(group: Any, wanted: list[str]) -> int:
    """Rows to read at once, about a MiB of text by what the file says of itself."""
    found = [group.column(i) for i in range(group.num_columns) if group.column(i).path_in_schema in wanted]
    size = sum(column.total_uncompressed_size for column in found)
    return max(1, min(MAX_BATCH_ROWS, BATCH * group.num_rows // max(1, size)))


def _arrow(path: Path, name: str, column: str) -> Iterator[TextBlock]:
    pyarrow = _pyarrow("pyarrow")
    with _arrow_errors_as_value_error(name), pyarrow.memory_map(str(path)) as stored:
        is_file = stored.read(6) == b"ARROW1"
        stored.seek(0)
        reader = pyarrow.ipc.open_file(stored) if is_file else pyarrow.ipc.open_stream(stored)
        wanted = _columns(reader.schema, name, column)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        number = 1
        for batch in batches:
            for written in _batch_lines(batch.select(wanted), name, column, number):
                yield written, min(stored.tell(), path.stat().st_size)
            number += batch.num_rows


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ValueError(f"Parquet and Arrow files need pyarrow: {install_command('parquet')}") from None


def _columns(schema: Any, name: str, column: str) -> list[str]:
    """The columns to read, in a table that has them as text; else a ValueError that says what it has."""
    types = _pyarrow("pyarrow.types")
    if schema.get_field_index(column) < 0:  # absent, or there twice
        raise ValueError(
            f"{name}: no column {column!r}, or not one; it has {', '.join(schema.names[:20]) or 'none'}: "
            "name the one that holds the text with --column"
        )
    wanted = [column, *([SOURCE] if SOURCE in schema.names and column != SOURCE else [])]
    for each in wanted:
        if schema.get_field_index(each) < 0:
            raise ValueError(f"{name}: several columns {each!r}; leave one of them")
        kind = schema.field(each).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
            raise ValueError(
                f"{name}: column {each!r} holds {str(kind)[:80]}, and a document's {each} is a string; "
                + ("name another with --column" if each == column else "rename it, or make it a string")
            )
    return wanted


def _batch_lines(batch: Any, name: str, column: str, number: int) -> Iterator[bytes]:
    """The lines of a batch, about a MiB at a time: rows may share one stored text, and every line has its own."""
    batch.validate(full=True)  # offsets that point outside, text that is no UTF-8
    texts = batch.column(column)
    sources = batch.column(SOURCE) if SOURCE in batch.schema.names and column != SOURCE else [None] * len(texts)
    held = bytearray()
    for row, (text, source) in enumerate(zip(texts, sources, strict=True), start=number):
        if (words := text.as_py()) is None:
            raise ValueError(f"{name}, row {row}: column {column!r} is null; a document without text is ''")
        held += _line(name, row, column, words, None if source is None else source.as_py())
        if len(held) >= BATCH:
            yield bytes(held)
            held.clear()
    yield bytes(held)


def _line(name: str, row: int, column: str, text: str, source: str | None) -> bytes:
    if len(text) > MAX_TEXT_BYTES:
        raise ValueError(_too_long(name, f"row {row} has {len(text) >> 20} Mi characters"))
    return json.dumps({column: text} if source is None else {column: text, SOURCE: source}).encode() + b"\n"


def _too_long(name: str, what: str) -> str:
    return (
        f"{name}: {what}, and a document at most {MAX_TEXT_BYTES >> 20} MiB of text; cut it, or make it a text file "
        "of its own"
    )


@contextlib.contextmanager
def _arrow_errors_as_value_error(name: str) -> Iterator[None]:
    """What pyarrow says of a damaged file, as a ValueError that names it. An error of the disk stays one."""
    pyarrow = _pyarrow("pyarrow")
    try:
        yield
    except (pyarrow.ArrowException, MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{name}: damaged or cut short ({str(error)[:200]}); fetch it again") from error


def _array_record(path: Path, name: str, column: str) -> Iterator[TextBlock]:
    try:
        reader = array_record_module.ArrayRecordReader(str(path))
        count, size, as_line = reader.num_records(), path.stat().st_size, None
        gathered, held = list[bytes](), 0
        for row in range(1, count + 1):
            record = reader.read()
            if len(record) > MAX_TEXT_BYTES:
                raise ValueError(_too_long(name, f"record {row} has {len(record) >> 20} MiB"))
            as_line = as_line or _detect_record_format(record)
            try:
                gathered.append(as_line(record, column))
            except (ValueError, KeyError, RecursionError) as error:
                raise ValueError(
                    f"{name}, record {row}: no {RECORD_FORMATS[as_line]} with one {column!r}, as its first record says "
                    f"they are ({str(error)[:100]}); repair the file, or name the field of the text with --column"
                ) from error
            held += len(gathered[-1])
            if held >= BATCH or row == count:
                yield b"".join(gathered), size * row // count
                gathered, held = [], 0
        reader.close()
    except (RuntimeError, IndexError) as error:
        if isinstance(error, RecursionError):
            raise
        raise ValueError(f"{name}: damaged or cut short ({str(error)[:200]}); fetch it again") from error


def _detect_record_format(first: bytes) -> Callable[[bytes, str], bytes]:
    """What the records of a file are, by its first."""
    for form in (_json_line, _example_line):
        with contextlib.suppress(ValueError, KeyError, RecursionError):
            form(first, "")
            return form
    return _text_line


def _json_line(record: bytes, column: str) -> bytes:
    found = json.loads(record)
    if not isinstance(found, dict) or (column and column not in found):
        raise KeyError(column)
    return json.dumps(found).encode() + b"\n"


def _example_line(record: bytes, column: str) -> bytes:
    """Of a `tf.train.Example`: features (1) of entries (1), each a name (1) and a feature (2), whose bytes (1) are a
    list (1)."""
    entries = [dict(_fields(entry)) for number, body in _fields(record) if number == 1 for _, entry in _fields(body)]
    features = {entry[1].decode(): entry.get(2, b"") for entry in entries}
    if not features:
        raise ValueError("no feature")
    wanted = {}
    for name in {column, SOURCE} & features.keys() if column else ():
        (wanted[name],) = (value.decode() for _, value in _fields(dict(_fields(features[name]))[1]))
    if column and column not in wanted:
        raise KeyError(column)
    return json.dumps(wanted).encode() + b"\n"


def _text_line(record: bytes, column: str) -> bytes:
    return json.dumps({column: record.decode()}).encode() + b"\n"


RECORD_FORMATS: dict[Callable[[bytes, str], bytes], str] = {
    _json_line: "JSON object",
    _example_line: "tf.train.Example",
    _text_line: "UTF-8 text",
}
READERS = {".parquet": _parquet, ".arrow": _arrow, ".array_record": _array_record, ".arrayrecord": _array_record}


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of the fields of a protocol-buffer message, all of them strings or messages."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        size, at = _varint(data, at)
        if tag & 7 != 2 or at + size > len(data):
            raise ValueError("not a message of strings and messages")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
    raise ValueError("a number without an end")


def find_saved_datasets(found: Collection[Path]) -> dict[Path, list[Path]]:
    """Folder -> its files, of each Hugging Face data set (`save_to_disk`) among the files of a directory: those that it
    lists, and not what `map` has left beside them. ValueError for a set of splits: one of them must be named, so that
    no test split is trained on."""
    for path in (path for path in found if path.name == "dataset_dict.json"):
        splits = sorted(p.parent.name for p in path.parent.glob("*/state.json"))
        raise ValueError(
            f"{path.parent}: holds the splits {', '.join(splits)}; name those to train on, such as "
            f"{path.parent / (splits or ['train'])[-1]}, and others with --validation"
        )
    states = (p for p in found if p.name == "state.json" and p.with_name("dataset_info.json").is_file())
    return {state.parent: _listed(state) for state in states}


def _listed(state: Path) -> list[Path]:
    try:
        found = [state.parent / Path(entry["filename"]).name for entry in read_json(state)["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{state}: no list of data files ({error}); save the data set again") from None
    for path in found:
        if path.suffix.lower() not in READERS:
            raise ValueError(f"{state}: lists {path.name!r}, which is no table; save the data set again")
        if not path.is_file():
            raise ValueError(f"{path}: missing, though {state.name} lists it; copy the folder again")
    return found
