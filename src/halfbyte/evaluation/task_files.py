"""Task files: jsonl (also .xz, .gz, .zst), one example per line. The fields of the first line tell the kind.

    choice   {"query", "choices", "gold"}                          ARC, HellaSwag, PIQA, OpenBookQA, BoolQ
    schema   {"context_options", "continuation", "gold"}           WinoGrande
    word     {"context", "continuation"}                           LAMBADA
    pair     {"sentence_good", "sentence_bad"}                     BLiMP
    text     {"text"}, or plain text                               perplexity

An example becomes texts: contexts, and a continuation of each that is scored. A query that asks ("Question: ...") is
continued by a line "Answer: ", any other by a space. Tokenizers join a space to the word that follows it, so a context
ends before it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.data.text_files import InputFile, iter_chunks, json_lines, split_text

TEXT_FORMAT = "text"
FIELDS = {
    "choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "word": ("context", "continuation"),
    "pair": ("sentence_good", "sentence_bad"),
    TEXT_FORMAT: ("text",),
}
OPTIONS = ("choices", "context_options")
QUESTION, ANSWER = "Question:", "\nAnswer:"
GROUP_FIELDS = ("linguistics_term", "source")  # by which results are broken down as well

Record = Mapping[str, Any]


@dataclass(frozen=True)
class TaskFile:
    """A file and its kind, a key of FIELDS; nothing but the first record has been read."""

    name: str
    file: InputFile
    kind: str


class UnknownTaskFormatError(ValueError):
    """A readable file that is no task."""


def open_task(file: InputFile) -> TaskFile:
    """The file with the kind that its first record shows; ValueError if it is empty or shows none."""
    name = file.path.name.split(".")[0]
    if file.kind == "text":
        return TaskFile(name, file, TEXT_FORMAT)
    number, record = next(_lines(file), (0, None))
    if record is None:
        raise ValueError(f"{file.name}: the file is empty")
    kind = next((kind for kind, fields in FIELDS.items() if record.keys() >= set(fields)), None)
    if kind is None:
        known = "; ".join(f"{{{', '.join(fields)}}}" for fields in FIELDS.values())
        raise UnknownTaskFormatError(
            f"{file.name}, line {number}: fields {', '.join(record)} are no task; tasks have {known}"
        )
    return TaskFile(name, file, kind)


def iter_examples(task: TaskFile) -> Iterator[Record]:
    """Every record of the file; ValueError names the file and the line of one that is malformed."""
    if task.file.kind == "text":
        yield {"text": _plain_text(task.file)}
        return
    for number, record in _lines(task.file):
        if problem := _problem(record, FIELDS[task.kind]):
            raise ValueError(f"{task.file.name}, line {number}: {problem}")
        yield record


def subsample(items: Sequence[Record], limit: int) -> list[Record]:
    """`limit` examples, evenly spread over the file (files are often sorted by category); 0: all."""
    if not 0 < limit < len(items):
        return list(items)
    return [items[number * len(items) // limit] for number in range(limit)]


def group_of(record: Record) -> str:
    """Returns the category of an example, or ""."""
    return next((str(record[field]) for field in GROUP_FIELDS if record.get(field)), "")


def texts_of(kind: str, record: Record) -> list[tuple[str, str]]:
    """Returns the (context, continuation) pairs to score; of a pair of sentences the good one first."""
    if kind == "choice":
        context = prompt(record["query"])
        return [(context, f" {choice}") for choice in record["choices"]]
    if kind == "schema":
        return [(prompt(option), f" {record['continuation']}") for option in record["context_options"]]
    if kind == "word":
        context, word = record["context"], record["continuation"]
        return [(context, word) if word[0].isspace() else (prompt(context), f" {word}")]
    return [("", record["sentence_good"]), ("", record["sentence_bad"])]


def prompt(text: str) -> str:
    """Returns the context up to the space before what continues it."""
    asks = text.startswith(QUESTION) or f"\n{QUESTION}" in text
    return text.rstrip(" ") + ANSWER * asks


def _lines(file: InputFile) -> Iterator[tuple[int, dict[str, Any]]]:
    for chunk in iter_chunks(file):
        for number, record in json_lines(chunk):
            if not isinstance(record, dict):
                raise ValueError(f"{file.name}, line {number}: {type(record).__name__} instead of a JSON object")
            yield number, record


def _plain_text(file: InputFile) -> str:
    data = b"".join(chunk.data for chunk in iter_chunks(file))
    try:
        text = "".join(split_text(data))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(f"{file.name}, line {line}: not UTF-8 text ({error.reason})") from None
    if not text:
        raise ValueError(f"{file.name}: the file is empty")
    return text


def _problem(record: Record, fields: Sequence[str]) -> str:
    """Returns what is wrong with a record: its first field that is not of its type."""
    for field in fields:
        value = record.get(field)
        if field == "gold":
            last = len(next(record[name] for name in OPTIONS if name in fields)) - 1
            good, wanted = type(value) is int and 0 <= value <= last, f"the number of an option, 0 to {last}"
        elif field in OPTIONS:
            good = isinstance(value, list) and len(value) > 1 and all(map(_is_text, value))
            wanted = "a list of two or more strings that are not empty"
        else:
            good, wanted = _is_text(value), "a string of valid Unicode that is not empty"
        if not good:
            return f"{field!r} is {'missing' if value is None else repr(value)[:60]}; it must be {wanted}"
    return ""


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and not re.search("[\ud800-\udfff]", value)
