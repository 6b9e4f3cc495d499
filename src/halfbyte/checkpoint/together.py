"""A save of several processes is written by all or given up by all.

While a save is written, in the background, Orbax lets its processes wait for each other again and again: until the
first has made a directory, until all have written, until the first has committed. One that has failed (its disk is
full) does not come, and the others would wait for it for minutes, and the next save with them. Here it tells them, and
whatever they wait for then ends.
"""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

GIVEN_UP = "another process could not write its part"
LONGEST = 300  # bytes of what a process says about its failure
LOOK_S = 0.2
BORDER = "set_value_"  # in the names of the waits at the beginning and at the end of a save, where all come
COMMITTED = "async_commit_complete"  # in the name of the last wait in between


class Breakable:
    """JAX's client of the coordination service, as Orbax waits with it: a wait ends when one process has failed."""

    def __init__(self, client: Any):
        self._client = client
        self._failed = ""  # the key under which a failure of this save is said
        self._begun = Counter[int]()  # saves by step: a step may be saved again
        self._borders, self._committed = 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def begin(self, step: int) -> None:
        """A save of `step`, whatever became of the one before."""
        self._begun[step] += 1
        self._failed = f"halfbyte/save/{step}/{self._begun[step]}/failed"
        self._borders, self._committed = 0, False

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> Any:
        """As the client's."""
        return self._wait(lambda: self._client.blocking_key_value_get(key, timeout_ms))

    def wait_at_barrier(self, key: str, timeout_ms: int, **options: Any) -> None:
        """As the client's. A process that comes to the end of a save which has not committed has failed."""
        if BORDER in key:
            self._borders += f"{BORDER}start" in key
            if self._borders == 2 and not self._committed:
                self._client.key_value_set(self._failed, "yes", True)
            self._client.wait_at_barrier(key, timeout_ms, **options)
            return
        self._wait(lambda: self._client.wait_at_barrier(key, timeout_ms, **options))
        self._committed = self._committed or COMMITTED in key

    def _wait(self, act: Callable[[], Any]) -> Any:
        """What `act` returns; OSError as soon as a process has failed. C++ cannot be called back: the thread that waits
        there is left to its own time-out."""
        result: Future[Any] = Future()
        threading.Thread(target=_settle, args=(result, act), name="halfbyte-together", daemon=True).start()
        while True:
            try:
                return result.result(LOOK_S)
            except TimeoutError:
                if not result.done() and self._has_failed():
                    raise OSError(GIVEN_UP) from None

    def _has_failed(self) -> bool:
        try:
            return bool(self._client.key_value_try_get(self._failed))
        except jax.errors.JaxRuntimeError:  # there is no such key
            return False


def _settle(result: Future[Any], act: Callable[[], Any]) -> None:
    try:
        result.set_result(act())
    except BaseException as error:  # raised where the result is asked for
        result.set_exception(error)


_breakable: Breakable | None = None


def break_waits_together() -> None:
    """Have Orbax wait with a `Breakable`; nothing for one process."""
    from orbax.checkpoint._src.multihost import multihost

    global _breakable
    if jax.process_count() > 1 and _breakable is None:
        _breakable = Breakable(multihost.get_jax_distributed_client())
        multihost.get_jax_distributed_client = lambda: _breakable


def saving(step: int) -> None:
    """Every process says which step it begins to save; nothing for one process."""
    if _breakable is not None:
        _breakable.begin(step)


def from_all(words: str) -> list[str]:
    """What each process has to say, in their order. Every process must ask."""
    if jax.process_count() == 1:
        return [words]
    mine = np.frombuffer(words.encode()[:LONGEST].ljust(LONGEST, b"\0"), np.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in multihost_utils.process_allgather(mine)]


def complaints(said: list[str]) -> str:
    """What went wrong, by process, in one sentence; nothing if all went well."""
    if len(said) == 1:
        return said[0]
    own = [f"process {rank}: {words}" for rank, words in enumerate(said) if words and GIVEN_UP not in words]
    return "; ".join(own) or next(filter(None, said), "")
