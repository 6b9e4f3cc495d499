"""Maps a function over chunks in this process, in several processes or on a Ray cluster, with a progress meter.

Results come in the order of the chunks for any number of workers.
"""

import collections
import concurrent.futures
import concurrent.futures.process
import errno
import itertools
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import rich.console
import rich.progress

from halfbyte.data.text_files import InputChunk
from halfbyte.io import escape_control_chars
from halfbyte.io.install_command import install_command

ENGINES = ("processes", "ray")
SMALL_INPUT = 8 << 20  # below this, starting processes costs more than they save
RETRIES = 3  # of a chunk whose worker ended; a chunk that ends every worker is itself the cause


SECONDS_BETWEEN_LINES = 10.0

MapFn = Callable[[Callable[[InputChunk], Any], Iterable[InputChunk]], Iterator[tuple[InputChunk, Any]]]


class WorkerPool:
    """Context manager whose value maps a function over chunks, in order; `engine` is "processes" or "ray"."""

    def __init__(self, workers: int | None, total_bytes: int, *, engine: str = "processes"):
        if engine not in ENGINES:
            raise ValueError(f"engine {engine!r}: one of {', '.join(ENGINES)}")
        if engine == "ray" and workers is not None:
            raise ValueError(f"workers {workers} with engine ray: the cluster has its own number of them; leave it out")
        self._engine = engine
        # All cores where the system does not say which this process may use (macOS).
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._workers = workers or (1 if total_bytes < SMALL_INPUT else cores)
        self._pool: RayPool | ProcessPool | None = None

    def __enter__(self) -> MapFn:
        if self._engine == "processes" and self._workers == 1:
            return lambda function, items: ((item, function(item)) for item in items)
        self._pool = RayPool() if self._engine == "ray" else ProcessPool(self._workers)
        return self._run

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()

    def _run(
        self, function: Callable[[InputChunk], Any], items: Iterable[InputChunk]
    ) -> Iterator[tuple[InputChunk, Any]]:
        assert self._pool is not None
        waiting: collections.deque[tuple[InputChunk, Any]] = collections.deque()
        remaining, submit = iter(items), self._pool.submitter(function)
        while True:
            for item in itertools.islice(remaining, 3 * self._pool.workers - len(waiting)):
                waiting.append((item, submit(item)))
            if not waiting:
                return
            item, task = waiting.popleft()
            yield item, self._pool.result(task)


class ProcessPool:
    """Worker processes on this machine."""

    def __init__(self, workers: int):
        self.workers, context = workers, multiprocessing.get_context("spawn")
        self._executor = concurrent.futures.ProcessPoolExecutor(workers, context, initializer=_begin_worker)

    def submitter(self, function: Callable[[InputChunk], Any]) -> Callable[[InputChunk], Any]:
        """Returns a function that submits a chunk."""
        return lambda chunk: self._executor.submit(function, chunk)

    def result(self, task: concurrent.futures.Future) -> Any:
        """Returns the worker's result. Its ValueError is raised here as one, so that it counts as bad input."""
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


class RayPool:
    """Workers of a running Ray cluster, one per CPU: the cluster of RAY_ADDRESS, or the local one; else ValueError.

    A task carries the text of its chunk, so nodes need no file except the tokenizer's, which is stored next to --out.
    Ray retries the task of a killed worker on another one.
    """

    def __init__(self) -> None:
        try:
            import ray
        except ImportError:
            raise ValueError(
                f"--engine ray: the package ray is missing; {install_command('ray')} here and on every node"
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
        self._task = ray.remote(num_cpus=1, max_retries=RETRIES)(_run_chunk)

    def submitter(self, function: Callable[[InputChunk], Any]) -> Callable[[InputChunk], Any]:
        """Returns a function that submits a chunk; `function` is sent to the cluster once."""
        sent = self._ray.put(function)
        return lambda chunk: self._task.remote(sent, chunk)

    def result(self, task: Any) -> Any:
        """Returns the worker's result; raises its ValueError as a ValueError."""
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
        """Leaves the cluster if this object has joined it, which ends its tasks."""
        if self._is_ours:
            self._ray.shutdown()


class ProgressMeter:
    """Context manager that reports bytes of work done on stderr; silent with `shown=False`.

    A bar on a terminal, otherwise a plain line every SECONDS_BETWEEN_LINES.
    """

    def __init__(self, label: str, total: int, *, shown: bool):
        self.label, self.total, self.done = escape_control_chars(label), max(total, 1), 0
        self._lines = shown and not sys.stderr.isatty()
        self._begun = self._last_print = time.monotonic()
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.DownloadColumn(binary_units=True),
            rich.progress.TransferSpeedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=rich.console.Console(stderr=True),
            disable=not shown or self._lines,
        )
        self._task = self._bar.add_task(self.label, total=self.total)

    def advance(self, amount: int) -> None:
        self.done += amount
        self._bar.update(self._task, advance=amount)
        if self._lines and time.monotonic() - self._last_print >= SECONDS_BETWEEN_LINES:
            self._last_print = time.monotonic()
            seconds = self._last_print - self._begun
            print(f"{self.label}: {100 * self.done / self.total:.0f}% after {seconds:.0f} s", file=sys.stderr)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _run_chunk(function: Callable[[InputChunk], Any], chunk: InputChunk) -> Any:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    return function(chunk)


def _begin_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Ends this worker when its parent process has ended, even if that was killed outright."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
