"""Task files: jsonl (also .xz, .gz, .zst), one example per line. The fields of the first line determine the kind.

    choice   {"query", "choices", "gold"}                          ARC, HellaSwag, PIQA, OpenBookQA, BoolQ
    schema   {"context_options", "continuation", "gold"}           WinoGrande
    word     {"context", "continuation"}                           LAMBADA
    pair     {"sentence_good", "sentence_bad"}                     BLiMP
    text     {"text"}, or plain text                               perplexity

An example becomes one or more pairs of a context and a continuation to score. A line "Answer: " is added to a query
with "Question: ...", a space to any other. Tokenizers join a space to the word that follows it, so a context ends
before the space.
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
GROUP_FIELDS = ("linguistics_term", "source")  # results are also reported per value of these fields

Record = Mapping[str, Any]


@dataclass(frozen=True)
class TaskFile:
    """A task file and its kind, a key of FIELDS. Only the first record has been read."""

    name: str
    file: InputFile
    kind: str


class UnknownTaskFormatError(ValueError):
    """A readable file whose fields match no task."""


def open_task(file: InputFile) -> TaskFile:
    """Returns the file with the kind of its first record. Raises ValueError if it is empty or matches no kind."""
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
    """Yield every record of the file. Raises ValueError with file and line of a malformed one."""
    if task.file.kind == "text":
        yield {"text": _plain_text(task.file)}
        return
    for number, record in _lines(task.file):
        if problem := _problem(record, FIELDS[task.kind]):
            raise ValueError(f"{task.file.name}, line {number}: {problem}")
        yield record


def subsample(items: Sequence[Record], limit: int) -> list[Record]:
    """Returns `limit` examples, evenly distributed over the file because files are often sorted by category; 0: all."""
    if not 0 < limit < len(items):
        return list(items)
    return [items[number * len(items) // limit] for number in range(limit)]


def group_of(record: Record) -> str:
    """Returns the category of an example, or ""."""
    return next((str(record[field]) for field in GROUP_FIELDS if record.get(field)), "")


def texts_of(kind: str, record: Record) -> list[tuple[str, str]]:
    """Returns the (context, continuation) pairs to score; for a pair of sentences the good one first."""
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
    """Returns the context, without the space that precedes the continuation."""
    has_question = text.startswith(QUESTION) or f"\n{QUESTION}" in text
    return text.rstrip(" ") + ANSWER * has_question


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
    """Returns the first field of a record that has the wrong type, as text; empty for a valid record."""
    for field in fields:
        value = record.get(field)
        if field == "gold":
            last = len(next(record[name] for name in OPTIONS if name in fields)) - 1
            is_valid, requirement = type(value) is int and 0 <= value <= last, f"the number of an option, 0 to {last}"
        elif field in OPTIONS:
            is_valid = isinstance(value, list) and len(value) > 1 and all(map(_is_text, value))
            requirement = "a list of two or more strings that are not empty"
        else:
            is_valid, requirement = _is_text(value), "a string of valid Unicode that is not empty"
        if not is_valid:
            return f"{field!r} is {'missing' if value is None else repr(value)[:60]}; it must be {requirement}"
    return ""


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and not re.search("[\ud800-\udfff]", value)
