"""`halfbyte compare` on metrics of MaxText. Oracle: the numbers written into the files."""

import importlib.util
import json

import numpy as np
import pytest

from halfbyte.cli.main import main
from halfbyte.evaluation.loss_curves import read_curve
from halfbyte.train.metric_writers import TensorBoardSink, read_scalar_events

WEIGHTS = 128.0  # targets of a step


def maxtext_rows(gap=0.0, seed=0, steps=100, time=0.5):
    noise = np.random.default_rng(seed).normal(0, 0.2, steps)
    own = np.random.default_rng(1000 + 10 * seed + round(gap * 100)).normal(0, 0.005, steps)
    return [
        {
            "learning/loss": 3 + noise[step] + gap + own[step],
            "learning/total_weights": WEIGHTS,
            "learning/grad_norm": 1.0,
            "perf/step_time_seconds": time,
            "perf/per_device_tokens_per_sec": WEIGHTS / time,
            "perf/per_device_tflops_per_sec": 2.0,
            "step": float(step),
            "run_name": "t",
        }
        for step in range(steps)
    ]


def write_metrics(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_metrics_file_is_a_curve(tmp_path):
    rows = maxtext_rows(steps=5)
    path = write_metrics(tmp_path / "metrics.json", [*rows, {"eval/avg_loss": 2.5, "step": 4.0, "run_name": "t"}])
    curve = read_curve(path, "run")
    assert curve.steps.tolist() == [1, 2, 3, 4, 5] and curve.tokens.tolist() == [128, 256, 384, 512, 640]
    assert curve.loss.tolist() == [row["learning/loss"] for row in rows]
    assert curve.column("step_time_s").tolist() == [0.5] * 5
    assert [values.tolist() for values in curve.validation()] == [[640], [2.5]]


def test_resumed_metrics_file_keeps_the_later_rows(tmp_path):
    """MaxText appends to its file: steps after the checkpoint are logged twice. Another begins after step 0."""
    first, second = maxtext_rows(steps=6), maxtext_rows(gap=1.0, steps=8)[4:]
    resumed = read_curve(write_metrics(tmp_path / "a", first + second), "a")
    assert resumed.steps.tolist() == list(range(1, 9))
    assert resumed.loss.tolist() == [row["learning/loss"] for row in first[:4] + second]
    assert read_curve(write_metrics(tmp_path / "b", second), "b").tokens.tolist() == [640, 768, 896, 1024]


def test_tensorboard_directory_is_the_same_curve(tmp_path):
    rows = maxtext_rows(steps=4)
    sink = TensorBoardSink(tmp_path / "tensorboard")
    for row in rows:
        sink.write({**row, "step": int(row["step"])})
    sink.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert next(iter(read_scalar_events(events))) == (0, "learning/loss", float(np.float32(rows[0]["learning/loss"])))
    for path in (tmp_path, tmp_path / "tensorboard"):  # MaxText's run directory, and the folder in it
        curve = read_curve(path, "run")
        np.testing.assert_array_equal(curve.loss, np.float32([row["learning/loss"] for row in rows]))
        assert curve.tokens.tolist() == [128, 256, 384, 512]
    whole = events.read_bytes()
    events.write_bytes(whole[:-7])  # the writer was killed
    assert len(read_curve(tmp_path, "run").rows) == 3


@pytest.mark.skipif(importlib.util.find_spec("tensorboardX") is None, reason="tensorboardX is not installed")
def test_events_of_tensorboardx_are_read(tmp_path):
    """MaxText writes with tensorboardX; text events, as of its config, are skipped."""
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("quantization", "te_nvfp4")
        for row in maxtext_rows(steps=3):
            for name, value in row.items():
                if name not in ("step", "run_name"):
                    writer.add_scalar(name, np.array(value), int(row["step"]))
    assert read_curve(tmp_path, "run").steps.tolist() == [1, 2, 3]


def test_two_runs_are_compared(tmp_path, capfd):
    base = write_metrics(tmp_path / "bf16.json", maxtext_rows())
    other = write_metrics(tmp_path / "nvfp4.json", maxtext_rows(gap=0.05, time=0.25))
    assert main(["compare", str(base), str(other), "--out", "", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    first, second = found["runs"]
    assert first["gap"] is None and second["gap"]["value"] == pytest.approx(0.05, abs=0.01)
    assert 0 < second["gap"]["error"] < 0.01 and second["speedup"] == pytest.approx(2.0)
    assert second["speed"]["tokens_per_s_per_device"] == pytest.approx(512)
    assert found["verdicts"] == []


@pytest.mark.parametrize(("gap", "word"), [(0.0, "PASS"), (0.05, "FAIL")])
def test_several_seeds_have_a_verdict_without_controls(tmp_path, capfd, gap, word):
    def arm(name, gap):
        files = (write_metrics(tmp_path / f"{name}{seed}.json", maxtext_rows(gap=gap, seed=seed)) for seed in range(4))
        return ",".join(map(str, files))

    arms = arm("bf16_", 0.0), arm("nvfp4_", gap + 0.0001)
    assert main(["compare", *arms, "--out", "", "--margin", "0.5%", "--json"]) == 0
    (verdict,) = json.loads(capfd.readouterr().out)["verdicts"]
    assert verdict["word"] == word and "4 seeds" in verdict["reason"]
    assert main(["compare", *arms, "--out", ""]) == 0
    text = " ".join(capfd.readouterr().out.split())
    assert f"{word} nvfp4_0.json: " in text
    assert "without controls: no twin of the baseline and no recipe that is broken on purpose ran" in text


def test_errors_name_the_file_and_the_remedy(tmp_path, capfd):
    ours = tmp_path / "run"
    ours.mkdir()
    (ours / "metrics.jsonl").write_text(json.dumps({"step": 1, "tokens": 8, "loss": 3.0}) + "\n")
    theirs = write_metrics(tmp_path / "m.json", maxtext_rows(steps=2))
    empty = write_metrics(tmp_path / "empty.json", [{"step": 0.0, "other": 1.0}])
    assert main(["compare", str(theirs), str(empty), "--out", ""]) == 2
    assert "empty.json holds no metrics of MaxText (learning/loss)" in " ".join(capfd.readouterr().err.split())
    assert main(["compare", f"{theirs},{theirs}", str(ours), "--out", ""]) == 2
    assert "runs joined by commas are seeds of MaxText runs" in " ".join(capfd.readouterr().err.split())
