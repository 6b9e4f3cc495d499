"""Two processes save together; the disk of one takes nothing for a while. Oracle: what each says, what is there.

The disk is a limit on the size of files, which the kernel keeps for one process alone."""

import json
import os
import subprocess
import sys

import pytest

from halfbyte.checkpoint import multihost
from halfbyte.distributed.supervisor import reserved_port

PROGRAM = """if True:
    import json, resource, sys
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from halfbyte.checkpoint import CheckpointManager

    rank, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    w = jax.make_array_from_callback((2048,), NamedSharding(mesh, P("x")), lambda index: np.arange(2048.0)[index])
    said, found = [], []
    store = CheckpointManager(directory, keep_last=2, say=said.append)

    for step, poor, size in ((1, 0, -1), (2, 1, 1000), (3, 0, 0), (4, 0, -1), (5, 0, -1)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size if rank == poor else -1, resource.RLIM_INFINITY))
        store.save(step, {"params": {"w": w}}, extra={})
        found.append(store.wait())
        store.poll()
    print(json.dumps([found, said, store.steps()]))
    store.close()
"""


@pytest.mark.slow
def test_save_that_one_process_cannot_write_is_aborted_by_all(tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", PROGRAM]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with reserved_port() as port:
        rest = [str(port), str(tmp_path / "checkpoints")]
        started = [subprocess.Popen([*command, str(rank), *rest], env=environment, **pipes) for rank in range(2)]
        try:
            output = [process.communicate(timeout=1800) for process in started]
        finally:
            for process in started:
                process.kill()
    answers = [json.loads(text.splitlines()[-1]) if text else error for text, error in output]
    for found, said, steps in answers:
        assert found == [True, False, False, True, True]
        assert [line.split(" WAS")[0] for line in said] == ["CHECKPOINT of step 2", "CHECKPOINT of step 3"]
        assert "process 1: " in said[0] and "process 0: " in said[1]
        assert steps == [4, 5]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["4", "5"]
    assert all((tmp_path / "checkpoints" / step / "halfbyte-files.json").exists() for step in "45")


class Client:
    """Notes which keys are set, and waits for nobody."""

    def __init__(self):
        self.keys = {}

    def key_value_set(self, key, value, overwrite):
        self.keys[key] = value

    def key_value_try_get(self, key):
        return self.keys.get(key, "")

    def wait_at_barrier(self, key, timeout_ms):
        pass


def test_barriers_of_a_save_are_named_by_its_step():
    """The first never comes to its end: the next begins all the same, and only what does not commit has failed."""
    client = Client()
    waits = multihost.AbortableBarrierClient(client)
    start, end, commit = (f"1:{name}" for name in ("set_value_start", "set_value_end", "async_commit_complete"))
    waits.begin(1)
    waits.wait_at_barrier(start, 1)
    for step, committed in ((2, True), (3, False), (3, True)):
        waits.begin(step)
        waits.wait_at_barrier(start, 1)
        assert not waits._has_failed()
        waits.wait_at_barrier(end, 1)
        if committed:
            waits.wait_at_barrier(commit, 1)
        waits.wait_at_barrier(start, 1)
        assert waits._has_failed() != committed
    assert len(client.keys) == 1 and "/3/" in next(iter(client.keys))
