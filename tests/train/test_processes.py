"""Several processes are one program: 1 x 4 and 2 x 2 (processes x devices) give identical losses, also across a kill.

Oracle: one process with four devices, never interrupted.
"""

import signal

import pytest
from runner import Runner, final_checksums, losses
from tiny import ONE_LINEAR, tiny

from halfbyte.train import CheckpointConfig


@pytest.fixture(scope="module")
def whole(tmp_path_factory, compile_cache, warm):
    """(runner, directory of an uninterrupted run on 1 process x 4 devices): nvfp4, accumulation, fsdp and tensor."""
    folder = tmp_path_factory.mktemp("processes")
    saves = CheckpointConfig(every=4, keep_last=2)
    config = tiny(recipe="nvfp4", policy=ONE_LINEAR, steps=44, accumulate=2, mesh="fsdp=2,tensor=2", checkpoint=saves)
    runner = Runner(folder, config, compile_cache, warm)
    code, output = runner.run(folder / "whole", devices=4)
    assert code == 0, output
    return runner, folder / "whole"


def test_killed_restarted_preempted_and_moved(whole, tmp_path):
    """Two processes, both killed; restarted, one of them told to stop; then one process takes over the four devices."""
    runner, reference = whole
    code, output = runner.killed_at(tmp_path / "run", 10, processes=2, devices=2)
    assert code == -signal.SIGKILL, output
    code, output = runner.killed_at(tmp_path / "run", 20, number=signal.SIGTERM, processes=2, devices=2)
    assert code == 75, output
    assert "resuming" in output
    assert losses(tmp_path / "run") == losses(reference)[: len(losses(tmp_path / "run"))]
    code, output = runner.run(tmp_path / "run", devices=4)
    assert code == 0, output
    assert losses(tmp_path / "run") == losses(reference)
    assert final_checksums(tmp_path / "run") == final_checksums(reference)
