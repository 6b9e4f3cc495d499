"""Programs for Blackwell, the files of each target in a process of their own (conftest.py says why)."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def test_blackwell(blackwell_files):
    files = [str(HERE / file) for file in blackwell_files]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files],
        cwd=HERE.parent, capture_output=True, text=True, timeout=3600, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
