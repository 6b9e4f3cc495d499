"""User-defined recipes and policies: from a file, from an installed package, or as a value.

A config stores them as text, so that flags, JSON and resumed runs have the same representation. Other than by name they
are written as

    path/file.py:name@0123456789abcdef    a Recipe or Policy in that Python file, and the SHA-256 of the file
    {"name": ..., "fprop_x": ...}         a Recipe or Policy that was passed as a value, as JSON

`pin_to_digest` adds the hash. A file that has changed since is refused whenever its text is read, as is a file that no
command names (`io/trusted_programs.py`). Packages provide recipes and policies by name, through the entry points
`halfbyte.recipes` and `halfbyte.policies`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from functools import cache
from importlib.abc import SourceLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from halfbyte import formats
from halfbyte.formats import BlockFormat
from halfbyte.io.trusted_programs import trust_program, trusted_program
from halfbyte.recipes.operand_policy import ROLES, OperandPolicy, Recipe

USER_FILE_PATTERN = re.compile(r"^(?P<path>.+\.py):(?P<name>\w+)(?:@(?P<hash>[0-9a-f]{16}))?$")
GROUPS = {"recipe": "halfbyte.recipes", "policy": "halfbyte.policies"}
_LOADED: dict[tuple[str, str], dict[str, Any]] = {}  # (path, hash) -> what the file defines


def is_user_defined(text: str) -> bool:
    """Returns True for text that names a file or contains a value as JSON."""
    return text.startswith("{") or USER_FILE_PATTERN.match(text) is not None


def pin_to_digest(text: str) -> str:
    """Returns the text with the hash of the file that it names, other text unchanged."""
    match = USER_FILE_PATTERN.match(text)
    if match is None or match["hash"]:
        return text
    return f"{text}@{trust_program(match['path'], text)}"


def load_object_from_file(text: str, what: str) -> Any:
    """Returns the object that `path/file.py:name` names. Raises ValueError if the file is not the pinned one, or if no
    command names it."""
    match = USER_FILE_PATTERN.match(pin_to_digest(text))
    assert match is not None, text
    namespace = _load(*trusted_program(match["hash"], f"{what} {text}"), match["hash"])
    if match["name"] not in namespace:
        raise ValueError(f"{what} {text}: the file defines no {match['name']!r}")
    return namespace[match["name"]]


def is_same_program(stored: str, given: str) -> bool:
    """Returns True if both texts name the same object in files of equal content, whatever their paths."""
    matches = [USER_FILE_PATTERN.match(text) for text in (stored, given)]
    return all(matches) and len({(match["name"], match["hash"]) for match in matches if match}) == 1


def check_program_unchanged(stored: str, given: str) -> None:
    """Raise ValueError if `given` names a file with the same name as the stored program, but other content."""
    old, new = USER_FILE_PATTERN.match(stored), USER_FILE_PATTERN.match(pin_to_digest(given))
    if old and new and old["hash"] != new["hash"] and Path(old["path"]).name == Path(new["path"]).name:
        raise ValueError(
            f"recipe {given}: the file has changed since the run was trained with it ({old['hash']}, now "
            f"{new['hash']}); put the old file back, or give the new one another name"
        )


def load_entry_point(name: str, what: str) -> Any:
    """Returns the object that an installed package provides under this name, None if there is none."""
    entry_point = _entry_points().get((what, name))
    return entry_point.load() if entry_point else None


@cache
def _entry_points() -> dict[tuple[str, str], EntryPoint]:
    """Returns all entry points by kind and name. They are cached, because searching the installed packages takes longer
    than building a config."""
    installed = entry_points()
    points = [(what, point) for what, group in GROUPS.items() for point in installed.select(group=group)]
    # Reversed, so that the first of equal names wins.
    return {(what, point.name): point for what, point in reversed(points)}


def _load(path: str, source: bytes, digest: str) -> dict[str, Any]:
    """Returns the namespace of the file. Executes the bytes that were hashed, not the current content of the file."""
    if (path, digest) not in _LOADED:
        loader = _SourceBytesLoader(f"halfbyte_own_{digest}", path, source)
        spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        _LOADED[path, digest] = vars(module)
    return _LOADED[path, digest]


class _SourceBytesLoader(SourceLoader):
    """Loads a module from source that has been read already."""

    def __init__(self, name: str, path: str, source: bytes):
        self.name, self._path, self._source = name, path, source

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: str | bytes) -> bytes:
        return self._source


def recipe_to_text(value: Recipe) -> str:
    """Returns the recipe as JSON text, from which `recipe_from_fields` returns an equal one."""
    return json.dumps(_recipe_fields(value), sort_keys=True)


def _recipe_fields(value: Recipe) -> dict[str, Any]:
    operands = {role: _operand_fields(policy) for role, policy in value.operands().items()}
    identity = {"name": value.name, "description": value.description, "shared_scales": value.shared_scales}
    # Omitted at their defaults, so that the text equals that of versions without these fields. "history" is 0.1's key.
    optional_fields = {"remainder": value.remainder, "history": value.amax_history_len}
    return identity | {name: value for name, value in optional_fields.items() if value} | operands


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


def recipe_from_fields(values: dict[str, Any]) -> Recipe:
    """Returns the recipe with the fields that `recipe_to_text` writes."""
    if values.get("mean"):
        raise ValueError(f"recipe {values['name']}: mean=true was removed; spell the recipe without it")
    formats_by_name = _formats()
    recipe_fields = ("description", "shared_scales", "remainder")
    fields: dict[str, Any] = {name: values[name] for name in recipe_fields if name in values}
    fields["amax_history_len"] = values.get("history", 0)
    for role in ROLES:
        fields[role] = OperandPolicy(**{**values[role], "format": formats_by_name[values[role]["format"]]})
    return Recipe(values["name"], **fields)


def load_user_recipe(text: str) -> Recipe:
    """Returns the recipe that the text names by file or contains as JSON."""
    if text.startswith("{"):
        try:
            return recipe_from_fields(json.loads(text))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"recipe {text[:60]}...: not a recipe spelled out ({error})") from None
    value = load_object_from_file(text, "recipe")
    if not isinstance(value, Recipe):
        raise ValueError(f"recipe {text}: must be a halfbyte.Recipe, got {value!r}")
    return dataclasses.replace(value, name=pin_to_digest(text))
