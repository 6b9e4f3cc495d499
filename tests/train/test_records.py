"""What a checkpoint's record may say, under a CRC that anybody can compute. Oracle: what a run writes."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from halfbyte.checkpoint import RestoredCheckpoint
from halfbyte.io.dataclass_json import to_dict
from halfbyte.train import create_state, run_mesh
from halfbyte.train.resume import resume_or_initialize
from halfbyte.train.session import count_discarded_rows
from tiny import ONE_LAYER, tiny

pytestmark = pytest.mark.usefixtures("one_device")

CONFIG = tiny(model=ONE_LAYER)
WHOLE = {"config": to_dict(CONFIG), "data": {"next_index": 2}, "data_set": "synthetic"}
BACK = {"step": 1, "at": 2, "reason": "x", "recipe": "bf16", "skipped": 1}
ROLLED_BACK = {"data": {"next_index": 3}, "returns": [BACK]}
FORGED = (
    {"data": {"next_index": -3}}, {"data": {"next_index": 1}}, {"data": {"next_index": 3}}, {"data": None},
    {"data": {"next_index": True}}, {"config": None}, {"returns": [{**BACK, "recipe": "theirs.py:x"}]},
    {"returns": [{**BACK, "skipped": -5}]}, {"returns": [{"step": 1}]}, {"returns": [{**BACK, "more": 1}]},
    {**ROLLED_BACK, "data": {"next_index": 4}},
)  # fmt: skip


@pytest.fixture(scope="module")
def resumed():
    """resumed(extra, config) -> the step at which a run resumes from a checkpoint of step 2 with this record."""
    mesh = run_mesh(CONFIG)
    items = create_state(CONFIG, mesh).items()

    def resume(extra, config=CONFIG):
        restored = RestoredCheckpoint(2, items, WHOLE | extra)
        store = SimpleNamespace(
            steps=lambda: [2], restore_latest=lambda abstract: restored, quarantine=lambda skipped: None
        )
        how = {"content": "synthetic", "allow": False, "say": lambda text: None}
        return resume_or_initialize(config, mesh, store, **how).step

    return resume


def test_forged_record_is_refused(resumed):
    assert resumed({}) == resumed(ROLLED_BACK) == 2
    for forged in FORGED:
        with pytest.raises(ValueError, match=r"checkpoint|config"):
            resumed(forged)


def test_checkpoint_beyond_the_last_step_is_refused(resumed):
    assert resumed({}, dataclasses.replace(CONFIG, steps=2)) == 2
    with pytest.raises(ValueError, match=r"checkpoint of step 2, beyond the last .*--steps 1"):
        resumed({}, dataclasses.replace(CONFIG, steps=1))


class Session:
    is_main = True

    def __init__(self, directory):
        self.directory, self.said = directory, []

    def say(self, text):
        self.said.append(text)


def test_rows_that_are_missing_before_a_checkpoint_are_said(tmp_path):
    session = Session(tmp_path)
    rows = [{"step": step} for step in (*range(1, 21), 38, 39)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert count_discarded_rows(session, 37) == rows[-2:] and "17 of the 37 steps" in session.said[0]
    assert count_discarded_rows(session, 20) == rows[-2:] and len(session.said) == 1
