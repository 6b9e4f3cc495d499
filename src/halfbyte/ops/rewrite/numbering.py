"""Which layer a weight belongs to: read off its name, or off the dim over which a scan runs.

A number in a path is a layer's if it stands alone (`layers/3/w`) or ends a name after `_` (`block_3`, `linear_3`), and
if the name has sisters that differ in the number alone. Of several, the outermost. A leaf without such a number and
with more than two dims may be a stack of layers along dim 0; one of three dims whose name says experts or heads is a
stack of those. All this, and what kind of weight it is, is read off names: paths without the `value` or `data_array`
that a framework puts between a variable and its array, and with one kind of separator. Where a guess is wrong, patterns
say it: `blocks/{layer}/*` gives the place of the number, `stack/*` names leaves that are stacked.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfbyte.ops.rewrite.origin import Origin

LAYER = "{layer}"
_NUMBER = re.compile(r"(?:^|/)((?:[^/]*_)?)(\d+)(?=/|$)")
_WRAPPERS = {"value", "raw_value", "data_array", "array"}
_NO_LAYERS = re.compile(r"expert|moe|heads", re.IGNORECASE)


@dataclass(frozen=True)
class Place:
    """A number in a path: what the path is with the number left open, and the number."""

    family: str
    number: int


def leaf_origins(paths: list[str], shapes: list[tuple[int, ...]], patterns: Sequence[str] = ()) -> list[Origin]:
    """An origin for each weight leaf, with its layer where that is known."""
    names = leaf_names(paths)
    places = [_by_pattern(p, patterns) if patterns else _places(name) for p, name in zip(paths, names, strict=True)]
    members = _members(places)
    places = [found or _unnumbered_first(name, members) for name, found in zip(names, places, strict=True)]
    members = _members(places)
    found = [
        _origin(path, shape, _layer_place(found, members), members, patterns)
        for path, shape, found in zip(paths, shapes, places, strict=True)
    ]
    return [dataclasses.replace(origin, name=name) for origin, name in zip(found, names, strict=True)]


def leaf_names(paths: Sequence[str]) -> list[str]:
    """The paths with `/` for `.`, and without the last parts that are a wrapper's: an array that is alone in it. One
    beside others in a folder (query, key and value) or beside folders is no wrapper's.
    """
    names = [path.replace(".", "/") for path in paths]
    while True:
        folders = collections.Counter(folder for name in names for folder in _folders(name))
        shorter = [
            folder if folder and last in _WRAPPERS and folders[folder] == 1 else name
            for name in names
            for folder, _, last in [name.rpartition("/")]
        ]
        if shorter == names:
            return names
        names = shorter


def _folders(name: str) -> Iterator[str]:
    """The folders around a leaf, the outermost first."""
    return itertools.accumulate(name.split("/")[:-1], "{}/{}".format)


def _origin(
    path: str, shape: tuple[int, ...], place: Place | None, members: dict[str, set[int]], patterns: Sequence[str]
) -> Origin:
    if place is not None:
        numbers = sorted(members[place.family])
        # Names that count from 1 are numbered in their order; others may leave gaps, and count from 0.
        layer = place.number if numbers[0] == 0 else numbers.index(place.number)
        count = numbers[-1] + 1 if numbers[0] == 0 else len(numbers)
        return Origin(path, range(layer, layer + 1), count)
    named = any(LAYER not in pattern and _regex(pattern).fullmatch(path) for pattern in patterns)
    if named or (not patterns and len(shape) > 2 + bool(_NO_LAYERS.search(path))):
        return Origin(path, range(shape[0]), shape[0], stacked=True)
    return Origin(path)


def _layer_place(found: list[Place], members: dict[str, set[int]]) -> Place | None:
    """The outermost number that has sisters, else the outermost."""
    return next((place for place in found if len(members[place.family]) > 1), found[0] if found else None)


def _places(path: str) -> list[Place]:
    return [Place(f"{path[: match.start(2)]}{LAYER}", int(match[2])) for match in _NUMBER.finditer(path)]


def _members(places: list[list[Place]]) -> dict[str, set[int]]:
    members: dict[str, set[int]] = {}
    for place in (place for found in places for place in found):
        members.setdefault(place.family, set()).add(place.number)
    return members


def _unnumbered_first(path: str, members: dict[str, set[int]]) -> list[Place]:
    """Haiku calls its layers linear, linear_1, linear_2: the sister without a number is number 0."""
    parts = path.split("/")
    families = ("/".join(parts[: at + 1]) + f"_{LAYER}" for at in range(len(parts)))
    return [Place(family, 0) for family in families if 0 not in members.get(family, {0})]


def _by_pattern(path: str, patterns: Sequence[str]) -> list[Place]:
    for pattern in patterns:
        match = _regex(pattern).fullmatch(path) if LAYER in pattern else None
        if match:
            return [Place(f"{path[: match.start(1)]}{LAYER}", int(match[1]))]
    return []


def _regex(pattern: str) -> re.Pattern[str]:
    parts = pattern.split(LAYER)
    if len(parts) > 2:
        raise ValueError(f"layers: {pattern!r} holds {LAYER} more than once; a leaf has one layer number")
    return re.compile(r"(\d+)".join(re.escape(part).replace(r"\*", ".*").replace(r"\?", ".") for part in parts))
