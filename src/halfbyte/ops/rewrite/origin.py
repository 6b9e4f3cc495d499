"""Which argument leaf a value of a jaxpr is: followed through whatever leaves its numbers where they are, or only
moves them.

A jaxpr holds no parameter names. So each variable carries its origin: the leaf's path, and, if the leaf is a stack of
layers, which layers the value holds. Casts, reshapes, transposes and slices keep the origin; anything that computes
loses it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

_SAME = (
    "convert_element_type",
    "copy",
    "copy_p",
    "reduce_precision",
    "sharding_constraint",
    "reshard",
    "name",
    "device_put",
)


@dataclass(frozen=True)
class Origin:
    """A leaf's path; the layers that the value holds, of how many; and whether its dim 0 still runs over those layers.

    `layers` is None where a layer number cannot be known: an index that is traced, a reshaped stack.
    """

    path: str
    layers: range | None = None
    num_layers: int | None = None
    stacked: bool = False

    def unstacked(self) -> Origin:
        """The same leaf, its layers no longer along dim 0, so that nobody can tell which is which."""
        return dataclasses.replace(self, stacked=False, layers=None) if self.stacked else self

    def iteration(self, layers: range | None) -> Origin:
        """One slice of a scan over dim 0, known to lie in `layers`."""
        return dataclasses.replace(self, stacked=False, layers=layers)


def leaf_origins(paths: list[str], shapes: list[tuple[int, ...]]) -> list[Origin]:
    """An origin for each weight leaf. An integer in a path (a list of layers) is its layer number; else dim 0 may
    be.
    """
    counts: dict[str, int] = {}
    numbered = [_numbered(path) for path in paths]
    for prefix, number in (found for found in numbered if found):
        counts[prefix] = max(counts.get(prefix, 0), number + 1)
    origins = []
    for path, shape, found in zip(paths, shapes, numbered, strict=True):
        if found:
            origins.append(Origin(path, range(found[1], found[1] + 1), counts[found[0]]))
        elif len(shape) > 2:
            origins.append(Origin(path, range(shape[0]), shape[0], stacked=True))
        else:
            origins.append(Origin(path))
    return origins


def _numbered(path: str) -> tuple[str, int] | None:
    parts = path.split("/")
    for at, part in enumerate(parts):
        if part.isdecimal():
            return "/".join(parts[:at]), int(part)
    return None


def follow(eqn: Any, origin: Origin) -> list[Origin | None]:
    """The origins of an equation's results, given that of its first operand; None where it is lost."""
    name = eqn.primitive.name
    rule = _RULES.get(name)
    if rule is not None:
        return [rule(eqn, origin)] * len(eqn.outvars)
    return [origin if name in _SAME else None] * len(eqn.outvars)


def _reshape(eqn: Any, origin: Origin) -> Origin:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return origin if before and after and before[0] == after[0] else origin.unstacked()


def _transpose(eqn: Any, origin: Origin) -> Origin:
    return origin if eqn.params["permutation"][0] == 0 else origin.unstacked()


def _squeeze(eqn: Any, origin: Origin) -> Origin:
    return dataclasses.replace(origin, stacked=origin.stacked and 0 not in eqn.params["dimensions"])


def _slice(eqn: Any, origin: Origin) -> Origin:
    if not origin.stacked or origin.layers is None:
        return origin
    stride = (eqn.params["strides"] or (1,))[0]
    taken = origin.layers[eqn.params["start_indices"][0] : eqn.params["limit_indices"][0] : stride]
    return dataclasses.replace(origin, layers=taken)


def _dynamic_slice(eqn: Any, origin: Origin) -> Origin:
    whole = eqn.params["slice_sizes"][0] == eqn.invars[0].aval.shape[0]
    return origin if whole else origin.unstacked()


def _split(eqn: Any, origin: Origin) -> Origin:
    return origin.unstacked() if eqn.params["axis"] == 0 else origin


_RULES: dict[str, Callable[[Any, Origin], Origin]] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "split": _split,
}


def sub_jaxprs(eqn: Any) -> list[Any]:
    """Every jaxpr among an equation's parameters, opened."""
    found = []
    for value in jax.tree_util.tree_leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
            found.append(open_jaxpr(value))
    return found


def open_jaxpr(value: Any) -> Any:
    """The jaxpr itself, of a jaxpr or of one closed over constants."""
    return value.jaxpr if hasattr(value, "consts") and hasattr(value, "jaxpr") else value


def _is_jaxpr(value: Any) -> bool:
    return hasattr(open_jaxpr(value), "eqns")


def scan_counts(eqn: Any) -> tuple[int, int]:
    """(constants, carries): how many of a scan's operands are which; the rest are scanned over."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # JAX 0.11 keeps the three groups as a tree instead of two numbers.
    consts, carries, _ = eqn.params["ft_in"].update(list(range(len(eqn.invars)))).unpack()
    return len(list(consts)), len(list(carries))
