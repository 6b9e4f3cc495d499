"""From files to shards. Oracle: the input's own texts, encoded one by one; sha256 of what is written."""

import json
import lzma
import os

import numpy as np
import pytest

from halfbyte.data import compression, open_dataset, preparation, prepare, text_files
from halfbyte.data.encode import split_rows_by_segment
from halfbyte.data.shard_files import ShardWriter

from .conftest import make_documents, write_jsonl


def contents(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def documents_of(dataset, split: str, source: str) -> list[str]:
    """The texts back from the rows: runs joined, cut at the end-of-document marker."""
    tokenizer = dataset.tokenizer()
    stream = np.concatenate(list(split_rows_by_segment(dataset.read_rows(split, source))))
    ends = np.flatnonzero(stream == tokenizer.eos_id)[1::2]  # bos and eos are one token here: every second one ends
    return [tokenizer.decode(part) for part in np.split(stream, ends + 1) if len(part)]


def texts(path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_document_comes_back_once(corpus, dataset):
    for source in ("laws", "news"):
        given = texts(corpus / f"{source}.jsonl")
        got = {split: documents_of(dataset, split, source) for split in ("train", "validation")}
        assert sorted(got["train"] + got["validation"]) == sorted(given)
        assert got["train"] == [text for text in given if text in got["train"]]  # in the order of the file
        assert got["validation"]


def test_lone_text_is_held_out_by_its_tail(corpus, dataset):
    train, held = (documents_of(dataset, split, "default") for split in ("train", "validation"))
    assert train[0] + held[0] == (corpus / "book.txt").read_text(encoding="utf-8")


def test_totals_of_the_manifest_are_those_of_the_rows(corpus, dataset):
    assert dataset.manifest.sources == ("default", "laws", "news")
    for split in ("train", "validation"):
        for source, totals in dataset.manifest.splits[split].items():
            rows = dataset.read_rows(split, source)
            assert len(rows) == totals.rows
            assert np.count_nonzero(rows["segments"]) == totals.tokens
            assert {dataset.manifest.sources[i] for i in rows["source"]} == {source}
    both = [dataset.manifest.splits[split]["laws"] for split in ("train", "validation")]
    assert sum(t.documents for t in both) == 60
    assert sum(t.text_bytes for t in both) == sum(len(t.encode()) for t in texts(corpus / "laws.jsonl"))
    assert len([s for s in dataset.manifest.shards if s.source == "laws" and s.split == "train"]) > 1


def test_any_number_of_workers_gives_the_same_bytes(corpus, prepared, tmp_path):
    out = tmp_path / "again"
    prepare(corpus, tokenizer="bpe:320", out=out, seq_len=32, val_fraction=0.2, workers=2, shard_bytes=8000)
    assert contents(out) == contents(prepared)


@pytest.mark.slow
def test_same_rows_however_documents_fall_into_chunks(corpus, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 700)
    monkeypatch.setattr(compression, "READ_BLOCK_BYTES", 512)
    out = tmp_path / "small-chunks"
    prepare(corpus, tokenizer="bpe:320", out=out, seq_len=32, val_fraction=0.2, workers=1, shard_bytes=8000)
    for split in ("train", "validation"):
        np.testing.assert_array_equal(open_dataset(out).read_rows(split), dataset.read_rows(split))


def test_explicit_validation_files_are_kept_out_of_training(corpus, tmp_path):
    out = tmp_path / "set"
    done = prepare([corpus], tokenizer="bytes", out=out, seq_len=64, validation=[corpus / "news.jsonl"])
    assert set(done.manifest.splits["train"]) == {"default", "laws"}
    assert set(done.manifest.splits["validation"]) == {"news"}
    assert documents_of(open_dataset(out), "validation", "news") == texts(corpus / "news.jsonl")


def test_copy_of_a_training_file_is_no_validation_file(corpus, tmp_path):
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes((corpus / "news.jsonl").read_bytes())
    with pytest.raises(ValueError, match="copy.jsonl has the same content as training file news.jsonl"):
        prepare(corpus, tokenizer="bytes", out=tmp_path / "set", validation=[copy])


def test_long_documents_are_tokenized_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_PIECE_BYTES", 300)
    text = "\n".join(make_documents(8, seed=4))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    write_jsonl(tmp_path / "b.jsonl", [text], "json")
    out = tmp_path / "set"
    prepare([tmp_path / "a.txt", tmp_path / "b.jsonl"], tokenizer="bytes", out=out, seq_len=50, val_fraction=0.0)
    dataset = open_dataset(out)
    assert documents_of(dataset, "train", "default") == documents_of(dataset, "train", "json") == [text]


def test_markers_in_text_do_not_end_a_document(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["one <|endoftext|> still one", "two"])
    prepare(tmp_path / "a.jsonl", tokenizer="bytes", out=tmp_path / "set", seq_len=20, val_fraction=0.0)
    assert documents_of(open_dataset(tmp_path / "set"), "train", "default") == ["one <|endoftext|> still one", "two"]


def test_repeated_request_is_up_to_date(corpus, prepared):
    before = contents(prepared)
    done = prepare(corpus, tokenizer="bpe:320", out=prepared, seq_len=32, val_fraction=0.2, shard_bytes=8000)
    assert not done.newly_written
    assert contents(prepared) == before


def test_another_request_needs_overwrite(corpus, tmp_path):
    out, path = tmp_path / "set", write_jsonl(tmp_path / "a.jsonl", make_documents(5, seed=5))
    prepare(path, tokenizer="bytes", out=out, seq_len=32)
    before = contents(out)
    with pytest.raises(ValueError, match="another request .different: seq_len, val_fraction.*--overwrite"):
        prepare(path, tokenizer="bytes", out=out, seq_len=16, val_fraction=0.3)
    write_jsonl(path, make_documents(5, seed=6))
    with pytest.raises(ValueError, match="different: inputs"):
        prepare(path, tokenizer="bytes", out=out, seq_len=32)
    assert contents(out) == before
    assert prepare(path, tokenizer="bytes", out=out, seq_len=16, overwrite=True).newly_written
    assert open_dataset(out).seq_len == 16
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "set"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_directory_is_never_replaced(corpus, tmp_path, overwrite):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="is not a prepared data set"):
        prepare(corpus, tokenizer="bytes", out=tmp_path / "mine", overwrite=overwrite)
    prepare(corpus, tokenizer="bytes", out=tmp_path / "set", seq_len=32)
    (tmp_path / "set" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="it also holds thesis.tex"):
        prepare(corpus, tokenizer="bytes", out=tmp_path / "set", seq_len=16, overwrite=overwrite)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
def test_interrupted_preparation_leaves_nothing(corpus, tmp_path, monkeypatch, error):
    written = []

    def fail(self, rows):
        written.append(os.listdir(tmp_path))
        raise error

    monkeypatch.setattr(ShardWriter, "write", fail)
    with pytest.raises(type(error) if isinstance(error, OSError) else error):
        prepare(corpus, tokenizer="bytes", out=tmp_path / "set", seq_len=32)
    assert written and os.listdir(tmp_path) == []


def test_losing_a_race_uses_the_winners_data_set(corpus, tmp_path, monkeypatch):
    out = tmp_path / "set"
    settings = {"tokenizer": "bytes", "out": out, "seq_len": 32}
    publish = preparation.rename_into_place

    def late(staging, where, *, replace, check):
        monkeypatch.setattr(preparation, "rename_into_place", publish)
        prepare(corpus, **settings)
        return publish(staging, where, replace=replace, check=check)

    monkeypatch.setattr(preparation, "rename_into_place", late)
    prepare(corpus, **settings)
    open_dataset(out)
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


@pytest.mark.slow
def test_bad_line_in_a_worker_is_the_same_error(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["fine"])
    path.write_text(path.read_text() + "nonsense\n")
    with pytest.raises(ValueError, match="a.jsonl, line 2: not JSON"):
        prepare(path, tokenizer="bytes", out=tmp_path / "set", workers=2, val_fraction=0.0)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seq_len": 1}, "seq_len 1"),
        ({"val_fraction": 1.0}, "val_fraction 1.0"),
        ({"workers": 0}, "workers 0"),
        ({"shard_bytes": 0}, "shard_bytes 0"),
        ({"tokenizer": "bpe:12"}, "bpe:12"),
        ({"eos": "</s>"}, "--eos and --bos name markers of a tokenizer.json; bytes has"),
    ],
)
def test_bad_settings_are_refused_before_any_work(corpus, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        prepare(corpus, **{"tokenizer": "bytes", "out": tmp_path / "set", **settings})
    assert list(tmp_path.iterdir()) == []


def test_input_without_text_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["", "  \n"])
    (tmp_path / "b.txt").write_bytes(b"")
    with pytest.raises(ValueError, match="no text for training in 2 file"):
        prepare([path, tmp_path / "b.txt"], tokenizer="bytes", out=tmp_path / "set")


def test_blank_file_among_others_is_passed_over(tmp_path):
    """The shards are those of the others alone, and it is named."""
    (tmp_path / "a.txt").write_text("Some text, and some more of it.\n\n")
    (tmp_path / "b.txt").write_text("\n \n")
    both, one = (
        prepare(names, tokenizer="bytes", out=tmp_path / f"set-{len(names)}", val_fraction=0.0)
        for names in ([tmp_path / "a.txt", tmp_path / "b.txt"], [tmp_path / "a.txt"])
    )
    assert (both.empty_files, one.empty_files) == (("b.txt",), ())
    assert both.manifest.shards == one.manifest.shards and both.manifest.splits == one.manifest.splits


def test_text_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ValueError, match="latin.txt: not UTF-8 text at byte 2"):
        prepare(tmp_path / "latin.txt", tokenizer="bytes", out=tmp_path / "set")


def test_too_many_sources_are_refused(tmp_path):
    lines = "".join(json.dumps({"text": "x" * 9, "source": f"url{i}"}) + "\n" for i in range(300))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    with pytest.raises(ValueError, match="more than 256 different values of 'source'"):
        prepare(tmp_path / "a.jsonl.xz", tokenizer="bytes", out=tmp_path / "set", val_fraction=0.0, seq_len=4)


def test_tokenizer_file_gives_the_set_of_its_training(corpus, prepared, tmp_path):
    out = tmp_path / "set"
    given = prepared / "tokenizer.json"
    prepare(corpus, tokenizer=given, out=out, seq_len=32, val_fraction=0.2, workers=1, shard_bytes=8000)
    ours, theirs = contents(out), contents(prepared)
    assert {k: v for k, v in ours.items() if k != "manifest.json"} == {
        k: v for k, v in theirs.items() if k != "manifest.json"
    }
