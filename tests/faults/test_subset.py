"""A few faults of the harness, one of each family; `make faults` runs all of them. Oracle: the undisturbed run."""

import os
import sys
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import NEEDS_MOUNT, prepare
from kinds import KINDS

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="signals, /proc and file systems of Linux"),
    pytest.mark.filterwarnings("ignore"),
]
FAMILIES = (
    "kill_during_a_step",
    "sigterm",
    "kill_one_rank",
    "ranks_that_differ",
    "flip_in_an_array",
    "flip_in_the_config",
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("faults"), two_ranks=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_of_each_family(bench, tmp_path, name):
    fault, _ = KINDS[name]
    assert fault(bench, tmp_path / "run", Random(f"ci/{name}"))


def test_the_full_run_is_large_enough():
    assert len(KINDS) >= 14
    assert sum(times for _, times in KINDS.values()) >= 100
    assert set(NEEDS_MOUNT) <= set(KINDS)
    assert os.path.exists(Path(__file__).parent / "soak.py")
