"""Data sets and their commands under attack: many shards and few handles, links, names that are markup, tokenizers that
panic. Oracle: exit codes, the files that were there before, and the bytes on the terminal."""

import json
import os
import pty
import subprocess
import sys

import pytest

from halfbyte.cli.main import main
from halfbyte.data import open_dataset, prepare

PANIC = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    "model": {"type": "BPE", "vocab": {"a": 0, "<|endoftext|>": 1}, "merges": []},
}
HANDLES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from halfbyte.data import open_dataset
from halfbyte.data.batch_loader import loader
dataset = open_dataset(sys.argv[1])
rows = dataset.rows("train")
print(len(dataset.manifest.shards), len([rows[i] for i in range(len(rows))]))
batches = loader(dataset, batch=8, seed=0)
for _ in range(20):
    next(batches)
batches.close()
"""


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n} " + "word " * 12}) + "\n" for n in range(60)))
    return path


@pytest.mark.slow
def test_more_shards_than_file_handles(tmp_path):
    """784 shards and more, at most 256 handles: verified, read at random, loaded."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n} " + "word " * 5}) + "\n" for n in range(350)))
    prepare(path, tokenizer="bytes", out=tmp_path / "set", seq_len=16, val_fraction=0.0, shard_bytes=1)
    done = subprocess.run([sys.executable, "-c", HANDLES, str(tmp_path / "set")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    shards, rows = map(int, done.stdout.split())
    assert shards == rows >= 784


def test_a_replaced_shard_is_another_file(tmp_path, text):
    """Readers are shared in the process; a data set made anew at the same place must not be read from the old one."""
    first = prepare(text, tokenizer="bytes", out=tmp_path / "set", seq_len=16, val_fraction=0.0).directory
    before = open_dataset(first).read_rows("train").copy()
    text.write_text(json.dumps({"text": "something else entirely " * 40}))
    prepare(text, tokenizer="bytes", out=tmp_path / "set", seq_len=16, val_fraction=0.0, overwrite=True)
    after = open_dataset(first).read_rows("train")
    assert before.tobytes() != after.tobytes()


@pytest.mark.parametrize("target", ["there", "dangling"])
def test_out_at_a_link_is_refused(tmp_path, text, capfd, target):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / target)
    assert main(["data", "prepare", str(text), "--tokenizer", "bytes", "--out", str(tmp_path / "link")]) == 2
    assert "a symbolic link to" in " ".join(capfd.readouterr().err.split())  # a long path folds the line
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "link", "there"]


@pytest.mark.parametrize("out", ["x" * 300, "a\nb", "", "a.jsonl"])
def test_names_that_cannot_be_made(tmp_path, text, capfd, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "prepare", str(text), "--tokenizer", "bytes", "--out", out]) == 2
    error = capfd.readouterr().err
    assert "Traceback" not in error and error.count("halfbyte:") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_name_with_nul_in_it(tmp_path, text):
    with pytest.raises(ValueError, match="control character"):
        prepare(text, tokenizer="bytes", out="a\0b")


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--seq-len", "99999999999"], "seq_len 99999999999"),
        (["--workers", "100000"], "workers 100000"),
        (["--val-fraction", "nan"], "val_fraction nan"),
        (["--tokenizer", "bpe:99999999999999"], "bpe:"),
        (["--tokenizer", "bpe:²"], "bpe:"),
        (["--source", "s" * 500], "--source must have"),
    ],
)
def test_numbers_out_of_range(tmp_path, text, capfd, flags, words):
    base = ["--tokenizer", "bytes"] if "--tokenizer" not in flags else []
    assert main(["data", "prepare", str(text), "--out", str(tmp_path / "out"), *base, *flags]) == 2
    error = " ".join(capfd.readouterr().err.split())
    assert words in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_deep_records_and_long_lines_are_named(tmp_path, capfd, monkeypatch):
    deep = tmp_path / "deep.jsonl"
    deep.write_text('{"text": "good"}\n{"text": "x", "meta": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    assert main(["data", "prepare", str(deep), "--tokenizer", "bytes", "--out", str(tmp_path / "out")]) == 2
    assert "deep.jsonl, line 2: not JSON" in capfd.readouterr().err
    monkeypatch.setattr("halfbyte.data.text_files.MAX_LINE_BYTES", 1 << 20)
    long = tmp_path / "long.jsonl"
    long.write_text('{"text": "good"}\n{"text": "' + "x" * (4 << 20) + '"}\n')
    assert main(["data", "prepare", str(long), "--tokenizer", "bytes", "--out", str(tmp_path / "out")]) == 2
    assert "longer than 1 MiB" in " ".join(capfd.readouterr().err.split())


def test_a_tokenizer_that_panics_is_a_sentence(tmp_path, text, capfd):
    (tmp_path / "t.json").write_text(json.dumps(PANIC))
    flags = ["--tokenizer", str(tmp_path / "t.json"), "--out", str(tmp_path / "out")]
    assert main(["data", "prepare", str(text), *flags]) == 2
    error = capfd.readouterr().err
    assert "gave up in its own code" in error and "panicked" not in error and "Traceback" not in error


@pytest.mark.parametrize(
    "content, words",
    [
        (b"[" * 100_000, "levels deep"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"3", "holds no object"),
        (b"{}", "not a tokenizer.json"),
    ],
)
def test_tokenizer_files_that_are_none(tmp_path, text, capfd, content, words):
    (tmp_path / "t.json").write_bytes(content)
    flags = ["--tokenizer", str(tmp_path / "t.json"), "--out", str(tmp_path / "out")]
    assert main(["data", "prepare", str(text), *flags]) == 2
    assert words in " ".join(capfd.readouterr().err.split())


def test_an_id_that_no_model_could_hold(tmp_path, text, capfd):
    huge = {**PANIC, "normalizer": None, "model": {**PANIC["model"], "vocab": {"a": 4_000_000_000, "<|endoftext|>": 1}}}
    (tmp_path / "t.json").write_text(json.dumps(huge))
    flags = ["--tokenizer", str(tmp_path / "t.json"), "--out", str(tmp_path / "out")]
    assert main(["data", "prepare", str(text), *flags]) == 2
    assert "its largest id is 4,000,000,000" in " ".join(capfd.readouterr().err.split())


def on_a_terminal(*words):
    """What `halfbyte ...` writes on a terminal, as bytes."""
    leader, follower = pty.openpty()
    wide = {**os.environ, "COLUMNS": "200"}
    code = "from halfbyte.cli.main import entry; entry()"
    done = subprocess.Popen([sys.executable, "-c", code, *words], stdout=follower, stderr=follower, env=wide)
    os.close(follower)
    shown = b""
    try:
        while part := os.read(leader, 65536):
            shown += part
    except OSError:  # how a terminal ends
        pass
    os.close(leader)
    return done.wait(), shown


@pytest.mark.slow
def test_a_source_that_is_markup_or_a_command_to_the_terminal(tmp_path):
    """A name that would clear the screen, set the title, or be a tag: shown as text, spelled out."""
    evil = "[/bold][red]x\x1b[2J\x1b]0;owned\x07\x9b31m"
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "some \x1b[2J words " * 30, "source": evil}) + "\n" for _ in range(20)))
    flags = ["--tokenizer", "bytes", "--seq-len", "16", "--out", str(tmp_path / "set")]
    code, shown = on_a_terminal("data", "prepare", str(path), *flags)
    assert code == 0, shown
    assert b"\x1b[2J" not in shown and b"\x1b]0;" not in shown and b"\x07" not in shown
    assert rb"[/bold][red]x\x1b[2J" in b"".join(shown.split())
    code, shown = on_a_terminal("data", "sample", str(tmp_path / "set"))
    assert code == 0, shown
    assert b"\x1b[2J" not in shown and rb"\x1b[2J" in shown


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--seed", "-1"], ["--rows", "0"], ["--rows", "-3"]])
def test_samples_out_of_range(prepared, capfd, flags):
    assert main(["data", "sample", str(prepared), *flags]) == 2
    assert flags[0] in capfd.readouterr().err
