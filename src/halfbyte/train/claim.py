"""Whether a directory may be that of a run: it is empty, or it holds a run, and nothing in it leads out of it. Whose it
is, while it is: one process's. And what is left of it when an error comes before the first step: nothing."""

import contextlib
import errno
import glob
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from halfbyte.checkpoint import LOCK, NAME, RunLock
from halfbyte.inputs import UnreadableFile, check_output, read_json, read_text

from .identity import file_hash, load_identity

KEPT = CONFIG, RUN = "config.json", "run.json"  # there from before the first step to the end
CONFIG_FIELDS = {"name", "model", "recipe", "steps"}
WRITTEN_FIRST = (
    *KEPT, "manifest.json", "data.json", "tokenizer.json", "metrics.jsonl", "radar.jsonl", "telemetry.jsonl",
    "wandb_id", NAME, "autotuned-*.txt", "tensorboard/events.out.tfevents.*.halfbyte",
)  # fmt: skip
"""What a run writes before its first step, as patterns; `huggingface` and `wandb` have names of their own."""
IMPORTED = "imported.json"  # of a directory that holds an imported model and no training


def check_run_directory(directory: Path) -> None:
    """ValueError if `directory` cannot be the directory of a run: nothing of somebody else's is overwritten. A
    config.json alone does not make a run: models have one."""
    check_output(directory, flag="--run-dir")
    if not directory.exists() and not directory.is_symlink():
        return
    if not directory.is_dir():
        raise ValueError(f"--run-dir {directory} is not a directory; give another")
    names = sorted(path.name for path in directory.iterdir() if path.name != LOCK and path.suffix != ".tmp")
    if IMPORTED in names:
        raise ValueError(
            f"{directory} holds an imported model, not a run that could go on; "
            f"start one with its weights: --init-from {directory} --run-dir ANOTHER"
        )
    killed_at_once = names == [RUN] and _fields(directory / RUN) == {"run", "crc32"}
    if not names or killed_at_once or _fields(directory / CONFIG) >= CONFIG_FIELDS:
        return
    what = "its config.json is not that of a run" if CONFIG in names else f"found {', '.join(names[:4])}"
    raise ValueError(
        f"run directory {directory} is not empty and holds no run ({what}); give another --run-dir: "
        "what is there would be overwritten"
    )


def _fields(path: Path) -> set[str]:
    """Returns the names of the fields in a JSON file. A damaged file next to checkpoints counts as a config: the error
    comes from `open_directory`, which names the remedy."""
    try:
        values = read_json(path) if path.is_file() else None
    except UnreadableFile:
        return CONFIG_FIELDS if (path.parent / "checkpoints").is_dir() else set()
    return set(values) if isinstance(values, dict) else set()


class Claim:
    """This process's hold on a run directory, from before it looks at it to its end: one process a directory, and all
    that is decided of it is decided under its lock. An error before the first step leaves nothing of a directory that
    was empty or was not there; only the holder removes anything."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._made = [path for path in (directory, *directory.parents) if not path.exists()]

    def __enter__(self) -> "Claim":
        with contextlib.suppress(FileNotFoundError):  # what a holder removes while it is looked at; the lock will tell
            check_run_directory(self.directory)  # nothing is made in a directory of somebody else's
        self._lock = RunLock(self.directory)
        try:
            check_run_directory(self.directory)  # what counts: nobody changes it now
        except BaseException:
            self._lock.close()
            raise
        self._fresh = os.listdir(self.directory) == [LOCK]
        return self

    def check(self) -> None:
        """Raise OSError if the directory is not the one that was claimed: what this run writes would be lost."""
        if not self._lock.holds() or not all((self.directory / name).exists() for name in KEPT):
            gone = "was removed, moved or replaced while the run trained: it ends here, and nothing more is saved"
            raise OSError(errno.EIO, f"run directory {self.directory} {gone}")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._fresh and self._lock.holds() and not _has_steps(self.directory):
            self._leave_nothing()
        self._lock.close()

    def _leave_nothing(self) -> None:
        """Remove what this run has written, and the lock last: until then no other process can have the directory. What
        somebody else has put there meanwhile stays."""
        for path in [path for path in self._own() if not path.parent.is_symlink()]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        folders = ("checkpoints", "tensorboard", "wandb", "huggingface", "profile")
        self._remove_empty(self.directory / name for name in folders)
        (self.directory / LOCK).unlink(missing_ok=True)
        self._remove_empty(self._made)

    def _own(self) -> Iterator[Path]:
        """Yields what a run writes before its first step: in `wandb` by the run's id, in `huggingface` by its seal."""
        patterns = [*WRITTEN_FIRST]
        with contextlib.suppress(OSError, ValueError):
            named = glob.escape(read_text(self.directory / "wandb_id", most=200).strip())
            patterns += [f"wandb/*-{named}", "wandb/latest-run", "wandb/debug*.log"]
        for pattern in patterns:
            yield from self.directory.glob(pattern)
        with contextlib.suppress(OSError, ValueError):
            identity = load_identity(self.directory)
            for name, digest in identity.files.items() if identity else ():
                if name.startswith("huggingface/") and file_hash(self.directory / name) == digest:
                    yield self.directory / name

    def _remove_empty(self, folders: Iterable[Path]) -> None:
        for path in folders:
            with contextlib.suppress(OSError):
                path.rmdir()


def _has_steps(directory: Path) -> bool:
    rows = directory / "metrics.jsonl"
    return (rows.is_file() and rows.stat().st_size > 0) or any(directory.glob("checkpoints/[0-9]*"))
