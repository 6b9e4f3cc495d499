"""Restores checkpoints: verified, the newest one that is intact.

A flipped bit is detected (one checksum per array). Values that are not finite are not restored, and a wrong dtype is an
error rather than a cast. A checkpoint of another step or another run is refused. A corrupt checkpoint is reported and
the one before it is used. An error of the storage is retried and never taken for corruption.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from halfbyte.checkpoint.checkpoint_record import (
    MAX_METADATA_BYTES,
    CheckpointLoadError,
    CheckpointReadError,
    CheckpointRecord,
    CorruptCheckpointError,
    NonFiniteCheckpointError,
    check_all_finite,
    check_file_list,
    check_readable,
    check_structure,
    checksum_tree,
    named_leaves,
    shorten_error,
)
from halfbyte.checkpoint.locks import CheckpointDeletedError, hold_for_reading, open_with_retry
from halfbyte.checkpoint.multihost import all_gather_strings

READ_ATTEMPTS = 3
MAX_DELETED_RETRIES = 20  # checkpoints that a run deletes under a reader, before the reader gives up
RETRY_PAUSE_S = 0.5
MAX_FILE_TO_ARRAY_RATIO = 4  # limit of file bytes / array bytes, and of its inverse; the ratio is about 1


@dataclass(frozen=True)
class RestoredCheckpoint:
    """A restored checkpoint: its items in the caller's structure and the caller's JSON.

    `skipped` has the reason for each newer checkpoint that was skipped.
    """

    step: int
    items: dict[str, Any]
    extra: Mapping[str, Any]
    skipped: dict[int, str] = field(default_factory=dict)


class NoUsableCheckpointError(ValueError):
    """Raised if there are checkpoints, but none can be used."""


class CheckpointReader:
    """Base class of `CheckpointManager`: lists, verifies and restores."""

    directory: Path
    _run: str | None
    _say: Callable[[str], None]
    _orbax: Any

    def steps(self) -> list[int]:
        """Returns committed steps, oldest first."""
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    def reload(self) -> None:
        """Lists the checkpoints again: another process writes and deletes them."""
        open_with_retry(self.directory, self._reloaded)

    def _reloaded(self) -> Any:
        self._orbax.reload()
        return self._orbax

    def record(self, step: int) -> CheckpointRecord:
        """Reads the record of a checkpoint without its arrays. Raises CorruptCheckpointError, also for a checkpoint of
        another step or another run, and for one whose files are not those that were written."""
        size = check_file_list(self.directory / str(step))
        try:
            metadata = self._orbax.checkpointables_metadata(step)
        except Exception as error:  # Orbax raises a bare Exception for corrupt files
            check_readable(self.directory / str(step), arrays=False)
            raise CheckpointLoadError(f"its metadata cannot be read: {shorten_error(error)}") from error
        record = CheckpointRecord.from_json(metadata.custom_metadata)
        if (
            record.total_bytes > MAX_FILE_TO_ARRAY_RATIO * size
            or size > MAX_FILE_TO_ARRAY_RATIO * record.total_bytes + MAX_METADATA_BYTES
        ):
            raise CorruptCheckpointError(
                f"its record claims {record.total_bytes:,} bytes of arrays, its files have {size:,}"
            )
        if record.step != step:
            raise CorruptCheckpointError(f"it is the checkpoint of step {record.step}, under the name of step {step}")
        stored_run = record.extra.get("run")
        if self._run is not None and stored_run is not None and stored_run != self._run:
            raise CorruptCheckpointError(f"it belongs to another run ({stored_run}; this one is {self._run})")
        return record

    def run_of_newest(self) -> str | None:
        """Returns the run of the newest checkpoint with a readable record; None if there is none."""
        for step in reversed(self.steps()):
            try:
                return self.record(step).extra.get("run")
            except CorruptCheckpointError:
                continue  # restoring reports it
        return None

    def restore(self, step: int, abstract: Mapping[str, Any]) -> RestoredCheckpoint:
        """Restores the items of one step to the shardings of `abstract`, verified. Raises CorruptCheckpointError,
        CheckpointReadError or CheckpointStructureError, and CheckpointDeletedError if a run has deleted it."""
        with hold_for_reading(self.directory / str(step)):
            return self._restore(step, abstract)

    def _restore(self, step: int, abstract: Mapping[str, Any]) -> RestoredCheckpoint:
        record = self.record(step)
        check_structure(record, abstract)
        flat = {item: flatten_for_orbax(tree) for item, tree in abstract.items()}
        try:
            loaded = self._orbax.load_checkpointables(step, flat)
        except Exception as error:
            check_readable(self.directory / str(step))
            raise CheckpointLoadError(f"its arrays cannot be read: {shorten_error(error)}") from error
        _verify_array_checksums(record, loaded)
        items = {item: _unflatten(tree, loaded[item]) for item, tree in abstract.items()}
        return RestoredCheckpoint(step=step, items=items, extra=record.extra)

    def restore_latest(self, abstract: Mapping[str, Any]) -> RestoredCheckpoint | None:
        """Restores the newest intact checkpoint; returns None only if there has never been one.

        A corrupt or non-finite checkpoint is reported and the one before it is tried. Raises NoUsableCheckpointError
        if none is left, CheckpointReadError if the storage keeps failing, and CheckpointStructureError if an intact
        checkpoint does not match; the last two move nothing.
        """
        skipped: dict[int, str] = {}
        num_deleted = 0
        while candidates := [step for step in self.steps() if step not in skipped]:
            step = candidates[-1]
            try:
                restored, reason, kind = self._try(step, abstract)
            except CheckpointDeletedError:
                num_deleted += 1
                if num_deleted == MAX_DELETED_RETRIES:
                    raise
                self.reload()
                continue
            if restored is not None:
                return replace(restored, skipped=skipped)
            skipped[step] = reason
            self._say(f"{kind} CHECKPOINT: {self.directory / str(step)}: {reason}")
        if skipped:
            listing = "; ".join(f"step {step}: {reason}" for step, reason in skipped.items())
            raise NoUsableCheckpointError(
                f"no checkpoint under {self.directory} can be used ({listing}); "
                "restore one from a copy, or start over with another --run-dir"
            )
        return None

    def _try(self, step: int, abstract: Mapping[str, Any]) -> tuple[RestoredCheckpoint | None, str, str]:
        """Returns (the restored checkpoint or None, the reason, DAMAGED or POISONED)."""
        restored, reason, kind = None, "", "DAMAGED"
        try:
            restored = self._restore_with_retry(step, abstract)
        except CorruptCheckpointError as error:
            reason = str(error)
            kind = "POISONED" if isinstance(error, NonFiniteCheckpointError) else kind
        bad = [rank for rank, text in enumerate(all_gather_strings("" if restored else "damaged")) if text]
        if bad:  # all processes must restore the same step
            return None, reason or f"damaged as seen by process {', '.join(map(str, bad))}", kind
        return restored, reason, kind

    def _restore_with_retry(self, step: int, abstract: Mapping[str, Any]) -> RestoredCheckpoint:
        """Restores a step; retries errors of the storage, which are not corruption. If they persist, the run ends with
        nothing moved."""
        for attempt in range(1, READ_ATTEMPTS + 1):
            try:
                return self.restore(step, abstract)
            except CheckpointReadError as error:
                if attempt == READ_ATTEMPTS:
                    raise CheckpointReadError(
                        f"the checkpoint of step {step} cannot be read ({error}), after {attempt} attempts; it was "
                        "left where it is: mend the storage and start again"
                    ) from error
                self._say(f"reading the checkpoint of step {step} failed ({error}); trying again")
            except CheckpointLoadError:  # not verified damage: the error may be transient
                if attempt == READ_ATTEMPTS:
                    raise
            time.sleep(RETRY_PAUSE_S)
        raise AssertionError("unreachable")


def _verify_array_checksums(record: CheckpointRecord, loaded: Mapping[str, Any]) -> None:
    """Raises CorruptCheckpointError if an array is not the one that was saved, NonFiniteCheckpointError if it holds
    values that are not finite."""
    nonfinite: dict[str, int] = {}
    for item, flat in loaded.items():
        stored = {name: leaf["checksum"] for name, leaf in record.leaves[item].items()}
        digests = {name.replace(".", "/"): digest for name, digest in checksum_tree(flat).items()}
        wrong = sorted(name for name in stored if name not in digests or digests[name].checksum != stored[name])
        if wrong:
            raise CorruptCheckpointError(
                f"checksum differs in {', '.join(f'{item}/{name}' for name in wrong[:4])} ({len(wrong)} arrays)"
            )
        nonfinite |= {f"{item}/{name}": digest.not_finite for name, digest in digests.items() if digest.not_finite}
    check_all_finite(nonfinite)


def flatten_for_orbax(tree: Any) -> dict[str, Any]:
    """Returns leaves by name, with dots instead of slashes: names that Orbax accepts."""
    return {name.replace("/", "."): leaf for name, leaf in named_leaves(tree).items()}


def _unflatten(abstract: Any, flat: Mapping[str, Any]) -> Any:
    leaves = [flat[name.replace("/", ".")] for name in named_leaves(abstract)]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)
