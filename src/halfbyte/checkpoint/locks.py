"""Locks of a run directory (one writer) and of its checkpoints (readers against deletion by the run).

The kernel releases a lock when its process ends in any way: no stale file blocks a restart.

A reader holds a shared lock on a checkpoint's directory. The run keeps a checkpoint that it cannot lock, and deletes it
at a later save. A reader that comes too late, or on a file system without such locks, finds files missing: it then
waits to see whether the others are deleted too, and reports a deleted checkpoint instead of a corrupt one.
"""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import jax

from halfbyte.checkpoint.checkpoint_record import MissingCheckpointFileError
from halfbyte.io import open_no_follow

LOCK_FILE = ".lock"
MAX_LOCK_ATTEMPTS = 100
PAUSE_S = 0.2
MAX_OPEN_ATTEMPTS = 20
STABLE_CHECKS = 10  # a directory that does not shrink for so many pauses is not being deleted


class RunDirectoryLockedError(ValueError):
    """Another process writes into this run directory. `why` names it; the remedy depends on the caller."""

    def __init__(self, why: str, do: str):
        super().__init__(f"{why}; {do}")
        self.why = why


class CheckpointDeletedError(ValueError):
    """Raised if a run has deleted a checkpoint while it was read."""


class RunLock(contextlib.AbstractContextManager["RunLock"]):
    """Creates and locks `directory/.lock` until closed. `what` describes the directory; default a run directory.

    Raises RunDirectoryLockedError if another process holds it, with that process and the `flag` for another directory.
    """

    def __init__(self, directory: str | os.PathLike[str], *, flag: str = "--run-dir", what: str = ""):
        self.path, self._flag = Path(directory) / LOCK_FILE, flag
        self._what = what or f"run directory {self.path.parent}"
        self._file = self._acquire()
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def _acquire(self) -> TextIO:
        for _ in range(MAX_LOCK_ATTEMPTS):
            # A failed start of another process may remove the directory meanwhile.
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = open(self.path, "a+", encoding="utf-8", opener=open_no_follow)  # noqa: SIM115 (it is the lock)
                self._lock(file)
                if self._lock_file_unchanged(file):
                    return file
                file.close()
        raise FileNotFoundError(errno.ENOENT, "no directory could be made", str(self.path.parent))

    def _lock(self, file: TextIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(200).strip() or "unknown"
            file.close()
            raise RunDirectoryLockedError(
                f"{self._what} is held by another process ({holder})",
                f"wait for it, stop it, or give {self._flag} another directory",
            ) from None

    def _lock_file_unchanged(self, file: TextIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.lstat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def is_held(self) -> bool:
        """Returns True while the lock file exists; False once the directory was removed, moved or replaced."""
        return self._lock_file_unchanged(self._file)

    def close(self) -> None:
        """Releases the lock."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class PreserveLockedCheckpoints:
    """Orbax preservation policy: keeps checkpoints under `directory` that are being read."""

    directory: Path

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns True for each checkpoint to keep."""
        return [self._is_read(self.directory / str(checkpoint.step)) for checkpoint in checkpoints]

    def _is_read(self, checkpoint: Path) -> bool:
        try:
            with _locked(checkpoint, fcntl.LOCK_EX):
                return False
        except BlockingIOError:
            return True


@contextlib.contextmanager
def hold_for_reading(directory: Path) -> Iterator[None]:
    """Holds a shared lock on a checkpoint while it is read.

    Raises CheckpointDeletedError instead of any other error if the run has deleted the checkpoint meanwhile.
    """
    files = -1
    try:
        with _locked(directory, fcntl.LOCK_SH):
            files = _files(directory)
            yield
    except Exception as error:
        left = _files(directory)
        is_suspect = left != files or not left or isinstance(error, MissingCheckpointFileError)
        if is_suspect and _is_being_deleted(directory):
            raise CheckpointDeletedError(
                f"the checkpoint {directory} was deleted by its run while it was read; try again, or let the run keep "
                "more (--checkpoint.keep-last)"
            ) from error
        raise


def open_with_retry(directory: Path, look: Callable[[], Any]) -> Any:
    """Returns look(), Orbax's checkpointer of the directory. Retries if a checkpoint is deleted while they are listed,
    or between the list and the read of its metadata: the list may then lack the next checkpoint too."""
    for _ in range(MAX_OPEN_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            checkpointer = look()
            if checkpointer.checkpoints or jax.process_count() > 1 or not _has_checkpoint(directory):
                return checkpointer  # ranks must have equal lists; no other process deletes from their directory
        time.sleep(PAUSE_S / 4)
    return look()


@contextlib.contextmanager
def _locked(directory: Path, kind: int) -> Iterator[None]:
    """Locks a directory; does nothing on a file system without locks. For LOCK_EX, raises BlockingIOError if another
    process holds the lock."""
    descriptor = -1
    with contextlib.ExitStack() as closing:
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            closing.callback(os.close, descriptor)
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if kind == fcntl.LOCK_EX:
                raise
        except OSError:
            pass
        yield


def _is_being_deleted(directory: Path) -> bool:
    """Returns True if the directory is deleted, or disappears within some pauses."""
    seen: list[int] = []
    while directory.is_dir():
        seen.append(_files(directory))
        if len(seen) > STABLE_CHECKS and len(set(seen[-STABLE_CHECKS:])) == 1:
            return False
        time.sleep(PAUSE_S)
    return True


def _has_checkpoint(directory: Path) -> bool:
    return any(path.name.isdigit() and path.is_dir() for path in directory.glob("*"))


def _files(directory: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(directory))
