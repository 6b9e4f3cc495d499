"""Checkpoints as they come back: verified, the newest that is whole.

A flipped bit is found (checksum an array), values that are not finite are not restored, a wrong dtype is an error
rather than a cast, a checkpoint of another step or another run is not taken for this one, a damaged one is named and
the one before it is used, and an error of the storage is tried again and never taken for damage.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from .beside import GoneCheckpoint, looked_up, reading
from .checksum import inspect, named_leaves
from .files import MOST_AROUND, check_file_list, check_readable
from .record import (
    DamagedCheckpoint,
    LoadFailed,
    PoisonedCheckpoint,
    Record,
    UnreadableCheckpoint,
    check_fits,
    one_line,
    refuse_poisoned,
)
from .together import from_all

READ_ATTEMPTS = 3
MOST_GONE = 20  # checkpoints that a run deletes under a reader, before the reader gives up
RETRY_PAUSE_S = 0.5
MOST_TIMES = 4  # ratio of a checkpoint's bytes in files to those of its arrays, or the reverse; it is about 1


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


class Restoring:
    """The reading half of `Checkpoints`."""

    directory: Path
    _run: str | None
    _say: Callable[[str], None]
    _orbax: Any

    def steps(self) -> list[int]:
        """Committed steps, oldest first."""
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    def reload(self) -> None:
        """Look again which there are: another process writes and deletes them."""
        looked_up(self.directory, self._reloaded)

    def _reloaded(self) -> Any:
        self._orbax.reload()
        return self._orbax

    def record(self, step: int) -> Record:
        """What the checkpoint says about itself, without reading arrays. Raises DamagedCheckpoint, also for one that
        belongs to another step or another run, and for one whose files are not those that were written."""
        held = check_file_list(self.directory / str(step))
        try:
            metadata = self._orbax.checkpointables_metadata(step)
        except Exception as error:  # a bare Exception is what damage looks like from here
            check_readable(self.directory / str(step), arrays=False)
            raise LoadFailed(f"its metadata cannot be read: {one_line(error)}") from error
        record = Record.from_json(metadata.custom_metadata)
        if record.claimed > MOST_TIMES * held or held > MOST_TIMES * record.claimed + MOST_AROUND:
            raise DamagedCheckpoint(f"its record claims {record.claimed:,} bytes of arrays, its files have {held:,}")
        if record.step != step:
            raise DamagedCheckpoint(f"it is the checkpoint of step {record.step}, under the name of step {step}")
        theirs = record.extra.get("run")
        if self._run is not None and theirs is not None and theirs != self._run:
            raise DamagedCheckpoint(f"it belongs to another run ({theirs}; this one is {self._run})")
        return record

    def owner(self) -> str | None:
        """The run that the newest checkpoint with a readable record belongs to; None where none says."""
        for step in reversed(self.steps()):
            try:
                return self.record(step).extra.get("run")
            except DamagedCheckpoint:
                continue  # named when it is restored
        return None

    def restore(self, step: int, abstract: Mapping[str, Any]) -> Restored:
        """The items of one step on the shardings of `abstract`, verified. Raises DamagedCheckpoint,
        UnreadableCheckpoint or CheckpointMismatch, and GoneCheckpoint where a run that trains has deleted it."""
        with reading(self.directory / str(step)):
            return self._restore(step, abstract)

    def _restore(self, step: int, abstract: Mapping[str, Any]) -> Restored:
        record = self.record(step)
        check_fits(record, abstract)
        wanted = {item: storable(tree) for item, tree in abstract.items()}
        try:
            loaded = self._orbax.load_checkpointables(step, wanted)
        except Exception as error:
            check_readable(self.directory / str(step))
            raise LoadFailed(f"its arrays cannot be read: {one_line(error)}") from error
        _verify(record, loaded)
        items = {item: _rebuild(tree, loaded[item]) for item, tree in abstract.items()}
        return Restored(step=step, items=items, extra=record.extra)

    def restore_latest(self, abstract: Mapping[str, Any]) -> Restored | None:
        """The newest checkpoint that is whole; None only when there has never been one.

        A damaged or poisoned one is named aloud and the one before it is tried. Raises NoGoodCheckpoint when none is
        left, UnreadableCheckpoint (nothing moved) when the storage keeps failing, and CheckpointMismatch (nothing
        moved) when a healthy checkpoint does not fit.
        """
        refused: dict[int, str] = {}
        gone = 0
        while left := [step for step in self.steps() if step not in refused]:
            step = left[-1]
            try:
                restored, reason, kind = self._try(step, abstract)
            except GoneCheckpoint:
                gone += 1
                if gone == MOST_GONE:
                    raise
                self.reload()
                continue
            if restored is not None:
                return Restored(step=restored.step, items=restored.items, extra=restored.extra, refused=refused)
            refused[step] = reason
            self._say(f"{kind} CHECKPOINT: {self.directory / str(step)}: {reason}")
        if refused:
            listing = "; ".join(f"step {step}: {reason}" for step, reason in refused.items())
            raise NoGoodCheckpoint(
                f"no checkpoint under {self.directory} can be used ({listing}); "
                "restore one from a copy, or start over with another --run-dir"
            )
        return None

    def _try(self, step: int, abstract: Mapping[str, Any]) -> tuple[Restored | None, str, str]:
        """(what was restored or None, why not, in a word)."""
        restored, reason, kind = None, "", "DAMAGED"
        try:
            restored = self._restore_patiently(step, abstract)
        except DamagedCheckpoint as damage:
            reason = str(damage)
            kind = "POISONED" if isinstance(damage, PoisonedCheckpoint) else kind
        bad = [rank for rank, words in enumerate(from_all("" if restored else "damaged")) if words]
        if bad:  # one host's damage is everyone's
            return None, reason or f"damaged as seen by process {', '.join(map(str, bad))}", kind
        return restored, reason, kind

    def _restore_patiently(self, step: int, abstract: Mapping[str, Any]) -> Restored:
        """One error of the storage is not damage: it is tried again, and when it stays the run ends with nothing
        moved."""
        for attempt in range(1, READ_ATTEMPTS + 1):
            try:
                return self.restore(step, abstract)
            except UnreadableCheckpoint as error:
                if attempt == READ_ATTEMPTS:
                    raise UnreadableCheckpoint(
                        f"the checkpoint of step {step} cannot be read ({error}), after {attempt} attempts; it was "
                        "left where it is: mend the storage and start again"
                    ) from error
                self._say(f"reading the checkpoint of step {step} failed ({error}); trying again")
            except LoadFailed:  # verified damage stays what it is; this may have been a passing error
                if attempt == READ_ATTEMPTS:
                    raise
            time.sleep(RETRY_PAUSE_S)
        raise AssertionError("unreachable")


def _verify(record: Record, loaded: Mapping[str, Any]) -> None:
    """Raise DamagedCheckpoint if an array is not the one that was saved, PoisonedCheckpoint if its values are no
    numbers."""
    poisoned: dict[str, int] = {}
    for item, flat in loaded.items():
        stored = {name: leaf["checksum"] for name, leaf in record.leaves[item].items()}
        found = {name.replace(".", "/"): facts for name, facts in inspect(flat).items()}
        wrong = sorted(name for name in stored if name not in found or found[name].checksum != stored[name])
        if wrong:
            raise DamagedCheckpoint(
                f"checksum differs in {', '.join(f'{item}/{name}' for name in wrong[:4])} ({len(wrong)} arrays)"
            )
        poisoned |= {f"{item}/{name}": facts.not_finite for name, facts in found.items() if facts.not_finite}
    refuse_poisoned(poisoned)


def storable(tree: Any) -> dict[str, Any]:
    """Leaves by name, as Orbax can have them."""
    return {name.replace("/", "."): leaf for name, leaf in named_leaves(tree).items()}


def _rebuild(abstract: Any, flat: Mapping[str, Any]) -> Any:
    leaves = [flat[name.replace("/", ".")] for name in named_leaves(abstract)]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)
