"""Copies of runs in buckets, written and read back: in a directory that TensorStore serves as a store, and against real
servers of both kinds, whose every request is looked at. Oracle: the run directory, byte for byte, and what else was in
the bucket, byte for byte.

Processes that are killed: tests/faults/buckets.py. Training: tests/train/test_resume.py.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import servers

from halfbyte.checkpoint import NAME, Copy, RunDirectoryLockedError, RunLock, bucket_copy, object_store
from halfbyte.checkpoint.checkpoint_record import write_file_list
from halfbyte.checkpoint.object_store import Objects

RUN = "0123456789abcdef"
PREFIX = "my runs/ü/first"
OTHERS = {  # whatever else may be in a bucket: under the prefix, beside it, and named like what we write
    "README.md": b"mine",
    "my runs/thesis.pdf": b"mine",
    f"{PREFIX}/notes.txt": b"mine",
    f"{PREFIX}2/halfbyte-copy.json": b"mine",
    f"{PREFIX}/{RUN}/hello": b"mine",
    f"{PREFIX}/{RUN}/checkpoints/2/d/array@00": b"mine",
    f"{PREFIX}/fedcba9876543210/config.json@11": b"mine",
}


class Folder:
    """A directory as a bucket, through TensorStore's driver for files: a store like any other, without a log."""

    kind, log, scheme, bucket = "folder", None, "s3", "runs"

    def __init__(self, path):
        self.path = path

    def make(self):
        (self.path / self.bucket).mkdir(parents=True)

    def put(self, key, data):
        (self.path / self.bucket / key).parent.mkdir(parents=True, exist_ok=True)
        (self.path / self.bucket / key).write_bytes(data)

    def get(self, key):
        return self.objects().get(key)

    def remove(self, key):
        (self.path / self.bucket / key).unlink()

    def objects(self):
        files = [path for path in (self.path / self.bucket).rglob("*") if path.is_file() and path.suffix != ".__lock"]
        return {path.relative_to(self.path / self.bucket).as_posix(): path.read_bytes() for path in files}

    def spec_of(self, url):
        return {"driver": "file", "path": f"{self.path}/{url.partition('://')[2].rstrip('/')}/"}


SERVERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("s3", "gs")]


@pytest.fixture(params=["folder", *SERVERS])
def store(request, monkeypatch, tmp_path):
    """A store with a bucket `runs` that holds OTHERS; fast about its own pauses."""
    for name, seconds in {"LOOK_S": 0.01, "RETRY_S": 0.05, "PATIENCE_S": 0.5}.items():
        monkeypatch.setattr(bucket_copy, name, seconds)
    monkeypatch.setattr(object_store, "RETRIES", {"max_retries": 2, "initial_delay": "1ms", "max_delay": "1ms"})
    if request.param == "folder":
        found = Folder(tmp_path / "store")
        found.make()
        monkeypatch.setattr(object_store, "spec_of", found.spec_of)
        yield filled(found)
        return
    server = {"s3": "moto.server", "gs": "gcp_storage_emulator"}[request.param]
    pytest.importorskip(server, reason="`make test-all` installs servers of S3 and GCS")
    with servers.served(request.param) as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        yield filled(found)


def filled(store):
    for key, data in OTHERS.items():
        store.put(key, data)
    store.url = f"{store.scheme}://{store.bucket}/{PREFIX}"
    return store


@pytest.fixture
def run(tmp_path):
    directory = tmp_path / "run"
    (directory / "tensorboard").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / ".lock").write_text("pid 1")
    (directory / "tensorboard" / "events ü 1").write_bytes(os.urandom(100))
    (directory / "profile").mkdir()
    (directory / "profile" / "trace").write_text("large")
    return directory


def checkpoint(directory, step, size=1000):
    """As a run leaves one: whole at once."""
    folder = directory / "checkpoints" / f"{step}.orbax-checkpoint-tmp-1"
    (folder / "d").mkdir(parents=True)
    (folder / "d" / "array").write_bytes(os.urandom(size))
    (folder / "_METADATA").write_bytes(os.urandom(20))  # as the record of a checkpoint, like no other
    (folder / "empty").write_text("")
    write_file_list(folder)
    folder.rename(folder.with_name(str(step)))
    with open(directory / "metrics.jsonl", "a") as rows:
        rows.write(f'{{"step": {step}}}\n' * 100)


def copy(store, directory, run=RUN, keep=0, keep_every=0, take_over=False, say=lambda text: None):
    return Copy(store.url, directory, run, keep=keep, keep_every=keep_every, take_over=take_over, say=say)


def upload(store, directory, *args, step=None, **options):
    """Copies a run to its end, with a new checkpoint of `step`."""
    if step is not None:
        checkpoint(directory, step)
    with closing(copy(store, directory, *args, **options)):
        pass


@contextmanager
def closing(made):
    yield made
    assert made.close()["missing"] == []


def fetch(store, to, step=None):
    return bucket_copy.fetch(store.url, to, step=step, say=print)


def fetched(store, to):
    fetch(store, to)
    return contents(to)


def steps_in(store):
    """Checkpoints that the head of the prefix lists."""
    return sorted(map(int, bucket_copy.read_head(Objects(store.url))[0]["checkpoints"]))


def gone(*_):
    """Stands for any request to a store that does not answer."""
    raise OSError("the store is not there")


def contents(directory, without="tmp"):
    """What of a run is copied."""
    left_out = (".lock", NAME, "profile/trace")
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    kept = {name for name in files if name not in left_out and "tmp" not in name and without not in name}
    return {name: files[name].read_bytes() for name in kept}


def only_our_own_is_touched(store, *, deletes=0):
    """Nothing foreign has changed, and, where there is a log, nothing foreign was even asked for."""
    there = store.objects()
    assert {key: there.get(key) for key in OTHERS} == OTHERS
    if store.log is None:
        return
    assert not store.lists()
    own = f"{store.bucket}/{PREFIX}/"
    for request in store.writes():
        assert request.key == f"{own}halfbyte-copy.json" or request.key.startswith(f"{own}{RUN}/"), request
        assert request.key.removeprefix(f"{store.bucket}/") not in OTHERS, request
        assert request.conditions or (store.kind == "s3" and request.method == "DELETE"), request
    assert sum(request.method == "DELETE" and request.status < 300 for request in store.writes()) == deletes


def test_copied_run_is_fetched_byte_for_byte(store, run, tmp_path, until):
    said = []
    done = copy(store, run, say=said.append)
    for step in (2, 4, 6):
        checkpoint(run, step)
        until(lambda step=step: any(f"copied checkpoint {step} " in text for text in said))
    (run / "checkpoints" / "8.orbax-checkpoint-tmp-9").mkdir()
    (run / "report.html").write_text("the end")
    assert done.close()["missing"] == [] and said[-1] == f"copied to {store.url}"
    for step in (None, 4):
        told = bucket_copy.fetch(store.url, tmp_path / f"to {step}", step=step, say=said.append)
        assert told["step"] == (step or 6) and told["run"] == RUN
        other = [f"checkpoints/{step}/" for step in {2, 4, 6} - {told["step"]}]
        expected = {name: data for name, data in contents(run).items() if not name.startswith(tuple(other))}
        assert contents(tmp_path / f"to {step}") == expected
    assert steps_in(store) == [2, 4, 6]
    only_our_own_is_touched(store)


def test_large_files_are_split_and_growing_ones_sent_once(store, run, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_copy, "PART", 700)
    monkeypatch.setattr(bucket_copy, "GROWING_PART", 256)
    checkpoint(run, 2, size=2000)
    upload(store, run)
    before = set(store.objects())
    checkpoint(run, 4, size=1400)
    upload(store, run)
    new = [key for key in set(store.objects()) - before if "metrics.jsonl" in key]
    assert 0 < len(new) * 256 < (run / "metrics.jsonl").stat().st_size
    assert fetched(store, tmp_path / "to") == contents(run, without="checkpoints/2/")
    only_our_own_is_touched(store)


def test_prefix_may_be_a_bucket_and_lie_in_that_of_another_run(store, run, tmp_path):
    """Neither run sees, replaces or deletes what the other has."""
    (tmp_path / "other").mkdir()
    shutil.copytree(run, tmp_path / "other", dirs_exist_ok=True)
    inner, store.url = store.url, f"{store.scheme}://{store.bucket}"
    for step in (2, 4, 6):
        for directory, url, name in ((run, store.url, RUN), (tmp_path / "other", inner, "fedcba9876543210")):
            checkpoint(directory, step)
            shutil.rmtree(directory / "checkpoints" / str(step - 2), ignore_errors=True)
            done = Copy(url, directory, name, keep=1, keep_every=0, take_over=False, say=print)
            assert done.close()["missing"] == []
    for directory, url in ((run, store.url), (tmp_path / "other", inner)):
        bucket_copy.fetch(url, tmp_path / f"{directory.name}-fetched", step=None, say=print)
        assert contents(tmp_path / f"{directory.name}-fetched") == contents(directory)
    there = store.objects()
    assert {key: there.get(key) for key in OTHERS} == OTHERS


def test_another_run_is_refused(store, run, tmp_path):
    upload(store, run, step=2)
    before = store.objects()
    with pytest.raises(ValueError, match="holds another run"):
        copy(store, run, run="fedcba9876543210")
    assert store.objects() == before


def test_second_writer_is_refused_and_takes_over_when_told(store, run, tmp_path, until):
    said = []
    first = copy(store, run, say=said.append)
    checkpoint(run, 2)
    until(lambda: any("copied checkpoint 2" in text for text in said))
    shutil.copytree(run, tmp_path / "by hand")  # its name in the bucket comes with it
    with pytest.raises(ValueError, match=r"is being written from .*add --copy-take-over"):
        copy(store, tmp_path / "by hand")
    with closing(copy(store, tmp_path / "by hand", take_over=True)):
        checkpoint(run, 4)
        until(lambda: any("copies nothing more" in text for text in said))
        assert first.close()["missing"] == ["checkpoint 4", "the last rows and files"]
        assert said[-1] == f"COPY: not in {store.url}: checkpoint 4, the last rows and files"
    assert steps_in(store) == [2]
    with closing(copy(store, run)):  # after one that has ended, anybody may go on
        pass
    assert steps_in(store) == [2, 4]
    only_our_own_is_touched(store)


def test_run_without_a_checkpoint_releases_its_prefix(store, run, tmp_path, until):
    """The run has removed its directory; the next run has another name. Nothing is deleted for that."""
    said = []
    failed = copy(store, run, run="fedcba9876543210", say=said.append)
    shutil.move(run, tmp_path / "next")
    time.sleep(0.05)  # looks that see no directory, before the run has ended
    assert failed.close()["missing"] == []
    assert said == [f"{store.url} is free again: this run has ended before its first checkpoint"]
    with pytest.raises(ValueError, match="holds no copy of a run"):
        fetch(store, tmp_path / "to")
    checkpoint(tmp_path / "next", 2)
    upload(store, tmp_path / "next")
    fetch(store, tmp_path / "to")
    assert contents(tmp_path / "to") == contents(tmp_path / "next")
    only_our_own_is_touched(store)


# The thread that copies may see that the directory is gone before it sees the session of the other process.
REFUSED = re.compile("another process writes|was replaced while it was copied")


def test_prefix_that_is_no_longer_its_own_is_not_released(store, run, tmp_path):
    """Nor is one with a checkpoint: its run can be fetched."""
    said = []
    first = copy(store, run, say=said.append)
    shutil.copytree(run, tmp_path / "by hand")
    second = copy(store, tmp_path / "by hand", take_over=True)
    shutil.rmtree(run)
    assert first.close()["missing"] == ["the last rows and files"] and REFUSED.search(said[0])
    checkpoint(tmp_path / "by hand", 2)
    with closing(second):
        pass
    again = copy(store, tmp_path / "by hand", say=said.append)
    shutil.rmtree(tmp_path / "by hand")
    assert again.close()["missing"] == ["the last rows and files"] and "was replaced while" in said[-2]
    assert steps_in(store) == [2]
    only_our_own_is_touched(store)


def test_prefix_of_another_session_is_not_released(store, run, monkeypatch):
    """Somebody has removed `.lock`: two processes are the same writer, each in a session of its own."""
    said = []
    first = copy(store, run, say=said.append)
    monkeypatch.setattr(bucket_copy, "LOOK_S", 600)  # the second looks at the directory when it is closed, not before
    second = copy(store, run, say=said.append)
    shutil.rmtree(run)
    assert first.close()["missing"] == ["the last rows and files"] and REFUSED.search(said[0])
    assert bucket_copy.read_head(Objects(store.url))[0]["session"] == second._head["session"]
    assert second.close()["missing"] == [] and "is free again" in said[-1]
    only_our_own_is_touched(store)


def test_prefix_without_checkpoints_may_be_taken_over(store, run, tmp_path, until):
    """Its process was killed, and its directory was removed by hand."""
    said = []
    killed = copy(store, run, run="fedcba9876543210", say=said.append)
    with pytest.raises(ValueError, match=r"holds another run.* before its first checkpoint, add --copy-take-over"):
        copy(store, run)
    checkpoint(run, 2)
    with closing(copy(store, run, take_over=True)):
        until(lambda: any("another process writes" in text for text in said))  # if it was alive, it reports it
    killed.close()
    with pytest.raises(ValueError, match=r"holds another run; give this one another prefix$"):
        copy(store, run, run="fedcba9876543210", take_over=True)
    assert steps_in(store) == [2]


def test_another_continuation_of_the_run_is_refused(store, run, tmp_path, monkeypatch):
    """Of step 2 two directories go on; what one has copied, the other does not replace."""
    upload(store, run, step=2)
    fetch(store, tmp_path / "other")
    upload(store, run, step=4)
    before = store.objects()
    for directory in (tmp_path / "other", tmp_path / "again"):
        with pytest.raises(ValueError, match="holds checkpoint 4 of this run, and .* does not: fetch it"):
            copy(store, directory, take_over=True)
        fetch(store, tmp_path / "again", step=2) if directory.name == "other" else None
    checkpoint(tmp_path / "other", 4)  # the same step, and other arrays
    with pytest.raises(ValueError, match="holds checkpoint 4 of this run"):
        copy(store, tmp_path / "other")
    assert store.objects() == before
    fetch(store, tmp_path / "newest")
    upload(store, tmp_path / "newest")


def test_step_that_the_run_has_made_again_is_copied_again(store, run, tmp_path):
    for _ in range(2):
        checkpoint(run, 2)
        upload(store, run, step=4)
        assert fetched(store, tmp_path / "to") == contents(run, without="checkpoints/2/")
        shutil.rmtree(tmp_path / "to")
        for step in (2, 4):
            shutil.rmtree(run / "checkpoints" / str(step))
    only_our_own_is_touched(store)


def test_late_write_of_the_head_ends_nothing(store, run, tmp_path, monkeypatch, until):
    """A write of the head that timed out is done by the store between the next read of the head and its write."""
    write, given_up = Objects.write, []

    def slow(self, key, data, generation=object_store.ABSENT):
        if key == bucket_copy.HEAD and data is not None and b"checkpoints/2/" in data:
            if not given_up:
                given_up.append((data, generation))
                raise OSError("timed out")
            if len(given_up) == 1:
                given_up.append(write(self, key, *given_up[0]))
        return write(self, key, data, generation)

    made = copy(store, run)
    monkeypatch.setattr(Objects, "write", slow)
    checkpoint(run, 2)
    until(lambda: len(given_up) == 2)
    (run / "more").write_text("more")
    assert made.close()["missing"] == []
    assert fetched(store, tmp_path / "to") == contents(run)


def test_two_at_the_same_moment_are_one(store, run, monkeypatch):
    """Both have read that nothing is there; one writes first."""
    read = Objects.read

    def and_another_comes(self, key):
        answer = read(self, key)
        monkeypatch.setattr(Objects, "read", read)
        copy(store, run).close()
        return answer

    monkeypatch.setattr(Objects, "read", and_another_comes)
    with pytest.raises(ValueError, match="was written by another process"):
        copy(store, run)


def test_interrupted_upload_is_resumed(store, run, tmp_path, monkeypatch, until):
    checkpoint(run, 2)
    for name in ("one", "two", "three", "four", "five"):
        (run / "checkpoints/2" / name).write_text(name * 100)
    write_file_list(run / "checkpoints/2")
    write, written = Objects.write, []

    def dies(self, key, data, generation=object_store.ABSENT):
        if len(written) >= 6:
            raise object_store.ObjectChanged("dead")  # nothing of this process happens any more
        written.append(key)
        return write(self, key, data, generation)

    monkeypatch.setattr(Objects, "write", dies)
    dead = copy(store, run)
    until(lambda: not dead._thread.is_alive())
    monkeypatch.setattr(Objects, "write", write)
    before = store.objects()
    assert sum("checkpoints/2/" in key for key in before) > 3  # OTHERS has one
    if store.log is not None:
        store.log.clear()
    upload(store, run)
    if store.log is not None:
        sent = [r.key for r in store.writes() if r.status == 200 and "halfbyte-copy" not in r.key]
        assert len(set(sent)) == len(sent) and not {f"{store.bucket}/{key}" for key in before} & set(sent)
    assert fetched(store, tmp_path / "to") == contents(run)
    only_our_own_is_touched(store)


def test_keep_deletes_only_what_the_run_wrote(store, run, tmp_path):
    said = []
    for step in (2, 4, 6, 8):
        checkpoint(run, step)
        if step > 2:
            shutil.rmtree(run / "checkpoints" / str(step - 2))
        if step == 6:  # somebody has replaced an object of checkpoint 4
            (key,) = [key for key in store.objects() if "/checkpoints/4/d/array" in key]
            store.put(key, b"theirs")
        upload(store, run, keep=1, say=said.append)
    there = store.objects()
    steps = {key.split("/checkpoints/")[1].split("/")[0] for key in there.keys() - OTHERS if "/checkpoints/" in key}
    assert steps == {"4", "8"} and there[key] == b"theirs"
    assert any("was written by another process; it was left as it is" in text and "/4/d/array" in text for text in said)
    assert sum("metrics.jsonl@" in key for key in there) == 1
    assert fetched(store, tmp_path / "to") == contents(run)
    # The lists and records of 2, 4 and 6, the arrays of 2 and 6, and three earlier metrics.jsonl.
    only_our_own_is_touched(store, deletes=11)


def test_keep_keeps_what_the_run_keeps_for_good(store, run, tmp_path):
    """`fetch` brings the newest checkpoint only; those of every 4th step stay in the bucket all the same."""
    for step in (2, 4, 6):
        checkpoint(run, step)
    upload(store, run, keep=1, keep_every=4)
    assert steps_in(store) == [2, 4, 6]
    fetch(store, tmp_path / "to")
    for step in (8, 10):
        checkpoint(tmp_path / "to", step)
        upload(store, tmp_path / "to", keep=1, keep_every=4)
        shutil.rmtree(tmp_path / "to" / "checkpoints" / str(step))
    assert steps_in(store) == [4, 6, 8, 10]
    fetch(store, tmp_path / "fourth", step=4)
    assert {k: v for k, v in contents(tmp_path / "fourth").items() if "/4/" in k} == {
        k: v for k, v in contents(run).items() if "/4/" in k
    }


def test_emptied_directory_deletes_nothing_in_the_bucket(store, run, until):
    """`rm -rf RUN/*` while the run is copied, with --copy-keep."""
    said = []
    checkpoint(run, 2)
    made = copy(store, run, keep=1, say=said.append)
    until(lambda: any("copied checkpoint 2 " in text for text in said))
    before = store.objects()
    for path in (run / "config.json", run / "metrics.jsonl", run / NAME):
        path.unlink()
    shutil.rmtree(run / "checkpoints")
    assert made.close()["missing"] == ["the last rows and files"]
    assert store.objects() == before and any("was replaced while it was copied" in text for text in said)
    only_our_own_is_touched(store)


def test_removed_file_stays_in_the_bucket(store, run, tmp_path):
    checkpoint(run, 2)
    config = (run / "config.json").read_bytes()
    upload(store, run, keep=1)
    (run / "config.json").unlink()
    upload(store, run, keep=1)
    fetch(store, tmp_path / "to")
    assert (tmp_path / "to" / "config.json").read_bytes() == config
    only_our_own_is_touched(store)


def test_folder_with_a_number_that_is_no_step_is_not_copied(store, run, tmp_path, monkeypatch):
    """A backup made by hand: `0010`, or digits that Python's int does not read. The run is the current directory."""
    monkeypatch.chdir(run)
    checkpoint(run, 2)
    for name in ("0010", "8²"):
        shutil.copytree(run / "checkpoints" / "2", run / "checkpoints" / name)
    upload(store, Path("."))
    assert fetch(store, tmp_path / "to")["step"] == 2


def test_symbolic_link_in_a_checkpoint_is_reported(store, run, tmp_path):
    said = []
    checkpoint(run, 2)
    array = run / "checkpoints" / "2" / "d" / "array"
    array.rename(tmp_path / "array")
    array.symlink_to(tmp_path / "array")
    assert copy(store, run, say=said.append).close()["missing"] == ["checkpoint 2", "the last rows and files"]
    assert any("is a symbolic link" in text for text in said)


def test_parts_are_sent_once_while_the_head_cannot_be_written(store, run, monkeypatch):
    sent, write = [], Objects.write

    def refused(self, key, data, *rest):
        if key == bucket_copy.HEAD and len(sent):
            raise OSError("no permission")
        sent.append(key)
        return write(self, key, data, *rest)

    monkeypatch.setattr(Objects, "write", refused)
    checkpoint(run, 2)
    assert copy(store, run).close()["missing"] == ["checkpoint 2", "the last rows and files"]
    assert len(sent) == len(set(sent))


def test_unknown_generation_deletes_nothing(store):
    """TensorStore takes an empty generation for no condition."""
    with pytest.raises(ValueError, match="no generation is known"):
        Objects(store.url).write("notes.txt", None, b"")
    only_our_own_is_touched(store)


def test_server_without_conditions_is_refused(store, run, monkeypatch):
    """A server that creates an object although it exists. Found before any part is written."""

    class Careless:
        def __init__(self, real):
            self.real = real

        def read(self, key):
            return self.real.read(key)

        def write(self, key, data, **_):
            return self.real.write(key, data)

    opened = Objects.__init__

    def careless(self, url):
        opened(self, url)
        self._kv = Careless(self._kv)

    monkeypatch.setattr(Objects, "__init__", careless)
    with pytest.raises(ValueError, match="ignores the conditions of writes"):
        copy(store, run)
    assert {key for key in store.objects() if key not in OTHERS} == {f"{PREFIX}/halfbyte-copy.json"}


def test_checkpoint_removed_before_it_was_copied_is_reported(store, run, monkeypatch, until):
    said, write = [], Objects.write
    made = copy(store, run, say=said.append)

    monkeypatch.setattr(Objects, "write", gone)
    checkpoint(run, 2)
    until(lambda: made._failing)
    checkpoint(run, 4)
    shutil.rmtree(run / "checkpoints/2")
    time.sleep(0.2)  # it is tried again and again, and reported once
    monkeypatch.setattr(Objects, "write", write)
    assert made.close() == {"url": store.url, "missing": [], "removed": [2]}
    assert [text for text in said if "the store is not there" in text] == said[:1]
    assert said[-1] == f"COPY: not in {store.url}: checkpoint 2, which the run has removed"


def test_checkpoints_deleted_during_an_upload_are_reported(store, run, monkeypatch):
    """The upload of the first takes so long that no look sees the second and the third."""
    said, write, coming, ended = [], Objects.write, threading.Event(), threading.Event()

    def slow(self, key, data, *rest):
        if "/checkpoints/2/" in key:
            coming.set()
            ended.wait(60)
        return write(self, key, data, *rest)

    monkeypatch.setattr(Objects, "write", slow)
    checkpoint(run, 2)
    made = copy(store, run, say=said.append)
    assert coming.wait(60)
    for step in (4, 6, 8):
        checkpoint(run, step)
        made.committed(step)
        shutil.rmtree(run / "checkpoints" / str(step)) if step < 8 else None
    ended.set()
    assert made.close() == {"url": store.url, "missing": [], "removed": [4, 6]}
    removed = "checkpoint 4, which the run has removed, checkpoint 6, which the run has removed"
    assert said[-1] == f"COPY: not in {store.url}: {removed}"
    assert steps_in(store) == [2, 8]
    made.committed(10)  # of a run that failed while it was being written
    assert said[-1] == f"COPY: not in {store.url}: checkpoint 10, which was written after the copy had ended"


def test_checkpoint_whose_list_was_cut_off_by_a_kill_is_copied(store, run, tmp_path):
    checkpoint(run, 2)
    (run / "checkpoints" / "2" / "_CHECKPOINT_METADATA").write_text("{}")
    shutil.copytree(run / "checkpoints" / "2", run / "checkpoints" / "4")  # one that Orbax has committed
    (run / "checkpoints" / "6").mkdir()  # and a directory that it has not
    for step in (2, 4):
        (run / "checkpoints" / str(step) / "halfbyte-files.json").unlink()
    upload(store, run)
    assert fetch(store, tmp_path / "to")["step"] == 4
    assert contents(tmp_path / "to") == {k: v for k, v in contents(run).items() if "checkpoints/2/" not in k}
    assert not (run / "checkpoints" / "6" / "halfbyte-files.json").exists()


def test_files_that_have_not_changed_are_not_read_again(store, run, tmp_path, monkeypatch, until):
    """Until the end of the run, which reads everything once more."""
    read, upload, said = [], Copy._upload_file, []
    monkeypatch.setattr(Copy, "_upload_file", lambda self, name, part: read.append(name) or upload(self, name, part))
    checkpoint(run, 2)
    made = copy(store, run, say=said.append)
    until(lambda: any("copied checkpoint 2 " in text for text in said))
    assert "config.json" in read and "metrics.jsonl" in read
    read.clear()
    times = (run / "config.json").stat()
    (run / "config.json").write_text("[]")  # as long as before, and as old
    os.utime(run / "config.json", ns=(times.st_atime_ns, times.st_mtime_ns))
    checkpoint(run, 4)
    until(lambda: any("copied checkpoint 4 " in text for text in said))
    assert sorted(name for name in read if "/" not in name) == ["config.json", "metrics.jsonl"]
    assert not [name for name in read if name.startswith("tensorboard/")]
    read.clear()
    assert made.close()["missing"] == [] and "tensorboard/events ü 1" in read
    assert fetched(store, tmp_path / "to") == contents(run, without="checkpoints/2/")


def test_checkpoint_that_comes_back_is_copied_again(store, run, tmp_path, until):
    """Moved away, deleted from the bucket by --copy-keep, and moved back: inodes and times are those of before."""
    said = []
    made = copy(store, run, keep=1, say=said.append)
    for step in (2, 4, 6):
        checkpoint(run, step)
        until(lambda step=step: any(f"copied checkpoint {step} " in text for text in said))
        if step < 6:
            (run / "checkpoints" / str(step)).rename(tmp_path / str(step))
    (tmp_path / "4").rename(run / "checkpoints" / "4")
    until(lambda: len([text for text in said if "copied checkpoint 4 " in text]) == 2)
    assert made.close()["missing"] == []
    fetch(store, tmp_path / "to", step=4)
    assert contents(tmp_path / "to") == {k: v for k, v in contents(run).items() if "checkpoints/6/" not in k}


def test_directory_without_a_name_is_refused(store, run):
    """Two such directories would be one writer."""
    (run / NAME).mkdir()
    before = store.objects()
    with pytest.raises(ValueError, match=f"{NAME} is not a file; remove it"):
        copy(store, run)
    assert store.objects() == before


def test_files_that_fetch_would_refuse_are_reported(store, run, tmp_path):
    said, before = [], contents(run)
    deep = run / Path(*["a"] * bucket_copy.MAX_DEPTH)
    deep.mkdir(parents=True)
    for path in (deep / "file", run / "two\nlines"):
        path.write_text("mine")
    checkpoint(run, 2)
    missing = copy(store, run, say=said.append).close()["missing"]
    assert missing == [f"file '{'a/' * bucket_copy.MAX_DEPTH}file'", "file 'two\\nlines'"]
    assert len([text for text in said if "is not copied; rename it" in text and "\n" not in text]) == 2
    fetch(store, tmp_path / "to")
    fetched = contents(tmp_path / "to")
    assert before.items() <= fetched.items() and any("checkpoints/2/" in name for name in fetched)


def test_failed_deletion_spares_a_checkpoint_that_comes_back(store, run, tmp_path, monkeypatch, until):
    """A checkpoint is moved away, deleted from the bucket halfway, and moved back before that is tried again."""
    said, write, deleted, moved = [], Objects.write, [], threading.Event()

    def fails(self, key, data, *rest):
        if data is None:
            deleted.append(key)
            if len(deleted) == 2:
                moved.wait(60)
                raise OSError("the network is gone")
        return write(self, key, data, *rest)

    monkeypatch.setattr(Objects, "write", fails)
    made = copy(store, run, keep=1, say=said.append)
    checkpoint(run, 2)
    until(lambda: any("copied checkpoint 2 " in text for text in said))
    (run / "checkpoints" / "2").rename(tmp_path / "2")
    checkpoint(run, 4)
    until(lambda: len(deleted) == 2)
    (tmp_path / "2").rename(run / "checkpoints" / "2")
    moved.set()
    assert made.close()["missing"] == []
    for step in (2, 4):
        fetch(store, tmp_path / f"to {step}", step=step)
        other = f"checkpoints/{6 - step}/"
        assert contents(tmp_path / f"to {step}") == {k: v for k, v in contents(run).items() if not k.startswith(other)}


def test_store_that_stays_away_ends_the_wait_and_loses_nothing(store, run, tmp_path, monkeypatch):
    said, write = [], Objects.write
    made = copy(store, run, say=said.append)

    monkeypatch.setattr(Objects, "write", gone)
    checkpoint(run, 2)
    assert made.close()["missing"] == ["checkpoint 2", "the last rows and files"]
    monkeypatch.setattr(Objects, "write", write)
    with closing(copy(store, run)):  # the same command again
        pass
    assert fetched(store, tmp_path / "to") == contents(run)


def test_tampered_truncated_or_missing_objects_are_refused(store, run, tmp_path):
    upload(store, run, step=2)
    own = {key: data for key, data in store.objects().items() if key not in OTHERS}
    said = []
    for key, data in own.items():
        for change in (data[:-1], bytes([data[0] ^ 1]) + data[1:], data + b" ", None):
            store.remove(key) if change is None else store.put(key, change)
            try:
                fetch(store, tmp_path / "to")
                assert change == data + b" " and key.endswith("halfbyte-copy.json")  # JSON, as it was
                shutil.rmtree(tmp_path / "to")
            except (ValueError, OSError) as error:
                said.append(str(error))
            assert not (tmp_path / "to").exists()
            shutil.rmtree(tmp_path / ".to.fetching", ignore_errors=True)  # which would spare it the next
            store.put(key, data)
    assert all("\n" not in text and store.url in text for text in said) and len(said) == 4 * len(own) - 1
    assert fetched(store, tmp_path / "to") == contents(run)


def resealed(content):
    text = content if isinstance(content, str) else json.dumps(content)
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text}).encode()


def hostile(head):
    """Heads that somebody made, each sealed anew: what is wrong with them is not their checksum."""
    part, deep = ["0" * 64, 1, ""], "a/" * bucket_copy.MAX_DEPTH + "a"
    for path in ("/etc/passwd", "../out", "a/../../out", "", ".", "a//b", "a/", "x\x00y", "a\nb", "\ud800", deep):
        yield head | {"files": {path: [part]}}
    for wrong in ([], ["0" * 64], ["z" * 64, 1, ""], ["0" * 64, "1", ""], ["0" * 64, -5, ""], [None, 1, ""]):
        yield head | {"files": {"a": [wrong]}}
        yield head | {"checkpoints": {"2": {"checkpoints/2/a": [wrong]}}}
    for field in head:
        yield {key: value for key, value in head.items() if key != field}
        for value in (None, 5, "text", [1], {"a": 1}, True):
            yield head | {field: value}
    for step in ("x", "-1", "2.5", " 2"):
        yield head | {"checkpoints": {step: {}}}
    yield from (None, [], 5, "text", {}, "[" * 1000, "{", "NaN", '{"run": 1, "run": 2}')
    yield head | {"files": {"a": [part], "a/b": [part]}}
    yield head | {"run": "../fedcba9876543210"}


def test_hostile_heads_are_refused_in_one_sentence(store, run, tmp_path):
    upload(store, run, step=2)
    key = f"{PREFIX}/halfbyte-copy.json"
    good = json.loads(json.loads(store.get(key))["content"])
    heads = list(hostile(good))
    assert len(heads) > 60
    before, said = {path for path in tmp_path.rglob("*") if "store" not in path.parts}, []
    for number, head in enumerate(heads if store.kind == "folder" else heads[::7]):
        store.put(key, resealed(head))
        for use in (
            lambda: fetch(store, tmp_path / "to"),
            lambda: copy(store, run, take_over=True).close(),
        ):
            try:
                use()
            except (ValueError, OSError, FileExistsError, NotADirectoryError, IsADirectoryError) as error:
                said.append((str(error), number, head))
        shutil.rmtree(tmp_path / "to", ignore_errors=True)
        shutil.rmtree(tmp_path / ".to.fetching", ignore_errors=True)
    assert not [one for one in said if "\n" in one[0]]
    assert {path for path in tmp_path.rglob("*") if "store" not in path.parts} <= before
    if store.kind == "folder":
        assert {k: v for k, v in store.objects().items() if k in OTHERS} == OTHERS


def test_broken_download_is_resumed(store, run, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_copy, "PART", 300)
    checkpoint(run, 2, size=3000)
    upload(store, run)
    read, keys, number = Objects.read, [], itertools.count(1)

    def breaks(self, key):
        if key == bucket_copy.HEAD:  # copies of other tests may still be ending
            return read(self, key)
        keys.append(key)
        if next(number) == 8:  # in one of several threads
            raise OSError("the network is gone")
        return read(self, key)

    monkeypatch.setattr(Objects, "read", breaks)
    with pytest.raises(OSError, match="the network is gone"):
        fetch(store, tmp_path / "to")
    first = keys.copy()
    assert not (tmp_path / "to").exists()
    assert fetched(store, tmp_path / "to") == contents(run)
    again = keys[len(first) :]
    assert len(set(again)) == len(again) < len(store.objects()) - len(OTHERS)  # what was whole is not fetched again


def test_files_of_a_broken_download_are_verified(store, run, tmp_path):
    upload(store, run, step=2)
    (tmp_path / ".to.fetching").mkdir()
    (tmp_path / ".to.fetching" / "config.json").write_text("[]")
    (tmp_path / ".to.fetching" / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes() + b"more")
    assert fetched(store, tmp_path / "to") == contents(run)


def test_partial_download_of_another_step_is_refused(store, run, tmp_path, monkeypatch):
    upload(store, run, step=2)
    read, keys = Objects.read, []

    def breaks(self, key):
        keys.append(key)
        if "/checkpoints/2/" in key:
            raise OSError("the network is gone")
        return read(self, key)

    monkeypatch.setattr(bucket_copy, "WORKERS", 1)
    with monkeypatch.context() as broken:
        broken.setattr(Objects, "read", breaks)
        with pytest.raises(OSError, match="the network is gone"):
            fetch(store, tmp_path / "to")
    (tmp_path / ".to.fetching" / "checkpoints" / "2" / "_METADATA").write_text("half")
    upload(store, run, step=4)
    monkeypatch.setattr(Objects, "read", lambda self, key: keys.append(key) or read(self, key))
    keys.clear()
    with pytest.raises(ValueError, match=r"checkpoints/2/_METADATA', which is not in this copy; give the --step"):
        fetch(store, tmp_path / "to")
    assert keys == [bucket_copy.HEAD]
    assert fetch(store, tmp_path / "to", step=2)["step"] == 2


def test_second_fetch_into_one_directory_names_it(store, run, tmp_path):
    upload(store, run, step=2)
    with RunLock(tmp_path / ".to.fetching"), pytest.raises(RunDirectoryLockedError) as refused:
        fetch(store, tmp_path / "to")
    words = f"the download into {tmp_path / 'to'} is held by another process (pid {os.getpid()} "
    assert words in str(refused.value) and str(refused.value).endswith("or give DIR another directory")


def test_directory_that_holds_something_else_is_left_alone(store, run, tmp_path, monkeypatch):
    upload(store, run, step=2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for name in ("mine", "file", "link"):
        with pytest.raises(ValueError, match="holds something else"):
            fetch(store, tmp_path / name)
    for name in ("a", "b"):
        (tmp_path / f".{name}.fetching").mkdir()
    (tmp_path / ".a.fetching" / "checkpoints").symlink_to(tmp_path / "mine")
    (tmp_path / ".b.fetching" / "config.json").symlink_to(tmp_path / "file")
    with pytest.raises(ValueError, match="holds 'checkpoints', which is not in this copy"):
        fetch(store, tmp_path / "a")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis"]  # no directory was made there
    with monkeypatch.context() as late:
        late.setattr(bucket_copy, "_refuse_others", lambda *_: None)  # the link comes after that look
        with pytest.raises(ValueError, match="leads out of"):
            fetch(store, tmp_path / "a")
    with pytest.raises(ValueError, match="symbolic link"):
        fetch(store, tmp_path / "b")
    (tmp_path / ".c.fetching").mkdir()
    (tmp_path / ".c.fetching" / "thesis").write_text("mine")
    with pytest.raises(ValueError, match="is not in this copy"):
        fetch(store, tmp_path / "c")
    (tmp_path / "empty").mkdir()
    fetch(store, tmp_path / "empty")
    assert [path.read_text() for path in tmp_path.rglob("thesis")] == ["mine"] * 2
    assert (tmp_path / "file").read_text() == "mine"


def test_bucket_of_an_earlier_version_is_left_alone(store, run, tmp_path):
    store.put(f"{PREFIX}/head.json", b'{"files": {}}')
    before = store.objects()
    checkpoint(run, 2)
    for use in (lambda: copy(store, run), lambda: fetch(store, tmp_path / "to")):
        with pytest.raises(ValueError, match=r"holds the run of an earlier version: docs/buckets\.md"):
            use()
    assert store.objects() == before


def test_recipe_of_the_docs_reads_a_run_of_an_earlier_version(run, tmp_path):
    """docs/buckets.md, on the files of a prefix as an earlier version wrote them."""
    checkpoint(run, 2)
    old = tmp_path / "old"
    names = {path: f"{path}@{hashlib.sha256(data).hexdigest()[:24]}" for path, data in contents(run).items()}
    for path, name in names.items():
        (old / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(run / path, old / name)
    (old / "head.json").write_text(json.dumps({"files": names, "copy": "1", "holder": None, "beat": "1"}))
    shutil.move(run, tmp_path / "gone")
    page = (Path(__file__).parents[2] / "docs" / "buckets.md").read_text()
    (program,) = re.findall(r'python -c "\n(.*?)\n"', page, re.S)
    subprocess.run([sys.executable, "-c", program], cwd=old, check=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "gone")


def test_nothing_there_and_no_such_step_are_said(store, run, tmp_path):
    with pytest.raises(ValueError, match="holds no copy of a run"):
        fetch(store, tmp_path / "to")
    upload(store, run)
    with pytest.raises(ValueError, match="has no checkpoint ; it has: none"):
        fetch(store, tmp_path / "to")
    upload(store, run, step=2)
    with pytest.raises(ValueError, match=r"has no checkpoint 4; it has: \[2\]"):
        fetch(store, tmp_path / "to", step=4)


def test_malformed_addresses_are_refused():
    inside = ("s3://../b", "s3://a/../b", "s3://a/b//c", "gs://a/b/./c", "gs://a/b\\c")
    for url in ("ftp://a/b", "s3://", "gs:///b", "bucket", "s3:/a", *inside):
        with pytest.raises(ValueError, match="s3://BUCKET/PREFIX"):
            Objects(url)
