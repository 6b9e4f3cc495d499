"""Readers beside a writer that keeps one checkpoint and writes the next at once. Oracle: the values that were saved."""

import shutil
import threading

import pytest
from stored import abstract, filled, same, tree

from halfbyte.checkpoint import Checkpoints, DamagedCheckpoint, GoneCheckpoint


@pytest.fixture
def writing(tmp_path):
    """A directory in which a thread saves and deletes all the time."""
    store = filled(tmp_path, steps=(1,), keep_last=1)
    done = threading.Event()

    def write():
        step = 1
        while not done.is_set():
            step += 1
            store.save(step, tree(7), extra={})
            store.wait()

    thread = threading.Thread(target=write)
    thread.start()
    yield tmp_path
    done.set()
    thread.join()
    store.close()


def test_readers_get_a_whole_checkpoint_and_speak_of_no_damage(writing):
    said = []
    for _ in range(12):
        store = Checkpoints(writing, say=said.append)
        restored = store.restore_latest(abstract(tree(7)))
        store.close()
        assert same(restored.items, tree(7 if restored.step > 1 else 1))
    assert said == []


def test_what_is_read_is_deleted_later(tmp_path):
    store = filled(tmp_path, steps=(1,), keep_last=1)
    reader = Checkpoints(tmp_path)
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


def test_what_was_deleted_is_gone_and_what_lacks_a_file_is_damaged(tmp_path):
    store = filled(tmp_path, steps=(1, 2))
    shutil.rmtree(tmp_path / "1")
    with pytest.raises(GoneCheckpoint):
        store.restore(1, abstract(tree(1)))
    next((tmp_path / "2").rglob("manifest.ocdbt")).unlink()
    with pytest.raises(DamagedCheckpoint):
        store.restore(2, abstract(tree(2)))
    store.close()
