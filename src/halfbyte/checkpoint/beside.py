"""Readers beside a run that trains: it does not delete what they read, and what it has deleted is not damaged.

A reader holds a shared lock on a checkpoint's directory; the run keeps a checkpoint whose lock it cannot have, and
deletes it at a later save. Where a reader comes too late, or the file system has no such locks, it finds files missing:
then it looks whether the rest goes too.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from .record import MissingFile

PAUSE_S = 0.2
LOOKS = 20
STILL = 10  # pauses in which a directory does not shrink, and then nobody is deleting it


class GoneCheckpoint(ValueError):
    """A checkpoint that its run has deleted while it was read."""


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[None]:
    """While a checkpoint is read. Raises GoneCheckpoint for whatever was found wrong in one that was deleted."""
    files = -1
    try:
        with _locked(directory, fcntl.LOCK_SH):
            files = _files(directory)
            yield
    except Exception as error:
        left = _files(directory)
        if (left != files or not left or isinstance(error, MissingFile)) and _goes(directory):
            raise GoneCheckpoint(
                f"the checkpoint {directory} was deleted by its run while it was read; try again, or let the run keep "
                "more (--checkpoint.keep-last)"
            ) from error
        raise


def looked_up(directory: Path, look: Callable[[], Any]) -> Any:
    """look(), which gives Orbax's checkpointer of the directory; again where a checkpoint is deleted between its being
    listed and its being looked at, or while they are listed: then the list may lack the next one, too."""
    for _ in range(LOOKS):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = look()
            if found.checkpoints or jax.process_count() > 1 or not _has_one(directory):
                return found  # ranks, whose list must be one, have a directory that nobody else deletes from
        time.sleep(PAUSE_S / 4)
    return look()


def _has_one(directory: Path) -> bool:
    return any(path.name.isdigit() and path.is_dir() for path in directory.glob("*"))


def _goes(directory: Path) -> bool:
    """Whether it is gone, or goes while one looks."""
    seen: list[int] = []
    while directory.is_dir():
        seen.append(_files(directory))
        if len(seen) > STILL and len(set(seen[-STILL:])) == 1:
            return False
        time.sleep(PAUSE_S)
    return True


def _files(directory: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(directory))


@dataclass(frozen=True)
class BeingRead:
    """Orbax's policy of what to keep: checkpoints under `directory` that somebody reads now."""

    directory: Path

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """For each checkpoint."""
        return [self._is_read(self.directory / str(checkpoint.step)) for checkpoint in checkpoints]

    def _is_read(self, checkpoint: Path) -> bool:
        try:
            with _locked(checkpoint, fcntl.LOCK_EX):
                return False
        except BlockingIOError:
            return True


@contextlib.contextmanager
def _locked(directory: Path, kind: int) -> Iterator[None]:
    """Without a lock where there is none to have; BlockingIOError where another process has it."""
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
