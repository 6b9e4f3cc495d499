"""How the process ends after its work is done. Oracle: the exit code that the command returned."""

import os
import subprocess
import sys
from collections import Counter

import pytest

ENTRY = "from halfbyte.cli.main import entry; entry()"
WITHOUT_READERS = "from halfbyte.data import batch_loader as loading; loading.loader.__kwdefaults__['threads'] = 0; "
RUNS = int(os.environ.get("HALFBYTE_EXIT_RUNS", "4"))

COPYING = """
import atexit, threading, time
import jax, jax.numpy as jnp
from halfbyte.cli import main as cli

def command():
    compute = jax.jit(lambda x: jnp.sin(x @ x @ x).sum())
    x = jnp.ones((1500, 1500))
    compute(x).block_until_ready()

    def late():
        time.sleep(0.3)
        print("the thread has ended")
        compute(x).copy_to_host_async()

    threading.Thread(target=late).start()
    atexit.register(print, "atexit has run")
    print("done")
    return 3

cli.main = command
cli.entry()
"""


def test_a_copy_to_the_host_in_flight_does_not_abort_the_process():
    """On jaxlib 0.11 XLA's thread asks for the GIL after the interpreter's finalization has begun. Threads are joined,
    `atexit` functions run and output is flushed as in any other process."""
    done = subprocess.run(
        [sys.executable, "-c", COPYING],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines() == ["done", "the thread has ended", "atexit has run"]
    assert "terminate called" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("code", [ENTRY, WITHOUT_READERS + ENTRY], ids=["two reading threads", "none"])
def test_finished_runs_exit_with_0(code, tmp_path):
    """HALFBYTE_EXIT_RUNS short runs on prepared data, one after the other, with one compile cache."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"{i} is a number, and {i + 1} is the next." for i in range(2000)))
    halfbyte = [sys.executable, "-c", code]
    prepare = ["data", "prepare", str(text), "--tokenizer", "bytes", "--seq-len", "64", "--out", str(tmp_path / "data")]
    subprocess.run(halfbyte[:2] + [ENTRY] + prepare, check=True, capture_output=True, timeout=600)
    train = ["train", "demo", "--data", str(tmp_path / "data"), "--seq", "64", "--recipe", "bf16", "--steps", "2"]
    train += ["--model.layers", "1", "--compile-cache", str(tmp_path / "compiled")]
    codes = Counter(
        subprocess.run(
            [*halfbyte, *train, "--run-dir", str(tmp_path / f"run-{i}")], capture_output=True, timeout=1800
        ).returncode
        for i in range(RUNS)
    )
    assert codes == {0: RUNS}
