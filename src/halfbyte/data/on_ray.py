"""Chunks in the workers of a Ray cluster that is running: what a process pool is for one machine.

A task is a function of one chunk and carries its text, so nodes need no files but the tokenizer's, beside --out. Ray
does the task of a worker that was killed again, elsewhere; results are taken in the order of the chunks, each once.
"""

import errno
import os
from collections.abc import Callable
from typing import Any

from halfbyte.data.files import Chunk

RETRIES = 3  # of a chunk whose worker ended; one that ends every worker is not the workers' fault


class RayPool:
    """Submits to the cluster that RAY_ADDRESS names, or that runs here, a worker a CPU; ValueError if there is none."""

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
