"""Checkpoints of a run: written by Orbax in the background, verified by our own checksums when they come back
(`restoring.py`).

What Orbax gives: atomic commits (a kill during a save never costs the last good step), async writes, loading onto
another mesh. What it does not give, and is here: values that are not finite are not saved, a damaged checkpoint is set
aside, and a failed write (a full disk) does not poison the next.
"""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from halfbyte.later import later

from .aside import copied, lock_host_memory, on_gpus, run_once, without_room
from .beside import BeingRead, looked_up
from .files import refuse_irregular, remove_saves, remove_unfinished, write_file_list
from .hushing import hush_late_writes
from .lock import LOCK
from .record import Record, describe_with_checksums, one_line
from .restoring import Restoring, storable
from .together import break_waits_together, complaints, from_all, saving

ocp = later("orbax.checkpoint.v1")


def _warn(message: str) -> None:
    logging.getLogger("halfbyte.checkpoint").warning(message)


class Checkpoints(Restoring):
    """The checkpoints under one directory: the last `keep_last`, and every `keep_every`-th step for good.

    `run` is the run's own name for itself: it is written into every checkpoint, and one of another run is refused.
    `committed` is called, on the first process, with the step of a checkpoint that is whole, before its list of files
    is written.
    `say` gets every message a person must see. All processes of a distributed run call every method, in the same order.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
        run: str | None = None,
        committed: Callable[[int], None] = lambda step: None,
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
        self._misplaced: list[int] = []  # saves that were committed at the place after the directory was removed
        self._place = os.open(self.directory, os.O_RDONLY)  # open, so that its inode number is not used again

    def _open(self) -> Any:
        refuse_irregular(self.directory)
        for name in ("absl", "asyncio"):  # what fails is said here, in one line
            logging.getLogger(name).setLevel(logging.CRITICAL)
        hush_late_writes()
        context = ocp.Context()
        context.array.saving.use_compression = False  # four times the processor time, for 7% of trained weights
        context.array.saving.enable_pinned_host_transfer = self._locked
        break_waits_together()
        kept = ocp.training.preservation_policies.AnyPreservationPolicy(self._policies)
        make = functools.partial(ocp.training.Checkpointer, self.directory, preservation_policy=kept, context=context)
        return looked_up(self.directory, make)

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
        flat = {item: storable(tree) for item, tree in items.items()}
        begin = functools.partial(
            self._orbax.save_checkpointables_async, step, force=True, custom_metadata=record.to_json()
        )
        saving(step)
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
        if jax.process_index() or not (self.directory / str(step)).is_dir():
            return
        if not self._is_in_place():  # removed during the write, which has created the directory again
            self._misplaced.append(step)
        try:
            self._committed(step)
            write_file_list(self.directory / str(step))
        except OSError as error:  # the checkpoint is committed; without its list the arrays are verified all the same
            self._say(f"the list of files of checkpoint {step} was not written: {one_line(error)}")

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

    def remove_unfinished(self) -> None:
        """Delete what saves that never ended have left on the disk. Only for the one process that holds the run."""
        if jax.process_index() == 0:
            remove_unfinished(self.directory)

    def abandon(self) -> None:
        """Ends the write in progress after the run directory was removed or replaced, and deletes the unfinished saves
        that this write created at its place. Nothing is deleted if `checkpoints` is still the directory that was opened
        (only the lock file is gone), or if another run has locked the place. When one array cannot be written, Orbax
        does not wait for the others, and TensorStore creates their folders again: so this looks again for two seconds.
        """
        self._thread.shutdown()
        for _ in range(10):
            if self._begun and not self._is_in_place() and not (self.directory.parent / LOCK).exists():
                remove_saves(self.directory, self._begun, committed=self._misplaced)
                time.sleep(0.2)

    def _is_in_place(self) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._place), self.directory.stat())
        return False

    def close(self) -> bool:
        """Wait for the last write, then let go. False when that write failed."""
        written = self.wait()
        self._thread.shutdown()
        self._orbax.close()
        if self._place >= 0:
            os.close(self._place)
            self._place = -1
        return written

    def release(self) -> None:
        """Close after the write in progress, without waiting for it: for a run that failed. Does nothing after
        `close`."""
        if jax.process_count() == 1:  # processes close Orbax together, and one that failed is alone
            with contextlib.suppress(RuntimeError):  # the thread takes no more work: closed
                self._thread.submit(self._orbax.close)
        self._thread.shutdown(wait=False)

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


def _fail(error: Exception) -> None:
    raise error


def _to_the_end(begin: Callable[..., Any], flat: Mapping[str, Any]) -> None:
    """Write, and wait for it: that also ends the thread that Orbax waits with, and closes its files."""
    begin(checkpointables=flat).result()
