"""Task files: jsonl (also .xz, .gz, .zst), one example a line. What a file holds is told by the fields of its lines.

    choice   {"query", "choices", "gold"}                          ARC, HellaSwag, PIQA, OpenBookQA, BoolQ
    schema   {"context_options", "continuation", "gold"}           WinoGrande
    word     {"context", "continuation"}                           LAMBADA
    pair     {"sentence_good", "sentence_bad"}                     BLiMP
    text     {"text"}, or plain text                               perplexity

An example becomes texts: a context and a continuation that is scored given it. A query that asks ("Question: ...") is
continued by a line "Answer: ", any other by a space; a field `delimiter` says otherwise.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.data.files import InputFile, chunks, json_lines, pieces_of

QUESTION, ANSWER = "Question:", "\nAnswer: "
GROUP_FIELDS = ("linguistics_term", "source")  # by which results are broken down as well


@dataclass(frozen=True)
class Example:
    """Texts to score, and which of them is right. `lengths` (characters) normalise; `group` is a category or ""."""

    texts: tuple[tuple[str, str], ...]  # (context, continuation)
    gold: int
    lengths: tuple[int, ...]
    group: str = ""


@dataclass(frozen=True)
class Format:
    """A kind of task: the fields that tell it, and how a record becomes an Example."""

    kind: str
    fields: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Example]


@dataclass(frozen=True)
class TaskFile:
    """A file and its format; nothing but the first record has been read."""

    name: str
    file: InputFile
    format: Format


class UnknownFormat(ValueError):
    """A readable file that is no task."""


class BadRecord(ValueError):
    """What is wrong with one record, without its place."""


def open_task(file: InputFile) -> TaskFile:
    """The file with the format that its first record shows; ValueError if it is empty or shows none."""
    name = file.path.name.split(".")[0]
    if file.kind == "text":
        return TaskFile(name, file, TEXT)
    number, record = next(_lines(file), (0, None))
    if record is None:
        raise ValueError(f"{file.name}: the file is empty")
    for candidate in FORMATS:
        if all(field in record for field in candidate.fields):
            return TaskFile(name, file, candidate)
    known = "; ".join(f"{{{', '.join(candidate.fields)}}}" for candidate in FORMATS)
    raise UnknownFormat(f"{file.name}, line {number}: fields {', '.join(record)} are no task; tasks have {known}")


def examples(task: TaskFile) -> Iterator[Example]:
    """Every example of the file; ValueError names the file and the line of one that is malformed."""
    if task.file.kind == "text":
        yield from _plain_text(task.file)
        return
    for number, record in _lines(task.file):
        try:
            yield task.format.read(record)
        except BadRecord as problem:
            raise ValueError(f"{task.file.name}, line {number}: {problem}") from None


def chosen(items: Sequence[Example], limit: int) -> list[Example]:
    """`limit` examples, evenly spread over the file (files are often sorted by category); 0: all."""
    if not 0 < limit < len(items):
        return list(items)
    return [items[number * len(items) // limit] for number in range(limit)]


def _lines(file: InputFile) -> Iterator[tuple[int, dict[str, Any]]]:
    for chunk in chunks(file):
        for number, record in json_lines(chunk):
            if not isinstance(record, dict):
                raise ValueError(f"{file.name}, line {number}: {type(record).__name__} instead of a JSON object")
            yield number, record


def _plain_text(file: InputFile) -> Iterator[Example]:
    data = b"".join(chunk.data for chunk in chunks(file))
    try:
        text = "".join(pieces_of(data))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(f"{file.name}, line {line}: not UTF-8 text ({error.reason})") from None
    if not text:
        raise ValueError(f"{file.name}: the file is empty")
    yield Example((("", text),), 0, (len(text),))


# Formats


def _choice(record: Mapping[str, Any]) -> Example:
    query, choices = _text(record, "query"), _texts(record, "choices")
    context, lead = _joined(query, record)
    texts = tuple((context, lead + choice) for choice in choices)
    return Example(texts, _gold(record, choices), tuple(map(len, choices)), _group(record))


def _schema(record: Mapping[str, Any]) -> Example:
    options, ending = _texts(record, "context_options"), _text(record, "continuation")
    joined = [_joined(option, record) for option in options]
    texts = tuple((context, lead + ending) for context, lead in joined)
    return Example(texts, _gold(record, options), (len(ending),) * len(options), _group(record))


def _word(record: Mapping[str, Any]) -> Example:
    context, ending = _text(record, "context"), _text(record, "continuation")
    if not ending[:1].isspace():
        context, lead = _joined(context, record)
        ending = lead + ending
    return Example(((context, ending),), 0, (len(ending.strip()),), _group(record))


def _pair(record: Mapping[str, Any]) -> Example:
    pair = _text(record, "sentence_good"), _text(record, "sentence_bad")
    return Example(tuple(("", sentence) for sentence in pair), 0, tuple(map(len, pair)), _group(record))


def _document(record: Mapping[str, Any]) -> Example:
    text = _text(record, "text")
    return Example((("", text),), 0, (len(text),), _group(record))


def _joined(context: str, record: Mapping[str, Any]) -> tuple[str, str]:
    """(context up to the last whitespace, what then leads the continuation): tokenizers join a space to the word that
    follows it."""
    asks = context.startswith(QUESTION) or f"\n{QUESTION}" in context
    delimiter = record.get("delimiter", ANSWER if asks else " ")
    if not isinstance(delimiter, str):
        raise BadRecord(f"'delimiter' is {delimiter!r}; it must be a string")
    whole = context.rstrip(" ") + delimiter
    bare = whole.rstrip(" ")
    return bare, whole[len(bare) :]


def _text(record: Mapping[str, Any], field: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise BadRecord(f"{field!r} is {_short(value)}; it must be a string that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRecord(f"{field!r} is not valid Unicode ({error.reason})") from None
    return value


def _texts(record: Mapping[str, Any], field: str) -> list[str]:
    value = record.get(field)
    if not isinstance(value, list) or len(value) < 2:
        raise BadRecord(f"{field!r} is {_short(value)}; it must be a list of two or more strings")
    return [_text({f"{field}[{place}]": item}, f"{field}[{place}]") for place, item in enumerate(value)]


def _gold(record: Mapping[str, Any], options: list[str]) -> int:
    gold = record.get("gold")
    if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < len(options):
        raise BadRecord(f"'gold' is {_short(gold)}; it must be the number of an option, 0 to {len(options) - 1}")
    return gold


def _group(record: Mapping[str, Any]) -> str:
    return next((str(record[field]) for field in GROUP_FIELDS if record.get(field)), "")


def _short(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


TEXT = Format("text", ("text",), _document)
FORMATS = (
    Format("choice", ("query", "choices", "gold"), _choice),
    Format("schema", ("context_options", "continuation", "gold"), _schema),
    Format("word", ("context", "continuation"), _word),
    Format("pair", ("sentence_good", "sentence_bad"), _pair),
    TEXT,
)
