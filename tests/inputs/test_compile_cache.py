"""The cache of compiled programs under attack. Oracle: the numbers that a fresh compile gives, and exit codes of child
processes: a damaged program would crash the test's own."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.inputs import compile_cache
from halfbyte.inputs.compile_cache import remove_unsealed, seal

PROGRAM = """
import sys, jax, jax.numpy as jnp
from halfbyte.inputs.compile_cache import use_compile_cache
use_compile_cache(sys.argv[1], say=lambda text: print("said", text.split(":")[1]))
x = jnp.arange(64.0).reshape(8, 8)
print(float(jax.jit(lambda x: jnp.tanh(x @ x.T / 1e3).sum())(x)))
"""


def run(directory):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_damaged_entries_are_compiled_again_and_never_run(tmp_path):
    """Written and used; then one bit of every entry flipped; then an entry that a dead run did not seal."""
    directory = tmp_path / "cache"
    fresh = run(directory)
    entries = sorted(directory.glob("*-cache"))
    assert entries and len(fresh) == 1 and directory.stat().st_mode & 0o777 == 0o700
    before = {entry: entry.stat().st_mtime_ns for entry in entries}
    assert run(directory) == fresh
    assert {entry: entry.stat().st_mtime_ns for entry in entries} == before  # served from the cache
    dice = random.Random(0)
    for entry in entries:
        content = bytearray(entry.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        entry.write_bytes(bytes(content))
    said, *numbers = run(directory)
    assert f" {len(entries)} entries are damaged" in said and numbers == fresh


@pytest.fixture
def cache(tmp_path):
    for name in ("a-cache", "b-cache", "c-cache"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    seal(tmp_path)
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_every_flip_is_found(cache):
    content = (cache / "a-cache").read_bytes()
    for bit in range(0, 8 * len(content), 7):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        (cache / "a-cache").write_bytes(bytes(flipped))
        assert not compile_cache._is_sealed(cache / "a-cache")
    assert remove_unsealed(cache) == ["a-cache"]
    assert names(cache) == ["b-cache", "b-cache.sha256", "c-cache", "c-cache.sha256"]


def test_entries_that_were_swapped_linked_or_never_sealed_are_removed(cache):
    a, b = (cache / "a-cache").read_bytes(), (cache / "b-cache").read_bytes()
    (cache / "a-cache").write_bytes(b)
    (cache / "a-cache.sha256").write_text((cache / "b-cache.sha256").read_text())
    (cache / "b-cache").rename(cache / "elsewhere")
    (cache / "b-cache").symlink_to(cache / "elsewhere")
    (cache / "d-cache").write_bytes(a)
    assert remove_unsealed(cache) == ["a-cache", "b-cache", "d-cache"]
    assert names(cache) == ["c-cache", "c-cache.sha256", "elsewhere"]


def test_a_directory_that_others_can_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match=r"other users can write there.*chmod go-w"):
        compile_cache.check_private(tmp_path)
    tmp_path.chmod(0o755)
    compile_cache.check_private(Path(tmp_path))
