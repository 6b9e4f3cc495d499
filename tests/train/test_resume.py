"""A resumed run is bit-identical to an uninterrupted one: params, optimizer, and the loss of every later step.

Oracle: the run that nobody interrupted. Processes are really killed (-9) and restarted.
"""

import signal

import pytest
from runner import Runner, final_checksums, losses
from tiny import tiny

from halfbyte.train import CheckpointConfig, LossScaleConfig

STEPS, EVERY = 120, 20


@pytest.fixture(scope="module", params=["bf16", "nvfp4"])
def whole(request, tmp_path_factory, compile_cache):
    """(runner, directory of an uninterrupted run), with gradient accumulation."""
    folder = tmp_path_factory.mktemp(request.param)
    save_often = CheckpointConfig(every=EVERY, keep_last=2)
    scale = LossScaleConfig(mode="dynamic", initial=8.0, growth_interval=35)  # doubles before and after the kill
    config = tiny(recipe=request.param, steps=STEPS, accumulate=2, checkpoint=save_often, loss_scale=scale)
    runner = Runner(folder, config, compile_cache)
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


def test_killed_and_restarted(whole, tmp_path):
    runner, reference = whole
    code, _ = runner.killed_at(tmp_path / "run", 45)
    assert code == -signal.SIGKILL
    code, output = runner.run(tmp_path / "run")
    assert code == 0, output
    assert "resuming" in output
    assert losses(tmp_path / "run") == losses(reference)
    assert final_checksums(tmp_path / "run") == final_checksums(reference)

    # The newest checkpoint loses a bit: it is named, the one before it is used, and the run ends in the same state.
    damage(tmp_path / "run", STEPS)
    code, output = runner.run(tmp_path / "run")
    assert code == 0, output
    assert f"checkpoints/{STEPS}: checksum differs in" in output.replace("\n", " ")
    assert f"GOING BACK to the checkpoint of step {STEPS - EVERY}" in output
    assert (tmp_path / "run" / "damaged" / str(STEPS)).is_dir()
    assert losses(tmp_path / "run") == losses(reference)
    assert final_checksums(tmp_path / "run") == final_checksums(reference)


def test_sigterm_saves_and_exits_75(whole, tmp_path):
    runner, reference = whole
    code, output = runner.killed_at(tmp_path / "run", 30, number=signal.SIGTERM)
    assert code == 75, output
    assert "stopped by SIGTERM after step" in output
    code, output = runner.run(tmp_path / "run")
    assert code == 0, output
    assert losses(tmp_path / "run") == losses(reference)
    assert final_checksums(tmp_path / "run") == final_checksums(reference)
