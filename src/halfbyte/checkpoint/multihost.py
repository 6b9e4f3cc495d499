"""Saves of several processes: all of them commit a save, or all abort it.

While a save is written in the background, Orbax synchronizes its processes several times: until the first has created a
directory, until all have written, until the first has committed. A process that has failed (its disk is full) does not
reach the next barrier, and the others would wait for it for minutes, and the next save too. Here it publishes its
failure, and the barriers of the others abort.
"""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

PEER_SAVE_FAILED = "another process could not write its part"
MAX_ERROR_BYTES = 300  # of the error message of a process
POLL_INTERVAL_S = 0.2
EDGE_BARRIER_PREFIX = "set_value_"  # in the names of the barriers at the start and at the end of a save
COMMITTED = "async_commit_complete"  # in the name of the last barrier between them


class AbortableBarrierClient:
    """JAX's client of the coordination service, for Orbax: its barriers abort when one process has failed."""

    def __init__(self, client: Any):
        self._client = client
        self._failed = ""  # key of a failure of this save
        self._begun = Counter[int]()  # saves by step: a step may be saved again
        self._num_edges, self._committed = 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def begin(self, step: int) -> None:
        """Begins a save of `step`, regardless of how the last one ended."""
        self._begun[step] += 1
        self._failed = f"halfbyte/save/{step}/{self._begun[step]}/failed"
        self._num_edges, self._committed = 0, False

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> Any:
        """Gets a value as the client does; raises OSError if a process has failed."""
        return self._wait_or_abort(lambda: self._client.blocking_key_value_get(key, timeout_ms))

    def wait_at_barrier(self, key: str, timeout_ms: int, **options: Any) -> None:
        """Waits at a barrier as the client does; raises OSError if a process has failed.

        A process that reaches the end of a save without a commit has failed.
        """
        if EDGE_BARRIER_PREFIX in key:
            self._num_edges += f"{EDGE_BARRIER_PREFIX}start" in key
            if self._num_edges == 2 and not self._committed:
                self._client.key_value_set(self._failed, "yes", True)
            self._client.wait_at_barrier(key, timeout_ms, **options)
            return
        self._wait_or_abort(lambda: self._client.wait_at_barrier(key, timeout_ms, **options))
        self._committed = self._committed or COMMITTED in key

    def _wait_or_abort(self, act: Callable[[], Any]) -> Any:
        """Returns act(). Raises OSError as soon as a process has failed.

        A wait in C++ cannot be interrupted: its thread ends when the wait times out.
        """
        result: Future[Any] = Future()
        threading.Thread(target=_set_future, args=(result, act), name="halfbyte-together", daemon=True).start()
        while True:
            try:
                return result.result(POLL_INTERVAL_S)
            except TimeoutError:
                if not result.done() and self._has_failed():
                    raise OSError(PEER_SAVE_FAILED) from None

    def _has_failed(self) -> bool:
        try:
            return bool(self._client.key_value_try_get(self._failed))
        except jax.errors.JaxRuntimeError:  # no such key
            return False


def _set_future(result: Future[Any], act: Callable[[], Any]) -> None:
    try:
        result.set_result(act())
    except BaseException as error:  # `Future.result` raises it
        result.set_exception(error)


_client: AbortableBarrierClient | None = None


def install_abortable_barriers() -> None:
    """Makes Orbax use an AbortableBarrierClient. Does nothing for a single process."""
    from orbax.checkpoint._src.multihost import multihost

    global _client
    if jax.process_count() > 1 and _client is None:
        _client = AbortableBarrierClient(multihost.get_jax_distributed_client())
        multihost.get_jax_distributed_client = lambda: _client


def announce_save(step: int) -> None:
    """Tells the barriers which step is saved next. Every process must call it."""
    if _client is not None:
        _client.begin(step)


def all_gather_strings(text: str) -> list[str]:
    """Returns the text of each process, by rank, truncated to MAX_ERROR_BYTES. Every process must call it."""
    if jax.process_count() == 1:
        return [text]
    mine = np.frombuffer(text.encode()[:MAX_ERROR_BYTES].ljust(MAX_ERROR_BYTES, b"\0"), np.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in multihost_utils.process_allgather(mine)]


def join_errors(errors: list[str]) -> str:
    """Joins the errors of all processes into one sentence; empty if there is none."""
    if len(errors) == 1:
        return errors[0]
    failures = [f"process {rank}: {text}" for rank, text in enumerate(errors) if text and PEER_SAVE_FAILED not in text]
    return "; ".join(failures) or next(filter(None, errors), "")
