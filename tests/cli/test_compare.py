"""`halfbyte compare` as typed, on run directories with known numbers."""

import json
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest

from halfbyte.cli.compare import draw_curves, speed_up
from halfbyte.cli.compare_runs import short_names
from halfbyte.cli.main import main
from halfbyte.evaluation.loss_curves import MetricCurve
from halfbyte.train.run_identity import RunIdentity, save_identity

SVG = "{http://www.w3.org/2000/svg}"
COLOURS = ("#0072b2", "#c04a00")  # the first two of io/page.css


def make_run(folder, *, recipe, gap, time=1.0, steps=100, model=None, seed=0, batch=8):
    noise = np.random.default_rng(seed).normal(0, 0.2, steps)
    own = np.random.default_rng(100 * seed + len(recipe)).normal(0, 0.01, steps)
    folder.mkdir(parents=True)
    rows = [
        {"step": s, "tokens": 1000 * s, "loss": 3 + noise[s - 1] + gap + own[s - 1], "step_time_s": time,
         "tokens_per_s_per_device": 1000 / time, "tflops_per_device": 2.0, "mfu": 0.25, "input_wait_s": 0.0}
        for s in range(1, steps + 1)
    ]  # fmt: skip
    rows[-1]["validation_loss"] = 3 + gap
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"name": "demo", "recipe": recipe, "batch": batch, "seed": seed, "model": {"layers": 4, **(model or {})}}
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


@pytest.mark.slow
def test_numbers(runs, tmp_path, capfd):
    assert main(["compare", *map(str, runs), "--out", str(tmp_path / "out" / "a.svg"), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    base, other = found["runs"]
    assert base["gap"] is None and other["gap"]["value"] == pytest.approx(0.05, abs=0.02)
    assert 0 < other["gap"]["error"] < 0.01  # the shared noise of 0.2 falls out of the difference
    assert base["loss_error"] > 0.02
    assert other["speedup"] == pytest.approx(2.0)
    assert other["validation_loss"] == pytest.approx(3.05)
    assert found["config"] == {"model.layers": [4, 6], "recipe": ["bf16", "nvfp4"]}
    assert [round(cell["value"], 2) for cell in found["evaluations"]["arc acc"]] == [0.5, 0.55]
    assert found["picture"] == str(tmp_path / "out" / "a.svg")
    picture = ElementTree.fromstring((tmp_path / "out" / "a.svg").read_text())
    # Loss and speed, as logged and smoothed; of the second run also its difference, and the mean at its end.
    assert Counter(line.get("stroke") for line in picture.iter(f"{SVG}polyline")) == {COLOURS[0]: 4, COLOURS[1]: 7}
    assert [dot.get("fill") for dot in picture.iter(f"{SVG}circle")] == list(COLOURS)
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert f"other: {other['gap']['value']:+.4f} over the last 20 steps" in texts and "base" in texts


@pytest.mark.slow
def test_another_device_is_no_speed_up(runs, capfd):
    (runs[1] / "manifest.json").write_text(json.dumps({"device": "h200"}))
    other = compared(capfd, *runs)["runs"][1]
    assert other["device"] == "h200" and other["speedup"] is other["speedup_90"] is None and other["gap"]


@pytest.mark.slow
def test_what_people_read(runs, tmp_path, capfd):
    assert main(["compare", *map(str, runs), "--out", "", "--last", "10"]) == 0
    out = capfd.readouterr().out
    for text in ("end of training", "speed, medians", "2.00x", "loss minus base", "model.layers", "arc acc", "25.0%"):
        assert text in out
    assert "± is within one run, not over seeds" in out
    assert not list(tmp_path.glob("**/*.svg"))


def test_picture_places_points_by_its_axes():
    """Oracle: the tick labels of the axes, read from the SVG, map the ends of the lines back to their values."""
    rows = [
        {"step": s, "tokens": 100.0 * s, "loss": 4.0 - s / 60, "tokens_per_s_per_device": 7.0} for s in range(1, 61)
    ]
    base = MetricCurve("base", tuple(rows))
    other = MetricCurve("other", tuple({**row, "loss": row["loss"] + 0.25} for row in rows))
    picture = ElementTree.fromstring(draw_curves([base, other], {"other": base}, 1, None))
    loss, apart, _ = picture.iter(f"{SVG}g")
    for panel, first, last in ((loss, 4.25 - 1 / 60, 3.25), (apart, 0.25, 0.25)):
        strong = [p for p in panel.iter(f"{SVG}polyline") if p.get("stroke") == COLOURS[1] and p.get("opacity") == "1"]
        points = [tuple(map(float, point.split(","))) for point in strong[0].get("points").split()]
        x, y = axis_of(panel, "x"), axis_of(panel, "y")
        assert [x(points[0][0]), x(points[-1][0])] == pytest.approx([100, 6000], abs=20)
        assert [y(points[0][1]), y(points[-1][1])] == pytest.approx([first, last], abs=0.01)


def test_picture_of_a_diverged_and_of_a_short_run():
    rows = [{"step": s, "tokens": 100.0 * s, "loss": 3.0} for s in range(1, 61)]
    base = MetricCurve("base", tuple(rows))
    broken = MetricCurve("<b>", tuple({**row, "loss": np.nan if row["step"] > 50 else 3.1} for row in rows))
    short = MetricCurve("short", tuple(rows[:1]))
    drawn = draw_curves([base, broken, short], {c.name: base for c in (broken, short)}, 5, None)
    picture = ElementTree.fromstring(drawn)  # escaped: `<b>` is no element
    assert "nan" not in drawn and "var(" not in drawn
    assert [len(list(panel.iter(f"{SVG}polyline"))) for panel in picture.iter(f"{SVG}g")] == [4, 4]  # no speed is known


def test_the_picture_is_svg_only(runs, tmp_path, capfd):
    assert main(["compare", *map(str, runs), "--out", str(tmp_path / "b.png")]) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "compare writes SVG only" in said and f"use --out {tmp_path / 'b.svg'}" in said
    assert not (tmp_path / "b.png").exists()


def axis_of(panel, axis):
    """Pixels to values, a line through the tick labels of one axis of a chart."""
    anchor, shift = {"x": ("middle", 0), "y": ("end", 4)}[axis]  # labels of the y axis stand 4 below their lines
    ticks = [t for t in panel.iter(f"{SVG}text") if t.get("text-anchor") == anchor and t.text != "tokens"]
    values = [float(t.text.rstrip("k")) * (1000 if t.text.endswith("k") else 1) for t in ticks]
    return np.poly1d(np.polyfit([float(t.get(axis)) - shift for t in ticks], values, 1))


def test_only_a_picture_of_its_own_is_overwritten(runs, tmp_path, capfd, monkeypatch):
    """By default, too. A link to one is replaced, not what the link names."""
    monkeypatch.chdir(tmp_path)
    picture = tmp_path / "compare.svg"
    picture.write_text("<svg>mine</svg>")
    assert main(["compare", *map(str, runs)]) == 2
    assert "compare.svg: exists and is no picture of" in " ".join(capfd.readouterr().err.split())
    assert picture.read_text() == "<svg>mine</svg>"
    assert main(["compare", *map(str, runs), "--out", "a.svg"]) == 0
    before = (tmp_path / "a.svg").read_text()
    (tmp_path / "b.svg").symlink_to("a.svg")
    assert main(["compare", *map(str, runs[:2]), "--last", "5", "--out", "b.svg"]) == 0
    assert not (tmp_path / "b.svg").is_symlink() and (tmp_path / "a.svg").read_text() == before


GAPS = {0: 0.05, 1: 0.06, 2: 0.04}


@pytest.fixture
def seeds(tmp_path):
    """Three seeds of two arms; the noise of a seed, 0.2 a step, is shared by its two runs alone."""
    base = [make_run(tmp_path / f"bf16-{s}", recipe="bf16", gap=0.0, seed=s) for s in GAPS]
    return base, [make_run(tmp_path / f"nvfp4-{s}", recipe="nvfp4", gap=gap, seed=s) for s, gap in GAPS.items()]


def compared(capfd, *folders):
    assert main(["compare", *map(str, folders), "--out", "", "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_runs_are_paired_by_seed_and_the_interval_is_over_seeds(seeds, capfd):
    base, other = seeds
    found = compared(capfd, base[0], *reversed(other), *base[1:])  # in whatever order they are given
    assert {r["name"]: r["paired_with"] for r in found["runs"] if r["paired_with"]} == {
        f"nvfp4-{s}": f"bf16-{s}" for s in GAPS
    }
    (arm,) = found["arms"]
    assert arm["interval_is_over"] == "seeds" and arm["gap"]["count"] == 3
    # Student's t with two degrees of freedom, 2.92 standard errors; the tolerances are for the runs' own noise.
    assert arm["gap"]["mean"] == pytest.approx(0.05, abs=0.004)
    assert arm["gap"]["high"] - arm["gap"]["mean"] == pytest.approx(2.92 * 0.01 / 3**0.5, abs=0.006)


@pytest.mark.slow
def test_two_seeds_have_no_interval_over_seeds(seeds, capfd):
    base, other = seeds
    assert main(["compare", *map(str, (*base[:2], *other[:2])), "--out", ""]) == 0
    assert "2 seeds: no interval over fewer than 3" in capfd.readouterr().out


def test_a_run_without_a_baseline_of_its_seed_has_no_gap(seeds, capfd):
    base, other = seeds
    found = compared(capfd, base[0], other[1])
    assert found["runs"][1]["gap"] is None and "no baseline run has its seed 1" in found["arms"][0]["refusal"]


@pytest.mark.slow
def test_unlike_pairs_are_not_averaged(seeds, tmp_path, capfd):
    base, other = seeds
    wide = make_run(tmp_path / "wide", recipe="mxfp4", gap=0.01, seed=0, batch=16)
    found = compared(capfd, *base, *other[:1], wide)
    refused = next(arm for arm in found["arms"] if arm["name"] == "wide")
    assert refused["gap"] is None and "batch 8 against 16" in refused["refusal"]


@pytest.mark.parametrize("field", ["data", "code", "tokenizer", "file own.py"])
def test_runs_that_were_made_from_other_things_have_no_gap(tmp_path, capfd, field):
    base = make_run(tmp_path / "base", recipe="own.py:a@0123456789abcdef", gap=0.0)
    name = f"own.py:b@{'f' if 'file' in field else '0'}123456789abcdef"
    other = make_run(tmp_path / "other", recipe=name, gap=0.05)
    for folder in (base, other):
        own = {name: folder.name if name == field else "same" for name in ("data", "code", "tokenizer")}
        save_identity(folder, RunIdentity(folder.name, own["data"], made_with={"code": own["code"]}))
        (folder / "tokenizer.json").write_text(own["tokenizer"])
    assert main(["compare", str(base), str(other), "--out", "", "--json"]) == 2
    found = json.loads(capfd.readouterr().out)
    assert found["runs"][1]["gap"] is None and found["runs"][1]["speedup"] is None and found["arms"][0]["gap"] is None
    assert f"made from something else than base: {field}: " in found["runs"][1]["refusal"]


@pytest.mark.slow
def test_a_baseline_of_another_seed_on_other_data_is_refused_by_the_field(tmp_path, capfd):
    arms = [make_run(tmp_path / f"{name}{seed}", recipe=name, gap=0.0, seed=seed)
            for name in ("bf16", "nvfp4") for seed in (0, 1)]  # fmt: skip
    for folder in arms:
        save_identity(folder, RunIdentity(folder.name, f"set {folder.name[-1]}"))
    assert main(["compare", *map(str, arms), "--out", "", "--json"]) == 2
    found = {run["name"]: run for run in json.loads(capfd.readouterr().out)["runs"]}
    assert found["nvfp40"]["gap"] and not found["nvfp41"]["gap"]
    for name in ("bf161", "nvfp41"):
        assert "made from something else than bf160: data: set 0 against set 1" in found[name]["refusal"]


@pytest.mark.slow
def test_a_speed_up_has_a_spread(tmp_path, capfd):
    times = np.random.default_rng(0).uniform(0.5, 1.5, 12)
    folders = [make_run(tmp_path / name, recipe=name, gap=0.0, steps=12) for name in ("bf16", "nvfp4")]
    for folder in folders:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = [{**row, "step_time_s": time} for row, time in zip(rows, times, strict=True)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    low, high = compared(capfd, *folders)["runs"][1]["speedup_90"]
    assert low < 0.9 < 1.1 < high  # noise of 50% a step is no speed-up


@pytest.mark.slow
def test_a_speed_up_of_equal_runs_is_none_in_nine_of_ten_intervals():
    """As wide as it is called: bounds of one run over bounds of the other would hold 1 in 98%."""
    random = np.random.default_rng(0)

    def curve():
        return MetricCurve(
            "", tuple({"step": s, "step_time_s": time} for s, time in enumerate(random.normal(1, 0.1, 60)))
        )

    bounds = [speed_up(curve(), curve())[1] for _ in range(150)]
    assert 0.82 < np.mean([low <= 1 <= high for low, high in bounds]) < 0.97


def test_a_diverged_run_is_said_to_be_one(runs, capfd):
    path = runs[1] / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[60:]:
        row["loss"] = "nan"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["compare", *map(str, runs), "--out", ""]) == 0
    assert "other: 40 steps have a loss that is not finite" in capfd.readouterr().out


@pytest.mark.slow
def test_a_run_that_was_trained(tiny_run, tmp_path, capfd):
    assert main(["compare", str(tiny_run), str(tiny_run), "--out", str(tmp_path / "a.svg"), "--json"]) == 0
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


@pytest.mark.slow
def test_evaluations_that_are_none_are_passed_over(runs, capfd):
    for run in runs:
        with open(run / "evaluations.jsonl", "a") as file:
            for row in ({"step": 1}, {"task": "arc", "metrics": []}, {"task": "arc", "metrics": {"acc": {}, "f1": 1}}):
                file.write(json.dumps(row) + "\n")
    assert main(["compare", *map(str, runs), "--out", "", "--json"]) == 0
    assert list(json.loads(capfd.readouterr().out)["evaluations"]) == ["arc acc"]
