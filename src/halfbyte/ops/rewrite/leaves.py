"""The arguments of one call: arrays to trace, everything else as it is, and the path of each weight.

An NNX module is opened into its graph and its state, and put together again inside the traced function, so that
weights that it shares stay one, and what the function writes into it (batch statistics, dropout counters) comes out
beside the result and is written into the caller's module.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from halfbyte.ops.rewrite.numbering import leaf_origins
from halfbyte.ops.rewrite.origin import CONSTANT, Value


@functools.partial(jax.tree_util.register_dataclass, data_fields=["state"], meta_fields=["graph"])
@dataclass(frozen=True)
class _Opened:
    """An NNX module as a pytree of its state, each shared variable once."""

    state: Any
    graph: Any


@dataclass(frozen=True)
class Leaves:
    """See `Leaves.of`."""

    tree: jax.tree_util.PyTreeDef
    arrays: list[jax.Array]
    static: tuple[tuple[int, object], ...]
    values: list[str | Value]  # the path of a weight; CONSTANT for a mask among them; None for data
    modules: list[Any]

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple, kwargs: dict, argnums: tuple[int, ...]) -> Leaves:
        """The leaves of fn(*args, **kwargs), those of the arguments `argnums` as weights."""
        if argnums and max(argnums) >= len(args):
            raise ValueError(
                f"apply_recipe: argnums={argnums} names an argument that was not passed by position; got "
                f"{len(args)} of them"
            )
        names = _argument_names(fn, len(args))
        modules = [leaf for leaf in jax.tree.leaves((args, kwargs), is_leaf=_is_nnx) if _is_nnx(leaf)]
        opened = jax.tree.map(_open, (args, kwargs), is_leaf=_is_nnx) if modules else (args, kwargs)
        flat, tree = jax.tree_util.tree_flatten_with_path(opened)
        arrays, static, values = [], [], []
        for at, (path, leaf) in enumerate(flat):
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                static.append((at, leaf))
                continue
            arrays.append(leaf)
            weights = path[0].idx == 0 and path[1].idx in argnums
            values.append(_value(leaf, _path(path[2:]) or names[path[1].idx]) if weights else None)
        return cls(tree, arrays, tuple(static), values, modules)

    def call(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """fn as a function of the arrays alone: (its result, what it wrote into its modules)."""

        def positional(*arrays: jax.Array) -> Any:
            leaves: list[object] = list(arrays)
            for at, leaf in self.static:
                leaves.insert(at, leaf)
            made: list[Any] = []
            args, kwargs = jax.tree.map(
                functools.partial(_close, made), jax.tree.unflatten(self.tree, leaves), is_leaf=_is_opened
            )
            result = fn(*args, **kwargs)
            return result, [_written(module, before) for module, before in made]

        return positional

    def write(self, written: Sequence[Any]) -> None:
        """Writes what the traced function wrote into its modules into the caller's."""
        for module, state in zip(self.modules, written, strict=True):
            if jax.tree.leaves(state):
                sys.modules["flax.nnx"].update(module, state)

    def origins(self, patterns: Sequence[str]) -> list[Value]:
        """The value of each array; None for those that are no weights."""
        at = [i for i, value in enumerate(self.values) if isinstance(value, str)]
        found = leaf_origins([str(self.values[i]) for i in at], [self.arrays[i].shape for i in at], patterns)
        by_index = dict(zip(at, found, strict=True))
        return [by_index.get(i, None if isinstance(v, str) else v) for i, v in enumerate(self.values)]


def _value(leaf: Any, path: str) -> str | Value:
    """A floating-point leaf is a weight, a boolean one a mask of weights; numbers and keys may come from data."""
    if leaf.dtype == bool:
        return CONSTANT
    return path if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating) else None


def _path(entries: tuple[Any, ...]) -> str:
    """The entries joined by `/`, without what NNX variables and named arrays put around an array."""
    attributes = [getattr(entry, "name", None) for entry in entries]
    if "state" in attributes and attributes[-1] == "value":
        at = attributes.index("state")
        entries = (*entries[:at], *entries[at + 1 : -1])
    if len(entries) > 1 and isinstance(entries[-1], jax.tree_util.FlattenedIndexKey):  # the array of a named one
        entries = entries[:-1]
    return jax.tree_util.keystr(entries, simple=True, separator="/")


def _is_nnx(leaf: object) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(leaf, nnx.Module)


def _is_opened(leaf: object) -> bool:
    return isinstance(leaf, _Opened)


def _open(leaf: Any) -> Any:
    if not _is_nnx(leaf):
        return leaf
    graph, state = sys.modules["flax.nnx"].split(leaf)
    return _Opened(state, graph)


def _close(made: list[Any], leaf: Any) -> Any:
    if not _is_opened(leaf):
        return leaf
    nnx = sys.modules["flax.nnx"]
    module = nnx.merge(leaf.graph, leaf.state)
    made.append((module, {path: jax.tree.leaves(variable) for path, variable in nnx.to_flat_state(nnx.state(module))}))
    return module


def _written(module: Any, before: dict[Any, Any]) -> Any:
    """The state of a module that differs from `before`."""
    nnx = sys.modules["flax.nnx"]

    def changed(path: Any, variable: Any) -> bool:
        old, new = before.get(path, []), jax.tree.leaves(variable)
        return len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True))

    after = nnx.to_flat_state(nnx.state(module))
    return nnx.from_flat_state([(path, variable) for path, variable in after if changed(path, variable)])


def _argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        names = []
    return [names[i] if i < len(names) else f"arg{i}" for i in range(count)]
