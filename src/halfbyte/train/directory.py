"""The run directory: whose it is, what may be written into it and when.

A fresh directory gets its config before anything else. One that holds a run keeps its config.json until the checkpoint
has been restored: a resume that is refused leaves everything as it was.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from halfbyte.checkpoint import Checkpoints
from halfbyte.inputs import replace_file
from halfbyte.metrics import read_rows

from . import jsonconfig
from .claim import check_run_directory
from .config import TrainConfig
from .identity import ABSENT, Identity, hash_of, load_identity, new_name, save_identity, text_hash, versions
from .reading import CONFIG, RunDirectory, open_directory, origin_files
from .resume import ChangedConfig, check_unchanged

METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"


@dataclass(frozen=True)
class Found:
    """A run directory as it was before this start: its identity, if it has one, and whether it holds a run."""

    path: Path
    identity: Identity | None
    exists: bool


def look_at(directory: Path, config: TrainConfig, *, allow_change: bool, say: Callable[[str], None]) -> Found:
    """Raise ValueError if the directory is somebody else's, or belongs to a run that computes something else. Nothing
    is written."""
    check_run_directory(directory)
    if not (directory / CONFIG).exists():
        return Found(directory, None, exists=False)
    run = open_directory(directory, check=False, say=say)
    for name in run.changed():
        _answer_change(run, name, allow=allow_change, say=say)
    check_unchanged(run.values, config, allow=allow_change, say=say, ignore=("data",) if run.identity else ())
    return Found(directory, run.identity, exists=True)


def _answer_change(run: RunDirectory, name: str, *, allow: bool, say: Callable[[str], None]) -> None:
    if not allow:
        raise ChangedConfig(
            f"{run.path / name} is not what this run wrote: it was edited, or the disk has changed it. Give the "
            "run's own flags and --allow-change to go on with them, or restore the file from a copy"
        )
    say(f"{name} is not what this run wrote; going on, as allowed")


def check_data(found: Found, content: str, *, allow: bool, say: Callable[[str], None]) -> None:
    """Raise ChangedConfig if the data set does not hold what it held when the run began."""
    if found.identity is None or found.identity.data == content:
        return
    line = f"content of the data set: {found.identity.data} -> {content}"
    if not allow:
        raise ChangedConfig(
            f"this run was started on other data:\n  {line}\n"
            "give the data set that it was started on, --allow-change to go on with this one, or another --run-dir"
        )
    say(f"changed, as allowed: {line}")


@dataclass(frozen=True)
class Taken:
    """A directory that this process holds."""

    identity: Identity
    store: Checkpoints


def take(
    found: Found, config: TrainConfig, content: str, *, is_main: bool, say: Callable[[str], None],
    committed: Callable[[int], object] = lambda step: None,
) -> Taken:  # fmt: skip
    """Open the checkpoints of a directory that is claimed; a fresh one gets its config. Every process calls it.
    `committed` is called with the step of each checkpoint that this process has written whole."""
    directory = found.path
    identity = found.identity or Identity(_name_of(found), content)
    if is_main and not found.exists:
        write_sealed(directory, {CONFIG: jsonconfig.as_text(config)}, identity)
    if jax.process_count() > 1:  # a process that could not have the directory has raised; nobody runs past it
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("halfbyte:directory")
    identity = load_identity(directory) or identity
    if found.exists and not any(path.name.isdigit() for path in (directory / CHECKPOINTS).glob("*")):
        refuse_lost_checkpoints(directory, identity)
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


def _name_of(found: Found) -> str:
    """The name of a run without run.json: a new one for a fresh run; else the one that its checkpoints carry, or, if
    they carry none, one that every process finds in its config."""
    if not found.exists:
        return new_name()
    folder = found.path / CHECKPOINTS
    if folder.is_dir():
        store = Checkpoints(folder)
        name = store.owner()
        store.close()
        if name is not None:
            return name
    return hash_of(found.path / CONFIG)[:16]


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
    origin = {name: hash_of(directory / name) for name in origin_files(directory) if name not in identity.files}
    sealed = replace(identity, data=content, files={**identity.files, **origin}, made_with=now)
    write_sealed(directory, {CONFIG: jsonconfig.as_text(config), **facts}, sealed)


def write_sealed(directory: Path, texts: Mapping[str, str], identity: Identity) -> None:
    """Write files and the seal over them. run.json knows what is there and what comes, so that a kill between two files
    does no harm."""
    new = {name: text_hash(text) for name, text in texts.items()}
    both = {name: f"{digest} {_sealed_now(directory, name, identity)}" for name, digest in new.items()}
    save_identity(directory, replace(identity, files={**identity.files, **both}))
    for name, text in texts.items():
        replace_file(directory / name, text)
    save_identity(directory, replace(identity, files={**identity.files, **new}))


def _sealed_now(directory: Path, name: str, identity: Identity) -> str:
    """The hash that the seal has; of a file that never had a seal, the one that it has."""
    path = directory / name
    return identity.files.get(name) or (hash_of(path) if path.exists() else ABSENT)


def _mark_saved(directory: Path, committed: Callable[[int], object], step: int) -> None:
    """Keep in run.json that the run has had a checkpoint: without one it is then not taken for a run that never had."""
    committed(step)
    identity = load_identity(directory)
    if identity is not None and not identity.saved:
        save_identity(directory, replace(identity, saved=True))


def refuse_lost_checkpoints(directory: Path, identity: Identity) -> None:
    """Raise ValueError if a run that has no checkpoint has had one: it says so itself, or, where an earlier version
    wrote it, its metrics reach its last step, or its first checkpoint and the directory of checkpoints is gone."""
    rows = read_rows(directory / METRICS) if (directory / METRICS).exists() else []
    last = rows[-1].get("step", 0) if rows else 0
    config = jsonconfig.load(TrainConfig, directory / CONFIG)
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
