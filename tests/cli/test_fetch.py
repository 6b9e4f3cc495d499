"""`halfbyte fetch`, and what commands say of addresses of buckets. The store is a directory, as in
tests/checkpoint/test_copying.py, which tries the rest of it."""

import json

import pytest

from halfbyte.checkpoint import Copy, bucket_copy, object_store
from halfbyte.checkpoint.checkpoint_record import write_file_list
from halfbyte.cli.main import main

URL = "s3://bucket/runs/a b"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A copy of a run of two checkpoints, made without waiting."""

    def spec_of(url):
        return {"driver": "file", "path": f"{tmp_path}/{url.partition('://')[2]}/"}

    monkeypatch.setattr(object_store, "spec_of", spec_of)
    monkeypatch.setattr(bucket_copy, "LOOK_S", 0.0)
    run = tmp_path / "run"
    for step in ("2", "10"):
        (run / "checkpoints" / step).mkdir(parents=True)
        (run / "checkpoints" / step / "array").write_bytes(bytes(2**20))
        write_file_list(run / "checkpoints" / step)
    (run / "config.json").write_text("{}")
    assert Copy(URL, run, "0123456789abcdef", keep=0, keep_every=0, take_over=False, say=print).close()["missing"] == []
    return tmp_path / "bucket" / "runs" / "a b"


def test_list_shows_what_is_there(store, capsys):
    capsys.readouterr()
    assert main(["fetch", URL, "--list"]) == 0
    shown = capsys.readouterr().out
    assert "run 0123456789abcdef" in shown and shown.index(" 2 ") < shown.index("10 ") and "1.0" in shown
    assert main(["fetch", URL, "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["run"] == "0123456789abcdef" and listed["writer"] is None
    assert list(listed["checkpoints"]) == ["2", "10"]
    files, size = listed["checkpoints"]["2"]
    assert files == 2 and size > 2**20


def test_fetch_says_how_to_go_on_and_refuses_in_one_sentence(store, tmp_path, capsys):
    capsys.readouterr()
    assert main(["fetch", URL, str(tmp_path / "to"), "--step", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["step"], result["files"], result["run_dir"]) == (2, 3, str(tmp_path / "to"))
    assert (tmp_path / "to" / "checkpoints" / "2").is_dir() and not (tmp_path / "to" / "checkpoints" / "10").exists()
    assert main(["fetch", URL, str(tmp_path / "new")]) == 0
    out, err = capsys.readouterr()
    assert "go on with" in out and f"train --run-dir {tmp_path / 'new'}" in out and "3 files, 1.0 MiB" in err
    (damaged,) = store.glob("*/checkpoints/10/array@*")
    damaged.write_bytes(bytes(2**20 - 1))
    for words, said in (
        ([URL, str(tmp_path / "other")], "is not what was written"),
        ([URL, str(tmp_path / "to")], "holds something else"),
        ([URL], "DIR is empty"),
        ([URL, str(tmp_path / "other"), "--step", "4"], "has no checkpoint 4; it has: [2, 10]"),
        (["s3://bucket/nothing", str(tmp_path / "other")], "holds no copy of a run"),
    ):
        assert main(["fetch", *words]) == 2
        error = capsys.readouterr().err
        assert said in " ".join(error.split()) and "Traceback" not in error


@pytest.mark.parametrize(
    "words",
    [
        ["train", "demo", "--run-dir", URL],
        ["train", "demo", f"--run_dir={URL}"],
        ["train", "demo", "--init-from", URL],
        ["launch", "--", "train", "demo", "--run-dir", URL],
        ["generate", URL],
        ["eval", URL],
        ["compare", "runs/a", "gs://bucket/b"],
        ["verify", URL],
        ["export", URL, "--out", "x"],
        ["inspect", URL],
        ["parity", URL],
    ],
)
def test_every_command_says_how_a_run_gets_out_of_a_bucket(words, capsys):
    assert main(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "is in a bucket, and a run directory is local" in said and "halfbyte fetch" in said and "--copy-to" in said


def test_prompt_may_be_an_address(capsys):
    assert main(["generate", "no-such-run", "--prompt", URL]) == 2
    assert "is in a bucket" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (["--copy-to", "bucket"], "is not the address of a bucket"),
        (["--copy-keep", "2"], "need a copy"),
        (["--copy-take-over"], "need a copy"),
        (["--copy-to", URL, "--copy-keep", "-1"], "--copy-keep"),
    ],
)
def test_flags_of_a_copy_are_checked_before_anything_is_loaded(words, said, capsys):
    assert main(["train", "demo", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
