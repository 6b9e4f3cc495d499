"""`--compile-cache DIR`: compiled programs kept between runs, checked before JAX may load one.

An entry is machine code, and JAX runs what it finds: a flipped bit crashes the process or, worse, computes other
numbers. So each entry gets a seal beside it, the sha256 of its name and content, written as soon as JAX has written
the entry; when a run starts, an entry without a true seal is removed and compiled again. A seal is no signature: who
can write into the directory can write both, so the directory must belong to the user and be writable by nobody else.
"""

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from .names import check_output
from .reading import read_bytes
from .writing import replace_file

ENTRIES = "*-cache"
SEAL = ".sha256"
COMPILED = "/jax/core/compile/backend_compile_duration"  # what JAX tells its monitors after it compiled and stored
MOST_ENTRY = 16 << 30


def use_compile_cache(directory: str | Path, *, say: Callable[[str], None]) -> None:
    """Keep compiled programs in `directory` between runs. What is damaged there is removed, and said."""
    path = check_output(directory, flag="--compile-cache").absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(path)
    if removed := remove_unsealed(path):
        names = ", ".join(name[:60] for name in removed[:3]) + (", ..." if len(removed) > 3 else "")
        say(f"compile cache {path}: {len(removed)} entries are damaged or were never sealed, compiled again: {names}")
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.monitoring.register_event_duration_secs_listener(_sealing(path))


def check_private(directory: Path) -> None:
    """ValueError unless the directory is ours (or root's) and nobody else can write into it: it holds programs."""
    found = directory.stat()
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"--compile-cache {directory}: other users can write there (owner {found.st_uid}, mode "
            f"{stat.filemode(found.st_mode)}), and what lies there is executed; chmod go-w, or name another"
        )


def remove_unsealed(directory: Path) -> list[str]:
    """Names of the entries whose content is not what was sealed, after removing them and their seals."""
    removed = []
    for entry in sorted(directory.glob(ENTRIES)):
        if not _is_sealed(entry):
            entry.unlink(missing_ok=True)
            _seal_of(entry).unlink(missing_ok=True)
            removed.append(entry.name)
    return removed


def seal(directory: Path) -> None:
    """Seal every entry that has no seal yet."""
    for entry in directory.glob(ENTRIES):
        if not _seal_of(entry).exists():
            try:
                replace_file(_seal_of(entry), _digest(entry))
            except OSError:  # another run removed the entry, or the disk is full: then it is compiled again next time
                continue


def _sealing(directory: Path) -> Any:
    def listener(event: str, duration: float, **facts: Any) -> None:
        if event == COMPILED:
            seal(directory)

    return listener


def _seal_of(entry: Path) -> Path:
    return entry.with_name(entry.name + SEAL)


def _digest(entry: Path) -> str:
    """Of name and content: an entry under another's name is another program."""
    return hashlib.sha256(entry.name.encode() + b"\n" + read_bytes(entry, most=MOST_ENTRY)).hexdigest()


def _is_sealed(entry: Path) -> bool:
    try:
        return not entry.is_symlink() and read_bytes(_seal_of(entry), most=64).decode("ascii") == _digest(entry)
    except (OSError, ValueError):
        return False
