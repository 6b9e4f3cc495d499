"""A few faults of the harness, one of each family; `make faults` runs all of them. Oracle: the undisturbed run.
train/test_resume.py damages an array of a checkpoint, train/test_processes.py kills and stops one of two ranks.
"""

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from kinds import KINDS, Benches
from outside import Warm, change_memory

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="signals, /proc and file systems of Linux"),
    pytest.mark.filterwarnings("ignore"),
]
FAMILIES = (
    "kill_before_a_file_operation",
    "kill_during_a_save",
    "two_starts_at_once",
    "killed_prepare_that_overwrites",
    "flip_in_the_config",
)


@pytest.fixture(scope="module")
def benches(tmp_path_factory, compiled_programs):
    root = tmp_path_factory.mktemp("faults")
    warm = Warm(root)
    yield Benches(root, warm, compiled_programs / "faults")
    warm.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_one_of_each_family(benches, tmp_path, name):
    kind = KINDS[name]
    assert kind.run == "light"
    assert kind.fault(benches.of("short"), tmp_path / "run", Random(f"ci/{name}"))


def test_the_full_run_is_large_enough():
    assert len(KINDS) >= 50
    assert sum(kind.times for kind in KINDS.values()) >= 80
    assert any(kind.mounts for kind in KINDS.values())
    assert os.path.exists(Path(__file__).parent / "soak.py")


HOLDER = """
import sys
held = bytearray(b"halfbyte-" + sys.argv[1].encode() + b"-0123456789")
print("held", flush=True)
sys.stdin.readline()
print(held.decode(), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="writing into another process's memory needs root")
def test_the_memory_of_a_running_process_is_really_changed():
    words = [sys.executable, "-c", HOLDER, "pattern"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        assert change_memory(holder.pid, b"halfbyte-pattern-0123", 17, b"X") >= 1
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "halfbyte-pattern-X123456789\n"
