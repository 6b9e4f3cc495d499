"""A resumed run is bit-identical to an uninterrupted one: params, optimizer, and the loss of every later step.

Oracle: the run that nobody interrupted. Processes are really killed (-9) and restarted.
"""

import signal
import sys
from pathlib import Path

import pytest
from outside import wait_until
from runner import Runner, final_checksums, losses
from states import checkpoint_steps
from tiny import tiny

from halfbyte.optim import OptimizerConfig
from halfbyte.train import CheckpointConfig, LossScaleConfig

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))  # an S3 server on loopback
from s3_server import S3

STEPS, EVERY = 120, 20


@pytest.fixture(scope="module")
def whole(tmp_path_factory, compile_cache, warm):
    """(runner, directory of an uninterrupted run) in nvfp4 by Muon, which has AdamW's state too, with gradient
    accumulation; tests/faults kills bf16."""
    folder = tmp_path_factory.mktemp("resume")
    save_often = CheckpointConfig(every=EVERY, keep_last=2)
    scale = LossScaleConfig(mode="dynamic", initial=8.0, growth_interval=35)  # doubles before and after the kill
    muon = OptimizerConfig(name="muon", learning_rate=1e-2, warmup=1)
    config = tiny(recipe="nvfp4", optimizer=muon, steps=STEPS, accumulate=2, checkpoint=save_often, loss_scale=scale)
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


def test_killed_told_to_stop_and_damaged(whole, tmp_path):
    runner, reference = whole
    run = tmp_path / "run"
    code, _ = runner.killed_at(run, 45)
    assert code == -signal.SIGKILL

    # Started again it goes on; told to stop it saves, and nothing is lost.
    code, output = runner.killed_at(run, 75, number=signal.SIGTERM)
    assert code == 75, output
    assert "resuming" in output and "stopped by SIGTERM after step" in output
    assert losses(run) == losses(reference)[: len(losses(run))]
    assert checkpoint_steps(run)[-1] == len(losses(run))
    as_if_never_stopped(runner, run, reference)

    # The newest checkpoint loses a bit: it is named, the one before it is used, and the run ends in the same state.
    damage(run, STEPS)
    output = as_if_never_stopped(runner, run, reference)
    assert f"checkpoints/{STEPS}: checksum differs in" in output.replace("\n", " ")
    assert f"GOING BACK to the checkpoint of step {STEPS - EVERY}" in output
    assert (run / "damaged" / str(STEPS)).is_dir()


def as_if_never_stopped(runner, run, reference):
    """Started once more, it ends in the state of the run that nobody interrupted; what it said."""
    code, output = runner.run(run)
    assert code == 0, output
    assert "resuming" in output
    assert losses(run) == losses(reference)
    assert final_checksums(run) == final_checksums(reference)
    return output


def test_a_run_in_a_store_is_killed_while_it_saves_and_goes_on_elsewhere(whole, tmp_path, monkeypatch):
    """Each start is another machine, with nothing but the store; each kill comes with a copy under way."""
    runner, reference = whole
    server, url = S3(), "s3://runs/killed"
    begun = lambda: [name for name in list(server.objects) if "/checkpoints/" in name]  # noqa: E731
    try:
        for number in range(3):
            monkeypatch.setattr(runner, "environ", server.environment | {"HALFBYTE_CACHE": str(tmp_path / str(number))})
            seen, started = set(begun()), runner.start(url)
            assert wait_until(lambda seen=seen: set(begun()) - seen, [started], 600), started.output
            started.process.send_signal(signal.SIGKILL)
            assert started.wait(60) == -signal.SIGKILL
        monkeypatch.setattr(runner, "environ", server.environment | {"HALFBYTE_CACHE": str(tmp_path / "last")})
        code, output = runner.run(url)
        assert code == 0, output
    finally:
        server.stop()
    (run,) = (tmp_path / "last" / "stores").glob("*/killed")
    assert losses(run) == losses(reference)
    assert final_checksums(run) == final_checksums(reference)
