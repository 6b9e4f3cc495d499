"""Reading input. Oracle: Python's own gzip, lzma and zstandard writers, and the text that was written."""

import gzip
import json
import lzma

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.data import compression, text_files
from halfbyte.data.text_files import InputFile, file_kind, find_cut, find_files, iter_chunks, json_records

TEXTS = ["one", "two\nlines", "über 数", " "]
COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def as_file(path) -> InputFile:
    return find_files([path])[0]


def records(path) -> list:
    return [record for chunk in iter_chunks(as_file(path)) for record in json_records(chunk)]


def test_files_read_the_same_however_compressed(tmp_path):
    lines = "".join(json.dumps({"text": t, "source": "s"}) + "\n" for t in TEXTS)
    text = "first line\nzweite Zeile: ü\n" * 50
    for suffix, compress in COMPRESS.items():
        path, plain, two = (tmp_path / f"{name}{suffix}" for name in ("a.jsonl", "a.txt", "two.jsonl"))
        path.write_bytes(compress(lines.encode()))
        assert records(path) == [(t.encode(), "s") for t in TEXTS], suffix
        plain.write_bytes(compress(text.encode()))
        assert b"".join(chunk.data for chunk in iter_chunks(as_file(plain))).decode() == text, suffix
        two.write_bytes(compress(b'{"text": "a"}\n') + compress(b'{"text": "b"}\n'))  # two frames
        assert records(two) == [(b"a", None), (b"b", None)], suffix


def test_damaged_compressed_files_are_refused_by_name(tmp_path):
    lines = b"".join(b'{"text": "%d"}\n' % (i * 7919) for i in range(5000))
    for suffix in filter(None, COMPRESS):
        whole = COMPRESS[suffix](lines)
        for data in (whole[: len(whole) // 2], b'{"text": "plain"}\n' * 9):  # cut, and not compressed at all
            (tmp_path / f"x.jsonl{suffix}").write_bytes(data)
            with pytest.raises(ValueError, match="x.jsonl.*damaged or cut short"):
                records(tmp_path / f"x.jsonl{suffix}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2: not JSON"),
        (b'"text"', "line 2: no 'text'"),
        (b'{"body": "x"}', "line 2: no 'text'"),
        (b'{"text": 5}', "line 2: no 'text'"),
        (b'{"text": "x", "source": 3}', "line 2: 'source' is 3"),
        (b'{"text": "\\ud800"}', "line 2: 'text' or 'source' is not valid Unicode"),
        (b'{"text": "\xff"}', "line 2: not JSON"),
    ],
)
def test_bad_line_is_refused_by_number(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"bad.jsonl, {message}"):
        records(path)


def test_line_numbers_continue_over_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 40)
    monkeypatch.setattr(compression, "READ_BLOCK_BYTES", 16)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n' * 20 + b"oops\n")
    with pytest.raises(ValueError, match="line 21: not JSON"):
        records(path)


def test_byte_order_mark_and_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "x"}\n\n\n{"text": "y"}')
    assert [text for text, _ in records(path)] == [b"x", b"y"]


@given(st.text(min_size=2), st.integers(1, 200))
def test_cut_never_breaks_a_character(text, limit):
    data = text.encode()
    cut = find_cut(data, min(limit, len(data)))
    assert data[:cut].decode() + data[cut:].decode() == text
    assert 0 < cut <= limit + 3


def test_pieces_of_a_text_file_join_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_PIECE_BYTES", 50)
    monkeypatch.setattr(compression, "READ_BLOCK_BYTES", 64)
    text = "数字 and words " * 100
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    pieces = list(iter_chunks(as_file(path)))
    assert "".join(p.data.decode() for p in pieces) == text
    assert [p.first for p in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [p.last for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [p.start for p in pieces] == [sum(len(q.data) for q in pieces[:i]) for i in range(len(pieces))]


def test_find_files_gives_each_file_once_in_order(tmp_path):
    for name in ("b.jsonl", "a.txt", "sub/c.jsonl.xz", "notes.pdf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert [f.name for f in find_files([tmp_path])] == ["a.txt", "b.jsonl", "sub/c.jsonl.xz"]
    assert [f.name for f in find_files([tmp_path / "*.jsonl", tmp_path / "b.jsonl"])] == ["b.jsonl"]


def test_unreadable_names_are_refused(tmp_path):
    (tmp_path / "notes.pdf").write_bytes(b"")
    with pytest.raises(ValueError, match="notes.pdf: its name does not tell what it holds; .*--text .pdf"):
        find_files([tmp_path / "notes.pdf"])
    with pytest.raises(ValueError, match="no such file"):
        find_files([tmp_path / "absent.jsonl"])
    with pytest.raises(ValueError, match="no file in this directory"):
        find_files([tmp_path])


def test_kind_is_read_from_the_name(tmp_path):
    names = {"a.jsonl": "jsonl", "a.b.JSONL.zst": "jsonl", "a.txt.gz": "text", "a.md": "text", "a.gz": None, "a": None}
    assert {name: file_kind(tmp_path / name) for name in names} == names
