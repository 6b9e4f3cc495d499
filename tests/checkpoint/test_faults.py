"""What must not pass for a good checkpoint, and what must not be taken for a damaged one. Oracle: the arrays saved."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from stored import abstract, biggest_files, filled, same, tree

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
def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    kept = filled(tmp_path / "checkpoints", steps=(10,))
    with pytest.raises(NonFiniteCheckpointError, match=r"3 in params/w"):
        kept.save(20, poisoned_tree(), extra={})
    kept.save(30, tree(30), extra={})
    assert kept.close()
    assert CheckpointManager(tmp_path / "checkpoints").steps() == [10, 30]


def test_a_poisoned_checkpoint_is_named_and_the_one_before_used(tmp_path):
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


@pytest.mark.slow
def test_threads_and_handles_stay_flat(tmp_path):
    kept = filled(tmp_path / "checkpoints", steps=(1, 2, 3))
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for step in range(4, 12):
        kept.save(step, tree(step), extra={})
    kept.wait()
    after = threading.active_count(), len(os.listdir("/proc/self/fd"))
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 2


@pytest.mark.slow
def test_a_renamed_swapped_or_foreign_checkpoint_is_refused(tmp_path):
    filled(tmp_path / "a" / "checkpoints", run="aaaa").close()
    filled(tmp_path / "b" / "checkpoints", steps=(30,), run="bbbb").close()
    shutil.move(tmp_path / "b" / "checkpoints" / "30", tmp_path / "a" / "checkpoints" / "30")
    shutil.copytree(tmp_path / "a" / "checkpoints" / "10", tmp_path / "a" / "checkpoints" / "40")
    said = []
    restored = CheckpointManager(tmp_path / "a" / "checkpoints", run="aaaa", say=said.append).restore_latest(
        abstract(tree(20))
    )
    assert restored.step == 20
    assert "checkpoint of step 10, under the name of step 40" in restored.skipped[40]
    assert "belongs to another run (bbbb; this one is aaaa)" in restored.skipped[30]


def test_one_read_error_is_not_damage(tmp_path, monkeypatch):
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


@pytest.mark.slow(fast_cases=["{"])
@pytest.mark.parametrize("damaged", ['{"a": {}}', '{"a": null}', '["a"]', '{"a": {"bytes": "1"}}', "{"])
def test_a_damaged_list_of_files_is_named(tmp_path, damaged):
    """A flip may leave JSON that is no list of ours."""
    (tmp_path / "a").write_text("1")
    (tmp_path / checkpoint_record.FILE_LIST).write_text(damaged)
    with pytest.raises(CorruptCheckpointError, match=rf"{checkpoint_record.FILE_LIST} is damaged|file a "):
        checkpoint_record.check_file_list(tmp_path)


def test_a_list_of_files_cut_by_a_kill_does_no_harm(tmp_path):
    filled(tmp_path / "checkpoints").close()
    newest = tmp_path / "checkpoints" / "20"
    (newest / checkpoint_record.FILE_LIST).rename(newest / f".{checkpoint_record.FILE_LIST}.abc.tmp")
    restored = CheckpointManager(tmp_path / "checkpoints").restore_latest(abstract(tree(20)))
    assert restored.step == 20


FAILED_WRITE = """
import os, sys, pathlib
sys.path.insert(0, sys.argv[2])
from halfbyte.checkpoint import CheckpointManager
from stored import filled, tree
folder = pathlib.Path(sys.argv[1])
said = []
kept = filled(folder / "checkpoints", steps=(10,), say=said.append)
os.rename(folder / "checkpoints", folder / "away")
(folder / "checkpoints").write_text("in the way")
kept.save(20, tree(20), extra={})
kept.wait()
assert any("WAS NOT WRITTEN" in line for line in said), said
(folder / "checkpoints").unlink()
os.rename(folder / "away", folder / "checkpoints")
(folder / "checkpoints" / "99.orbax-checkpoint-tmp-1").mkdir()
kept.remove_unfinished()
kept.save(30, tree(30), extra={})
assert kept.close()
assert CheckpointManager(folder / "checkpoints").steps() == [10, 30]
assert not list((folder / "checkpoints").glob("*tmp*"))
print("done", flush=True)
os._exit(0)  # Orbax keeps threads that wait ten minutes for the directory that it could not make
"""


@pytest.mark.slow
def test_a_failed_write_leaves_nothing_behind_and_the_next_one_works(tmp_path):
    """A file lies where the save wants its directory: the storage's own error, as on a full disk."""
    command = [sys.executable, "-W", "ignore", "-c", FAILED_WRITE, str(tmp_path), str(Path(__file__).parent)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert ended.stdout.endswith("done\n"), ended.stderr


@pytest.mark.slow
def test_an_array_without_its_file_list_is_still_verified(tmp_path):
    filled(tmp_path / "checkpoints").close()
    victim = biggest_files(tmp_path / "checkpoints" / "20")[0]
    (tmp_path / "checkpoints" / "20" / checkpoint_record.FILE_LIST).unlink()
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    restored = CheckpointManager(tmp_path / "checkpoints", say=lambda _: None).restore_latest(abstract(tree(20)))
    assert restored.step == 10
    assert np.all(jax.tree.leaves(jax.tree.map(lambda x: bool(jnp.all(jnp.isfinite(x))), restored.items)))


def test_a_closed_event_loop_is_not_printed_and_everything_else_is(monkeypatch):
    passed = []
    monkeypatch.setattr(sys, "unraisablehook", passed.append)
    suppress_late_write_errors()
    suppress_late_write_errors()
    for text in ("Event loop is closed", "another"):
        sys.unraisablehook(SimpleNamespace(exc_type=RuntimeError, exc_value=RuntimeError(text)))
    assert [str(found.exc_value) for found in passed] == ["another"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "params/_METADATA", "params/manifest.ocdbt", "a-pipe"])
def test_a_pipe_in_a_checkpoint_is_named_and_not_waited_for(tmp_path, name):
    filled(tmp_path, steps=(10,)).close()
    (tmp_path / "10" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "10" / name)
    with pytest.raises(ValueError, match=f"10/{name} is not a regular file"):
        CheckpointManager(tmp_path)


def test_a_giant_beside_the_arrays_is_named_and_not_read(tmp_path):
    filled(tmp_path, steps=(10,)).close()
    os.truncate(tmp_path / "10" / "_CHECKPOINT_METADATA", 8 << 30)  # a hole: it takes no disk
    with pytest.raises(ValueError, match="10/_CHECKPOINT_METADATA has 8,589,934,592 bytes"):
        CheckpointManager(tmp_path)
