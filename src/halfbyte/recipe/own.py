"""Recipes and policies of the user's own: from a file, from an installed package, or as a value.

A config holds text, so that flags, JSON and a resumed run all mean the same. What is not a name is written as

    path/file.py:name@0123456789abcdef    a Recipe or Policy of that Python file, and the SHA-256 of the file
    {"name": ..., "fprop_x": ...}         a Recipe or Policy that was given as a value, spelled out

`pin` adds the hash; a file that has changed since is refused wherever its text is read again. Packages offer recipes
and policies by name, through the entry points `halfbyte.recipes` and `halfbyte.policies`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import re
from importlib.abc import SourceLoader
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from halfbyte import formats
from halfbyte.formats import BlockFormat
from halfbyte.recipe.operands import ROLES, OperandPolicy, Recipe

FILE = re.compile(r"^(?P<path>.+\.py):(?P<name>\w+)(?:@(?P<hash>[0-9a-f]{16}))?$")
GROUPS = {"recipe": "halfbyte.recipes", "policy": "halfbyte.policies"}
_LOADED: dict[tuple[str, str], dict[str, Any]] = {}  # (path, hash) -> what the file defines


def is_own(text: str) -> bool:
    """True for text that names a file or spells a value out."""
    return text.startswith("{") or FILE.match(text) is not None


def pin(text: str) -> str:
    """The text with the hash of the file it names; other text as it is."""
    found = FILE.match(text)
    if found is None or found["hash"]:
        return text
    return f"{text}@{_digest(_source(found['path']))}"


def from_file(text: str, what: str) -> Any:
    """The object that `path/file.py:name` names; ValueError if the file is not the one that was pinned."""
    found = FILE.match(text)
    assert found is not None, text
    source = _source(found["path"])
    digest = _digest(source)
    if found["hash"] not in (None, digest):
        raise ValueError(
            f"{what} {text}: the file has changed since (it is {digest} now); put the old file back, or name it anew "
            f"without the hash, {found['path']}:{found['name']}, in a new run or with --allow-change"
        )
    names = _load(found["path"], source, digest)
    if found["name"] not in names:
        raise ValueError(f"{what} {text}: the file defines no {found['name']!r}")
    return names[found["name"]]


def refuse_inside(text: str, folder: Path) -> None:
    """ValueError for a file under `folder`: a run directory may come from elsewhere, and nothing in it is executed."""
    found = FILE.match(text)
    if found and Path(found["path"]).resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"{folder} names a program of its own, {found['path']}, as its recipe or policy, and nothing inside a run "
            f"is executed; look at the file, move it out of there, and name the new place in the config: "
            f"PATH/FILE.py:{found['name']}"
        )


def from_package(name: str, what: str) -> Any:
    """The object that an installed package offers under this name, None if none does."""
    found = list(entry_points(group=GROUPS[what], name=name))
    return found[0].load() if found else None


def _source(path: str) -> bytes:
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"there is no file {path}; a recipe or policy of your own is PATH/FILE.py:NAME")
    return file.read_bytes()


def _digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:16]


def _load(path: str, source: bytes, digest: str) -> dict[str, Any]:
    """What the file defines. The bytes that were hashed are those that run, whatever lies there by now."""
    if (path, digest) not in _LOADED:
        loader = _Hashed(f"halfbyte_own_{digest}", path, source)
        spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        _LOADED[path, digest] = vars(module)
    return _LOADED[path, digest]


class _Hashed(SourceLoader):
    """A module from source that has been read already."""

    def __init__(self, name: str, path: str, source: bytes):
        self.name, self._path, self._source = name, path, source

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: str | bytes) -> bytes:
        return self._source


def spell_recipe(made: Recipe) -> str:
    """The recipe as text that `read_recipe` turns back into an equal one."""
    return json.dumps(_recipe_fields(made), sort_keys=True)


def _recipe_fields(made: Recipe) -> dict[str, Any]:
    operands = {role: _operand_fields(policy) for role, policy in made.operands().items()}
    return {"name": made.name, "description": made.description, "shared_scales": made.shared_scales, **operands}


def _operand_fields(policy: OperandPolicy) -> dict[str, Any]:
    if _formats().get(policy.format.name) != policy.format:
        raise ValueError(
            f"the format {policy.format.name!r} is none of halfbyte.formats, so that a recipe with it cannot be "
            "spelled out in a config; define the recipe in a file and name it as FILE.py:NAME"
        )
    values = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    return {name: value.name if name == "format" else value for name, value in values.items()}


def _formats() -> dict[str, BlockFormat]:
    return {value.name: value for value in vars(formats).values() if isinstance(value, BlockFormat)}


def read_recipe(values: dict[str, Any]) -> Recipe:
    """The recipe of `spell_recipe`'s fields."""
    known = _formats()
    fields: dict[str, Any] = {name: values[name] for name in ("description", "shared_scales") if name in values}
    for role in ROLES:
        fields[role] = OperandPolicy(**{**values[role], "format": known[values[role]["format"]]})
    return Recipe(values["name"], **fields)


def own_recipe(text: str) -> Recipe:
    """The recipe that the text names by file or spells out."""
    if text.startswith("{"):
        try:
            return read_recipe(json.loads(text))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"recipe {text[:60]}...: not a recipe spelled out ({error})") from None
    made = from_file(text, "recipe")
    if not isinstance(made, Recipe):
        raise ValueError(f"recipe {text}: must be a halfbyte.Recipe, got {made!r}")
    return dataclasses.replace(made, name=pin(text))
