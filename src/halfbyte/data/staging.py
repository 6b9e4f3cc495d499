"""A directory that appears complete or not at all: made hidden beside its place, renamed at the end."""

import contextlib
import errno
import shutil
import tempfile
from pathlib import Path


class Staging:
    """A hidden directory beside `out`, removed unless it was renamed away."""

    def __init__(self, out: Path):
        self.out = out

    def __enter__(self) -> Path:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.path = Path(tempfile.mkdtemp(prefix=f".{self.out.name}.partial-", dir=self.out.parent))
        return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def publish(staging: Path, out: Path, *, replace: bool) -> bool:
    """Renames `staging` to `out`. False if something is there and `replace` is not set: another process was first."""
    staging.chmod(0o755)
    while True:
        try:
            staging.rename(out)
            return True
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if not replace:
            return False
        _move_aside(out)


def _move_aside(out: Path) -> None:
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.replaced-", dir=out.parent))
    with contextlib.suppress(FileNotFoundError):  # another process moved it first
        out.rename(aside / "old")
    shutil.rmtree(aside)
