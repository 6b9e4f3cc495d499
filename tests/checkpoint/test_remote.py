"""A run in an object store, against an S3 server on loopback that can be slow, refuse, cut off and be gone. Oracle: the
directory that was copied, byte for byte. Runs that are killed and go on elsewhere: tests/train/test_resume.py.
"""

import itertools
import json
import shutil
import signal
import threading
import time

import pytest
from s3_server import S3

from halfbyte.checkpoint import RunDirectoryHeld, remote
from halfbyte.checkpoint.files import write_file_list

URL = "s3://runs/team/first"


@pytest.fixture
def s3(monkeypatch):
    server = S3()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    for name, seconds in {"BEAT": 0.1, "LOOK": 0.02, "ROWS": 0.3, "PATIENCE": 1.0}.items():
        monkeypatch.setattr(remote, name, seconds)
    monkeypatch.setattr(remote, "LEASE", 600.0)  # who lives is heard of at once, however busy the machine is
    yield server
    server.close()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes this process another machine: another cache, another host."""
    names = itertools.count()

    def become():
        name = f"host-{next(names)}"
        monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / name))
        monkeypatch.setattr(remote, "_machine", lambda: name)
        return name

    become()
    return become


def opened(say=lambda text: None):
    directory = remote.fetch(URL, say=say)
    directory.mkdir(exist_ok=True)
    return remote.Mirror(URL, directory, say=say)


def checkpoint(directory, step, text="weights"):
    """As a run leaves one: whole at once."""
    folder = directory / "checkpoints" / f"{step}.orbax-checkpoint-tmp-1"
    (folder / "d").mkdir(parents=True)
    (folder / "d" / "array").write_text(f"{text} {step}")
    write_file_list(folder)
    folder.rename(folder.with_name(str(step)))
    (directory / "metrics.jsonl").write_text(f"{step}\n")


def contents(directory):
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def head(s3):
    return json.loads(s3.objects["team/first/head.json"][0])


@pytest.mark.slow
def test_another_machine_goes_on_with_the_same_bytes(s3, machine, until):
    with opened() as mirror:
        checkpoint(mirror.directory, 2)
        until(lambda: "checkpoints/2/d/array" in head(s3)["files"])  # while the run goes on
        (mirror.directory / "checkpoints" / "4.orbax-checkpoint-tmp-9").mkdir()
        (mirror.directory / "checkpoints" / "4.orbax-checkpoint-tmp-9" / "half").write_text("")
        first = mirror.directory
    whole = {path: data for path, data in contents(first).items() if "tmp" not in path}
    machine()
    with opened() as mirror:
        assert mirror.directory != first and contents(mirror.directory) == whole
        shutil.rmtree(mirror.directory / "checkpoints/2")
        checkpoint(mirror.directory, 4)
    kept = {name.removeprefix("team/first/").partition("@")[0] for name in s3.objects}
    files = {"checkpoints/4/d/array", "checkpoints/4/halfbyte-files.json", "metrics.jsonl"}
    assert kept == {"head.json"} | files  # what nothing names is gone
    assert remote.shown(mirror.directory) == URL and remote.shown(mirror.directory.parent) == str(
        mirror.directory.parent
    )


def test_of_many_starts_into_one_prefix_one_wins(s3, machine, monkeypatch):
    monkeypatch.setattr(remote.Mirror, "_is_dead_here", lambda *_: False)  # they are threads of one process
    directory = remote.fetch(URL, say=print)
    won, lost, barrier = [], [], threading.Barrier(4)

    def start():
        barrier.wait()
        try:
            won.append(remote.Mirror(URL, directory, say=print))
        except RunDirectoryHeld as error:
            lost.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(lost) == 3 and s3.conditional  # the store itself compares and swaps
    assert all("another process" in text for text in lost)
    won[0].close()


def test_a_holder_that_lives_is_left_alone_and_one_that_died_is_followed(s3, machine, monkeypatch):
    said, mirror = [], opened()
    machine()
    with pytest.raises(RunDirectoryHeld, match="is held by another process"):
        opened(said.append)
    assert any("waiting" in text for text in said)
    process_ends(mirror)
    machine()
    monkeypatch.setattr(remote, "LEASE", 0.5)
    with opened() as second:
        assert head(s3)["holder"] == second.holder
    stopped = []
    monkeypatch.setattr(remote.os, "kill", lambda pid, number: stopped.append(number))
    assert (
        not mirror._try(mirror._beat) and mirror.lost and stopped == [signal.SIGTERM]
    )  # it was only slow: it ends, and knows
    with pytest.raises(OSError, match="another process has the run"):
        mirror.close()


@pytest.mark.slow
@pytest.mark.parametrize("faults", [["refuse"] * 9, ["cut"] * 9, [0.2, "refuse", 0.2, "cut"]])
def test_faults_lose_nothing(s3, machine, until, faults):
    said = []
    with opened(said.append) as mirror:
        s3.faults += faults
        checkpoint(mirror.directory, 2)
        until(lambda: not s3.faults)
        checkpoint(mirror.directory, 4)
    assert set(head(s3)["files"]) == set(contents(mirror.directory))
    machine()
    assert contents(remote.fetch(URL, say=print)) == contents(mirror.directory)


@pytest.mark.slow
def test_a_store_slower_than_checkpoints_are_made_and_removed_gets_whole_ones(s3, machine):
    mirror, step = opened(), 1
    copied = lambda: {path for path in head(s3)["files"] if path.startswith("checkpoints")}  # noqa: E731
    while not copied() and step < 2000:  # to end a hang
        s3.faults[:], step = [0.1] * 20, step + 1
        checkpoint(mirror.directory, step)
        shutil.rmtree(mirror.directory / "checkpoints" / str(step - 1), ignore_errors=True)
        time.sleep(0.05 + step / 2000)  # a slow machine gets a moment in which nothing changes, sooner or later
    s3.faults.clear()
    assert {path.split("/", 2)[2] for path in copied()} == {"d/array", "halfbyte-files.json"}
    mirror.close()


@pytest.mark.slow
def test_with_the_server_gone_the_run_goes_on_and_the_copy_is_tried_again(s3, machine, until):
    said = []
    with opened(said.append) as mirror:
        s3.stop()
        checkpoint(mirror.directory, 2)
        until(lambda: any("training goes on" in text for text in said))
        checkpoint(mirror.directory, 4)
        s3.start()
        until(lambda: any("answers again" in text for text in said))
    assert sum("training goes on" in text for text in said) == 1
    assert set(head(s3)["files"]) == set(contents(mirror.directory))


def test_a_head_that_is_no_head_stops_nothing(s3, machine, until):
    said = []
    mirror = opened(said.append)
    with s3.lock:  # not between the store's looking at the head and its replacing it
        good, s3.objects["team/first/head.json"] = s3.objects["team/first/head.json"], (b"{", '"other"')
    checkpoint(mirror.directory, 2)
    until(lambda: any("is not what a run writes" in text for text in said))
    s3.objects["team/first/head.json"] = good
    mirror.close()
    assert set(head(s3)["files"]) == set(contents(mirror.directory))


def ends_with(error, s3, mirror):
    with mirror:
        s3.stop()
        checkpoint(mirror.directory, 2)
        raise error


def process_ends(mirror):
    """As when its process has ended: nothing of it is under way any more, and it has let nothing go."""
    mirror._end.set()
    for thread in mirror._threads:
        thread.join()


@pytest.mark.slow
def test_an_interrupted_run_waits_for_no_store_and_a_failed_one_ends_with_its_error(s3, machine, monkeypatch):
    monkeypatch.setattr(remote, "PATIENCE", 600.0)
    interrupted = opened()
    with pytest.raises(KeyboardInterrupt):
        ends_with(KeyboardInterrupt(), s3, interrupted)
    process_ends(interrupted)
    s3.start()
    machine()
    monkeypatch.setattr(remote, "PATIENCE", 0.0)
    monkeypatch.setattr(remote, "LEASE", 0.5)
    said = []
    with pytest.raises(ValueError, match="of its own"):
        ends_with(ValueError("of its own"), s3, opened(said.append))
    assert any("lacks the end of this run" in text for text in said)
    s3.start()


def test_what_was_never_copied_is_still_here_and_goes_on(s3, machine):
    mirror = opened()
    s3.stop()
    checkpoint(mirror.directory, 2)
    with pytest.raises(OSError, match="lacks the end of this run"):
        mirror.close()
    s3.start()
    with opened() as again:
        assert contents(again.directory) == contents(mirror.directory) != {}
    machine()
    assert contents(remote.fetch(URL, say=print)) == contents(mirror.directory)


def test_a_machine_that_was_overtaken_keeps_what_it_had(s3, machine, monkeypatch):
    name = machine()
    with opened() as first:
        checkpoint(first.directory, 2)
    cache = remote.user_cache()
    machine()
    with opened() as second:
        checkpoint(second.directory, 4, "other")
    monkeypatch.setenv("HALFBYTE_CACHE", str(cache))
    monkeypatch.setattr(remote, "_machine", lambda: name)
    before, said = contents(first.directory), []
    assert contents(remote.fetch(URL, say=said.append)) == contents(second.directory)
    (aside,) = first.directory.parent.glob("first.overtaken-*")
    assert contents(aside) == before and any(str(aside) in text for text in said)


def test_damage_in_the_store_is_named(s3, machine):
    with opened() as mirror:
        checkpoint(mirror.directory, 2)
    (name,) = [name for name in s3.objects if "array" in name]
    s3.objects[name] = b"other", '"tag"'
    machine()
    with pytest.raises(ValueError, match="is not what was written"):
        opened()
    s3.objects["team/first/head.json"] = b"[1]", '"tag"'
    with pytest.raises(ValueError, match="is not what a run writes"):
        opened()


@pytest.mark.slow
@pytest.mark.parametrize("url", ["ftp://a/b", "s3://", "gs:///b", "s3://../b"])
def test_an_address_that_is_no_store_is_refused(url):
    with pytest.raises(ValueError, match="s3://BUCKET/PREFIX"):
        remote.fetch(url, say=print)
