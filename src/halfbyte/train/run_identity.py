"""Identity of a run: run.json, the lock on its directory, and what is refused if a file, data or config has changed.

`run.json` holds the run's identifier, a hash of the content of its data set, the hashes of the files that others read
(its seal), and the software versions that trained it. A checkpoint has the same identifier, so that one of another run
with equal shapes is refused. A file that was edited or changed by a failing disk is detected before it is used. A data
set is identified by its content: it may move, but not be replaced under its name.

A run directory is empty or holds a run, and is locked by one process. If startup fails before the first step, nothing
that it wrote is left.
"""

import contextlib
import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jaxlib

from halfbyte.checkpoint import LOCK_FILE, NAME, RunLock
from halfbyte.data.dataset import as_mixture
from halfbyte.data.text_files import sha256_of
from halfbyte.io import (
    UnreadableFile,
    atomic_write,
    parse_json,
    read_json,
    read_text,
    sealed_json,
    sealed_text,
    validated_output_path,
)
from halfbyte.io.dataclass_json import from_dict
from halfbyte.io.disk_cache import source_digest

IDENTITY_FILE = "run.json"
ABSENT = "absent"  # hash of a file that does not exist
RUN_MARKER_FILES = CONFIG, RUN = "config.json", "run.json"  # they exist from before the first step to the end
CONFIG_FIELDS = {"name", "model", "recipe", "steps"}
WRITTEN_FIRST = (
    *RUN_MARKER_FILES, "manifest.json", "data.json", "tokenizer.json", "metrics.jsonl", "radar.jsonl",
    "telemetry.jsonl", "wandb_id", NAME, "autotuned-*.txt", "tensorboard/events.out.tfevents.*.halfbyte",
)  # fmt: skip
"""Patterns of the files that a run writes before its first step, except for those in `huggingface` and `wandb`."""
IMPORT_RECORD_FILE = "imported.json"  # of a directory that holds an imported model and no training
OTHER_DATA = "give the data set that it was started on, --allow-change to go on with this one, or another --run-dir"
OTHER_CONFIG = "give --allow-change to go on with the new values, or another --run-dir"
EDITED = "files of this run were edited, or the disk has changed them"


class ChangedRun(ValueError):
    """Files, data or config are not those of the run."""


@dataclass(frozen=True)
class RunIdentity:
    """Content of run.json.

    run: a random identifier. data: fingerprint of the data set. files: the seal, name -> sha256 (old and new while a
    file is replaced). made_with: software versions that trained the run last. saved: the run has had a checkpoint.
    """

    run: str
    data: str
    files: Mapping[str, str] = field(default_factory=dict)
    made_with: Mapping[str, str] = field(default_factory=dict)
    saved: bool = False


class RunDirectoryClaim:
    """Context manager that locks a run directory for one process, from its first check to the end of the run.

    The decisive checks happen under the lock. An error before the first step removes a directory that was empty or did
    not exist; only the process with the lock removes anything.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._created = [path for path in (directory, *directory.parents) if not path.exists()]

    def __enter__(self) -> "RunDirectoryClaim":
        with contextlib.suppress(FileNotFoundError):  # another process removes files meanwhile; the lock decides
            check_run_directory(self.directory)  # before anything is created in a directory that is no run's
        self._lock = RunLock(self.directory)
        try:
            check_run_directory(self.directory)  # the decisive check: the directory is locked now
        except BaseException:
            self._lock.close()
            raise
        self._fresh = os.listdir(self.directory) == [LOCK_FILE]
        return self

    def assert_still_held(self) -> None:
        """Raises OSError if the directory is not the one that was claimed: what this run writes would be lost."""
        if not self._lock.is_held() or not all((self.directory / name).exists() for name in RUN_MARKER_FILES):
            gone = "was removed, moved or replaced while the run trained: it ends here, and nothing more is saved"
            raise OSError(errno.EIO, f"run directory {self.directory} {gone}")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._fresh and self._lock.is_held() and not _has_steps(self.directory):
            self._remove_failed_start()
        self._lock.close()

    def _remove_failed_start(self) -> None:
        """Removes the files of this run, the lock last: until then no other process can claim the directory.

        Files of other programs stay.
        """
        for path in [path for path in self._startup_files() if not path.parent.is_symlink()]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        folders = ("checkpoints", "tensorboard", "wandb", "huggingface", "profile")
        self._remove_empty(self.directory / name for name in folders)
        (self.directory / LOCK_FILE).unlink(missing_ok=True)
        self._remove_empty(self._created)

    def _startup_files(self) -> Iterator[Path]:
        """Yields the files of a run before its first step: in `wandb` by the run's id, in `huggingface` by its seal."""
        patterns = [*WRITTEN_FIRST]
        with contextlib.suppress(OSError, ValueError):
            run_id = glob.escape(read_text(self.directory / "wandb_id", most=200).strip())
            patterns += [f"wandb/*-{run_id}", "wandb/latest-run", "wandb/debug*.log"]
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


def check_run_directory(directory: Path) -> None:
    """Raises ValueError if `directory` cannot be a run directory: files of other programs are never overwritten.

    A config.json does not make it a run: models have one too.
    """
    validated_output_path(directory, flag="--run-dir")
    if not directory.exists() and not directory.is_symlink():
        return
    if not directory.is_dir():
        raise ValueError(f"--run-dir {directory} is not a directory; give another")
    names = sorted(path.name for path in directory.iterdir() if path.name != LOCK_FILE and path.suffix != ".tmp")
    if IMPORT_RECORD_FILE in names:
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


def load_identity(directory: Path) -> RunIdentity | None:
    """Reads run.json of a run directory; returns None if there is none. Raises ValueError if it is damaged."""
    path = directory / IDENTITY_FILE
    if not path.exists():
        return None
    text = sealed_text("run", read_json(path))
    if text is None:
        raise ValueError(
            f"{path} is damaged (it does not match its own CRC); restore it from a copy (without it nothing says "
            "whether the run's config, tokenizer and checkpoints are its own)"
        )
    try:
        values = parse_json(text, what=str(path))
        if "config_sha256" in values:  # written by a version that sealed only the config
            values["files"] = {"config.json": values.pop("config_sha256")}
        return from_dict(RunIdentity, values)
    except (TypeError, AttributeError, ValueError):
        raise ValueError(
            f"{path} is not as this version writes it; read the run with the version that wrote it (without the file "
            "nothing would say whether its config, tokenizer and weights are its own)"
        ) from None


def save_identity(directory: Path, identity: RunIdentity) -> None:
    """Writes run.json, with its own CRC."""
    atomic_write(directory / IDENTITY_FILE, json.dumps(sealed_json("run", asdict(identity))) + "\n")


def new_run_id() -> str:
    """Returns a random identifier."""
    return secrets.token_hex(8)


def software_versions() -> dict[str, str]:
    """Returns the versions of the software that decides what a step computes."""
    package = sys.modules[__name__.partition(".")[0]]  # a subpackage does not import the top-level package
    versions = {program.__name__: str(program.__version__) for program in (package, jax, jaxlib)}  # installed or not
    return versions | {"code": source_digest()[:16]}


def dataset_fingerprint(dataset: Any) -> str:
    """Returns a hash of the content of a data set, independent of its path; `synthetic` for None."""
    if dataset is None:
        return "synthetic"
    mixture = as_mixture(dataset)
    fingerprints = [
        [hashlib.sha256(part.manifest.to_json().encode()).hexdigest(), weight]
        for part, weight in zip(mixture.datasets, mixture.weights, strict=True)
    ]
    return hashlib.sha256(json.dumps(fingerprints).encode()).hexdigest()[:32]


def data_changes(stored: str | None, content: str) -> list[str]:
    """Returns the change of a data set's content as a list for `refuse_or_say`; empty if `stored` is None."""
    return [] if stored in (None, content) else [f"content of the data set: {stored} -> {content}"]


def refuse_or_say(
    changes: Sequence[str], *, what: str, remedy: str, allow: bool = False, say: Callable[[str], None] = print
) -> None:
    """Raises ChangedRun, with the list of changes under `what`, if there are any; with `allow`, prints each instead."""
    if changes and not allow:
        raise ChangedRun("\n  ".join([f"{what}:", *changes]) + f"\n{remedy}")
    for change in changes:
        say(f"changed, as allowed: {change}")


def file_hash(path: Path) -> str:
    """Returns the sha256 of a file; ABSENT where there is none."""
    return sha256_of(path) if path.exists() else ABSENT


def text_sha256(text: str) -> str:
    """Returns the sha256 of a text as UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def _fields(path: Path) -> set[str]:
    """Returns the names of the fields in a JSON file.

    A damaged file next to checkpoints counts as a config: `open_run_directory` then raises the error with the remedy.
    """
    try:
        values = read_json(path) if path.is_file() else None
    except UnreadableFile:
        return CONFIG_FIELDS if (path.parent / "checkpoints").is_dir() else set()
    return set(values) if isinstance(values, dict) else set()


def _has_steps(directory: Path) -> bool:
    rows = directory / "metrics.jsonl"
    return (rows.is_file() and rows.stat().st_size > 0) or any(directory.glob("checkpoints/[0-9]*"))
