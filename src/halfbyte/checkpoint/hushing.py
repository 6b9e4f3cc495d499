"""What a failed write prints when it has been said already."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def hush_late_writes() -> None:
    """When one array cannot be written, Orbax gives the others up and closes its event loop; those that fail later find
    it closed, and Python prints a traceback for each. The failure is said once, by `Checkpoints`."""
    if not isinstance(sys.unraisablehook, _WithoutClosedLoops):
        sys.unraisablehook = _WithoutClosedLoops(sys.unraisablehook)


@dataclass(frozen=True)
class _WithoutClosedLoops:
    """A hook for exceptions that nobody can catch; it passes on everything but `Event loop is closed`."""

    before: Callable[[Any], Any]

    def __call__(self, unraisable: Any) -> None:
        if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
            self.before(unraisable)
