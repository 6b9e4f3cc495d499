"""`--compile-cache DIR`: compiled programs kept between runs, and only those that this user's own runs have compiled.

An entry is machine code, and JAX runs what it finds: who writes it runs in this process, and a flipped bit crashes it
or, worse, computes other numbers. So an entry begins with a tag: HMAC-SHA256 of its name and content, under a key that
this user keeps in `user_cache()` and that no run directory holds. It is written with the entry by the process that
compiled it, and compared whenever JAX asks for the entry; what does not match is said, removed and compiled again.
Entries of somebody else, or of this cache under other names, do not match.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

import jax
from jax._src import compilation_cache  # the cache's interface; no public hook exists
from jax._src.compilation_cache_interface import CacheInterface

from .names import check_output, user_cache
from .reading import read_bytes
from .writing import replace_file

MOST_ENTRY = 16 << 30
KEY = "compile-cache.key"
TAG = hashlib.sha256().digest_size
HOOKS = ("_cache", "_cache_initialized", "reset_cache")


def use_compile_cache(directory: str | Path, *, say: Callable[[str], None]) -> None:
    """Keep compiled programs in `directory` between runs; say it where that is not possible."""
    path = check_output(directory, flag="--compile-cache").absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(path)
    if missing := [name for name in HOOKS if not hasattr(compilation_cache, name)]:
        say(f"NO COMPILE CACHE: this version of JAX ({jax.__version__}) has no {missing[0]} to check entries with")
        return
    try:
        cache = SealedCache(path, user_key(), say)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        say(f"NO COMPILE CACHE: its key cannot be kept in {user_cache()} ({reason}); set HALFBYTE_CACHE")
        return
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()
    compilation_cache._cache, compilation_cache._cache_initialized = cache, True


def check_private(directory: Path) -> None:
    """ValueError unless the directory is ours (or root's) and nobody else can write into it: it holds programs."""
    found = directory.stat()
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"--compile-cache {directory}: other users can write there (owner {found.st_uid}, mode "
            f"{stat.filemode(found.st_mode)}), and what lies there is executed; chmod go-w, or name another"
        )


def user_key() -> bytes:
    """32 random bytes that this user keeps on this machine; made the first time."""
    folder = user_cache()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)
    path = folder / KEY
    if not path.exists():
        fresh = folder / f".{KEY}.{secrets.token_hex(8)}"
        with open(fresh, "xb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600)) as file:
            file.write(secrets.token_bytes(TAG))
        with contextlib.suppress(FileExistsError):  # another process was first: its key holds
            os.link(fresh, path)
        fresh.unlink()
    check_private(path)
    key = read_bytes(path, most=TAG)
    if len(key) != TAG:
        raise ValueError(f"{path} has {len(key)} bytes instead of {TAG}; remove it, and programs are compiled again")
    return key


class SealedCache(CacheInterface):
    """A directory of entries as JAX asks for them, by name."""

    def __init__(self, path: Path, key: bytes, say: Callable[[str], None]):
        self._path, self._key, self._say = path, key, say

    def get(self, key: str) -> bytes | None:
        """The program, if it is what one of our own runs wrote under this name."""
        entry = self._path / f"{key}-cache"
        try:
            content = read_bytes(entry, most=MOST_ENTRY)
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            content = b""
        value = content[TAG:]
        if hmac.compare_digest(content[:TAG], self._tag(key, value)):
            return value
        self._say(f"compile cache {self._path}: {key[:60]} is not what this user's runs have written; compiled again")
        with contextlib.suppress(OSError):
            entry.unlink()
        return None

    def put(self, key: str, value: bytes) -> None:
        """Write it with its tag, in one rename."""
        replace_file(self._path / f"{key}-cache", self._tag(key, value) + value)

    def _tag(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._key, key.encode() + b"\n" + value, "sha256")
