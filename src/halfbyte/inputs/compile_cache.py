"""`--compile-cache DIR`: JAX's own compilation cache, in a directory that nobody else can write."""

import os
import stat
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from .names import check_output


def use_compile_cache(directory: str | Path) -> None:
    """Keep compiled programs of this process in `directory`, and use those that are there.

    ValueError where other users can write to it: JAX executes what it reads.
    """
    path = check_output(directory, flag="--compile-cache").absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(path)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # XLA's own caches would choose tiles by what an earlier process measured.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    compilation_cache.reset_cache()  # JAX may have opened another directory


def check_private(directory: Path) -> None:
    """Raise ValueError unless `directory` is the user's or root's, and nobody else can write to it."""
    found = directory.stat()
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"--compile-cache {directory}: other users can write there (owner {found.st_uid}, mode "
            f"{stat.filemode(found.st_mode)}), and what lies there is executed; chmod go-w, or name another"
        )
