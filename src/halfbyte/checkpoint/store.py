"""Checkpoints of a run: Orbax writes them in the background, checksums of Halfbyte verify them (`restore.py`).

Orbax provides atomic commits (a kill during a save never costs the last good step), asynchronous writes and restores
onto another mesh. This file adds: values that are not finite are not saved, corrupt checkpoints are quarantined, and a
failed write (a full disk) does not affect the next save.

Saves are written from a copy of the state on the device if there is memory for one, so that training continues on the
original without a stall; else the step waits until the state is copied to the host.
"""

import contextlib
import functools
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from halfbyte.checkpoint.checkpoint_record import (
    CheckpointRecord,
    check_checkpoint_files_regular,
    checksum_tree,
    leaf_metadata_with_checksums,
    remove_checkpoints,
    remove_unfinished,
    shorten_error,
    write_file_list,
)
from halfbyte.checkpoint.locks import LOCK_FILE, PreserveLockedCheckpoints, open_with_retry
from halfbyte.checkpoint.multihost import all_gather_strings, announce_save, install_abortable_barriers, join_errors
from halfbyte.checkpoint.restore import CheckpointReader, flatten_for_orbax
from halfbyte.io.lazy_import import lazy_module

ocp = lazy_module("orbax.checkpoint.v1")

COPY_SAFETY_FACTOR = 1.25  # times the size of a copy must have stayed unused: later steps may need a little more
GIB = 2**30
MAX_PINNED_FRACTION = 0.5  # of the host's free memory, for copies of the state
JAX_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def _warn(message: str) -> None:
    logging.getLogger("halfbyte.checkpoint").warning(message)


class CheckpointManager(CheckpointReader):
    """Checkpoints under one directory: the last `keep_last`, and every `keep_every`-th step forever.

    `run` is the identifier of the run: it is written into every checkpoint, and checkpoints of other runs are refused.
    `committed` is called, on the first process, with the step of a checkpoint that is committed, before its list of
    files is written. `say` prints messages to the user. All processes call every method, in the same order.
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
        self._policies.append(PreserveLockedCheckpoints(self.directory))
        if keep_every:
            self._policies.append(ocp.training.preservation_policies.EveryNSteps(keep_every))
        self._run = run
        self._committed = committed
        self._say = say
        self._pending: tuple[int, Future[Any]] | None = None
        self._begun: list[int] = []  # the newest save, and the one that it waited for
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copied = self._stops = False  # a save was made from a copy; the last had no memory for one
        self._prepared = self._pinned = False  # `warm_up` was called; copies to the host use pinned memory
        self._orbax = self._open()
        self._misplaced: list[int] = []  # saves that were committed after the directory was removed or replaced
        self._directory_fd = os.open(self.directory, os.O_RDONLY)  # keeps the inode number from being reused

    def _open(self) -> Any:
        check_checkpoint_files_regular(self.directory)
        for name in ("absl", "asyncio"):  # errors are reported here, in one line
            logging.getLogger(name).setLevel(logging.CRITICAL)
        suppress_late_write_errors()
        context = ocp.Context()
        context.array.saving.use_compression = False  # it takes four times the CPU time, for 7% of trained weights
        context.array.saving.enable_pinned_host_transfer = self._pinned
        install_abortable_barriers()
        policy = ocp.training.preservation_policies.AnyPreservationPolicy(self._policies)
        make = functools.partial(ocp.training.Checkpointer, self.directory, preservation_policy=policy, context=context)
        return open_with_retry(self.directory, make)

    @contextlib.contextmanager
    def warm_up(self, items: Mapping[str, Any]) -> Iterator[None]:
        """Context manager that prepares the first save concurrently with its body (compiling the step): compiles the
        programs of a save and, on GPUs, reserves pinned host memory, which saves use from then on."""
        if self._prepared:
            yield
            return
        self._prepared = True
        compiled = self._thread.submit(warm_up_save, items)
        reserved = self._thread.submit(reserve_pinned_host_memory, items) if is_gpu_backend() else None
        yield
        compiled.result()
        if reserved is not None:
            self._use_pinned_memory(reserved.result())

    def _use_pinned_memory(self, reason: str | None) -> None:
        """Reopens Orbax with pinned host memory on all processes, or reports the `reason` of one against it."""
        if refusal := join_errors(all_gather_strings(reason or "")):
            self._say(f"each save copies the state to the host slowly, and steps wait for it: {refusal}")
            return
        self._orbax.close()
        self._pinned = True
        self._orbax = self._open()

    def save(self, step: int, items: Mapping[str, Any], *, extra: Mapping[str, Any]) -> bool:
        """Starts to write `items` (pytrees of arrays by name); returns once training may overwrite the arrays. Returns
        False if the write could not start; with several processes that is known at the next save.

        Raises NonFiniteCheckpointError, and writes nothing, if a value is not finite. A write that fails is reported,
        and does not affect the next save.
        """
        self.wait()
        self._begun = [*self._begun[-1:], step]
        leaves = leaf_metadata_with_checksums(items)
        record = CheckpointRecord(step=step, leaves=leaves, extra={**extra, "run": self._run})
        flat = {item: flatten_for_orbax(tree) for item, tree in items.items()}
        begin = functools.partial(
            self._orbax.save_checkpointables_async, step, force=True, custom_metadata=record.to_json()
        )
        announce_save(step)
        try:
            if self._can_copy_on_device(flat):
                write = functools.partial(_write_and_wait, begin, device_copy(flat))
            else:
                write = begin(checkpointables=flat).result  # returns when the arrays are off the device
        except Exception as error:  # Orbax raises whatever the storage raised
            if jax.process_count() == 1:
                self._report_failed_save(step, shorten_error(error))
                return False
            write = functools.partial(_raise_error, error)  # others may have begun: all abort it at the next save
        self._pending = (step, self._thread.submit(self._write, step, write))
        return True

    def _write(self, step: int, write: Callable[[], None]) -> None:
        """Completes a write in the background, then writes the list of its files."""
        write()
        if jax.process_index() or not (self.directory / str(step)).is_dir():
            return
        if not self._is_in_place():  # removed during the write, which has recreated the directory
            self._misplaced.append(step)
        try:
            self._committed(step)
            write_file_list(self.directory / str(step))
        except OSError as error:  # the checkpoint is committed; restoring verifies the arrays also without the list
            self._say(f"the list of files of checkpoint {step} was not written: {shorten_error(error)}")

    def _can_copy_on_device(self, flat: Mapping[str, Any]) -> bool:
        """Returns True if a save is made from a copy on the device. With several processes it is not: Orbax's barriers
        are collectives, which must not interleave with those of a step."""
        if jax.process_count() > 1:
            return False
        reason = copy_refusal(flat, copied_before=self._copied)
        if reason and not self._stops:
            self._say(f"each save stops training until the state is copied to the host: {reason}")
        self._stops, self._copied = reason is not None, self._copied or reason is None
        return reason is None

    def is_saving(self) -> bool:
        """Returns True while a write is in progress."""
        return self._pending is not None and not self._pending[1].done()

    def poll(self) -> None:
        """Finishes the bookkeeping of a write that has ended; never blocks. Several processes do so at the next save:
        they abort a write together."""
        if self._pending is not None and not self.is_saving() and jax.process_count() == 1:
            self.wait()

    def wait(self) -> bool:
        """Blocks until the write in progress has ended. Returns False, and reports it, if the write failed."""
        if self._pending is None:
            return True
        (step, write), self._pending = self._pending, None
        failure = ""
        try:
            write.result()
            self._orbax.wait()
        except Exception as error:  # Orbax raises whatever the storage raised
            failure = shorten_error(error)
        if reason := join_errors(all_gather_strings(failure)):
            self._report_failed_save(step, reason)
        return not reason

    def _report_failed_save(self, step: int, reason: str) -> None:
        self._say(f"CHECKPOINT of step {step} WAS NOT WRITTEN: {reason}; training goes on, the next save tries again")
        self._orbax = self._open()  # the old object would raise this error again
        self.remove_unfinished()

    def remove_unfinished(self) -> None:
        """Deletes unfinished saves from the disk. Only for the process that has locked the run."""
        if jax.process_index() == 0:
            remove_unfinished(self.directory)

    def discard_directory(self) -> None:
        """Ends the write in progress after the run directory was removed or replaced, and deletes the unfinished saves
        that this write created under its path. Deletes nothing if `checkpoints` is still the directory that was opened
        (only the lock file was removed), or if another run has locked the path. When one array cannot be written, Orbax
        does not wait for the others, and TensorStore recreates their directories: so this retries for two seconds.
        """
        self._thread.shutdown()
        for _ in range(10):
            if self._begun and not self._is_in_place() and not (self.directory.parent / LOCK_FILE).exists():
                remove_checkpoints(self.directory, self._begun, committed=self._misplaced)
                time.sleep(0.2)

    def _is_in_place(self) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._directory_fd), self.directory.stat())
        return False

    def close(self) -> bool:
        """Waits for the last write and releases all resources. Returns False if that write failed."""
        written = self.wait()
        self._thread.shutdown()
        self._orbax.close()
        if self._directory_fd >= 0:
            os.close(self._directory_fd)
            self._directory_fd = -1
        return written

    def release(self) -> None:
        """Closes after the write in progress, without waiting for it, for a run that failed. Does nothing after
        `close`."""
        if jax.process_count() == 1:  # Orbax's close is collective, and the other processes have not failed
            with contextlib.suppress(RuntimeError):  # the thread takes no more work: closed
                self._thread.submit(self._orbax.close)
        self._thread.shutdown(wait=False)

    def quarantine(self, steps: Mapping[int, str]) -> None:
        """Moves corrupt checkpoints to `damaged/STEP`, so that the run can write those steps again."""
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


def copy_refusal(tree: Any, *, copied_before: bool) -> str | None:
    """Returns why a device copy does not fit next to the state and the memory of a step; None if it fits. The memory of
    an earlier copy may be reused."""
    for device, size in bytes_by_device(tree).items():
        free = unused_device_bytes(device) + copied_before * size
        if COPY_SAFETY_FACTOR * size > free:
            return f"the state takes {size / GIB:.1f} GiB of {device} and {free / GIB:.1f} GiB of it are free"
    return None


def device_copy(tree: Any) -> Any:
    """Copies the arrays of a pytree, in their shardings. Other leaves are returned as they are."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def warm_up_save(items: Mapping[str, Any]) -> None:
    """Runs the programs of a save once, so that they are compiled. Not on several processes: there all must launch
    programs in the same order, which threads do not guarantee."""
    if jax.process_count() == 1:
        for tree in items.values():
            checksum_tree(tree)
        for leaf in jax.tree.leaves(items) if copy_refusal(items, copied_before=False) is None else ():
            jax.block_until_ready(device_copy(leaf))


def reserve_pinned_host_memory(tree: Any) -> str | None:
    """Makes JAX pin as much host memory as the arrays take; JAX keeps it, and later copies to the host run at the speed
    of the bus. Pinning is slow and no step runs meanwhile: 9 s for 14 GiB on the host of an H200, then copied in 0.3 s.
    Returns None, or why it cannot be reserved."""
    size, free = sum(bytes_by_device(tree).values()), free_host_bytes() / processes_here()
    limit = float(os.environ.get(JAX_LIMIT, 64)) * GIB
    if size > MAX_PINNED_FRACTION * free:
        return f"the state takes {size / GIB:.1f} GiB, and {free / GIB:.1f} GiB of the host's memory are free for it"
    if size > limit:
        return f"the state takes {size / GIB:.1f} GiB, and JAX locks {limit / GIB:.1f} at most ({JAX_LIMIT})"
    try:
        pinned = [
            jax.device_put(shard, shard.sharding.with_memory_kind("pinned_host")) for shard in addressable_arrays(tree)
        ]
        jax.block_until_ready(pinned)
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0][:160]
    return None


def suppress_late_write_errors() -> None:
    """Installs a filter for errors of arrays after a failed write. When one array cannot be written, Orbax abandons the
    others and closes its event loop; those that fail later find it closed, and Python prints a traceback for each.
    `CheckpointManager` reports the failure once."""
    if not isinstance(sys.unraisablehook, _WithoutClosedLoops):
        sys.unraisablehook = _WithoutClosedLoops(sys.unraisablehook)


@dataclass(frozen=True)
class _WithoutClosedLoops:
    """Hook for unraisable exceptions that forwards all but `Event loop is closed`."""

    before: Callable[[Any], Any]

    def __call__(self, unraisable: Any) -> None:
        if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
            self.before(unraisable)


def addressable_arrays(tree: Any) -> Iterator[jax.Array]:
    """Yields the shards of this process, device by device."""
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards if isinstance(leaf, jax.Array) else ():
            yield shard.data


def bytes_by_device(tree: Any) -> dict[jax.Device, int]:
    """Returns the bytes of the arrays on each device of this process."""
    total: dict[jax.Device, int] = {}
    for shard in addressable_arrays(tree):
        total[shard.device] = total.get(shard.device, 0) + shard.nbytes
    return total


def unused_device_bytes(device: jax.Device) -> float:
    """Returns the bytes of a device that no step has used so far; infinite if the device does not count them (a
    CPU)."""
    stats: Mapping[str, int] | None = device.memory_stats()
    if stats is None:
        return float("inf")
    return stats.get("bytes_limit", 0) - stats.get("peak_bytes_in_use", 0)


def is_gpu_backend() -> bool:
    """Returns True if arrays are copied to the host over a bus."""
    return jax.local_devices()[0].platform == "gpu"


def free_host_bytes(root: Path = Path("/")) -> float:
    """Returns the bytes of memory available on a Linux host, within the limits of the control groups (version 2) of
    this process; 0 if they are not known. The page cache counts as free."""
    free = []
    with contextlib.suppress(OSError):
        free += _numbers(r"^MemAvailable:\s+(\d+) kB", root / "proc/meminfo", times=1024)
    group = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        group /= re.sub(r"^0::/*", "", (root / "proc/self/cgroup").read_text().splitlines()[-1])
    while group != root / "sys/fs":
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
            free.append(limit - used + sum(_numbers(r"^inactive_file (\d+)", group / "memory.stat")))
        group = group.parent
    return min(free, default=0)


def processes_here(root: Path = Path("/")) -> int:
    """Returns how many processes share this host, if each has as many of its GPUs as this one."""
    return max(1, len(list((root / "dev").glob("nvidia[0-9]*"))) // jax.local_device_count())


def _numbers(pattern: str, file: Path, times: int = 1) -> list[int]:
    return [times * int(digits) for digits in re.findall(pattern, file.read_text(), re.M)]


def _raise_error(error: Exception) -> None:
    raise error


def _write_and_wait(begin: Callable[..., Any], flat: Mapping[str, Any]) -> None:
    """Writes and waits for the end: that also ends the thread that Orbax waits with, and closes its files."""
    begin(checkpointables=flat).result()
