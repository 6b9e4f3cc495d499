"""Makes `stored` importable, and finds what Orbax has dropped while the marks of the test that made it hold."""

import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "faults"))  # servers: S3 and Google's storage on loopback


@pytest.fixture(autouse=True)
def dropped_coroutines():
    """Left to the end of the test run, where no mark ignores them, they would make its exit code 1."""
    yield
    gc.collect()
