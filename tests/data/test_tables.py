"""Tables people have: Parquet, Hugging Face `datasets` folders, ArrayRecord. Oracle: the same texts as JSON lines."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from halfbyte.cli.main import main
from halfbyte.data import prepare, tabular_files

from .conftest import make_documents, write_jsonl

TEXTS = [*make_documents(70, seed=5), "", " ", '{"text": 1}', "\n\x05looks like a message", "\u2028 \x00 end"]
SOURCES = [("laws", "news", None)[i % 3] for i in range(len(TEXTS))]


def message(number, body):
    """A field of a protocol-buffer message."""
    size, length = len(body), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + body


def example(**features):
    """A tf.train.Example of bytes features, by the definition of its messages."""
    given = {name: message(1, message(1, value.encode())) for name, value in features.items() if value}
    entries = (message(1, name.encode()) + message(2, feature) for name, feature in given.items())
    return message(1, b"".join(message(1, entry) for entry in entries))


def write_records(path, records):
    writer = ArrayRecordWriter(str(path), "group_size:7")
    for record in records:
        writer.write(record)
    writer.close()


def as_parquet(folder):
    table = pa.table({"id": range(len(TEXTS)), "text": pa.array(TEXTS, pa.large_string()), "source": SOURCES})
    pq.write_table(table, folder / "a.parquet", row_group_size=9, compression="zstd")
    return folder


def as_parquet_with_empty_parts(folder):
    """Writers that share out rows leave groups and files that got none."""
    table = pa.table({"text": TEXTS, "source": SOURCES})
    with pq.ParquetWriter(folder / "a.parquet", table.schema) as writer:
        for part in (table.slice(0, 0), table.slice(0, 40), table.slice(0, 0), table.slice(40)):
            writer.write_table(part)
    pq.write_table(table.slice(0, 0), folder / "b.parquet")
    return folder


def as_saved(folder):
    """What `Dataset.save_to_disk` leaves, and a file that `map` left beside it."""
    table = pa.table({"text": TEXTS, "source": pa.array(SOURCES).dictionary_encode()})
    for number, part in enumerate((table.slice(0, 40), table.slice(40))):
        with pa.ipc.new_stream(folder / f"data-0000{number}-of-00002.arrow", part.schema) as writer:
            writer.write_table(part, max_chunksize=7)
    (folder / "cache-1.arrow").write_bytes((folder / "data-00000-of-00002.arrow").read_bytes())
    names = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": names}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def as_json_records(folder):
    write_records(folder / "a.array_record", [
        json.dumps({"text": t, "source": s, "more": [1]}, indent=1).encode() for t, s in zip(TEXTS, SOURCES)
    ])  # fmt: skip
    return folder


def as_examples(folder):
    kept = [(t, s) for t, s in zip(TEXTS, SOURCES) if t]  # an empty value is an absent one here
    write_records(folder / "a.arrayrecord", [example(source=s, text=t, url="u") for t, s in kept])
    return folder


def rows(directory):
    """Everything but the manifest, which names the input files."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "manifest.json"}


@pytest.fixture(scope="module")
def from_lines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lines")
    records = ({"text": t} | ({"source": s} if s else {}) for t, s in zip(TEXTS, SOURCES))
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return made(folder, folder / "out")


def made(files, out, **options):
    prepare(files, tokenizer="bpe:300", out=out, seq_len=32, val_fraction=0.2, workers=1, shard_bytes=4000, **options)
    return rows(out)


@pytest.mark.parametrize("write", [as_parquet, as_parquet_with_empty_parts, as_saved, as_json_records, as_examples])
def test_tables_give_the_shards_of_json_lines(tmp_path, from_lines, write):
    (tmp_path / "in").mkdir()
    assert made(write(tmp_path / "in"), tmp_path / "out") == from_lines


def test_another_column_and_records_of_plain_text(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    expected = made(tmp_path / "a.jsonl", tmp_path / "lines")
    pq.write_table(pa.table({"content": TEXTS}), tmp_path / "b.parquet")
    assert made(tmp_path / "b.parquet", tmp_path / "parquet", column="content") == expected
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"content": t}) + "\n" for t in TEXTS))
    assert made(tmp_path / "c.jsonl", tmp_path / "renamed", column="content") == expected
    write_records(tmp_path / "d.array_record", [t.encode() for t in TEXTS])
    assert made(tmp_path / "d.array_record", tmp_path / "plain") == expected


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path, compression="snappy", write_page_checksum=True)
    return path


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    return path


def records(path, *content):
    write_records(path, content)
    return path


def stream(path, column):
    """An Arrow stream of one text whose offsets point far outside."""
    with pa.ipc.new_stream(path, pa.schema({column: pa.string()})) as writer:
        writer.write_batch(pa.record_batch([["abcdefghi"]], [column]))
    whole = path.read_bytes()
    assert whole.count(bytes([0, 0, 0, 0, 9, 0, 0, 0])) >= 1
    path.write_bytes(whole.replace(bytes([0, 0, 0, 0, 9, 0, 0, 0]), bytes([0, 0, 0, 0, 9, 0, 0, 64])))
    return path


def splits(folder):
    (folder / "test").mkdir()
    (folder / "dataset_dict.json").write_text('{"splits": ["test"]}')
    return as_saved(folder / "test").parent


def no_list(folder, text="[1]"):
    (as_saved(folder) / "state.json").write_text(text)
    return folder


def as_text(values):
    """Bytes that claim to be text."""
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())


def shared(text, rows):
    """One text of many rows."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))


def named(path, *names):
    pq.write_table(pa.table([TEXTS] * len(names), names), path)
    return path


def numbered(path):
    """A short example whose source is no text; all of it is UTF-8."""
    text = message(1, b"text") + message(2, message(1, message(1, b"ab")))
    source = message(1, b"source") + message(2, message(3, b"\x01"))
    return records(path, message(1, message(1, text) + message(1, source)))


HOSTILE = {
    "cut parquet": lambda p: cut(parquet(p / "a.parquet", text=TEXTS)),
    "flipped parquet": lambda p: flipped(parquet(p / "a.parquet", text=TEXTS)),
    "wrong column": lambda p: parquet(p / "a.parquet", content=TEXTS),
    "twice": lambda p: named(p / "a.parquet", "text", "text"),
    "nested": lambda p: parquet(p / "a.parquet", text=[{"a": "b"}]),
    "numbers": lambda p: parquet(p / "a.parquet", text=[1, 2]),
    "null": lambda p: parquet(p / "a.parquet", text=["a", None]),
    "giant": lambda p: parquet(p / "a.parquet", text=["x" * 3000, "y"]),
    "text of bytes": lambda p: parquet(p / "a.parquet", text=as_text([b"ok", b"\xff\xfe"])),
    "shared giant": lambda p: parquet(p / "a.parquet", text=shared("x" * 3000, 2000)),
    "cut arrow": lambda p: cut(as_saved(p) / "data-00001-of-00002.arrow"),
    "offsets": lambda p: stream(p / "a.arrow", "text"),
    "splits": splits,
    "no list": no_list,
    "missing shard": lambda p: (as_saved(p) / "data-00001-of-00002.arrow").unlink() or p,
    "record without text": lambda p: records(p / "a.array_record", b'{"text": "a"}', b'{"a": "text"}'),
    "record of another kind": lambda p: records(p / "a.array_record", example(text="a"), b"plain"),
    "record of bytes": lambda p: records(p / "a.array_record", b"\xff\xfe\x00"),
    "source of an example": lambda p: numbered(p / "a.arrayrecord"),
    "giant record": lambda p: records(p / "a.array_record", b"x" * 3000),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_table_is_refused_in_one_paragraph(tmp_path, capfd, monkeypatch, kind):
    monkeypatch.setattr(tabular_files, "MAX_TEXT_BYTES", 2000)
    (tmp_path / "in").mkdir()
    given = HOSTILE[kind](tmp_path / "in")
    assert main(["data", "prepare", str(given), "--tokenizer", "bytes", "--out", str(tmp_path / "out")]) == 2
    error = capfd.readouterr().err
    assert "Traceback" not in error and error.count("halfbyte:") == 1 and str(given.name)[:6] in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_shared_text_of_many_rows_is_copied_in_batches(tmp_path, kind):
    path, table = tmp_path / f"a.{kind}", pa.table({"text": shared("x" * (tabular_files.BATCH // 4), 50)})
    if kind == "parquet":
        pq.write_table(table, path, compression="zstd", store_schema=False)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    blocks = [block for block, _ in tabular_files.table_lines(path, name="a", column="text")]
    assert sum(block.count(b"\n") for block in blocks) == 50
    assert max(map(len, blocks)) < 1.5 * tabular_files.BATCH  # a MiB, and what JSON adds


def test_without_pyarrow_it_says_what_to_install(tmp_path, monkeypatch):
    path = parquet(tmp_path / "a.parquet", text=TEXTS)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"pip install .*\[parquet\]'"):
        prepare(path, tokenizer="bytes", out=tmp_path / "out")
