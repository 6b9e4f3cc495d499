"""Results of earlier versions. Oracle: docs/evidence/playbook, which a run on one H200 wrote."""

import json
from pathlib import Path

import pytest

from halfbyte.cli.main import main
from halfbyte.study import STAGES, StageRecords, make_decision
from halfbyte.study.playbook_report import evidence_rows

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "playbook" / "playbook.json"
FIGURES = ("what", "values", "limit", "verdict", "made_by")


@pytest.fixture(scope="module")
def written():
    return json.loads(EVIDENCE.read_text(encoding="utf-8"))


@pytest.fixture
def directory(tmp_path, written):
    """The result directory that the run left: one numbered file per stage."""
    folder = tmp_path / "playbook"
    (folder / "records").mkdir(parents=True)
    for number, (stage, record) in enumerate(written["records"].items()):
        (folder / "records" / f"{number:02d}-{stage}.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


def test_decision_of_an_earlier_version_is_unchanged(directory, written):
    decision = make_decision(StageRecords(directory / "records"))
    assert json.loads(json.dumps(vars(decision))) == written["decision"]


def test_figures_of_an_earlier_version_are_unchanged(directory, written):
    before = {point["what"]: {name: point[name] for name in FIGURES} for point in written["points"]}
    now = {point.what: vars(point) for point in evidence_rows(StageRecords(directory / "records"))}
    assert len(before) == 28 and now == before


@pytest.mark.parametrize("stage, changes, opens", [
    ("parity", {"complete": False}, True), ("plan", {"seeds": 0}, True), ("parity", {}, False), ("bench", {}, False),
])  # fmt: skip
def test_cut_study_of_an_earlier_version_goes_on(directory, written, stage, changes, opens):
    records = StageRecords(directory / "records")
    assert all(records.is_over(name, 60.0) for name in STAGES)
    record = {name: value for name, value in written["records"][stage].items() if name != "stage"}
    records.put(stage, **record | {"data": record["data"] | changes})
    assert records.is_over(stage, 60.0) != opens


@pytest.mark.filterwarnings("ignore:.*was renamed:FutureWarning")  # a config that 0.1 wrote, under a name of its own
def test_report_of_an_earlier_version_is_written_again(directory, written, capfd):
    model = EVIDENCE.with_name("llama-20m.json")
    stored = {path.name: path.read_bytes() for path in (directory / "records").iterdir()}
    assert main(["playbook", str(model), "--out", str(directory), "--report"]) == 0
    assert written["decision"]["sentence"] in " ".join(capfd.readouterr().out.split())
    again = json.loads((directory / "playbook.json").read_text(encoding="utf-8"))
    assert again["decision"] == written["decision"]
    assert {path.name: path.read_bytes() for path in (directory / "records").iterdir()} == stored
