"""One writer a run directory. The kernel drops the lock when the process dies, however it dies; no stale file blocks
a restart."""

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

from halfbyte.inputs import no_follow

LOCK = ".lock"
ATTEMPTS = 100


class RunDirectoryHeld(ValueError):
    """Another living process writes into this run directory. `why` says which; what to do depends on who asked."""

    def __init__(self, why: str, do: str):
        super().__init__(f"{why}; {do}")
        self.why = why


class RunLock(contextlib.AbstractContextManager["RunLock"]):
    """Holds `directory/.lock`, which it makes, until closed. Raises RunDirectoryHeld, naming the holder and the `flag`
    of another directory, when another process has it. `what` describes the directory; default a run directory."""

    def __init__(self, directory: str | os.PathLike[str], *, flag: str = "--run-dir", what: str = ""):
        self.path, self._flag = Path(directory) / LOCK, flag
        self._what = what or f"run directory {self.path.parent}"
        self._file = self._take()
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def _take(self) -> TextIO:
        for _ in range(ATTEMPTS):
            with contextlib.suppress(FileNotFoundError, FileExistsError):  # a holder that leaves nothing removes it now
                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = open(self.path, "a+", encoding="utf-8", opener=no_follow)  # noqa: SIM115 (it is the lock)
                self._lock(file)
                if self._is_at_its_place(file):
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
            raise RunDirectoryHeld(
                f"{self._what} is held by another process ({holder})",
                f"wait for it, stop it, or give {self._flag} another directory",
            ) from None

    def _is_at_its_place(self, file: TextIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.lstat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def holds(self) -> bool:
        """Whether the lock still lies where it was made: False once the directory was removed, moved or replaced."""
        return self._is_at_its_place(self._file)

    def close(self) -> None:
        """Let the next process in."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()
