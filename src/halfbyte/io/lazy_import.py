"""Modules that are imported when they are first used: those that take a second and that most commands never touch."""

from pkgutil import resolve_name
from typing import Any


class _LazyModule:
    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # Not import_module: `orbax.checkpoint.v1` is a name in a package, and no module of its own.
        return getattr(resolve_name(self._name), attribute)

    def __repr__(self) -> str:
        return f"later({self._name!r})"


def lazy_module(name: str) -> Any:
    """A stand-in for the module `name`; the first attribute that is asked of it imports it."""
    return _LazyModule(name)
