"""Oracle: the arrays that were saved. Damage is real: files on disk are flipped, cut and deleted."""

import json
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from stored import abstract, biggest_files, filled, same, tree

from halfbyte.checkpoint import (
    CheckpointManager,
    CheckpointStructureError,
    CorruptCheckpointError,
    NoUsableCheckpointError,
    RunDirectoryLockedError,
    RunLock,
    checksum_tree,
)
from halfbyte.checkpoint import store as store_module
from halfbyte.checkpoint.checkpoint_record import FILE_LIST, check_file_list

# Orbax drops its coroutines when it meets a damaged file.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine.*was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def checksums(tree):
    return {name: found.checksum for name, found in checksum_tree(tree).items()}


def test_round_trip_with_caller_json(tmp_path):
    with_steps = filled(tmp_path / "checkpoints")
    restored = with_steps.restore_latest(abstract(tree(20)))
    assert restored.step == 20
    assert restored.extra["data"] == {"next_index": 80}
    assert not restored.skipped
    assert same(restored.items, tree(20))
    with_steps.close()


def test_no_checkpoint_is_none(tmp_path):
    assert CheckpointManager(tmp_path / "checkpoints").restore_latest(abstract(tree(1))) is None


@pytest.mark.slow
def test_keeps_the_last_and_every_mth(tmp_path):
    store = filled(tmp_path / "checkpoints", steps=(10, 20, 25, 30, 35), keep_last=2, keep_every=20)
    assert store.steps() == [20, 30, 35]


@pytest.mark.slow(fast_cases=["False"])
@pytest.mark.parametrize("room", [True, False])
def test_saved_state_is_that_of_the_call_of_save(tmp_path, monkeypatch, room):
    """From a copy on the device, or, where there is no room for one, after the arrays are off it; said once."""
    monkeypatch.setattr(store_module, "unused_device_bytes", lambda device: float("inf") if room else 100.0)
    said = []
    store = CheckpointManager(tmp_path / "checkpoints", say=said.append)
    overwrite = jax.jit(lambda items: jax.tree.map(lambda leaf: leaf + 1, items), donate_argnums=0)
    for step in (10, 20):
        items = tree(step)
        store.save(step, items, extra={})
        jax.block_until_ready(overwrite(items))
    assert store.wait()
    assert same(store.restore(10, abstract(tree(10))).items, tree(10))
    assert same(store.restore(20, abstract(tree(20))).items, tree(20))
    assert ["stops training" in text for text in said] == ([] if room else [True])
    store.close()


@pytest.mark.slow(fast_cases=["1099511627776-64", "1099511627776-1e-9"])
@pytest.mark.parametrize("free, limit", [(2**40, "64"), (1000, "64"), (2**40, "1e-9")])
def test_saves_use_pinned_host_memory_or_say_why_not(tmp_path, monkeypatch, free, limit):
    """Taken beside what is done meanwhile, once. A CPU's devices have such memory too."""
    monkeypatch.setattr(store_module, "is_gpu_backend", lambda: True)
    monkeypatch.setattr(store_module, "free_host_bytes", lambda: free)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", limit)
    locks = free > 1000 and limit == "64"
    said = []
    store = CheckpointManager(tmp_path / "checkpoints", say=said.append)
    for _ in range(2):
        with store.warm_up(tree(10)):
            assert store.steps() == []
    assert store._orbax._context.array.saving.enable_pinned_host_transfer == locks
    assert ["GiB" in text and "slowly" in text for text in said] == ([] if locks else [True])
    for step in (10, 20):
        store.save(step, tree(step), extra={})
    assert store.wait()
    assert same(store.restore_latest(abstract(tree(20))).items, tree(20))
    store.close()


def test_free_host_memory_is_that_of_host_and_cgroups(tmp_path):
    assert store_module.free_host_bytes(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemFree: 100 kB\nMemAvailable:     300 kB\n")
    assert store_module.free_host_bytes(tmp_path) == 300 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1000\n")
    (group / "memory.max").write_text("max\n")
    assert store_module.free_host_bytes(tmp_path) == 300 * 1024
    (group / "memory.max").write_text("5000\n")
    (group / "memory.stat").write_text("anon 7\ninactive_file 300\nactive_file 9\n")
    assert store_module.free_host_bytes(tmp_path) == 4300
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    (group / "job/step").mkdir(parents=True)
    assert store_module.free_host_bytes(tmp_path) == 4300
    for name, text in (("memory.max", "900"), ("memory.current", "500"), ("memory.stat", "anon 1\n")):
        (group / "job" / name).write_text(text)
    assert store_module.free_host_bytes(tmp_path) == 400


@pytest.mark.slow
def test_processes_of_one_host_share_its_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    assert store_module.processes_here(tmp_path) == 1
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert store_module.processes_here(tmp_path) == 2


@pytest.mark.slow
def test_saving_returns_before_anything_is_written(tmp_path, monkeypatch):
    store = CheckpointManager(tmp_path / "checkpoints")
    go_on, begin = threading.Event(), store._orbax.save_checkpointables_async
    monkeypatch.setattr(
        store._orbax, "save_checkpointables_async", lambda *words, **more: go_on.wait(600) and begin(*words, **more)
    )
    store.save(10, tree(10), extra={})
    assert store.is_saving()
    assert store.steps() == []
    go_on.set()
    assert store.wait()
    assert store.steps() == [10]
    store.close()


def test_rank_that_cannot_begin_a_save_meets_the_others(tmp_path, monkeypatch):
    """They ask each other how a save went; one that does not come leaves them waiting."""
    asked, said = [], []
    store = CheckpointManager(tmp_path / "checkpoints", say=said.append)

    def begin(*_, **__):
        raise OSError("no room to copy")

    with monkeypatch.context() as several:
        several.setattr(store._orbax, "save_checkpointables_async", begin)
        several.setattr(jax, "process_count", lambda: 2)
        several.setattr(store_module, "all_gather_strings", lambda words: asked.append(words) or [words])
        assert store.save(10, tree(10), extra={}) and not said
        several.setattr(jax, "process_count", lambda: 1)
        assert not store.wait()
    assert asked == ["no room to copy"] and "step 10 WAS NOT WRITTEN: no room to copy" in said[0]
    store.save(20, tree(20), extra={})
    assert store.close()


@pytest.mark.slow(fast_cases=["truncate"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path, damage):
    filled(tmp_path / "checkpoints").close()
    victim = biggest_files(tmp_path / "checkpoints" / "20")[0]
    content = bytearray(victim.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 0x10
        victim.write_bytes(content)
    elif damage == "truncate":
        victim.write_bytes(content[: len(content) // 2])
    else:
        victim.unlink()
    said = []
    store = CheckpointManager(tmp_path / "checkpoints", say=said.append)
    restored = store.restore_latest(abstract(tree(20)))
    assert restored.step == 10
    assert same(restored.items, tree(10))
    assert list(restored.skipped) == [20]
    assert "20" in said[0] and "DAMAGED" in said[0]
    expected = {"flip": "checksum differs in", "truncate": victim.name, "delete": victim.name}[damage]
    assert expected in restored.skipped[20]
    store.quarantine(restored.skipped)
    assert store.steps() == [10]
    assert (tmp_path / "damaged" / "20").is_dir()
    store.save(20, tree(20), extra={})
    assert store.wait()
    assert store.steps() == [10, 20]


@pytest.mark.slow
def test_only_damaged_checkpoints_are_an_error(tmp_path):
    filled(tmp_path / "checkpoints").close()
    for step in ("10", "20"):
        biggest_files(tmp_path / "checkpoints" / step)[0].unlink()
    with pytest.raises(NoUsableCheckpointError, match=r"step 20.*step 10.*--run-dir"):
        CheckpointManager(tmp_path / "checkpoints").restore_latest(abstract(tree(20)))


def test_wrong_dtype_shape_or_name_is_refused_by_name(tmp_path):
    store = filled(tmp_path / "checkpoints")
    wanted = abstract(tree(20))
    wanted["params"]["w"] = jax.ShapeDtypeStruct((64, 48), jnp.bfloat16)
    wanted["params"]["b"] = jax.ShapeDtypeStruct((8,), jnp.bfloat16)
    wanted["params"]["new"] = jax.ShapeDtypeStruct((8,), jnp.float32)
    with pytest.raises(CheckpointStructureError) as error:
        store.restore_latest(wanted)
    text = str(error.value)
    assert "params/w: checkpoint has float32[64,48], this run wants bfloat16[64,48]" in text
    assert "params/b: checkpoint has bfloat16[7], this run wants bfloat16[8]" in text
    assert "params/new: checkpoint has nothing" in text


def test_checksum_depends_on_every_element_and_its_place():
    x = jnp.arange(24, dtype=jnp.float32).reshape(4, 6)
    words = {checksums({"x": each})["x"] for each in (x, x[::-1], x.reshape(6, 4))}
    for i in range(24):
        flipped = np.asarray(x).copy().reshape(-1)
        flipped.view(np.uint32)[i] ^= 1
        words.add(checksums({"x": jnp.asarray(flipped.reshape(4, 6))})["x"])
    ones = np.eye(320, dtype=np.float32).reshape(320, 8, 40)  # a row and a column swapped is another place
    words |= {checksums({"x": jnp.asarray(one)})["x"] for one in ones[::3]}
    assert len(words) == 3 + 24 + 107


@pytest.mark.slow
def test_checksum_does_not_depend_on_the_mesh():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a", "b")))
    assert checksums({"x": x}) == checksums({"x": sharded})


def test_lock_is_exclusive_and_dies_with_its_process(tmp_path):
    code = f"""if True:
        import time
        from halfbyte.checkpoint.locks import RunLock
        lock = RunLock({str(tmp_path)!r})
        print("held", flush=True)
        time.sleep(600)"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline().strip() == "held"
    with pytest.raises(RunDirectoryLockedError, match=f"pid {holder.pid}.*--run-dir"):
        RunLock(tmp_path)
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with RunLock(tmp_path):
        pass


def test_checksums_are_those_that_earlier_versions_stored():
    """Pinned: a checkpoint of an earlier version is verified by these numbers."""
    x = jnp.arange(24, dtype=jnp.float32).reshape(4, 6)
    arrays = {"f32": x, "bf16": x.astype(jnp.bfloat16), "int8": x.astype(jnp.int8), "cube": x.reshape(2, 3, 4)}
    assert checksums(arrays) == {
        "f32": "59950cd4b1e1c8ec",
        "bf16": "acea23eefe83aa87",
        "int8": "5b5e4b8fc2756da9",
        "cube": "ada39b8908279b96",
    }


def test_quarantine_of_a_step_twice_keeps_both(tmp_path):
    store = filled(tmp_path / "checkpoints", steps=(10, 20))
    store.quarantine({20: "damaged"})
    store.save(20, tree(21), extra={})
    store.wait()
    store.quarantine({20: "damaged once more"})
    assert store.close()
    kept = sorted(path.name for path in (tmp_path / "damaged").iterdir())
    assert kept == ["20", "20-again"] and store.steps() == [10]


def test_file_with_other_bytes_or_another_size_is_damaged(tmp_path):
    filled(tmp_path / "checkpoints", steps=(10,)).close()
    folder = tmp_path / "checkpoints" / "10"
    listed = json.loads((folder / FILE_LIST).read_text())
    name = next(name for name, facts in listed.items() if facts.get("crc32") is not None)
    content = bytearray((folder / name).read_bytes())
    for changed, words in ((content + b" ", "bytes instead of"), (content[:-1], "bytes instead of"),
                           (bytes([content[0] ^ 1]) + content[1:], "is not what was written")):  # fmt: skip
        (folder / name).write_bytes(bytes(changed))
        with pytest.raises(CorruptCheckpointError, match=f"{name} .*{words}"):
            check_file_list(folder)
