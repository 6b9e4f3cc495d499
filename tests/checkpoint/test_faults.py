"""What must not pass for a good checkpoint, and what must not be taken for a damaged one. Oracle: the arrays saved."""

import os
import shutil
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from orbax.checkpoint import v1 as ocp
from stored import abstract, filled, same, tree

from halfbyte.checkpoint import (
    CheckpointManager,
    CheckpointReadError,
    CheckpointRecord,
    CorruptCheckpointError,
    NonFiniteCheckpointError,
    checkpoint_record,
    restore,
)
from halfbyte.checkpoint.checkpoint_record import leaf_metadata
from halfbyte.checkpoint.store import suppress_late_write_errors

# Orbax drops its coroutines when a write fails.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine.*was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def poisoned_tree():
    items = tree(20)
    items["params"]["w"] = items["params"]["w"].at[3, 5].set(jnp.nan).at[4, 4].set(jnp.inf).at[5, 5].set(1e30)
    return items


@pytest.mark.slow
def test_nonfinite_state_is_not_saved(tmp_path):
    kept = filled(tmp_path / "checkpoints", steps=(10,))
    with pytest.raises(NonFiniteCheckpointError, match=r"3 in params/w"):
        kept.save(20, poisoned_tree(), extra={})
    kept.save(30, tree(30), extra={})
    assert kept.close()
    assert CheckpointManager(tmp_path / "checkpoints").steps() == [10, 30]


def test_nonfinite_checkpoint_is_skipped_for_the_one_before(tmp_path):
    """Written around our own store, as an earlier version would have: its checksums are those of what it holds."""
    filled(tmp_path / "checkpoints", steps=(10,)).close()
    items, leaves = poisoned_tree(), leaf_metadata(poisoned_tree())
    for item, content in items.items():
        for name, words in restore.checksum_tree(content).items():
            leaves[item][name]["checksum"] = words.checksum
    flat = {item: restore.flatten_for_orbax(content) for item, content in items.items()}
    writer = ocp.training.Checkpointer(tmp_path / "checkpoints")
    record = CheckpointRecord(20, leaves, {"config": {}, "data": {}}).to_json()
    writer.save_checkpointables(20, flat, force=True, custom_metadata=record)
    writer.close()
    said = []
    restored = CheckpointManager(tmp_path / "checkpoints", say=said.append).restore_latest(abstract(tree(10)))
    assert restored.step == 10
    assert "POISONED CHECKPOINT" in said[0]
    assert "3 in params/w" in said[0]


def test_renamed_or_foreign_checkpoint_is_refused(tmp_path):
    filled(tmp_path, run="aaaa").close()
    for source, name in ((10, 40), (20, 15)):
        shutil.copytree(tmp_path / str(source), tmp_path / str(name))
    ours, theirs = (CheckpointManager(tmp_path, run=run) for run in ("aaaa", "bbbb"))
    assert ours.record(10).step == 10
    for source, name in ((10, 40), (20, 15)):
        with pytest.raises(CorruptCheckpointError, match=f"of step {source}, under the name of step {name}"):
            ours.record(name)
    with pytest.raises(CorruptCheckpointError, match=r"belongs to another run \(aaaa; this one is bbbb\)"):
        theirs.record(20)


def test_passing_read_error_is_retried_and_a_lasting_one_raised(tmp_path, monkeypatch):
    """The storage fails once: the newest checkpoint is used. It keeps failing: nothing is moved, nothing is silent."""
    monkeypatch.setattr(restore, "RETRY_PAUSE_S", 0.0)
    filled(tmp_path / "checkpoints").close()
    failures = iter([OSError(5, "Input/output error")])
    real = checkpoint_record._describe

    def flaky(path):
        error = next(failures, None)
        if error:
            raise error
        return real(path)

    monkeypatch.setattr(checkpoint_record, "_describe", flaky)
    said = []
    kept = CheckpointManager(tmp_path / "checkpoints", say=said.append)
    restored = kept.restore_latest(abstract(tree(20)))
    assert restored.step == 20
    assert same(restored.items, tree(20))
    assert not restored.skipped
    assert "Input/output error" in said[0]
    failures = iter([OSError(5, "Input/output error")] * 10)
    with pytest.raises(CheckpointReadError, match=r"step 20 cannot be read.*left where it is"):
        kept.restore_latest(abstract(tree(20)))
    assert kept.steps() == [10, 20]


def test_damaged_list_of_files_is_refused(tmp_path):
    """A flip may leave JSON that is no list of ours."""
    (tmp_path / "a").write_text("1")
    for damaged in ('{"a": {}}', '{"a": null}', '["a"]', '{"a": {"bytes": "1"}}', "{"):
        (tmp_path / checkpoint_record.FILE_LIST).write_text(damaged)
        with pytest.raises(CorruptCheckpointError, match=rf"{checkpoint_record.FILE_LIST} is damaged|file a "):
            checkpoint_record.check_file_list(tmp_path)


def test_unwritten_list_of_files_does_no_harm(tmp_path):
    filled(tmp_path / "checkpoints").close()
    newest = tmp_path / "checkpoints" / "20"
    (newest / checkpoint_record.FILE_LIST).rename(newest / f".{checkpoint_record.FILE_LIST}.abc.tmp")
    restored = CheckpointManager(tmp_path / "checkpoints").restore_latest(abstract(tree(20)))
    assert restored.step == 20


def test_only_closed_event_loops_are_not_printed(monkeypatch):
    passed = []
    monkeypatch.setattr(sys, "unraisablehook", passed.append)
    suppress_late_write_errors()
    suppress_late_write_errors()
    for text in ("Event loop is closed", "another"):
        sys.unraisablehook(SimpleNamespace(exc_type=RuntimeError, exc_value=RuntimeError(text)))
    assert [str(found.exc_value) for found in passed] == ["another"]


def test_pipe_or_giant_in_a_checkpoint_is_refused_unread(tmp_path):
    for name in ("_CHECKPOINT_METADATA", "params/_METADATA", "params/manifest.ocdbt", "a-pipe"):
        path = tmp_path / "10" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
        with pytest.raises(ValueError, match=f"10/{name} is not a regular file"):
            CheckpointManager(tmp_path)
        path.unlink()
    (tmp_path / "10" / "_CHECKPOINT_METADATA").touch()
    os.truncate(tmp_path / "10" / "_CHECKPOINT_METADATA", 8 << 30)  # a hole: it takes no disk
    with pytest.raises(ValueError, match="10/_CHECKPOINT_METADATA has 8,589,934,592 bytes"):
        CheckpointManager(tmp_path)
