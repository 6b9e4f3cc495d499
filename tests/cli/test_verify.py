"""`halfbyte verify` on a real run, whole and damaged. Oracle: the damage that was done."""

import shutil
import tracemalloc

import pytest

from halfbyte import metrics
from halfbyte.cli.main import main
from halfbyte.cli.verify import check_metrics

pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine.*was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def run(tiny_run, tmp_path):
    shutil.copytree(tiny_run, tmp_path / "run")
    return tmp_path / "run"


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
    assert check_metrics(tmp_path).detail.startswith(said)


def test_a_step_that_ends_while_rows_are_read_is_no_damage(tmp_path, monkeypatch):
    """A run that trains has written row and checkpoint 3 by the time that rows 1 and 2 are read."""
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')

    def read_beside_a_run(path):
        rows = metrics_rows(path)
        (tmp_path / "checkpoints" / "3").mkdir(exist_ok=True)
        return rows

    metrics_rows = metrics.read_rows
    monkeypatch.setattr(metrics, "read_rows", read_beside_a_run)
    assert check_metrics(tmp_path).state == "whole"
    assert check_metrics(tmp_path).state == "NOT WHOLE"  # the row of checkpoint 3 is still not there


def test_a_giant_of_metrics_takes_no_memory(tmp_path):
    with open(tmp_path / "metrics.jsonl", "wb") as file:
        file.truncate(1 << 28)
    tracemalloc.start()
    assert check_metrics(tmp_path).state == "NOT WHOLE"
    assert tracemalloc.get_traced_memory()[1] < 1 << 26
    tracemalloc.stop()
