"""Modules that are imported when they are first used: those that take a second and that most commands never touch."""

from importlib import import_module
from typing import Any


class _Later:
    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)

    def __repr__(self) -> str:
        return f"later({self._name!r})"


def later(name: str) -> Any:
    """A stand-in for the module `name`; the first attribute that is asked of it imports it."""
    return _Later(name)
