"""A function over chunks, in this process, in several or on a Ray cluster, results in the order of the chunks."""

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

ENGINES = ("processes", "ray")
SMALL_INPUT = 8 << 20  # below this, starting processes costs more than they save
RETRIES = 3  # of a chunk whose worker ended; one that ends every worker is not the workers' fault

Runner = Callable[[Callable[[Chunk], Any], Iterable[Chunk]], Iterator[tuple[Chunk, Any]]]


class ChunkRunner:
    """Gives a function that maps over chunks in order: in this process, in several, or on a Ray cluster."""

    def __init__(self, workers: int | None, total_bytes: int, *, engine: str = "processes"):
        if engine not in ENGINES:
            raise ValueError(f"engine {engine!r}: one of {', '.join(ENGINES)}")
        if engine == "ray" and workers is not None:
            raise ValueError(f"workers {workers} with engine ray: the cluster has its own number of them; leave it out")
        self._engine = engine
        # All cores where the system does not say which this process may use (macOS).
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._here = workers or (1 if total_bytes < SMALL_INPUT else cores)
        self._pool: RayPool | ProcessPool | None = None

    def __enter__(self) -> Runner:
        if self._engine == "processes" and self._here == 1:
            return lambda function, items: ((item, function(item)) for item in items)
        self._pool = RayPool() if self._engine == "ray" else ProcessPool(self._here)
        return self._run

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()

    def _run(self, function: Callable[[Chunk], Any], items: Iterable[Chunk]) -> Iterator[tuple[Chunk, Any]]:
        assert self._pool is not None
        waiting: collections.deque[tuple[Chunk, Any]] = collections.deque()
        remaining, submit = iter(items), self._pool.submitter(function)
        while True:
            for item in itertools.islice(remaining, 3 * self._pool.workers - len(waiting)):
                waiting.append((item, submit(item)))
            if not waiting:
                return
            item, task = waiting.popleft()
            yield item, self._pool.result(task)


class ProcessPool:
    """Processes of this machine."""

    def __init__(self, workers: int):
        self.workers, context = workers, multiprocessing.get_context("spawn")
        self._executor = concurrent.futures.ProcessPoolExecutor(workers, context, initializer=_begin_worker)

    def submitter(self, function: Callable[[Chunk], Any]) -> Callable[[Chunk], Any]:
        """Begins the function of a chunk."""
        return lambda chunk: self._executor.submit(function, chunk)

    def result(self, task: concurrent.futures.Future) -> Any:
        """The worker's result; its ValueError as one raised here, so that it counts as bad input and not as a
        failure."""
        try:
            return task.result()
        except ValueError as error:
            raise ValueError(str(error)) from error
        except concurrent.futures.process.BrokenProcessPool:
            raise OSError(
                errno.ENOMEM, "a worker process was ended from outside, most likely for memory; try fewer --workers"
            ) from None

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this worker when the process that started it is gone, even if that was killed outright."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class RayPool:
    """What a process pool is for one machine, in the workers of a Ray cluster that is running: the one that RAY_ADDRESS
    names, or that runs here, a worker a CPU; ValueError if there is none.

    A task is a function of one chunk and carries its text, so nodes need no files but the tokenizer's, beside --out.
    Ray does the task of a worker that was killed again, elsewhere; results are taken in the order of the chunks, each
    once.
    """

    def __init__(self) -> None:
        try:
            import ray
        except ImportError:
            raise ValueError(
                "--engine ray: the package ray is missing; pip install 'halfbyte[ray]' here and on every node"
            ) from None
        self._ray, self._is_ours = ray, not ray.is_initialized()
        if self._is_ours:
            try:
                ray.init(address=os.environ.get("RAY_ADDRESS") or "auto", logging_level="error", log_to_driver=False)
            except (ConnectionError, RuntimeError) as error:
                raise ValueError(
                    f"--engine ray: no cluster answers ({str(error).splitlines()[0]}); `ray start --head` starts one "
                    "here, RAY_ADDRESS names another"
                ) from None
        self.workers = max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._task = ray.remote(num_cpus=1, max_retries=RETRIES)(_work)

    def submitter(self, function: Callable[[Chunk], Any]) -> Callable[[Chunk], Any]:
        """Begins the function of a chunk; the function itself is sent once."""
        sent = self._ray.put(function)
        return lambda chunk: self._task.remote(sent, chunk)

    def result(self, task: Any) -> Any:
        """What became of it; a worker's ValueError as one raised here."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(task)
        except errors.RayTaskError as error:
            if isinstance(error.cause, ValueError):
                raise ValueError(str(error.cause)) from error
            raise OSError(errno.EIO, f"a Ray worker failed: {type(error.cause).__name__}: {error.cause}") from error
        except errors.RayError as error:
            raise OSError(
                errno.EIO, f"Ray gave up on a chunk after {RETRIES + 1} workers: {str(error).splitlines()[0]}"
            ) from None

    def close(self) -> None:
        """Leave the cluster; what it still does for us ends."""
        if self._is_ours:
            self._ray.shutdown()


def _work(function: Callable[[Chunk], Any], chunk: Chunk) -> Any:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    return function(chunk)
