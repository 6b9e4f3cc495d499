"""One writer a run directory. The kernel drops the lock when the process dies, however it dies; no stale file blocks
a restart."""

import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

from halfbyte.inputs import no_follow


class RunDirectoryHeld(ValueError):
    """Another living process writes into this run directory."""


class RunLock:
    """Holds `directory/.lock` until closed. Raises RunDirectoryHeld, naming the holder, when another process has it."""

    def __init__(self, directory: str | os.PathLike[str]):
        self.path = Path(directory) / ".lock"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+", encoding="utf-8", opener=no_follow)  # noqa: SIM115 (the open file is the lock)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise RunDirectoryHeld(
                f"run directory {self.path.parent} is held by another process ({holder}); "
                "wait for it, stop it, or give --run-dir another directory"
            ) from None
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def close(self) -> None:
        """Let the next process in."""
        self._file.close()

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
