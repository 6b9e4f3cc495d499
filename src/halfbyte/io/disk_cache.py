"""Disk caches: JSON results of compilations in the user's cache, and JAX's compilation cache.

A JSON entry is keyed by the request, the source of this package, the versions of the compiler and the environment
variables that it reads, so that a change of any of them is a miss. The file holds plain JSON with its CRC; a damaged
file is a miss. Of two processes with the same request, one compiles and the other waits for it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import stat
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from halfbyte.io.files import atomic_write, open_no_follow, read_json, sealed_json, sealed_text
from halfbyte.io.validation import user_cache, validated_output_path

PACKAGE_ROOT = Path(__file__).parents[1]
CACHE_KEY_ENV_PREFIXES = ("XLA_FLAGS", "JAX_")  # prefixes of variables that JAX and XLA read
# Variables with these prefixes that do not change a compiled program.
IGNORED_ENV_VARS = ("JAX_COMPILATION_CACHE_DIR", "JAX_PLATFORMS")
COMPILER_PACKAGES = ("jax", "nvidia-", "numpy")


def cached_json(
    namespace: str, facts: Mapping[str, Any], make: Callable[[], Any], *, say: Callable[[str], None]
) -> Any:
    """Returns the JSON value that `make` returned for these facts, now or in an earlier call."""
    path = _path(namespace, facts)
    with _exclusive_lock(path, say):
        text = _load(path)
        if text is None:
            sealed = sealed_json("kept", make())
            text = sealed["kept"]
            try:
                atomic_write(path, json.dumps(sealed))
            except OSError as error:
                say(f"not kept for the next call: {path} cannot be written ({error.strerror}); set HALFBYTE_CACHE")
    return json.loads(text)


def is_cached(namespace: str, facts: Mapping[str, Any]) -> bool:
    """Returns True if the value for these facts is in the cache."""
    return _load(_path(namespace, facts)) is not None


@cache
def source_digest() -> str:
    """Returns the sha256 of this package's source files: two checkouts of one version may differ."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE_ROOT.rglob("*.py")):
        digest.update(str(file.relative_to(PACKAGE_ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def enable_compile_cache(directory: str | Path) -> None:
    """Uses `directory` as JAX's compilation cache (`--compile-cache DIR`).

    ValueError if other users can write to it: JAX executes the programs that it reads.
    """
    path = validated_output_path(directory, flag="--compile-cache").absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(path)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # With XLA's caches, autotuning results of an earlier process would choose the tiles.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    compilation_cache.reset_cache()  # JAX may have opened another directory


def check_private(directory: Path) -> None:
    """Raises ValueError unless `directory` belongs to the user or root, and no other user can write to it."""
    status = directory.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"--compile-cache {directory}: other users can write there (owner {status.st_uid}, mode "
            f"{stat.filemode(status.st_mode)}), and what lies there is executed; chmod go-w, or name another"
        )


def _path(namespace: str, facts: Mapping[str, Any]) -> Path:
    return user_cache() / namespace / f"{_key(facts)}.json"


@contextlib.contextmanager
def _exclusive_lock(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds a file lock, or none if it cannot be created, which costs at most a second compilation."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            held = stack.enter_context(open(path.with_suffix(".lock"), "ab", opener=open_no_follow))
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another process compiles the same step; waiting for it ...")
                fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _load(path: Path) -> str | None:
    try:
        return sealed_text("kept", read_json(path))
    except (OSError, ValueError):
        return None


def _key(facts: Mapping[str, Any]) -> str:
    env_vars = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(CACHE_KEY_ENV_PREFIXES) and name not in IGNORED_ENV_VARS
    }
    key = json.dumps([facts, env_vars, source_digest(), _versions()], sort_keys=True, default=str)
    return hashlib.sha256(key.encode()).hexdigest()[:32]


@cache
def _versions() -> list[str]:
    packages = (dist for dist in distributions() if (dist.name or "").startswith(COMPILER_PACKAGES))
    return [platform.python_version(), *sorted({f"{dist.name} {dist.version}" for dist in packages})]
