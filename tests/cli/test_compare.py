"""`halfbyte compare` as typed, on run directories with known numbers."""

import json

import numpy as np
import pytest

from halfbyte.cli.compare import short_names
from halfbyte.cli.main import main


def make_run(folder, *, recipe, gap, time, steps=100, model=None):
    noise = np.random.default_rng(0).normal(0, 0.2, steps)
    own = np.random.default_rng(len(recipe)).normal(0, 0.01, steps)
    folder.mkdir(parents=True)
    rows = [
        {"step": s, "tokens": 1000 * s, "loss": 3 + noise[s - 1] + gap + own[s - 1], "step_time_s": time,
         "tokens_per_s_per_device": 1000 / time, "tflops_per_device": 2.0, "mfu": 0.25, "input_wait_s": 0.0}
        for s in range(1, steps + 1)
    ]  # fmt: skip
    rows[-1]["validation_loss"] = 3 + gap
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"name": "demo", "recipe": recipe, "batch": 8, "model": {"layers": 4, **(model or {})}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "manifest.json").write_text(json.dumps({"device": "cpu"}))
    metric = {"value": 0.5 + gap, "error": 0.01}
    (folder / "evaluations.jsonl").write_text(json.dumps({"task": "arc", "metrics": {"acc": metric}}) + "\n")
    return folder


@pytest.fixture
def runs(tmp_path):
    base = make_run(tmp_path / "base", recipe="bf16", gap=0.0, time=1.0)
    other = make_run(tmp_path / "other", recipe="nvfp4", gap=0.05, time=0.5, model={"layers": 6})
    return base, other


def test_numbers(runs, tmp_path, capfd):
    assert main(["compare", *map(str, runs), "--png", str(tmp_path / "out" / "a.png"), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    base, other = found["runs"]
    assert base["gap"] is None and other["gap"]["value"] == pytest.approx(0.05, abs=0.02)
    assert 0 < other["gap"]["error"] < 0.01  # the shared noise of 0.2 falls out of the difference
    assert base["loss_error"] > 0.02
    assert other["speedup"] == pytest.approx(2.0)
    assert other["validation_loss"] == pytest.approx(3.05)
    assert found["config"] == {"model.layers": [4, 6], "recipe": ["bf16", "nvfp4"]}
    assert [round(cell["value"], 2) for cell in found["evaluations"]["arc acc"]] == [0.5, 0.55]
    assert (tmp_path / "out" / "a.png").read_bytes().startswith(b"\x89PNG")


def test_what_people_read(runs, tmp_path, capfd):
    assert main(["compare", *map(str, runs), "--png", "", "--last", "10"]) == 0
    out = capfd.readouterr().out
    for text in ("end of training", "speed, medians", "2.00x", "loss minus base", "model.layers", "arc acc", "25.0%"):
        assert text in out
    assert not list(tmp_path.glob("**/*.png"))


def test_a_diverged_run_is_said_to_be_one(runs, capfd):
    path = runs[1] / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[60:]:
        row["loss"] = "nan"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["compare", *map(str, runs), "--png", ""]) == 0
    assert "other: 40 steps have a loss that is not finite" in capfd.readouterr().out


def test_a_run_that_was_trained(tiny_run, tmp_path, capfd):
    assert main(["compare", str(tiny_run), str(tiny_run), "--png", str(tmp_path / "a.png"), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["runs"][1]["gap"]["value"] == 0.0 and found["config"] == {}


def test_bad_input_exits_2(runs, tmp_path, capfd):
    for flags, message in (
        ([str(runs[0])], "two or more runs"),
        ([str(runs[0]), str(tmp_path)], "holds no metrics.jsonl"),
        ([*map(str, runs), "--last", "-1"], "must be 0 or more"),
    ):
        assert main(["compare", *flags]) == 2
        assert message in " ".join(capfd.readouterr().err.split())


def test_names_tell_runs_apart(tmp_path):
    a, b = tmp_path / "x" / "run", tmp_path / "y" / "run"
    assert short_names([a, b]) == ["x/run", "y/run"]
    assert short_names([a, b / "z"]) == ["run", "z"]
    assert len(set(short_names([a, a]))) == 2
