"""Which faults run at the same time: each takes the cores that it keeps busy, and gives them back while it waits."""

import contextlib
import threading
from collections.abc import Iterator


class Places:
    """`count` cores, given out in the order in which they were asked for; who waited for something else comes first."""

    def __init__(self, count: int = 2):
        self.count = self.free = count
        self.queue: list[object] = []
        self.changed = threading.Condition()
        self.mine = threading.local()

    @contextlib.contextmanager
    def taken(self, cores: int) -> Iterator[None]:
        """Hold that many, or all there are."""
        self.mine.cores = min(cores, self.count)
        self._take(first=False)
        try:
            yield
        finally:
            self._give()
            self.mine.cores = 0

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """While this thread waits for something that needs no core, others run on those that it holds."""
        self._give()
        try:
            yield
        finally:
            self._take(first=True)

    def _take(self, *, first: bool) -> None:
        cores, ticket = getattr(self.mine, "cores", 0), object()
        if not cores:
            return
        with self.changed:
            self.queue.insert(0 if first else len(self.queue), ticket)
            self.changed.wait_for(lambda: self.queue[0] is ticket and self.free >= cores)
            self.queue.remove(ticket)
            self.free -= cores
            self.changed.notify_all()

    def _give(self) -> None:
        with self.changed:
            self.free += getattr(self.mine, "cores", 0)
            self.changed.notify_all()
