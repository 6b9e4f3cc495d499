"""`--part I/N`: what N machines make of their files, packed by one. Oracle: the bytes that one machine makes."""

import numpy as np
import pytest

from halfbyte.cli.main import main
from halfbyte.data import open_dataset, prepare, prepare_part
from halfbyte.data.encoding import Encoder, Run

from .conftest import make_documents, write_jsonl
from .test_prepare import contents

PARTS = 8
OPTIONS = {"tokenizer": "bytes", "val_fraction": 0.2}
PACKED = {"seq_len": 32, "shard_bytes": 4000, "workers": 1}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "in"
    made.mkdir()
    for number in range(9):
        write_jsonl(made / f"{number}.jsonl", make_documents(9, seed=number), ("laws", "news", None)[number % 3])
    (made / "book.txt").write_text("\n".join(make_documents(30, seed=3)), encoding="utf-8")
    return made


def all_parts(folder, out, *, first=1, **options):
    order = [(number + first) % PARTS + 1 for number in range(PARTS)]  # array jobs begin in any order
    return [prepare_part(folder, part=(part, PARTS), out=out, **(OPTIONS | options)) for part in order]


def test_eight_parts_give_the_bytes_of_one_machine(tmp_path, folder, monkeypatch):
    one = contents(prepare(folder, out=tmp_path / "one", **OPTIONS, **PACKED).directory)
    out, encode = tmp_path / "set", Encoder.encode
    assert all_parts(folder, out) == [False] * (PARTS - 1) + [True]

    def killed(self, chunk):
        assert chunk.name != "4.jsonl"
        return encode(self, chunk)

    monkeypatch.setattr(Encoder, "encode", killed)
    with pytest.raises(AssertionError):
        all_parts(folder, out)
    assert not list((tmp_path / "set.parts").glob("tokens-000004*"))
    monkeypatch.setattr(Encoder, "encode", encode)
    assert all_parts(folder, out, first=5) == [True] * PARTS
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "set.parts").glob("tokens*")}
    assert len(kept) == 10
    assert all_parts(folder, out) == [True] * PARTS  # nothing is made twice
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "set.parts").glob("tokens*")} == kept
    monkeypatch.setattr(Encoder, "encode", None)  # what packs tokenizes nothing
    assert contents(prepare(folder, out=out, **OPTIONS, **PACKED).directory) == one
    assert open_dataset(out).manifest.rows("validation") > 0


@pytest.mark.slow
def test_what_no_part_has_made_is_made_by_the_packer(tmp_path, folder):
    options = {"tokenizer": "bytes", "validation": [folder / "2.jsonl"]}
    one = contents(prepare(folder, out=tmp_path / "one", **options, **PACKED).directory)
    out = tmp_path / "set"
    assert prepare_part(folder, part=(2, PARTS), out=out, **options)  # nothing is held out by hash: no summaries
    assert contents(prepare(folder, out=out, **options, **PACKED).directory) == one


HOSTILE = {
    "a file elsewhere": ({("../escaped", "default"): Run(np.ones(4000, np.uint32), np.ones(4000, bool), 1)}, "damaged"),
    "no such token": ({("train", "default"): Run(np.full(9, 999, np.uint32), np.ones(9, bool), 1)}, "vocabulary of"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_part_is_refused(tmp_path, folder, monkeypatch, kind):
    runs, words = HOSTILE[kind]
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "encode", lambda self, chunk: runs)
        assert prepare_part(folder, part=(1, 1), out=tmp_path / "set", tokenizer="bytes", val_fraction=0.0)
    with pytest.raises(ValueError, match=words):
        prepare(folder, out=tmp_path / "set", tokenizer="bytes", val_fraction=0.0, **PACKED)
    assert not list(tmp_path.rglob("escaped*")) and not (tmp_path / "set").exists()


def test_what_a_preparation_writes_is_none_of_its_input(tmp_path, folder):
    """--out may lie in the folder that is read: shards and parts there are no texts."""
    out = folder / "set"
    for part in (1, 2):
        assert prepare_part(folder, part=(part, 2), out=out, tokenizer="bytes", val_fraction=0.0)
    assert [prepare(folder, out=out, tokenizer="bytes", val_fraction=0.0).fresh for _ in range(2)] == [True, False]
    with pytest.raises(ValueError, match="no file in this directory"):
        prepare(out, out=tmp_path / "again", tokenizer="bytes")


def test_a_part_may_begin_while_another_does(tmp_path, folder):
    """Array jobs start at once: the folder is there, and not yet what says whose it is."""
    out = tmp_path / "set"
    (tmp_path / "set.parts").mkdir()
    (tmp_path / "set.parts" / ".request.json.1.tmp").touch()
    assert prepare_part(folder, part=(1, PARTS), out=out, tokenizer="bytes", val_fraction=0.0)
    (tmp_path / "set.parts" / "request.json").unlink()  # now it holds tokens of nobody knows what
    with pytest.raises(ValueError, match=r"set\.parts: no folder of parts"):
        prepare_part(folder, part=(1, PARTS), out=out, tokenizer="bytes", val_fraction=0.0)


def test_parts_of_something_else_are_refused(tmp_path, folder, capfd):
    out = tmp_path / "set"
    all_parts(folder, out, val_fraction=0.0)
    text = (folder / "3.jsonl").read_text()
    (folder / "3.jsonl").write_text(text.replace("e", "f"))  # the same name and size
    flags = ["--tokenizer", "bytes", "--out", str(out)]
    for more, words in [
        (["--val-fraction", "0.0"], "made of other content than 3.jsonl"),
        (["--val-fraction", "0.1"], "parts of another request"),
        (["--val-fraction", "0.0", "--part", "9/8"], "part I of N"),
        (["--val-fraction", "0.0", "--part", "1/8", "--tokenizer", "bpe:300", "--out", f"{out}-2"], "tokenizer.json"),
    ]:
        assert main(["data", "prepare", str(folder), *flags, *more]) == 2
        error = " ".join(capfd.readouterr().err.split())
        assert words in error and "Traceback" not in error
    (folder / "3.jsonl").write_text(text)
    victim = sorted((tmp_path / "set.parts").glob("tokens*"))[1]
    victim.write_bytes(victim.read_bytes()[:100])
    assert main(["data", "prepare", str(folder), *flags, "--val-fraction", "0.0"]) == 2
    assert victim.name in capfd.readouterr().err.replace("\n", "")
