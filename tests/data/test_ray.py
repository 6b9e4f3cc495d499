"""`--engine ray`: workers of a cluster, one of them killed. Oracle: the bytes that one machine makes."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from halfbyte.cli.main import main
from halfbyte.data import prepare, worker_pool
from halfbyte.data.text_files import InputChunk

from .conftest import make_documents, write_jsonl
from .test_prepare import contents


def test_without_ray_and_with_workers_the_way_out_is_said(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "ray", None)
    write_jsonl(tmp_path / "a.jsonl", make_documents(3, seed=0))
    words = [str(tmp_path / "a.jsonl"), "--tokenizer", "bytes", "--out", str(tmp_path / "out"), "--engine", "ray"]
    for more, said in (([], "[ray]'"), (["--workers", "2"], "the cluster has its own number")):
        assert main(["data", "prepare", *words, *more]) == 2
        assert said in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def cluster():
    """On loopback alone: with its setting for several machines Ray listens on every address, whatever it is told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # read when it is imported
        patch.setenv("RAY_worker_niceness", "0")
        ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
        ray.init(num_cpus=3, include_dashboard=False, logging_level="error", log_to_driver=False)
        yield ray
        ray.shutdown()


def test_cluster_is_on_loopback_alone(cluster):
    assert [node["NodeManagerAddress"] for node in cluster.nodes()] == ["127.0.0.1"]


def test_chunk_of_a_killed_worker_is_encoded_again(tmp_path, cluster):
    for number in range(12):
        write_jsonl(tmp_path / f"{number:02}.jsonl", make_documents(300, seed=number), ("laws", None)[number % 2])
    shared = {"tokenizer": "bpe:300", "val_fraction": 0.1, "seq_len": 64}
    one = prepare(str(tmp_path / "*.jsonl"), out=tmp_path / "one", workers=1, **shared)
    killed, over = [], threading.Event()
    thread = threading.Thread(target=kill_one_worker, args=(killed, over))
    thread.start()
    made = prepare(str(tmp_path / "*.jsonl"), out=tmp_path / "two", engine="ray", **shared)
    over.set()
    thread.join()
    assert killed and contents(made.directory) == contents(one.directory)


def kill_one_worker(killed, over):
    """The first process that is seen at work on a chunk."""
    while not killed and not over.is_set():
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if place.read_bytes().startswith(b"ray::_work"):
                    os.kill(int(place.parent.name), signal.SIGKILL)
                    killed.append(place)
                    break
            except OSError:
                continue


def chunk(number):
    return InputChunk(str(number), "text", b"", number, True, True, 0)


def test_order_errors_and_a_chunk_that_ends_every_worker(cluster):
    def work(item):
        if item.start == 7:
            raise ValueError("line 7 is bad")
        if item.start == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return item.start

    with worker_pool.WorkerPool(None, 0, engine="ray") as run:
        assert [found for _, found in run(work, map(chunk, range(7)))] == list(range(7))
        with pytest.raises(ValueError, match="^line 7 is bad$"):
            list(run(work, map(chunk, range(5, 8))))
        with pytest.raises(OSError, match="gave up on a chunk"):
            list(run(work, [chunk(8)]))
