"""The cache of compiled programs. Oracle: the number that a fresh compilation gives, and the times of the entries."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.io import disk_cache

PROGRAM = """
import sys, jax, jax.numpy as jnp
from halfbyte.io.disk_cache import enable_compile_cache as use_compile_cache
use_compile_cache(sys.argv[1])
x = jnp.arange(64.0).reshape(8, 8)
print(float(jax.jit(lambda x: jnp.tanh(x @ x.T / 1e3).sum())(x)))
"""


def run(directory):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(directory.parent / "other")}
    command = [sys.executable, "-c", PROGRAM, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return float(done.stdout), done.stderr


@pytest.mark.slow
def test_programs_are_cached_and_damaged_ones_recompiled(tmp_path):
    """Earlier versions wrote a tag of 32 bytes before each program."""
    directory = tmp_path / "cache"
    fresh, _ = run(directory)
    entries = sorted(directory.glob("*-cache"))
    assert entries and directory.stat().st_mode & 0o777 == 0o700 and not (tmp_path / "other").exists()
    before = {entry: entry.stat().st_mtime_ns for entry in entries}
    assert run(directory)[0] == fresh
    assert {entry: entry.stat().st_mtime_ns for entry in entries} == before  # served from the cache
    for entry in entries:
        entry.write_bytes(bytes(32) + entry.read_bytes())
    again, said = run(directory)
    assert again == fresh and "Error reading persistent compilation cache entry" in said


def test_directory_that_others_can_write_is_refused(tmp_path):
    for mode in (0o777, 0o775, 0o757):
        tmp_path.chmod(mode)
        with pytest.raises(ValueError, match=r"other users can write there.*chmod go-w"):
            disk_cache.check_private(tmp_path)
    tmp_path.chmod(0o755)
    disk_cache.check_private(Path(tmp_path))
