"""Task files as people have them: every format, compressed or not, and every way a line can be wrong."""

import gzip
import json
import lzma

import pytest

from halfbyte.data.text_files import find_files
from halfbyte.evaluation import UnknownTaskFormatError, iter_examples, open_task, subsample
from halfbyte.evaluation.task_files import group_of, texts_of

CHOICE = {"query": "To open a jar", "choices": ["turn the lid", "sing"], "gold": 0}
ARC = {"query": "Question: Which is a gas?", "choices": ["iron", "air", "ice", "wood"], "gold": 1}
BOOLQ = {"query": "Passage: Ice floats.\nQuestion: does ice float?", "choices": ["no", "yes"], "gold": 1}
SCHEMA = {"context_options": ["Ann told Eve. Ann", "Ann told Eve. Eve"], "continuation": "was told.", "gold": 1}
WORD = {"context": "he went to pick up", "continuation": " Irina"}
PAIR = {"sentence_good": "Who left?", "sentence_bad": "Left who?", "linguistics_term": "island_effects", "UID": "x"}
TEXT = {"text": "a document", "source": "books"}


def write(path, records):
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    data = ("\n".join(lines) + "\n").encode()
    opener = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    with opener(path, "wb") as file:
        file.write(data)
    return path


def read(path):
    (file,) = find_files([path])
    task = open_task(file)
    return task, list(iter_examples(task))


RECORDS = [
    (CHOICE, "choice", [("To open a jar", " turn the lid"), ("To open a jar", " sing")]),
    (ARC, "choice", [("Question: Which is a gas?\nAnswer:", f" {c}") for c in ARC["choices"]]),
    (BOOLQ, "choice", [(BOOLQ["query"] + "\nAnswer:", " no"), (BOOLQ["query"] + "\nAnswer:", " yes")]),
    (SCHEMA, "schema", [(o, " was told.") for o in SCHEMA["context_options"]]),
    (WORD, "word", [("he went to pick up", " Irina")]),
    (PAIR, "pair", [("", "Who left?"), ("", "Left who?")]),
    (TEXT, "text", [("", "a document")]),
]


def test_records_give_their_kind_texts_and_group(tmp_path):
    for record, kind, texts in RECORDS:
        task, items = read(write(tmp_path / "some_task.jsonl.xz", [record, "", record]))
        assert (task.name, task.kind, items) == ("some_task", kind, [record, record])
        assert kind == "text" or texts_of(kind, record) == texts
    assert [group_of(record) for record in (ARC, PAIR, TEXT)] == ["", "island_effects", "books"]


def test_spaces_are_not_doubled():
    spaced = {**CHOICE, "query": "To open a jar "}
    bare = {"context": "pick up", "continuation": "Irina"}
    assert texts_of("choice", spaced)[0] == ("To open a jar", " turn the lid")
    assert texts_of("word", bare) == [("pick up", " Irina")]


def test_plain_text_is_one_document(tmp_path):
    with lzma.open(tmp_path / "book.txt.xz", "wb") as file:
        file.write(" = Title = \n\nnaïve\n".encode())
    task, items = read(tmp_path / "book.txt.xz")
    assert task.name == "book" and items == [{"text": " = Title = \n\nnaïve\n"}]


BAD = [
    ("{", "line 3: not JSON"),
    ("[1]", "line 3: list instead of a JSON object"),
    ({"query": "x", "choices": ["a", "b"]}, "line 3: 'gold' is missing; .*an option, 0 to 1"),
    ({**CHOICE, "gold": 2}, "line 3: 'gold' is 2; .* 0 to 1"),
    ({**CHOICE, "gold": True}, "line 3: 'gold' is True"),
    ({**CHOICE, "choices": ["one"]}, "line 3: 'choices' is .* two or more"),
    ({**CHOICE, "choices": ["a", 7]}, r"line 3: 'choices' is \['a', 7\]; .* two or more"),
    ({**CHOICE, "query": " "}, "line 3: 'query' is ' '; it must be a string of valid Unicode that is not empty"),
    ({"sentence_good": "x", "sentence_bad": "y"}, "line 3: 'query' is missing"),
    ('{"query": "\\ud800", "choices": ["a", "b"], "gold": 0}', "line 3: 'query' is .*valid Unicode"),
]


def test_malformed_line_is_refused_by_number(tmp_path):
    for bad, message in BAD:
        path = write(tmp_path / "task.jsonl", [CHOICE, "", bad, CHOICE])
        with pytest.raises(ValueError, match=f"task.jsonl, {message}"):
            read(path)


def test_files_that_are_no_task(tmp_path):
    with pytest.raises(
        UnknownTaskFormatError, match=r"a.jsonl, line 1: fields question, answer are no task; .*query, choices"
    ):
        read(write(tmp_path / "a.jsonl", [{"question": "?", "answer": "!"}]))
    with pytest.raises(ValueError, match=r"b.jsonl: the file is empty"):
        read(write(tmp_path / "b.jsonl", []))
    (tmp_path / "c.txt").write_bytes(b"fine\n\xff\xfe")
    with pytest.raises(ValueError, match=r"c.txt, line 2: not UTF-8"):
        read(tmp_path / "c.txt")
    (tmp_path / "d.txt").touch()
    with pytest.raises(ValueError, match=r"d.txt: the file is empty"):
        read(tmp_path / "d.txt")
    (tmp_path / "e.jsonl.xz").write_bytes(lzma.compress(b'{"text": "x"}\n' * 9)[:-20])
    with pytest.raises(ValueError, match=r"e.jsonl.xz: damaged or cut short"):
        read(tmp_path / "e.jsonl.xz")


def test_limit_is_spread_over_the_file(tmp_path):
    _, items = read(write(tmp_path / "a.jsonl", [{"text": str(number)} for number in range(10)]))
    assert [item["text"] for item in subsample(items, 4)] == ["0", "2", "5", "7"]
    assert subsample(items, 0) == subsample(items, 99) == items
