"""Makes the tiny run importable, compiles quickly, and gives all tests of this folder one cache of compiled
programs."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # runner; tiny
sys.path.append(str(Path(__file__).parents[1] / "faults"))  # outside: processes, seen from outside


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_compiles):
    """Compiling is most of what these tests cost."""


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """A process that has loaded Halfbyte, and forks one for each command."""
    from outside import Warm

    if sys.platform != "linux":
        pytest.skip("processes are forked, held and looked into as on Linux")
    made = Warm(tmp_path_factory.mktemp("warm"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory):
    """Directory of compiled programs, shared by the subprocesses of this session."""
    return tmp_path_factory.mktemp("compiled")
