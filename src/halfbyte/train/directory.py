"""The run directory: whose it is, what may be written into it and when.

A fresh directory gets its config before anything else. One that holds a run keeps its config.json until the checkpoint
has been restored: a resume that is refused leaves everything as it was.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from halfbyte.checkpoint import Checkpoints
from halfbyte.inputs import replace_file
from halfbyte.metrics import read_rows

from . import jsonconfig
from .changed import EDITED, OTHER_CONFIG, OTHER_DATA, data_changes, refuse_or_say
from .claim import check_run_directory
from .config import TrainConfig
from .identity import Identity, file_hash, load_identity, new_name, save_identity, text_hash, versions
from .reading import CONFIG, RunDirectory, open_directory, origin_files
from .resume import guarded_changes

METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"


def look_at(directory: Path, config: TrainConfig, *, allow_change: bool, say: Callable[[str], None]) -> RunDirectory:
    """Raise ValueError if the directory is somebody else's, or belongs to a run that computes something else. Nothing
    is written. Returns the directory as it is before this start, without `values` if it holds no run."""
    check_run_directory(directory)  # on every process: each host may have a disk of its own
    if not (directory / CONFIG).exists():
        return RunDirectory(directory, {}, None)
    run = open_directory(directory, check=False, say=say)
    remedy = "give the run's own flags and --allow-change to go on with them, or restore the file from a copy"
    refuse_or_say(run.changes(), what=EDITED, remedy=remedy, allow=allow_change, say=say)
    changes = guarded_changes(run.values, config, ignore=("data",) if run.identity else ())  # judged by its content
    what = "this run directory was started with another configuration"
    refuse_or_say(changes, what=what, remedy=OTHER_CONFIG, allow=allow_change, say=say)
    if (before := run.values.get("steps")) != config.steps:
        say(f"steps {before} -> {config.steps}: the learning-rate schedule now ends at step {config.steps}")
    return run


def check_data(found: RunDirectory, content: str, *, allow: bool, say: Callable[[str], None]) -> None:
    """Raise ChangedRun if the data set does not hold what it held when the run began."""
    changes = data_changes(found.identity.data if found.identity else None, content)
    refuse_or_say(changes, what="this run was started on other data", remedy=OTHER_DATA, allow=allow, say=say)


@dataclass(frozen=True)
class Taken:
    """A directory that this process holds."""

    identity: Identity
    store: Checkpoints


def take(
    found: RunDirectory, config: TrainConfig, content: str, *, is_main: bool, say: Callable[[str], None],
    committed: Callable[[int], object] = lambda step: None,
) -> Taken:  # fmt: skip
    """Open the checkpoints of a directory that is claimed; a fresh one gets its config. Every process calls it.
    `committed` is called with the step of each checkpoint that this process has written whole."""
    directory = found.path
    identity = found.identity or Identity(_name_of(found), content)
    if is_main and not found.values:
        write_sealed(directory, {CONFIG: jsonconfig.as_text(config)}, identity)
    if jax.process_count() > 1:  # a process that could not have the directory has raised; nobody runs past it
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("halfbyte:directory")
    identity = load_identity(directory) or identity
    if found.values and not any(path.name.isdigit() for path in (directory / CHECKPOINTS).glob("*")):
        _refuse_lost_checkpoints(found.config, directory, identity)
    keep = config.checkpoint
    store = Checkpoints(
        directory / CHECKPOINTS,
        keep_last=keep.keep_last,
        keep_every=keep.keep_every or None,
        run=identity.run,
        committed=functools.partial(_mark_saved, directory, committed),
        say=say,
    )
    store.remove_unfinished()
    return Taken(identity, store)


def _name_of(found: RunDirectory) -> str:
    """The name of a run without run.json: a new one for a fresh run; else the one that its checkpoints carry, or, if
    they carry none, one that every process finds in its config."""
    if not found.values:
        return new_name()
    if (folder := found.path / CHECKPOINTS).is_dir():
        with contextlib.closing(Checkpoints(folder)) as store:
            if name := store.owner():
                return name
    return file_hash(found.path / CONFIG)[:16]


def settle(
    directory: Path, config: TrainConfig, identity: Identity, *, content: str, facts: Mapping[str, str],
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Write what is now known to be true: config.json, the `facts` of the data, and run.json, which seals them. Say it
    if other versions than now have trained the run so far."""
    now = versions()
    others = [f"{name} {old}, now {now.get(name)}" for name, old in identity.made_with.items() if now.get(name) != old]
    if others:
        say(f"NOTE: this run was trained with other versions so far: {'; '.join(others)}")
    origin = {name: file_hash(directory / name) for name in origin_files(directory) if name not in identity.files}
    sealed = replace(identity, data=content, files={**identity.files, **origin}, made_with=now)
    write_sealed(directory, {CONFIG: jsonconfig.as_text(config), **facts}, sealed)


def write_sealed(directory: Path, texts: Mapping[str, str], identity: Identity) -> None:
    """Write files and the seal over them. run.json knows what is there and what comes, so that a kill between two files
    does no harm."""
    new = {name: text_hash(text) for name, text in texts.items()}
    before = {name: identity.files.get(name) or file_hash(directory / name) for name in new}
    both = {name: f"{digest} {before[name]}" for name, digest in new.items()}
    save_identity(directory, replace(identity, files={**identity.files, **both}))
    for name, text in texts.items():
        replace_file(directory / name, text)
    save_identity(directory, replace(identity, files={**identity.files, **new}))


def _mark_saved(directory: Path, committed: Callable[[int], object], step: int) -> None:
    """Keep in run.json that the run has had a checkpoint: without one it is then not taken for a run that never had."""
    committed(step)
    identity = load_identity(directory)
    if identity is not None and not identity.saved:
        save_identity(directory, replace(identity, saved=True))


def _refuse_lost_checkpoints(config: TrainConfig, directory: Path, identity: Identity) -> None:
    """Raise ValueError if a run that has no checkpoint has had one: it says so itself, or, where an earlier version
    wrote it, its metrics reach its last step, or its first checkpoint and the directory of checkpoints is gone."""
    rows = read_rows(directory / METRICS) if (directory / METRICS).exists() else []
    last = rows[-1].get("step", 0) if rows else 0
    due = config.steps if (directory / CHECKPOINTS).is_dir() else config.checkpoint.every or config.steps
    if identity.saved or last >= min(due, config.steps):
        raise ValueError(
            f"{directory} has the metrics of {last} steps and has had checkpoints, and none is in its directory "
            f"{CHECKPOINTS}/ any more; put them back, or start over with another --run-dir"
        )


def set_rows_aside(directory: Path) -> Path | None:
    """Rename the metrics of a run that starts again at step 0, so that nothing is lost; where they are now."""
    rows = directory / METRICS
    if not rows.exists() or not rows.stat().st_size:
        return None
    number = 1
    while (aside := directory / f"metrics.before-restart-{number}.jsonl").exists():
        number += 1
    rows.rename(aside)
    return aside
