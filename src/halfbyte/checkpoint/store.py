"""Checkpoints of a run: written by Orbax in the background, verified by our own checksums when they come back.

What Orbax gives: atomic commits (a kill during a save never costs the last good step), async writes, loading onto
another mesh. What it does not give, and is here: a flipped bit is found (checksum an array), values that are not finite
are neither saved nor restored, a wrong dtype is an error rather than a cast, a damaged checkpoint is named, set aside
and the one before it is used, a checkpoint of another step or another run is not taken for this one, an error of the
storage is tried again and never taken for damage, and a failed write (a full disk) does not poison the next.
"""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from halfbyte.later import later

from .aside import copied, lock_host_memory, on_gpus, run_once, without_room
from .beside import BeingRead, GoneCheckpoint, reading
from .checksum import disagreements, inspect, named_leaves
from .files import check_file_list, check_readable, refuse_irregular, remove_saves, remove_unfinished, write_file_list
from .hushing import hush_late_writes
from .lock import LOCK
from .record import (
    DamagedCheckpoint,
    LoadFailed,
    PoisonedCheckpoint,
    Record,
    UnreadableCheckpoint,
    check_fits,
    describe_with_checksums,
    one_line,
    refuse_poisoned,
)
from .together import break_waits_together, complaints, from_all

ocp = later("orbax.checkpoint.v1")
READ_ATTEMPTS = 3
MOST_GONE = 20  # checkpoints that a run deletes under a reader, before the reader gives up
RETRY_PAUSE_S = 0.5


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

    `run` is the run's own name for itself: it is written into every checkpoint, and one of another run is refused.
    `committed` is called, on the first process, when a write has ended well.
    `say` gets every message a person must see. All processes of a distributed run call every method, in the same order.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
        run: str | None = None,
        committed: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = _warn,
    ):
        self.directory = Path(directory).absolute()
        self._policies = [ocp.training.preservation_policies.LatestN(keep_last)]
        self._policies.append(BeingRead(self.directory))
        if keep_every:
            self._policies.append(ocp.training.preservation_policies.EveryNSteps(keep_every))
        self._run = run
        self._committed = committed
        self._say = say
        self._pending: tuple[int, Future[Any]] | None = None
        self._begun: list[int] = []  # the newest save, and the one that it waited for
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copied = self._stops = False  # whether a save was made from a copy, and whether the last had no room
        self._prepared = self._locked = False  # the second: whether copies to the host go into locked memory
        self._orbax = self._open()

    def _open(self) -> Any:
        refuse_irregular(self.directory)
        for name in ("absl", "asyncio"):  # what fails is said here, in one line
            logging.getLogger(name).setLevel(logging.CRITICAL)
        hush_late_writes()
        context = ocp.Context()
        context.array.saving.use_compression = False  # four times the processor time, for 7% of trained weights
        context.array.saving.enable_pinned_host_transfer = self._locked
        break_waits_together()
        return ocp.training.Checkpointer(
            self.directory,
            preservation_policy=ocp.training.preservation_policies.AnyPreservationPolicy(self._policies),
            context=context,
        )

    @contextlib.contextmanager
    def preparing(self, items: Mapping[str, Any]) -> Iterator[None]:
        """Beside what is done meanwhile (compiling the step), do what would make the first save slow: compile its
        programs, and, where arrays lie on GPUs, lock memory of the host, which saves go through from then on."""
        if self._prepared:
            yield
            return
        self._prepared = True
        compiled = self._thread.submit(run_once, items)
        locked = self._thread.submit(lock_host_memory, items) if on_gpus() else None
        yield
        compiled.result()
        if locked is not None:
            self._go_through_locked_memory(locked.result())

    def _go_through_locked_memory(self, reason: str | None) -> None:
        """Unless a process has a reason not to; all of them do, or none."""
        if told := complaints(from_all(reason or "")):
            self._say(f"each save copies the state to the host slowly, and steps wait for it: {told}")
            return
        self._orbax.close()
        self._locked = True
        self._orbax = self._open()

    def steps(self) -> list[int]:
        """Committed steps, oldest first."""
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    def reload(self) -> None:
        """Look again which there are: another process writes and deletes them."""
        self._orbax.reload()

    # -- writing
    # -----------------------------------------------------------------------------------------------------------------

    def save(self, step: int, items: Mapping[str, Any], *, extra: Mapping[str, Any]) -> bool:
        """Start writing `items` (pytrees of arrays by name); returns once training may write on the arrays again. False
        when the write could not even begin; with several processes that is known when they meet again.

        Raises PoisonedCheckpoint, and writes nothing, when a value is not finite. A write that fails is said aloud, and
        the next save starts clean.
        """
        self.wait()
        self._begun = [*self._begun[-1:], step]
        leaves = describe_with_checksums(items)
        record = Record(step=step, leaves=leaves, extra={**extra, "run": self._run})
        flat = {item: _storable(tree) for item, tree in items.items()}
        begin = functools.partial(
            self._orbax.save_checkpointables_async, step, force=True, custom_metadata=record.to_json()
        )
        try:
            if self._has_room(flat):
                write = functools.partial(_to_the_end, begin, copied(flat))
            else:
                write = begin(checkpointables=flat).result  # returns when the arrays are off the device
        except Exception as error:  # Orbax raises whatever the storage raised
            if jax.process_count() == 1:
                self._not_written(step, one_line(error))
                return False
            write = functools.partial(_fail, error)  # others may have begun: all meet at the next save, and give it up
        self._pending = (step, self._thread.submit(self._write, step, write))
        return True

    def _write(self, step: int, write: Callable[[], None]) -> None:
        """In the background: to the end, and then the list of its files."""
        write()
        if jax.process_index() == 0 and (self.directory / str(step)).is_dir():
            self._list_files(step)

    def _has_room(self, flat: Mapping[str, Any]) -> bool:
        """Whether a save is made from a copy on the device. With several processes it is not: Orbax's barriers are
        collectives, which must not meet those of a step."""
        if jax.process_count() > 1:
            return False
        reason = without_room(flat, copied_before=self._copied)
        if reason and not self._stops:
            self._say(f"each save stops training until the state is copied to the host: {reason}")
        self._stops, self._copied = reason is not None, self._copied or reason is None
        return reason is None

    def is_saving(self) -> bool:
        """Whether a write is under way."""
        return self._pending is not None and not self._pending[1].done()

    def poll(self) -> None:
        """Finish the bookkeeping of a write that has ended; never blocks. Several processes do so at the next save:
        they give a write up together."""
        if self._pending is not None and not self.is_saving() and jax.process_count() == 1:
            self.wait()

    def wait(self) -> bool:
        """Block until the write in progress has ended. False, said aloud, when it failed; the next save starts
        clean."""
        if self._pending is None:
            return True
        (step, write), self._pending = self._pending, None
        words = ""
        try:
            write.result()
            self._orbax.wait()
        except Exception as error:  # Orbax raises whatever the storage raised
            words = one_line(error)
        if reason := complaints(from_all(words)):
            self._not_written(step, reason)
        return not reason

    def _not_written(self, step: int, reason: str) -> None:
        self._say(f"CHECKPOINT of step {step} WAS NOT WRITTEN: {reason}; training goes on, the next save tries again")
        self._orbax = self._open()  # the old object would raise this error once more
        self.remove_unfinished()

    def _list_files(self, step: int) -> None:
        try:
            write_file_list(self.directory / str(step))
            self._committed()
        except OSError as error:  # the checkpoint is committed; without its list the arrays are verified all the same
            self._say(f"the list of files of checkpoint {step} was not written: {one_line(error)}")

    def remove_unfinished(self) -> None:
        """Delete what saves that never ended have left on the disk. Only for the one process that holds the run."""
        if jax.process_index() == 0:
            remove_unfinished(self.directory)

    def abandon(self) -> None:
        """The directory is no longer this run's: let the write in progress end, and remove what it has made anew at
        that place, unless the place is another run's by now. When one array cannot be written, Orbax does not wait for
        the others, and TensorStore makes their folders anew: so this looks again for two seconds."""
        self._thread.shutdown()
        for _ in range(10):
            if self._begun and not (self.directory.parent / LOCK).exists():
                remove_saves(self.directory, self._begun)
                time.sleep(0.2)

    def close(self) -> bool:
        """Wait for the last write, then let go. False when that write failed."""
        written = self.wait()
        self._thread.shutdown()
        self._orbax.close()
        return written

    # -- reading
    # -----------------------------------------------------------------------------------------------------------------

    def record(self, step: int) -> Record:
        """What the checkpoint says about itself, without reading arrays. Raises DamagedCheckpoint, also for one that
        belongs to another step or another run, and for one whose files are not those that were written."""
        check_file_list(self.directory / str(step))
        try:
            metadata = self._orbax.checkpointables_metadata(step)
        except Exception as error:  # a bare Exception is what damage looks like from here
            check_readable(self.directory / str(step))
            raise LoadFailed(f"its metadata cannot be read: {one_line(error)}") from error
        record = Record.from_json(metadata.custom_metadata)
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
        wanted = {item: _storable(tree) for item, tree in abstract.items()}
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
        wrong = disagreements(stored, {name: facts.checksum for name, facts in found.items()})
        if wrong:
            raise DamagedCheckpoint(
                f"checksum differs in {', '.join(f'{item}/{name}' for name in wrong[:4])} ({len(wrong)} arrays)"
            )
        poisoned |= {f"{item}/{name}": facts.not_finite for name, facts in found.items() if facts.not_finite}
    refuse_poisoned(poisoned)


def _fail(error: Exception) -> None:
    raise error


def _to_the_end(begin: Callable[..., Any], flat: Mapping[str, Any]) -> None:
    """Write, and wait for it: that also ends the thread that Orbax waits with, and closes its files."""
    begin(checkpointables=flat).result()


def _storable(tree: Any) -> dict[str, Any]:
    return {name.replace("/", "."): leaf for name, leaf in named_leaves(tree).items()}


def _rebuild(abstract: Any, flat: Mapping[str, Any]) -> Any:
    leaves = [flat[name.replace("/", ".")] for name in named_leaves(abstract)]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)
