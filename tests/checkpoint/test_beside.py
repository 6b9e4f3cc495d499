"""Readers beside a writer that keeps one checkpoint and writes the next at once. Oracle: the values that were saved."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from orbax.checkpoint import v1 as ocp
from stored import abstract, filled, same, tree

from halfbyte.checkpoint import CheckpointDeletedError, CheckpointManager, CorruptCheckpointError, locks, restore

# Orbax leaves a coroutine behind where what it was to read is gone.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine.*was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


WRITE_ON = "import sys; sys.path.insert(0, sys.argv[2]); import stored; stored.write_on(sys.argv[1])"


@pytest.fixture
def writing(tmp_path, until):
    """A directory in which a process saves and deletes all the time. (Within one process Orbax would take the reader's
    signals for the writer's.)"""
    words = [sys.executable, "-c", WRITE_ON, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as writer:
        until(lambda: any(path.name.isdigit() for path in tmp_path.iterdir()) or writer.poll() is not None)
        yield tmp_path
        writer.stdin.close()
        assert writer.wait() == 0


@pytest.mark.slow
def test_concurrent_readers_get_whole_checkpoints(writing, monkeypatch):
    monkeypatch.setattr(locks, "STABLE_CHECKS", 3000)  # a writer that stands still while it deletes, on a busy machine
    monkeypatch.setattr(restore, "MAX_DELETED_RETRIES", 3000)  # or one that deletes faster than a slow reader opens
    said = []
    for _ in range(12):
        store = CheckpointManager(writing, say=said.append)
        restored = store.restore_latest(abstract(tree(7)))
        store.close()
        assert same(restored.items, tree(7 if restored.step > 1 else 1))
    assert said == []


def test_list_without_the_only_checkpoint_is_read_again(tmp_path, monkeypatch):
    """It was made while the one before was deleted, and this one got its name."""
    filled(tmp_path, steps=(1,)).close()
    lacking, listed = [(), ()], ocp.training.Checkpointer.checkpoints.fget
    monkeypatch.setattr(
        ocp.training.Checkpointer, "checkpoints", property(lambda self: lacking.pop() if lacking else listed(self))
    )
    store = CheckpointManager(tmp_path)
    assert lacking == [] and store.steps() == [1]
    lacking.append(())
    store.reload()
    assert lacking == [] and store.steps() == [1]
    store.close()


def test_checkpoint_being_read_is_deleted_later(tmp_path):
    store = filled(tmp_path, steps=(1,), keep_last=1)
    reader = CheckpointManager(tmp_path)
    load = reader._orbax.load_checkpointables

    def slowly(step, wanted):  # the run saves twice while this is read
        for later in (2, 3):
            store.save(later, tree(later), extra={})
            store.wait()
        return load(step, wanted)

    reader._orbax.load_checkpointables = slowly
    assert same(reader.restore(1, abstract(tree(1))).items, tree(1))
    assert store.steps() == [1, 3]
    store.save(4, tree(4), extra={})
    store.wait()
    assert store.steps() == [4]
    reader.close()
    store.close()


def test_half_deleted_checkpoint_is_deleted(tmp_path, monkeypatch):
    """Its run has removed a file and stands still for a moment, on a busy machine; for good, it is damaged."""
    filled(tmp_path, steps=(1, 2)).close()
    store, pauses = CheckpointManager(tmp_path), []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == locks.STABLE_CHECKS // 2:
            shutil.rmtree(tmp_path / "1")

    monkeypatch.setattr(locks, "time", SimpleNamespace(sleep=pause))
    for step in (1, 2):
        (tmp_path / str(step) / "_CHECKPOINT_METADATA").unlink()
    with pytest.raises(CheckpointDeletedError):
        store.restore(1, abstract(tree(1)))
    assert sum(pauses) == pytest.approx(locks.PAUSE_S * locks.STABLE_CHECKS / 2)
    with pytest.raises(CorruptCheckpointError):
        store.restore(2, abstract(tree(2)))
    store.close()
