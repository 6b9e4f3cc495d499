"""`halfbyte verify` on a real run, whole and damaged. Oracle: the damage that was done."""

import dataclasses
import json
import shutil
import tracemalloc

import pytest

from halfbyte import train
from halfbyte.checkpoint import CheckpointManager
from halfbyte.cli import verify
from halfbyte.cli.main import main
from halfbyte.cli.verify import verify_metrics
from halfbyte.data.text_files import sha256_of
from halfbyte.train.run_identity import load_identity, save_identity

pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine.*was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def run(tiny_run, tmp_path):
    shutil.copytree(tiny_run, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.slow
def test_a_whole_run(run, capsys):
    assert main(["verify", str(run)]) == 0
    text = capsys.readouterr().out
    assert "checkpoint 4" in text
    assert "0 parts are not whole; the run goes on from: checkpoint 4" in text


def test_damage_is_named_and_nothing_is_moved(run, capsys):
    arrays = sorted((run / "checkpoints" / "4").rglob("d/*"), key=lambda path: -path.stat().st_size)
    content = bytearray(arrays[0].read_bytes())
    content[len(content) // 2] ^= 8
    arrays[0].write_bytes(content)
    (run / "config.json").write_text((run / "config.json").read_text().replace('"seed": 0', '"seed": 1'))
    assert main(["verify", str(run)]) == 3
    text = capsys.readouterr().out
    assert "it is not what the run wrote" in text
    assert text.count("NOT WHOLE") >= 2
    assert (run / "checkpoints" / "4").is_dir()
    assert not (run / "damaged").exists()


@pytest.mark.slow
def test_checkpoints_from_before_an_allowed_change_are_whole_if_the_newest_is_of_the_config(run, capsys, monkeypatch):
    states = [verify.EARLIER, verify.GOOD]
    found = lambda store, step, opened: verify.VerifyFinding("checkpoint", states.pop(0), "")  # noqa: E731
    monkeypatch.setattr(CheckpointManager, "steps", lambda store: [4, 4])
    monkeypatch.setattr(verify, "_check_one", found)
    assert main(["verify", str(run)]) == 0 and "of an earlier config" in capsys.readouterr().out
    changed = (run / "config.json").read_text().replace('"seed": 0', '"seed": 1')
    monkeypatch.undo()
    (run / "config.json").write_text(changed)  # and sealed, by whoever knows how: no checkpoint is of this config
    known = load_identity(run)
    save_identity(run, dataclasses.replace(known, files={**known.files, "config.json": sha256_of(run / "config.json")}))
    assert main(["verify", str(run)]) == 3
    text = " ".join(capsys.readouterr().out.split())
    assert "made with another config: seed: 0 -> 1" in text and "goes on from: no checkpoint" in text


def test_a_config_that_cannot_be_read_stands_before_the_checkpoint(run, capfd):
    (run / "config.json").write_text("{}")
    assert main(["verify", str(run), "--json"]) == 3
    found, text = capfd.readouterr()
    first = json.loads(found)["parts"][0]
    assert first["part"] == "config.json, run.json" and "config.json is not what this run wrote" in first["detail"]
    assert "the run goes on from: checkpoint 4, once config.json, run.json is as it was" in text


def test_not_a_run(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"step": 1}\n{"step": 2}\n', "2 rows"),
        ('{"step": 1}\n{"step": 1000000000000000}\n', "0 lines unreadable, steps missing: 999999999999998 of 2 to "),
        ('{"step": 1}\n{"step": 2.5}\n[]\n', "2 lines unreadable, steps missing: none"),
    ],
)
def test_rows_are_counted_whatever_step_they_tell_of(tmp_path, text, said):
    (tmp_path / "metrics.jsonl").write_text(text)
    assert verify_metrics(tmp_path).detail.startswith(said)


def test_a_step_that_ends_while_rows_are_read_is_no_damage(tmp_path, monkeypatch):
    """A run that trains has written row and checkpoint 3 by the time that rows 1 and 2 are read."""
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')

    def read_beside_a_run(path):
        rows = metrics_rows(path)
        (tmp_path / "checkpoints" / "3").mkdir(exist_ok=True)
        return rows

    metrics_rows = train.read_rows
    monkeypatch.setattr(train, "read_rows", read_beside_a_run)
    assert verify_metrics(tmp_path).state == "whole"
    assert verify_metrics(tmp_path).state == "NOT WHOLE"  # the row of checkpoint 3 is still not there


@pytest.mark.slow
def test_a_giant_of_metrics_takes_no_memory(tmp_path):
    with open(tmp_path / "metrics.jsonl", "wb") as file:
        file.truncate(1 << 28)
    tracemalloc.start()
    assert verify_metrics(tmp_path).state == "NOT WHOLE"
    assert tracemalloc.get_traced_memory()[1] < 1 << 26
    tracemalloc.stop()
