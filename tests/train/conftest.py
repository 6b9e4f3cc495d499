"""Makes the tiny run importable, compiles quickly, and gives all tests of this folder one cache of compiled
programs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_compiles):
    """Compiling is most of what these tests cost."""


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory):
    """Directory of compiled programs, shared by the subprocesses of this session."""
    return tmp_path_factory.mktemp("compiled")
