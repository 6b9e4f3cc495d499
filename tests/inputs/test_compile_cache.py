"""The cache of compiled programs under attack. Oracle: the numbers that a fresh compile gives, and exit codes of child
processes: a damaged program would crash the test's own."""

import dataclasses
import hashlib
import hmac
import io
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from halfbyte.inputs import compile_cache
from halfbyte.inputs.compile_cache import SealedCache, user_key
from halfbyte.runs import run_config
from halfbyte.train.run import train

PROGRAM = """
import sys, jax, jax.numpy as jnp
from halfbyte.inputs.compile_cache import use_compile_cache
use_compile_cache(sys.argv[1], say=lambda text: print("said", text))
x = jnp.arange(64.0).reshape(8, 8)
print(float(jax.jit(lambda x: jnp.tanh(x @ x.T / 1e3).sum())(x)))
"""


def run(directory, home):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HALFBYTE_CACHE": str(home)}
    command = [sys.executable, "-c", PROGRAM, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_only_what_this_user_compiled_is_run(tmp_path):
    """Written and used; then one bit of every entry flipped; then the same cache brought to another user."""
    directory, home = tmp_path / "cache", tmp_path / "home"
    fresh = run(directory, home)
    entries = sorted(directory.glob("*-cache"))
    assert entries and len(fresh) == 1 and directory.stat().st_mode & 0o777 == 0o700
    before = {entry: entry.stat().st_mtime_ns for entry in entries}
    assert run(directory, home) == fresh
    assert {entry: entry.stat().st_mtime_ns for entry in entries} == before  # served from the cache
    dice = random.Random(0)
    for entry in entries:
        content = bytearray(entry.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        entry.write_bytes(bytes(content))
    *said, number = run(directory, home)
    assert len(said) == len(entries) and [number] == fresh
    *said, number = run(directory, tmp_path / "somebody else")
    assert len(said) == len(entries) and [number] == fresh


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "home"))
    said = []
    made = SealedCache(tmp_path, user_key(), said.append)
    made.said = said
    for name in ("a", "b", "c"):
        made.put(name, name.encode() * 100)
    return made


def test_every_flip_is_found(cache, tmp_path):
    content = (tmp_path / "a-cache").read_bytes()
    assert cache.get("a") == b"a" * 100 and not cache.said
    for bit in range(0, 8 * len(content), 31):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "a-cache").write_bytes(bytes(flipped))
        assert cache.get("a") is None and cache.said.pop()
    assert not (tmp_path / "a-cache").exists()  # to be written anew


def test_entries_that_another_put_there_are_not_taken(cache, tmp_path):
    """Another's name, no tag, a tag that anybody could compute, a pipe, a link to nothing, and an entry that lay there
    when this process sealed its own."""
    whole = (tmp_path / "b-cache").read_bytes()
    (tmp_path / "a-cache").write_bytes(whole)
    (tmp_path / "d-cache").write_bytes(b"a" * 100)
    (tmp_path / "e-cache").write_bytes(hashlib.sha256(b"a" * 100).digest() + b"a" * 100)
    (tmp_path / "f-cache").write_bytes(hmac.digest(b"", b"f\n" + b"a" * 100, "sha256") + b"a" * 100)
    os.mkfifo(tmp_path / "g-cache")
    (tmp_path / "h-cache").symlink_to(tmp_path / "nothing")
    cache.put("i", b"ours")
    assert [cache.get(name) for name in "adefgh"] == [None] * 6
    assert cache.get("i") == b"ours" and cache.get("b") == b"b" * 100


def test_one_key_a_user_that_nobody_else_reads(cache, tmp_path):
    path = tmp_path / "home" / compile_cache.KEY
    assert user_key() == user_key() == path.read_bytes() and path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="5 bytes instead of 32"):
        user_key()


def test_a_directory_that_others_can_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match=r"other users can write there.*chmod go-w"):
        compile_cache.check_private(tmp_path)
    tmp_path.chmod(0o755)
    compile_cache.check_private(Path(tmp_path))


def test_without_a_private_place_for_the_key_programs_are_compiled_again_and_it_is_said(tmp_path, monkeypatch):
    """A umask of 002 makes a cache directory that the group can write: no reason not to train."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o775)
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "home"))
    said: list[str] = []
    compile_cache.use_compile_cache(tmp_path / "compiled", say=said.append)
    assert len(said) == 1 and "NO COMPILE CACHE" in said[0] and "chmod go-w" in said[0]


@pytest.mark.slow
def test_brackets_in_what_is_said_of_a_cache_are_no_markup(tmp_path, monkeypatch):
    """A run says it on a console for which brackets could mean a style."""

    def speaks(directory, *, say):
        say(f"NO COMPILE CACHE in {directory}")
        raise ValueError("enough")

    shown = io.StringIO()
    monkeypatch.setattr("halfbyte.train.run.use_compile_cache", speaks)
    config = dataclasses.replace(run_config("demo"), compile_cache="a[/b]c")
    with pytest.raises(ValueError, match="enough"):
        train(config, tmp_path / "run", console=Console(file=shown, width=200))
    assert "a[/b]c" in shown.getvalue()
