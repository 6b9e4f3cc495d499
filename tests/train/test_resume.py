"""A resumed run is bit-identical to an uninterrupted one: params, optimizer, and the loss of every later step.

Oracle: the run that nobody interrupted. Processes are really killed (-9) and restarted.
"""

import signal
import threading

import pytest
from outside import Gate, wait_until
from runner import Runner, final_checksums, finish, losses
from servers import served

from halfbyte.checkpoint import bucket_copy
from halfbyte.checkpoint.object_store import Objects
from halfbyte.train import CheckpointConfig, LossScaleConfig, OptimizerConfig
from tiny import MODEL, ONE_LINEAR, tiny

pytestmark = pytest.mark.slow

STEPS, EVERY = 60, 10


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
def bucket(whole, tmp_path, monkeypatch):
    """The URL of a bucket to which runs are copied: a server of the fault harness."""
    pytest.importorskip("moto.server")
    with served("s3") as proxy:
        monkeypatch.setattr(whole[0], "environ", proxy.environment)
        for name, value in proxy.environment.items():
            monkeypatch.setenv(name, value)
        proxy.url = f"s3://{proxy.bucket}/killed"
        yield proxy


@pytest.mark.slow
def test_killed_copied_stopped_and_damaged(whole, bucket, tmp_path):
    """Killed during an upload, resumed; stopped, fetched elsewhere, its newest checkpoint damaged: the same end."""
    (runner, reference), copied = whole, ("--copy-to", bucket.url)

    # Killed while its first checkpoint is uploaded: the head lists none. The gate keeps the run from training on.
    run = tmp_path / "here"
    coming, killed = threading.Event(), threading.Event()

    def hold(method, key):
        if method == "PUT" and f"/checkpoints/{EVERY}/" in key:
            coming.set()
            killed.wait(600)

    bucket.before = hold
    started = runner.start(run, *copied, gate=Gate(run, 2 * EVERY, tmp_path / "first"))
    assert wait_until(coming.is_set, [started], 600), started.output
    started.process.send_signal(signal.SIGKILL)
    assert started.wait(600) == -signal.SIGKILL
    killed.set()
    bucket.before = lambda method, key: None
    assert steps_in(bucket) == set()

    # Told to stop it saves, and says how it goes on; all of it is in the bucket.
    gate = Gate(run, 3 * EVERY, tmp_path / "second")
    started = runner.start(run, *copied, gate=gate)
    gate.wait([started], 600)
    started.process.send_signal(signal.SIGTERM)
    gate.open()
    code, output = finish([started])
    assert code == 75, output
    assert "resuming" in output and f"--copy-to {bucket.url}" in output
    assert losses(run) == losses(reference)[: len(losses(run))]

    # Elsewhere it goes on.
    run = tmp_path / "elsewhere"
    assert bucket_copy.fetch(bucket.url, run, step=None, say=print)["step"] == len(losses(run))
    as_if_never_stopped(runner, run, reference, *copied)
    assert STEPS in steps_in(bucket)

    # The newest checkpoint loses a bit: it is named, the one before it is used, and the run ends in the same state.
    damage(run, STEPS)
    output = as_if_never_stopped(runner, run, reference)
    assert f"checkpoints/{STEPS}: checksum differs in" in output.replace("\n", " ")
    assert f"GOING BACK to the checkpoint of step {STEPS - EVERY}" in output
    assert (run / "damaged" / str(STEPS)).is_dir()


def steps_in(bucket):
    """The steps of the checkpoints that the bucket's head lists."""
    head, _ = bucket_copy.read_head(Objects(bucket.url))
    return set(map(int, head["checkpoints"])) if head else set()


def as_if_never_stopped(runner, run, reference, *flags):
    """Started once more, it ends in the state of the run that nobody interrupted; what it said."""
    code, output = runner.run(run, *flags)
    assert code == 0, output
    assert "resuming" in output
    assert losses(run) == losses(reference)
    assert final_checksums(run) == final_checksums(reference)
    return output
