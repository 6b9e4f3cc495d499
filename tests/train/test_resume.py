"""A resumed run is bit-identical to an uninterrupted one: params, optimizer, and the loss of every later step.

Oracle: the run that nobody interrupted. Processes are really killed (-9) and restarted.
"""

import itertools
import json
import re
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
from outside import Gate, wait_until
from runner import Runner, final_checksums, finish, losses
from states import checkpoint_steps
from tiny import MODEL, ONE_LINEAR, tiny

from halfbyte.checkpoint import remote
from halfbyte.inputs import compile_cache as sealed
from halfbyte.inputs.names import user_cache
from halfbyte.optim import OptimizerConfig
from halfbyte.train import CheckpointConfig, LossScaleConfig

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))  # an S3 server on loopback
from s3_server import S3

pytestmark = pytest.mark.slow

STEPS, EVERY, URL = 60, 10, "s3://runs/killed"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, compile_cache, warm):
    """(runner, directory of an uninterrupted run) in nvfp4 by Muon, which has AdamW's state too, with gradient
    accumulation; tests/faults kills bf16."""
    folder = tmp_path_factory.mktemp("resume")
    save_often = CheckpointConfig(every=EVERY, keep_last=2)
    scale = LossScaleConfig(mode="dynamic", initial=8.0, growth_interval=17)  # doubles before and after the kill
    muon = OptimizerConfig(name="muon", learning_rate=1e-2, warmup=1)
    config = tiny(
        model=MODEL.replace(layers=1), recipe="nvfp4", policy=ONE_LINEAR, optimizer=muon, steps=STEPS, accumulate=2,
        checkpoint=save_often, loss_scale=scale,
    )  # fmt: skip
    runner = Runner(folder, config, compile_cache, warm)
    code, output = runner.run(folder / "whole")
    assert code == 0, output
    return runner, folder / "whole"


def damage(directory, step):
    """Flip one bit in the largest file of a checkpoint."""
    files = [path for path in (directory / "checkpoints" / str(step)).rglob("*") if path.is_file()]
    victim = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 4
    victim.write_bytes(content)


@pytest.fixture
def machines(whole, tmp_path, monkeypatch):
    """(an S3 server, `elsewhere`): the next start is on another machine, where nothing is but the address of the run
    (and what seals compiled programs); the directory in which the run will live there."""
    server, numbers, key = S3(), itertools.count(), user_cache() / sealed.KEY

    def elsewhere():
        cache = tmp_path / str(next(numbers))
        cache.mkdir(mode=0o700)
        shutil.copy(key, cache)
        monkeypatch.setattr(whole[0], "environ", server.environment | {"HALFBYTE_CACHE": str(cache)})
        monkeypatch.setenv("HALFBYTE_CACHE", str(cache))
        return remote.local_directory(URL)

    yield server, elsewhere
    server.close()


def test_killed_told_to_stop_and_damaged_in_a_store(whole, machines, tmp_path):
    (runner, reference), (server, elsewhere) = whole, machines

    # Killed with the second copy under way: the head is the first one's.
    run = elsewhere()
    gate = Gate(run, 2 * EVERY, tmp_path / "first")
    started = runner.start(URL, gate=gate)
    assert wait_until(lambda: committed(server), [started], 600), started.output
    coming, killed = hold_the_second_object(server)
    gate.open()
    assert wait_until(coming.is_set, [started], 600), started.output
    started.process.send_signal(signal.SIGKILL)
    assert started.wait(600) == -signal.SIGKILL
    killed.set()
    assert committed(server) == {EVERY} and arriving(server)
    named = json.loads(server.objects["killed/head.json"][0])["files"].values()
    assert {f"killed/{name}" for name in named} < set(server.objects)

    # Started elsewhere it goes on; told to stop it saves, and nothing is lost.
    run = elsewhere()
    gate = Gate(run, 3 * EVERY, tmp_path / "second")
    started = runner.start(URL, gate=gate)
    gate.wait([started], 600)
    started.process.send_signal(signal.SIGTERM)
    gate.open()
    code, output = finish([started])
    assert code == 75, output
    assert "resuming" in output and "stopped by SIGTERM after step" in output and f"--run-dir {URL}" in output
    assert losses(run) == losses(reference)[: len(losses(run))]
    assert checkpoint_steps(run)[-1] == len(losses(run))
    run = elsewhere()
    as_if_never_stopped(runner, run, reference)

    # The newest checkpoint loses a bit: it is named, the one before it is used, and the run ends in the same state.
    damage(run, STEPS)
    output = as_if_never_stopped(runner, run, reference)
    assert f"checkpoints/{STEPS}: checksum differs in" in output.replace("\n", " ")
    assert f"GOING BACK to the checkpoint of step {STEPS - EVERY}" in output
    assert (run / "damaged" / str(STEPS)).is_dir()


def hold_the_second_object(server):
    """Of a checkpoint that the head does not name: (the event that it has come, the event that lets it in)."""
    coming, go_on = threading.Event(), threading.Event()

    def hold(key):
        if "/checkpoints/" in key and arriving(server):
            coming.set()
            go_on.wait(600)

    server.before_put = hold
    return coming, go_on


def committed(server):
    """The steps of the checkpoints that the store's head names."""
    head = json.loads(server.objects.get("killed/head.json", (b"{}",))[0])
    return {int(path.split("/")[1]) for path in head.get("files", {}) if path.startswith("checkpoints/")}


def arriving(server):
    """Whether something of a checkpoint is there that is newer than the head's."""
    found = (re.search(r"/checkpoints/(\d+)/", name) for name in list(server.objects))
    newest = max((int(match[1]) for match in found if match), default=0)
    return newest > max(committed(server))


def as_if_never_stopped(runner, run, reference):
    """Started once more, it ends in the state of the run that nobody interrupted; what it said."""
    code, output = runner.run(URL)
    assert code == 0, output
    assert "resuming" in output
    assert losses(run) == losses(reference)
    assert final_checksums(run) == final_checksums(reference)
    return output
