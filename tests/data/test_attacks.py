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


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n} " + "word " * 12}) + "\n" for n in range(60)))
    return path


@pytest.fixture
def refused(tmp_path, text, capfd):
    """refused(*flags) -> the one paragraph of a `data prepare` that ends with 2 and leaves no data set."""

    def run(*flags, source=text):
        base = [] if "--tokenizer" in flags else ["--tokenizer", "bytes"]
        base += [] if "--out" in flags else ["--out", str(tmp_path / "out")]
        assert main(["data", "prepare", str(source), *base, *flags]) == 2
        error = capfd.readouterr().err
        assert "Traceback" not in error and error.count("halfbyte:") == 1
        assert not (tmp_path / "out").exists()
        return " ".join(error.split())

    return run


def test_rewritten_set_is_not_read_from_old_readers(tmp_path, text):
    """Readers are shared in the process; a data set made anew at the same place must not be read from the old one."""
    first = prepare(text, tokenizer="bytes", out=tmp_path / "set", seq_len=16, val_fraction=0.0).directory
    before = open_dataset(first).read_rows("train").copy()
    text.write_text(json.dumps({"text": "something else entirely " * 40}))
    prepare(text, tokenizer="bytes", out=tmp_path / "set", seq_len=16, val_fraction=0.0, overwrite=True)
    after = open_dataset(first).read_rows("train")
    assert before.tobytes() != after.tobytes()


@pytest.mark.parametrize("target", ["there", "dangling"])
def test_out_at_a_link_is_refused(tmp_path, refused, target):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / target)
    assert "a symbolic link to" in refused("--out", str(tmp_path / "link"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "link", "there"]


def test_out_that_cannot_be_made_is_refused(tmp_path, text, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out in ("x" * 300, "a\nb", "", "a.jsonl"):
        refused("--out", out)
        assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"], out
    with pytest.raises(ValueError, match="control character"):
        prepare(text, tokenizer="bytes", out="a\0b")


def test_flags_out_of_range_are_refused_by_name(refused):
    for *flags, words in (
        ("--seq-len", "99999999999", "seq_len 99999999999"),
        ("--val-fraction", "nan", "val_fraction nan"),
        ("--tokenizer", "bpe:99999999999999", "bpe:"),
        ("--source", "s" * 500, "--source must have"),
    ):
        assert words in refused(*flags)


def test_deep_records_and_long_lines_are_refused(tmp_path, refused, monkeypatch):
    deep, long = tmp_path / "deep.jsonl", tmp_path / "long.jsonl"
    deep.write_text('{"text": "good"}\n{"text": "x", "meta": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    assert "deep.jsonl, line 2: not JSON" in refused(source=deep)
    monkeypatch.setattr("halfbyte.data.text_files.MAX_LINE_BYTES", 1 << 20)
    long.write_text('{"text": "good"}\n{"text": "' + "x" * (4 << 20) + '"}\n')
    assert "longer than 1 MiB" in refused(source=long)


HUGE = {**PANIC, "normalizer": None, "model": {**PANIC["model"], "vocab": {"a": 4_000_000_000, "<|endoftext|>": 1}}}


@pytest.mark.parametrize("content, words", [
    (b"[" * 100_000, "levels deep"), (b"\xff\xfe", "not UTF-8"), (b'{"a": 1, "a": 2}', "twice"),
    (b"3", "holds no object"), (b"{}", "not a tokenizer.json"),
    (json.dumps(PANIC).encode(), "gave up in its own code"),
    (json.dumps(HUGE).encode(), "its largest id is 4,000,000,000"),
])  # fmt: skip
def test_file_that_is_no_tokenizer_is_refused(tmp_path, refused, content, words):
    (tmp_path / "t.json").write_bytes(content)
    error = refused("--tokenizer", str(tmp_path / "t.json"))
    assert words in error and "panicked" not in error


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
def test_control_characters_of_sources_and_text_are_escaped(tmp_path):
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
