"""A function over chunks, in this process or in several, results in the order of the chunks."""

import collections
import concurrent.futures
import concurrent.futures.process
import errno
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from halfbyte.data.files import Chunk

SMALL_INPUT = 8 << 20  # below this, starting processes costs more than they save

Runner = Callable[[Callable[[Chunk], Any], Iterable[Chunk]], Iterator[tuple[Chunk, Any]]]


class ChunkRunner:
    """Gives a function that maps over chunks in order, in this process or in several."""

    def __init__(self, workers: int | None, total_bytes: int):
        auto = 1 if total_bytes < SMALL_INPUT else _cores()
        self.workers = workers or auto
        self._executor: concurrent.futures.ProcessPoolExecutor | None = None

    def __enter__(self) -> Runner:
        if self.workers == 1:
            return lambda function, items: ((item, function(item)) for item in items)
        context = multiprocessing.get_context("spawn")
        self._executor = concurrent.futures.ProcessPoolExecutor(self.workers, context, initializer=_begin_worker)
        return self._run

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def _run(self, function: Callable[[Chunk], Any], items: Iterable[Chunk]) -> Iterator[tuple[Chunk, Any]]:
        assert self._executor is not None
        waiting: collections.deque[tuple[Chunk, concurrent.futures.Future]] = collections.deque()
        remaining = iter(items)
        while True:
            for item in itertools.islice(remaining, 3 * self.workers - len(waiting)):
                waiting.append((item, self._executor.submit(function, item)))
            if not waiting:
                return
            item, future = waiting.popleft()
            yield item, _result(future)


def _cores() -> int:
    """Cores this process may use; where the system does not say (macOS), all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _result(future: concurrent.futures.Future) -> Any:
    """The worker's result; its ValueError as one raised here, so that it counts as bad input and not as a failure."""
    try:
        return future.result()
    except ValueError as error:
        raise ValueError(str(error)) from error
    except concurrent.futures.process.BrokenProcessPool:
        raise OSError(
            errno.ENOMEM, "a worker process was ended from outside, most likely for memory; try fewer --workers"
        ) from None


def _begin_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this worker when the process that started it is gone, even if that was killed outright."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
