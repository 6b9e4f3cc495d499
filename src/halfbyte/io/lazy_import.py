"""Imports modules on first use: those that take a second to import and that most commands do not need."""

from pkgutil import resolve_name
from typing import Any


class _LazyModule:
    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # Not import_module: `orbax.checkpoint.v1` is an attribute of a package, not a module.
        return getattr(resolve_name(self._name), attribute)

    def __repr__(self) -> str:
        return f"later({self._name!r})"


def lazy_module(name: str) -> Any:
    """Returns a proxy of the module `name`, which is imported on the first attribute access."""
    return _LazyModule(name)
