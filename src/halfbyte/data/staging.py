"""A directory that appears complete or not at all: made hidden beside its place, and put there in one call.

What is replaced and what replaces it exchange their names, so that a kill at any moment leaves the old or the new.
Where a file system cannot exchange (NFS), the old is moved aside first; if a kill comes there, `clear_left` puts it
back.

Whoever makes a directory holds a lock on it, which the kernel drops when it dies, however it dies: that is how the next
command tells what was left behind from what is being made.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

Whose = Literal["mine", "another's", "nobody's"]

PARTIAL, REPLACED = "partial", "replaced"
HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]  # in names: locks may hold on one machine only
TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
HERE, EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


class Staging:
    """A hidden directory beside `out`, removed unless it was renamed away."""

    def __init__(self, out: Path):
        self.out = out
        self._locked = contextlib.ExitStack()

    def __enter__(self) -> Path:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        while True:
            prefix = f"{_prefix(self.out, PARTIAL)}{HOST}-"
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=self.out.parent))
            if self._locked.enter_context(_lock(self.path)) != "another's":  # who clears up may have been faster
                return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._locked.close()


def clear_left(out: Path) -> None:
    """Remove, and say so, what processes of this machine that were killed have left beside `out`; what they had moved
    aside to replace it comes back, if nothing has taken its place. A lock of another machine may not be seen here (NFS
    with `local_lock`, Lustre with `localflock`): its directories are named, and stay."""
    for kind in (REPLACED, PARTIAL):
        for path in sorted(out.parent.glob(".*")):
            if not path.name.startswith(_prefix(out, kind)):
                continue
            with _lock(path) as whose:
                lost = kind == REPLACED and not out.exists()  # the only copy: whoever replaces it now tries again
                if whose == "mine" and not path.name.startswith(f"{_prefix(out, kind)}{HOST}-"):
                    whose = "nobody's"
                if whose == "mine" or (whose == "nobody's" and lost):
                    _clear(path, out, kind)
                elif whose == "nobody's":
                    print(f"{path}: left behind, or still being made; remove it if nobody makes it", file=sys.stderr)


def _clear(path: Path, out: Path, kind: str) -> None:
    if kind == REPLACED and not out.exists():
        path.rename(out)
        print(f"{out}: put back; a process was killed while it replaced it", file=sys.stderr)
        return
    print(f"{path}: removed; a process that was killed has left it half made", file=sys.stderr)
    shutil.rmtree(path, ignore_errors=True)


def publish(staging: Path, out: Path, *, replace: bool, check: Callable[[], object] = lambda: None) -> bool:
    """Renames `staging` to `out`. False if something is there and `replace` is not set: another process was first. Only
    what was there when `check` was called is replaced; `check` raises if that has to stay."""
    staging.chmod(0o755)
    while True:
        try:
            staging.rename(out)
            return True
        except OSError as error:
            if error.errno not in TAKEN:
                raise
        if not replace:
            return False
        with contextlib.suppress(FileNotFoundError):  # another process moved it first
            seen = out.lstat()
            check()
            if exchange(staging, out):
                if os.path.samestat(staging.lstat(), seen):
                    return True
                exchange(staging, out)  # something else was moved there since the check
            elif _replace_in_two(staging, out, seen):
                return True


def exchange(one: Path, other: Path) -> bool:
    """Give each of two directories the other's name, in one call; False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if rename(HERE, os.fsencode(one), HERE, os.fsencode(other), EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EXDEV):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _replace_in_two(staging: Path, out: Path, seen: os.stat_result) -> bool:
    """False if another process was faster between the two renames, or has moved something else than `seen` there."""
    aside = out.with_name(_prefix(out, REPLACED) + staging.name.removeprefix(_prefix(out, PARTIAL)))
    with _lock(out):
        out.rename(aside)
        if not os.path.samestat(aside.lstat(), seen):
            aside.rename(out)
            return False
        try:
            staging.rename(out)
        except BaseException as error:
            if getattr(error, "errno", None) not in TAKEN:
                aside.rename(out)
                raise
        shutil.rmtree(aside, ignore_errors=True)
    return not staging.exists()


def _prefix(out: Path, kind: str) -> str:
    return f".{out.name}.{kind}-"


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[Whose]:
    """Hold the directory's lock, and say whose it is: another's where a process has it, or has removed the directory;
    nobody's where the file system keeps none (a directory on NFS)."""
    descriptor = -1
    whose: Whose = "another's"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        whose = "mine" if os.path.samestat(os.fstat(descriptor), os.lstat(path)) else "another's"
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        whose = "nobody's"
    try:
        yield whose
    finally:
        if descriptor >= 0:
            os.close(descriptor)
