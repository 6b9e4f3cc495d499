"""The run directory: whose it is, what may be written into it and when.

A fresh directory gets its config before anything else. One that holds a run keeps its config.json until the checkpoint
has been restored: a resume that is refused leaves everything as it was.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from halfbyte.checkpoint import Checkpoints, RunLock
from halfbyte.inputs import read_json, replace_file
from halfbyte.metrics import read_rows

from . import jsonconfig
from .claim import check_run_directory
from .config import TrainConfig
from .identity import Identity, hash_of, load_identity, new_name, save_identity, text_hash
from .resume import ChangedConfig, check_unchanged

CONFIG, METRICS, CHECKPOINTS = "config.json", "metrics.jsonl", "checkpoints"


@dataclass(frozen=True)
class Found:
    """A run directory as it was before this start: its identity, if it has one, and whether it holds a run."""

    path: Path
    identity: Identity | None
    exists: bool


def look_at(
    directory: Path, config: TrainConfig, *, allow_change: bool, is_main: bool, say: Callable[[str], None]
) -> Found:
    """Raise ValueError if the directory is somebody else's, is in use, or belongs to a run that computes something
    else. Nothing is written."""
    check_run_directory(directory)
    if is_main and (directory / ".lock").exists():
        RunLock(directory).close()  # refuse a directory in use before anything is shown
    if not (directory / CONFIG).exists():
        return Found(directory, None, exists=False)
    identity = load_identity(directory)
    if identity is not None:
        _check_seal(directory, identity, allow=allow_change, say=say)
    stored = read_json(directory / CONFIG)
    check_unchanged(stored, config, allow=allow_change, say=say, ignore=("data",) if identity else ())
    return Found(directory, identity, exists=True)


def _check_seal(directory: Path, identity: Identity, *, allow: bool, say: Callable[[str], None]) -> None:
    if hash_of(directory / CONFIG) in identity.config_sha256.split():
        return
    if not allow:
        raise ChangedConfig(
            f"{directory / CONFIG} is not what this run wrote: it was edited, or the disk has changed it. Give the "
            "run's own flags and --allow-change to go on with them, or restore the file from a copy"
        )
    say(f"{CONFIG} is not what this run wrote; going on with it, as allowed")


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
    found: Found, config: TrainConfig, content: str, *, stack: ExitStack, is_main: bool, say: Callable[[str], None]
) -> Taken:
    """Lock the directory and open its checkpoints; a fresh one gets its config. Every process calls it."""
    directory = found.path
    had_checkpoints = (directory / CHECKPOINTS).exists()
    identity = found.identity or Identity(_name_of(found), "", content)
    if is_main:
        stack.enter_context(RunLock(directory))
        if not found.exists:
            _write_config(directory, config, identity)
    if jax.process_count() > 1:  # a process that could not have the directory has raised; nobody runs past it
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("halfbyte:directory")
    identity = load_identity(directory) or identity
    refuse_lost_checkpoints(directory, config, had_checkpoints=had_checkpoints)
    keep = config.checkpoint
    store = Checkpoints(
        directory / CHECKPOINTS,
        keep_last=keep.keep_last,
        keep_every=keep.keep_every or None,
        run=identity.run,
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


def settle(directory: Path, config: TrainConfig, identity: Identity, *, content: str) -> None:
    """Write what is now known to be true: config.json and run.json."""
    _write_config(directory, config, replace(identity, data=content))


def _write_config(directory: Path, config: TrainConfig, identity: Identity) -> None:
    """run.json knows the config that is there and the one that comes, so that a kill between the two files does no
    harm."""
    text = jsonconfig.as_text(config)
    known = [text_hash(text)] + ([hash_of(directory / CONFIG)] if (directory / CONFIG).exists() else [])
    save_identity(directory, replace(identity, config_sha256=" ".join(dict.fromkeys(known))))
    replace_file(directory / CONFIG, text)
    save_identity(directory, replace(identity, config_sha256=known[0]))


def refuse_lost_checkpoints(directory: Path, config: TrainConfig, *, had_checkpoints: bool) -> None:
    """Raise ValueError if the metrics tell of a checkpoint and the directory of checkpoints is gone."""
    rows = read_rows(directory / METRICS) if (directory / METRICS).exists() else []
    due = min(config.checkpoint.every or config.steps, config.steps)
    if rows and rows[-1].get("step", 0) >= due and not had_checkpoints:
        raise ValueError(
            f"{directory} has the metrics of {rows[-1]['step']} steps, and its directory {CHECKPOINTS}/ is gone; "
            "put it back, or start over with another --run-dir"
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
