"""Several processes are one program: 1 x 4 and 2 x 2 (processes x devices) give identical losses, also across a kill.

Oracle: one process with four devices, never interrupted.
"""

import re
import signal

import pytest
from disagreeing import WATCHED, stop_and_hear
from killing import kill_and_hear
from outside import wait_until
from runner import Runner, final_checksums, finish, losses

from tiny import MODEL, ONE_LINEAR, tiny

pytestmark = pytest.mark.slow

BEGUN = 8
ON = ("--steps", "100000", "--checkpoint.every", "100000")  # no end before a signal, and no save that it could meet


@pytest.fixture(scope="module")
def runner(tmp_path_factory, compile_cache, warm):
    """Of nvfp4, accumulation, fsdp and tensor; the learning rate does not depend on the number of steps."""
    model = MODEL.replace(layers=1)
    config = tiny(model=model, recipe="nvfp4", policy=ONE_LINEAR, steps=BEGUN, accumulate=2, mesh="fsdp=2,tensor=2")
    return Runner(tmp_path_factory.mktemp("processes"), config, compile_cache, warm)


def test_killed_stopped_preempted_and_moved(runner, tmp_path):
    """One process begins; two go on, of which one is killed; started again, of which one stands still; again, of which
    one is told to stop; then one process takes over the four devices. `make faults` does each by itself, in bf16 and at
    any step."""
    run, shape = tmp_path / "run", {"processes": 2, "devices": 2}
    assert runner.run(run, devices=4)[0] == 0
    for flags, disturb in (((), kill_and_hear), (WATCHED, stop_and_hear)):
        ranks = runner.start_all(run, *ON, *flags, **shape)
        has_stepped(ranks)
        disturb(ranks, victim=1)
    ranks = runner.start_all(run, *ON, **shape)
    has_stepped(ranks)
    ranks[1].process.send_signal(signal.SIGTERM)
    code, output = finish(ranks)
    assert code == 75, output
    assert f"resuming {run} after step {BEGUN}" in output
    reached = len(losses(run))
    steps = ("--steps", str(reached + 4))
    code, output = runner.run(run, *steps, devices=4)
    assert code == 0, output
    assert f"resuming {run} after step {reached}" in output
    assert runner.run(tmp_path / "whole", *steps, devices=4)[0] == 0
    assert losses(run) == losses(tmp_path / "whole")
    assert final_checksums(run) == final_checksums(tmp_path / "whole")


def has_stepped(ranks):
    """Wait until these very processes have trained: what an earlier start has left says nothing about them."""
    stepped = wait_until(lambda: bool(re.search(r"^step +\d+/\d+ +loss", ranks[0].output, re.M)), ranks, 1800)
    assert stepped, ranks[0].output
