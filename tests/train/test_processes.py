"""Several processes are one program: 1 x 4 and 2 x 2 (processes x devices) give identical losses, also across a kill.

Oracle: one process with four devices, never interrupted.
"""

import signal

import pytest
from disagreeing import WATCHED, stop_and_hear
from killing import kill_and_hear
from runner import Runner, final_checksums, losses, wait_for_step
from tiny import MODEL, ONE_LINEAR, tiny

from halfbyte.train import CheckpointConfig


@pytest.fixture(scope="module")
def whole(tmp_path_factory, compile_cache, warm):
    """(runner, directory of an uninterrupted run on 1 process x 4 devices): nvfp4, accumulation, fsdp and tensor."""
    folder = tmp_path_factory.mktemp("processes")
    saves, model = CheckpointConfig(every=4, keep_last=2), MODEL.replace(layers=1)
    config = tiny(
        model=model, recipe="nvfp4", policy=ONE_LINEAR, steps=32, accumulate=2, mesh="fsdp=2,tensor=2", checkpoint=saves
    )
    runner = Runner(folder, config, compile_cache, warm)
    code, output = runner.run(folder / "whole", devices=4)
    assert code == 0, output
    return runner, folder / "whole"


def test_killed_stopped_preempted_and_moved(whole, tmp_path):
    """Two processes, of which one is killed; started again, of which one stands still; again, of which one is told to
    stop; then one process takes over the four devices. `make faults` does each by itself, in bf16 and at any step."""
    runner, reference = whole
    run, shape = tmp_path / "run", {"processes": 2, "devices": 2}
    for step, flags, disturb in ((6, (), kill_and_hear), (10, WATCHED, stop_and_hear)):
        ranks = runner.start_all(run, *flags, **shape)
        wait_for_step(run, step, ranks)
        disturb(ranks, victim=1)
    code, output = runner.killed_at(run, 14, number=signal.SIGTERM, **shape)
    assert code == 75, output
    assert "resuming" in output
    assert losses(run) == losses(reference)[: len(losses(run))]
    code, output = runner.run(run, devices=4)
    assert code == 0, output
    assert losses(run) == losses(reference)
    assert final_checksums(run) == final_checksums(reference)
