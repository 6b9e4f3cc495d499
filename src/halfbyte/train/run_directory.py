"""Run directory: opened for reading, checked against its seal, and written in an order that survives a kill.

A run directory may come from anywhere. It holds regular files and directories only; what its seal (`run.json`) covers
must be what the run wrote; files without a seal are reported; the data set must be the one that it was trained on; and
no program runs because a file names it (`io/trusted_programs.py`). Every command that reads a run opens it here.

A fresh directory gets its config before anything else. A directory with a run keeps its config.json until the
checkpoint has been restored: a resume that is refused changes nothing.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from halfbyte.checkpoint import CheckpointManager
from halfbyte.io import MAX_JSON_BYTES, UnreadableFile, atomic_write, dataclass_json, escape_control_chars, refuse_url
from halfbyte.io.trusted_programs import UntrustedProgramError
from halfbyte.train.metrics_log import read_rows
from halfbyte.train.resume import guarded_changes
from halfbyte.train.run_identity import (
    EDITED,
    IDENTITY_FILE,
    IMPORT_RECORD_FILE,
    OTHER_CONFIG,
    OTHER_DATA,
    RunIdentity,
    check_run_directory,
    data_changes,
    dataset_fingerprint,
    file_hash,
    load_identity,
    new_run_id,
    refuse_or_say,
    save_identity,
    software_versions,
    text_sha256,
)
from halfbyte.train.train_config import TrainConfig

if TYPE_CHECKING:
    from halfbyte.train.batch_source import BatchSource

CONFIG_FILE, ORIGIN = "config.json", "huggingface"
METRICS_FILE, CHECKPOINTS = "metrics.jsonl", "checkpoints"
SEALED = (CONFIG_FILE, "tokenizer.json", "data.json", IMPORT_RECORD_FILE)
"""Files of the seal. Checkpoints have separate checksums; ORIGIN holds the files of the folder that the run was
imported, or started, from, and is sealed too."""
LARGE_FILE_BYTES = 1 << 28  # bytes that take a while to hash
RESTORE_HINT = "If the file was edited or damaged, restore it from a copy; a new run needs another directory"
UNCHECKED_DIRECTORIES = ("wandb",)
"""Directories that other programs write, also with symbolic links; they are not read here."""


@dataclass(frozen=True)
class RunDirectory:
    """A run directory that was opened for reading.

    `values` are the fields of config.json without its compile cache, empty in a directory without a run. `identity` is
    None without run.json.
    """

    path: Path
    values: Mapping[str, Any]
    identity: RunIdentity | None

    @cached_property
    def config(self) -> TrainConfig:
        """Returns the config of the run. Raises ValueError, with the file name, if its fields are invalid.

        Programs that the config names only run if the command names them too.
        """
        try:
            return dataclass_json.from_file(TrainConfig, self.values, self.path / CONFIG_FILE)
        except UntrustedProgramError:
            raise
        except ValueError as error:
            self.check_unmodified()
            raise ValueError(f"{error}. {RESTORE_HINT}") from None

    @property
    def seal(self) -> Mapping[str, str]:
        """Returns the sealed files with their hashes; empty without run.json."""
        return self.identity.files if self.identity else {}

    def unsealed_files(self) -> list[str]:
        """Returns the files that a seal should cover and does not."""
        present = [name for name in SEALED if (self.path / name).exists()] + origin_files(self.path)
        return [name for name in present if name not in self.seal]

    def modified_files(self, *, origin: bool = False) -> list[str]:
        """Returns the sealed files, of ORIGIN or all others, that are not what the run wrote. Reads them in full."""
        return [name for name in self.seal if name.startswith(f"{ORIGIN}/") == origin and not self._matches_seal(name)]

    def changes(self, *, origin: bool = False) -> list[str]:
        """Returns a clause about each modified file, for `refuse_or_say`."""
        return [f"{self.path / name} is not what this run wrote" for name in self.modified_files(origin=origin)]

    def check_unmodified(self, *, origin: bool = False) -> None:
        """Raises ChangedRun if there is a modified file."""
        refuse_or_say(self.changes(origin=origin), what=EDITED, remedy="restore the file from a copy")

    def _matches_seal(self, name: str) -> bool:
        path = self.path / name
        size = path.stat().st_size if path.exists() else 0
        if name in SEALED and size > MAX_JSON_BYTES:  # readers refuse it
            return False
        if size > LARGE_FILE_BYTES:
            _note(f"comparing {path} ({size / 2**30:.1f} GiB) with the run's seal")
        return file_hash(path) in self.seal[name].split()

    def source(self) -> "BatchSource":
        """Opens the run's data; raises ValueError if it is not what the run was trained on."""
        from halfbyte.train.batch_source import open_batch_source

        source = open_batch_source(self.config)
        changes = data_changes(self.identity.data if self.identity else None, dataset_fingerprint(source.dataset))
        what = f"{self.config.data} holds something else than this run was trained on"
        refuse_or_say(changes, what=what, remedy="put the data set back")
        return source


@dataclass(frozen=True)
class OpenedRun:
    """A run directory that this process has locked, with its checkpoints."""

    identity: RunIdentity
    store: CheckpointManager


def open_run_directory(
    directory: Path, *, check: bool = True, say: Callable[[str], None] | None = None
) -> RunDirectory:
    """Opens the run in `directory` for reading, and reports files without a seal.

    Raises ValueError if there is no run, if an entry is neither file nor directory, or, with `check`, if a file is not
    what the run wrote.
    """
    if not (directory / CONFIG_FILE).is_file():
        refuse_url(directory)
        if directory.is_file():
            raise ValueError(f"{directory} is a file, and a run is a directory; name the one that holds {CONFIG_FILE}")
        what = "there is no such directory" if not directory.is_dir() else f"it holds no {CONFIG_FILE}"
        raise ValueError(f"{directory} is not a run: {what}; `halfbyte train --run-dir {directory}` makes one")
    check_run_files_regular(directory)
    try:
        values = dataclass_json.rename_old_fields(TrainConfig, dataclass_json.read_values(directory / CONFIG_FILE))
        values["compile_cache"] = ""  # its compiled programs are not run
    except UnreadableFile as error:
        raise UnreadableFile(f"{error}. {RESTORE_HINT}") from None
    run = RunDirectory(directory, values, load_identity(directory))
    if strange := [name for name in run.seal if not _may_be_sealed(name)]:
        raise ValueError(f"{directory}: run.json seals {strange[0][:200]!r}, which is no file that a run seals")
    if check:
        run.check_unmodified()
    if unsealed := run.unsealed_files():
        why = "its run.json is gone" if run.identity is None else "an earlier version wrote it"
        (say or _note)(
            f"{directory}: no seal covers {', '.join(unsealed[:4])} ({why}): whether they are as written is not known"
        )
    return run


def read_config_fields(path: Path) -> dict[str, Any]:
    """Reads the fields of a config file; one in a run directory is checked against the seal."""
    if path.name != CONFIG_FILE or not any(
        (path.parent / name).exists() for name in (IDENTITY_FILE, "checkpoints", "metrics.jsonl")
    ):
        return dataclass_json.read_values(path)
    return dict(open_run_directory(path.parent).values)


def examine_directory(
    directory: Path, config: TrainConfig, *, allow_change: bool, say: Callable[[str], None]
) -> RunDirectory:
    """Returns the directory as it was before this start, without `values` if it has no run. Writes nothing.

    Raises ValueError if the directory has files of other programs or a run that computes something else.
    """
    check_run_directory(directory)  # on every process: each host may have a local disk
    if not (directory / CONFIG_FILE).exists():
        return RunDirectory(directory, {}, None)
    run = open_run_directory(directory, check=False, say=say)
    remedy = "give the run's own flags and --allow-change to go on with them, or restore the file from a copy"
    refuse_or_say(run.changes(), what=EDITED, remedy=remedy, allow=allow_change, say=say)
    changes = guarded_changes(
        run.values, config, ignore=("data",) if run.identity else ()
    )  # `check_data_unchanged` compares the data's content
    what = "this run directory was started with another configuration"
    refuse_or_say(changes, what=what, remedy=OTHER_CONFIG, allow=allow_change, say=say)
    if (before := run.values.get("steps")) != config.steps:
        say(f"steps {before} -> {config.steps}: the learning-rate schedule now ends at step {config.steps}")
    return run


def check_data_unchanged(run: RunDirectory, content: str, *, allow: bool, say: Callable[[str], None]) -> None:
    """Raises ChangedRun if the content of the data set is not that at the start of the run."""
    changes = data_changes(run.identity.data if run.identity else None, content)
    refuse_or_say(changes, what="this run was started on other data", remedy=OTHER_DATA, allow=allow, say=say)


def open_run(
    run: RunDirectory, config: TrainConfig, content: str, *, is_main: bool, say: Callable[[str], None],
    committed: Callable[[int], object] = lambda step: None,
) -> OpenedRun:  # fmt: skip
    """Opens the checkpoints of a claimed directory and writes the config of a fresh one. Every process calls it.

    `committed` is called with the step of each checkpoint that this process has committed.
    """
    directory = run.path
    identity = run.identity or RunIdentity(_run_id_of(run), content)
    if is_main and not run.values:
        write_sealed(directory, {CONFIG_FILE: dataclass_json.config_to_json(config)}, identity)
    if jax.process_count() > 1:  # a process without the directory has raised: the others must not continue
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("halfbyte:directory")
    identity = load_identity(directory) or identity
    if run.values and not any(path.name.isdigit() for path in (directory / CHECKPOINTS).glob("*")):
        _refuse_lost_checkpoints(run.config, directory, identity)
    keep = config.checkpoint
    store = CheckpointManager(
        directory / CHECKPOINTS,
        keep_last=keep.keep_last,
        keep_every=keep.keep_every or None,
        run=identity.run,
        committed=functools.partial(_mark_saved, directory, committed),
        say=say,
    )
    store.remove_unfinished()
    return OpenedRun(identity, store)


def write_run_files(
    directory: Path, config: TrainConfig, identity: RunIdentity, *, content: str, facts: Mapping[str, str],
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Writes config.json, the `facts` of the data, and run.json, which seals them.

    Reports if other software versions have trained the run so far.
    """
    now = software_versions()
    others = [f"{name} {old}, now {now.get(name)}" for name, old in identity.made_with.items() if now.get(name) != old]
    if others:
        say(f"NOTE: this run was trained with other versions so far: {'; '.join(others)}")
    origin = {name: file_hash(directory / name) for name in origin_files(directory) if name not in identity.files}
    sealed = replace(identity, data=content, files={**identity.files, **origin}, made_with=now)
    write_sealed(directory, {CONFIG_FILE: dataclass_json.config_to_json(config), **facts}, sealed)


def write_sealed(directory: Path, texts: Mapping[str, str], identity: RunIdentity) -> None:
    """Writes files and their seal.

    run.json first gets the old and the new hash of each file: after a kill between two files the seal is still valid.
    """
    new = {name: text_sha256(text) for name, text in texts.items()}
    before = {name: identity.files.get(name) or file_hash(directory / name) for name in new}
    both = {name: f"{digest} {before[name]}" for name, digest in new.items()}
    save_identity(directory, replace(identity, files={**identity.files, **both}))
    for name, text in texts.items():
        atomic_write(directory / name, text)
    save_identity(directory, replace(identity, files={**identity.files, **new}))


def archive_metrics(directory: Path) -> Path | None:
    """Renames the metrics of a run that restarts at step 0, so that nothing is lost; returns their new path."""
    metrics_path = directory / METRICS_FILE
    if not metrics_path.exists() or not metrics_path.stat().st_size:
        return None
    number = 1
    while (archive := directory / f"metrics.before-restart-{number}.jsonl").exists():
        number += 1
    metrics_path.rename(archive)
    return archive


def origin_files(directory: Path) -> list[str]:
    """Returns the files of ORIGIN, by their names in the run directory."""
    folder = directory / ORIGIN
    return sorted(f"{ORIGIN}/{path.name}" for path in folder.iterdir()) if folder.is_dir() else []


def check_run_files_regular(directory: Path) -> None:
    """Raises ValueError for a link, a pipe or a device in a run directory: it would lead out of it, or never end."""
    pending, unchecked = [os.fspath(directory)], [directory / name for name in UNCHECKED_DIRECTORIES]
    while pending:
        with suppress(FileNotFoundError), os.scandir(pending.pop()) as entries:  # a run removes checkpoints meanwhile
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending += [entry.path] if Path(entry.path) not in unchecked else []
                elif not entry.is_file(follow_symlinks=False):
                    what = "a symbolic link" if entry.is_symlink() else "neither a file nor a directory"
                    raise ValueError(f"{entry.path} is {what}; a run directory holds files and directories: remove it")


def _may_be_sealed(name: str) -> bool:
    folder, _, inside = name.rpartition("/")
    return name in SEALED or (folder == ORIGIN and inside not in ("", ".", ".."))


def _note(text: str) -> None:
    print(escape_control_chars(f"NOTE: {text}"), file=sys.stderr, flush=True)


def _run_id_of(run: RunDirectory) -> str:
    """Returns the identifier for a run without run.json: a new one for a fresh run, else that of its checkpoints.

    If the checkpoints have none, returns a hash of the config, which is equal on every process.
    """
    if not run.values:
        return new_run_id()
    if (folder := run.path / CHECKPOINTS).is_dir():
        with contextlib.closing(CheckpointManager(folder)) as store:
            if run_id := store.run_of_newest():
                return run_id
    return file_hash(run.path / CONFIG_FILE)[:16]


def _mark_saved(directory: Path, committed: Callable[[int], object], step: int) -> None:
    """Records in run.json that the run has had a checkpoint.

    A run whose checkpoints were removed then does not restart at step 0.
    """
    committed(step)
    identity = load_identity(directory)
    if identity is not None and not identity.saved:
        save_identity(directory, replace(identity, saved=True))


def _refuse_lost_checkpoints(config: TrainConfig, directory: Path, identity: RunIdentity) -> None:
    """Raises ValueError if a run without a checkpoint has had one.

    run.json records it. If an earlier version wrote run.json, the metrics show it: they reach the last step, or, if the
    checkpoint directory is missing, the step of the first checkpoint.
    """
    rows = read_rows(directory / METRICS_FILE) if (directory / METRICS_FILE).exists() else []
    last = rows[-1].get("step", 0) if rows else 0
    due = config.steps if (directory / CHECKPOINTS).is_dir() else config.checkpoint.every or config.steps
    if identity.saved or last >= min(due, config.steps):
        raise ValueError(
            f"{directory} has the metrics of {last} steps and has had checkpoints, and none is in its directory "
            f"{CHECKPOINTS}/ any more; put them back, or start over with another --run-dir"
        )
