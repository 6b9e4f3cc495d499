"""What a checkpoint's record may say, under a CRC that anybody can compute. Oracle: what a run writes."""

import json

import pytest

from halfbyte.checkpoint import CheckpointManager
from halfbyte.io.dataclass_json import to_dict
from halfbyte.train import create_state, run_mesh
from halfbyte.train.resume import resume_or_initialize
from halfbyte.train.session import count_discarded_rows
from tiny import tiny

pytestmark = pytest.mark.usefixtures("one_device")

CONFIG = tiny()
WHOLE = {"config": to_dict(CONFIG), "data": {"next_index": 2}, "data_set": "synthetic"}
BACK = {"step": 1, "at": 2, "reason": "x", "recipe": "bf16", "skipped": 1}
FORGED = (
    {"data": {"next_index": -3}}, {"data": {"next_index": 0}}, {"data": {"next_index": 3}}, {"data": None},
    {"data": {"next_index": True}}, {"config": None}, {"returns": [{**BACK, "recipe": "theirs.py:x"}]},
    {"returns": [{**BACK, "skipped": -5}]}, {"returns": [{"step": 1}]}, {"returns": [{**BACK, "more": 1}]},
)  # fmt: skip


@pytest.fixture(scope="module")
def state():
    return create_state(CONFIG, run_mesh(CONFIG))


def started(folder, state, extra):
    with_record = CheckpointManager(folder, say=lambda text: None)
    with_record.save(2, state.items(), extra=extra)
    with_record.wait()
    try:
        return resume_or_initialize(
            CONFIG, run_mesh(CONFIG), with_record, content="synthetic", allow=False, say=lambda text: None
        )
    finally:
        with_record.close()


@pytest.mark.slow
def test_forged_record_is_refused(state, tmp_path):
    assert started(tmp_path / "whole", state, WHOLE).step == 2
    assert started(tmp_path / "back", state, {**WHOLE, "data": {"next_index": 3}, "returns": [BACK]}).step == 2
    for number, forged in enumerate(FORGED):
        with pytest.raises(ValueError, match=r"checkpoint|config"):
            started(tmp_path / str(number), state, {**WHOLE, **forged})


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
