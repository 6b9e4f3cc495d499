"""Checkpoints of a run: written by Orbax in the background, verified by our own checksums when they come back.

What Orbax gives: atomic commits (a kill during a save never costs the last good step), async writes, loading onto
another mesh. What it does not
give, and is here: a flipped bit is found (checksum an array), a wrong dtype is an error rather than a cast, a damaged
checkpoint is named, set
aside and the one before it is used, and a failed write (a full disk) does not poison the next.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from .checksum import checksums, disagreements, named_leaves
from .record import DamagedCheckpoint, Record, check_fits, describe_with_checksums

FILE_LIST = "halfbyte-files.json"


@dataclass(frozen=True)
class Restored:
    """What came back: the step, the items in the caller's structure, the caller's JSON, and why newer checkpoints
    were refused."""

    step: int
    items: dict[str, Any]
    extra: Mapping[str, Any]
    refused: dict[int, str] = field(default_factory=dict)


class NoGoodCheckpoint(ValueError):
    """Checkpoints exist and none can be used."""


def _warn(message: str) -> None:
    logging.getLogger("halfbyte.checkpoint").warning(message)


class Checkpoints:
    """The checkpoints under one directory: the last `keep_last`, and every `keep_every`-th step for good.

    `say` gets every message a person must see. All processes of a distributed run call every method, in the same order.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
        say: Callable[[str], None] = _warn,
    ):
        self.directory = Path(directory).absolute()
        self._policies = [ocp.training.preservation_policies.LatestN(keep_last)]
        if keep_every:
            self._policies.append(ocp.training.preservation_policies.EveryNSteps(keep_every))
        self._say = say
        self._pending: int | None = None
        self._orbax = self._open()

    def _open(self) -> Any:
        logging.getLogger("absl").setLevel(logging.ERROR)
        return ocp.training.Checkpointer(
            self.directory,
            preservation_policy=ocp.training.preservation_policies.AnyPreservationPolicy(self._policies),
        )

    def steps(self) -> list[int]:
        """Committed steps, oldest first."""
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    # -- writing
    # -----------------------------------------------------------------------------------------------------------------

    def save(self, step: int, items: Mapping[str, Any], *, extra: Mapping[str, Any]) -> None:
        """Start writing `items` (pytrees of arrays by name); returns once the arrays are copied off the device."""
        self.wait()
        record = Record(step=step, leaves=describe_with_checksums(items), extra=extra)
        flat = {item: _storable(tree) for item, tree in items.items()}
        self._orbax.save_checkpointables_async(step, flat, force=True, custom_metadata=record.to_json())
        self._pending = step

    def poll(self) -> None:
        """Finish the bookkeeping of a write that has ended; never blocks."""
        if self._pending is not None and not self._orbax.is_saving_in_progress():
            self.wait()

    def wait(self) -> bool:
        """Block until the write in progress has ended. False, said aloud, when it failed; the next save starts
        clean."""
        if self._pending is None:
            return True
        step, self._pending = self._pending, None
        try:
            self._orbax.wait()
        except Exception as error:  # Orbax raises whatever the storage raised
            self._say(
                f"CHECKPOINT of step {step} WAS NOT WRITTEN: {_one_line(error)}; "
                "training goes on, the next save tries again"
            )
            self._orbax = self._open()  # the old object would raise this error once more
            return False
        if step in self.steps() and jax.process_index() == 0:
            _write_file_list(self.directory / str(step))
        return True

    def close(self) -> bool:
        """Wait for the last write, then let go. False when that write failed."""
        written = self.wait()
        self._orbax.close()
        return written

    # -- reading
    # -----------------------------------------------------------------------------------------------------------------

    def record(self, step: int) -> Record:
        """What the checkpoint says about itself, without reading arrays. Raises DamagedCheckpoint."""
        try:
            metadata = self._orbax.checkpointables_metadata(step)
        except Exception as error:  # a bare Exception is what damage looks like from here
            raise DamagedCheckpoint(f"its metadata cannot be read: {_one_line(error)}") from error
        return Record.from_json(metadata.custom_metadata)

    def restore(self, step: int, abstract: Mapping[str, Any]) -> Restored:
        """The items of one step on the shardings of `abstract`, verified. Raises DamagedCheckpoint or
        CheckpointMismatch."""
        _check_file_list(self.directory / str(step))
        record = self.record(step)
        check_fits(record, abstract)
        wanted = {item: _storable(tree) for item, tree in abstract.items()}
        try:
            loaded = self._orbax.load_checkpointables(step, wanted)
        except Exception as error:
            raise DamagedCheckpoint(f"its arrays cannot be read: {_one_line(error)}") from error
        for item, flat in loaded.items():
            stored = {name: leaf["checksum"] for name, leaf in record.leaves[item].items()}
            found = {name.replace(".", "/"): words for name, words in checksums(flat).items()}
            wrong = disagreements(stored, found)
            if wrong:
                raise DamagedCheckpoint(
                    f"checksum differs in {', '.join(f'{item}/{name}' for name in wrong[:4])} ({len(wrong)} arrays)"
                )
        items = {item: _rebuild(tree, loaded[item]) for item, tree in abstract.items()}
        return Restored(step=step, items=items, extra=record.extra)

    def restore_latest(self, abstract: Mapping[str, Any]) -> Restored | None:
        """The newest checkpoint that is whole; None only when there has never been one.

        A damaged one is named aloud, moved to `damaged/` and the one before it is tried. Raises NoGoodCheckpoint when
        none is left, and
        CheckpointMismatch (nothing moved) when a healthy checkpoint does not fit.
        """
        refused: dict[int, str] = {}
        for step in reversed(self.steps()):
            restored, reason = self._try(step, abstract)
            if restored is not None:
                return Restored(step=restored.step, items=restored.items, extra=restored.extra, refused=refused)
            refused[step] = reason
            self._say(f"DAMAGED CHECKPOINT: {self.directory / str(step)}: {reason}")
        if refused:
            listing = "; ".join(f"step {step}: {reason}" for step, reason in refused.items())
            raise NoGoodCheckpoint(
                f"every checkpoint under {self.directory} is damaged ({listing}); "
                "restore one from a copy, or start over with another --run-dir"
            )
        return None

    def set_aside(self, steps: Mapping[int, str]) -> None:
        """Move damaged checkpoints to `damaged/STEP`, so that the run can write those steps again."""
        if not steps:
            return
        if jax.process_index() == 0:
            for step in steps:
                target = self.directory.parent / "damaged" / str(step)
                while target.exists():
                    target = target.with_name(target.name + "-again")
                target.parent.mkdir(exist_ok=True)
                (self.directory / str(step)).rename(target)
                self._say(f"damaged checkpoint of step {step} moved to {target}")
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("halfbyte:set_aside")
        self._orbax.close()
        self._orbax = self._open()

    def _try(self, step: int, abstract: Mapping[str, Any]) -> tuple[Restored | None, str]:
        restored, reason = None, ""
        try:
            restored = self.restore(step, abstract)
        except DamagedCheckpoint as damage:
            reason = str(damage)
        if jax.process_count() > 1:  # one host's damage is everyone's
            good = multihost_utils.process_allgather(np.asarray(restored is not None))
            if not bool(np.all(good)):
                hosts = [int(host) for host in np.flatnonzero(~np.asarray(good))]
                return None, reason or f"damaged as seen by process {', '.join(map(str, hosts))}"
        return restored, reason


def _storable(tree: Any) -> dict[str, Any]:
    return {name.replace("/", "."): leaf for name, leaf in named_leaves(tree).items()}


def _rebuild(abstract: Any, flat: Mapping[str, Any]) -> Any:
    leaves = [flat[name.replace("/", ".")] for name in named_leaves(abstract)]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "..."


def _sizes(directory: Path) -> dict[str, int]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != FILE_LIST)
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def _write_file_list(directory: Path) -> None:
    (directory / FILE_LIST).write_text(json.dumps(_sizes(directory), indent=0, sort_keys=True))


def _check_file_list(directory: Path) -> None:
    """Raise DamagedCheckpoint naming the first file that is missing or has another size. A save cut off before its
    list was written has none."""
    listed = directory / FILE_LIST
    if not listed.exists():
        return
    try:
        expected = json.loads(listed.read_text())
    except ValueError as error:
        raise DamagedCheckpoint(f"file {FILE_LIST} is damaged: {_one_line(error)}") from error
    found = _sizes(directory)
    for name, size in expected.items():
        if name not in found:
            raise DamagedCheckpoint(f"file {name} is missing")
        if found[name] != size:
            raise DamagedCheckpoint(f"file {name} has {found[name]} bytes instead of {size}")
