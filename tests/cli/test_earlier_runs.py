"""Run directories, a study and a user recipe that earlier versions wrote: resume, evaluate, generate, verify, export.

`runs/e649e66.tar.xz`: four NVFP4 steps by the command of commit e649e66 (one layer, synthetic data, JAX 0.10.2, no
report), which sealed its config alone. LOSSES are those of two steps more by that commit's own resume.

`runs/8cfaecd.tar.xz` (JAX 0.10.2, CPU): `run-nvfp4`, 8 steps of the demo with one layer; `run-own`, 4 steps with the
user recipe `my_recipe.py:mine`; `study`, a parity study of nvfp4 with three seeds of 6 steps. Every config holds all
fields of that commit.
"""

import json
import tarfile
from pathlib import Path

import pytest

from halfbyte.cli.main import main
from halfbyte.hf import HfFolder
from halfbyte.study.study_plan import plan_from_json
from halfbyte.train.run_directory import open_run_directory
from halfbyte.train.train_config import PrecisionConfig

pytestmark = pytest.mark.usefixtures("one_device")

RUNS = Path(__file__).with_name("runs")
STUDY = "parity demo --candidates nvfp4 --seeds 3 --steps 6 --radar -1 --no-controls --batch 4 --seq 64 --out study"
SAME = ("verdict", "scope", "runs", "ranking", "controls")  # `sees` counts that the spread is an estimate since
LOSSES, VALIDATION = (4.2258076667785645, 4.187419891357422), 4.205428123474121


@pytest.fixture
def run(tmp_path):
    return unpacked("e649e66", tmp_path / "run")


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The files of 8cfaecd, in the current directory."""
    monkeypatch.chdir(unpacked("8cfaecd", tmp_path / "8cfaecd"))
    return Path()


def unpacked(commit, to):
    with tarfile.open(RUNS / f"{commit}.tar.xz") as archive:
        archive.extractall(to, filter="data")
    return to


@pytest.mark.slow
def test_it_resumes_where_its_own_version_would(run, capfd):
    assert main(["train", "--run-dir", str(run), "--steps", "6", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    fifth, sixth = (line["loss"] for line in lines if line.get("step", 0) > 4 and "grad_norm" in line)
    assert fifth == pytest.approx(LOSSES[0], rel=1e-5)  # of the weights that were read; another machine sums otherwise
    assert (sixth, found["validation"]["all"]) == pytest.approx((LOSSES[1], VALIDATION), rel=1e-3)


def test_it_is_verified_and_exported(run, tmp_path):
    assert main(["verify", str(run)]) == 0
    assert main(["export", str(run), "--out", str(tmp_path / "hf")]) == 0
    with HfFolder(tmp_path / "hf") as exported:
        assert exported.read("model.layers.0.mlp.down_proj.weight").shape == (32, 32)


@pytest.mark.slow
def test_a_run_of_8cfaecd_is_continued_evaluated_sampled_and_exported(written, capfd):
    run = written / "run-nvfp4"
    assert main(["train", "--run-dir", str(run), "--steps", "12", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["step"] == 12
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "grad_norm" in row}
    assert min(losses) < 9 and max(losses) == 12 and losses[12] < losses[min(losses)]
    assert main(["eval", str(run)]) == 0
    assert main(["generate", str(run), "--prompt", "The", "--max-tokens", "4"]) == 0
    assert main(["verify", str(run)]) == 0
    assert main(["export", str(run), "--out", "hf"]) == 0


@pytest.mark.slow
def test_a_run_of_8cfaecd_with_a_user_recipe_is_continued(written, capfd):
    assert main(["train", "--run-dir", "run-own", "--recipe", "my_recipe.py:mine", "--steps", "6", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["step"] == 6


def test_the_report_of_a_study_of_8cfaecd_is_written_again(written):
    before = json.loads((written / "study/report.json").read_text())
    for name in ("report.json", "report.html", "report.md"):
        (written / "study" / name).unlink()
    assert main([*STUDY.split(), "--report"]) == 3  # no broken control beside it: CANNOT TELL
    after = json.loads((written / "study/report.json").read_text())
    assert {name: after[name] for name in SAME} == {name: before[name] for name in SAME}


REMOVED = [("precision", PrecisionConfig, field) for field in getattr(PrecisionConfig, "REMOVED", {})]


@pytest.mark.filterwarnings("ignore:.*was renamed:FutureWarning")  # the file has a name of its own: its old keys warn
@pytest.mark.parametrize("group, kind, field", REMOVED)
def test_a_removed_field_is_ignored_at_its_default_and_otherwise_one_sentence(written, group, kind, field, capfd):
    run = written / "run-nvfp4"
    values = json.loads((run / "config.json").read_text())
    assert values[group][field] == kind.REMOVED[field].default
    assert open_run_directory(run).config.steps == 8
    Path("changed.json").write_text(json.dumps(values | {group: values[group] | {field: 7}}))
    assert main(["train", "--config", "changed.json", "--steps", "1"]) == 2
    sentence = f"{group}.{field}=7: this version has no {group}.{field}; {kind.REMOVED[field].instead}"
    assert f"changed.json: {sentence}" in " ".join(capfd.readouterr().err.split())


def test_a_plan_with_a_screening_round_is_refused():
    with pytest.raises(ValueError, match="plan.json has a screening round"):
        plan_from_json({"version": 2, "screen": {"steps": 3, "keep": "2"}}, "plan.json")
