"""Recipes and policies of the user's own: from a file, from an installed package, or as a value.

A config holds text, so that flags, JSON and a resumed run all mean the same. What is not a name is written as

    path/file.py:name@0123456789abcdef    a Recipe or Policy of that Python file, and the SHA-256 of the file
    {"name": ..., "fprop_x": ...}         a Recipe or Policy that was given as a value, spelled out

`pin_to_digest` adds the hash; a file that has changed since is refused wherever its text is read again, and so is one
that no command names (`io/trusted_programs.py`). Packages offer recipes and policies by name, through the entry points
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
    """True for text that names a file or spells a value out."""
    return text.startswith("{") or USER_FILE_PATTERN.match(text) is not None


def pin_to_digest(text: str) -> str:
    """The text with the hash of the file it names; other text as it is."""
    found = USER_FILE_PATTERN.match(text)
    if found is None or found["hash"]:
        return text
    return f"{text}@{trust_program(found['path'], text)}"


def load_object_from_file(text: str, what: str) -> Any:
    """The object that `path/file.py:name` names; ValueError if the file is not the one that was pinned, or if nobody
    but a file names it."""
    found = USER_FILE_PATTERN.match(pin_to_digest(text))
    assert found is not None, text
    names = _load(*trusted_program(found["hash"], f"{what} {text}"), found["hash"])
    if found["name"] not in names:
        raise ValueError(f"{what} {text}: the file defines no {found['name']!r}")
    return names[found["name"]]


def is_same_program(stored: str, given: str) -> bool:
    """Whether both texts name one object of files with one content, wherever they lie."""
    texts = [USER_FILE_PATTERN.match(text) for text in (stored, given)]
    return all(texts) and len({(found["name"], found["hash"]) for found in texts if found}) == 1


def check_program_unchanged(stored: str, given: str) -> None:
    """ValueError if `given` names the stored program by its file's name, and the file is another now."""
    old, new = USER_FILE_PATTERN.match(stored), USER_FILE_PATTERN.match(pin_to_digest(given))
    if old and new and old["hash"] != new["hash"] and Path(old["path"]).name == Path(new["path"]).name:
        raise ValueError(
            f"recipe {given}: the file has changed since the run was trained with it ({old['hash']}, now "
            f"{new['hash']}); put the old file back, or give the new one another name"
        )


def load_entry_point(name: str, what: str) -> Any:
    """The object that an installed package offers under this name, None if none does."""
    found = _entry_points().get((what, name))
    return found.load() if found else None


@cache
def _entry_points() -> dict[tuple[str, str], EntryPoint]:
    """All that packages offer, looked up once: asking every installed package takes longer than making a config."""
    installed = entry_points()
    points = [(what, point) for what, group in GROUPS.items() for point in installed.select(group=group)]
    return {(what, point.name): point for what, point in reversed(points)}  # the first of a name, as they are found


def _load(path: str, source: bytes, digest: str) -> dict[str, Any]:
    """Returns what the file defines. Runs the bytes that were hashed, not the present content of the file."""
    if (path, digest) not in _LOADED:
        loader = _SourceBytesLoader(f"halfbyte_own_{digest}", path, source)
        spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        _LOADED[path, digest] = vars(module)
    return _LOADED[path, digest]


class _SourceBytesLoader(SourceLoader):
    """A module from source that has been read already."""

    def __init__(self, name: str, path: str, source: bytes):
        self.name, self._path, self._source = name, path, source

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: str | bytes) -> bytes:
        return self._source


def recipe_to_text(value: Recipe) -> str:
    """Returns the recipe as JSON text, from which `recipe_from_fields` makes an equal one."""
    return json.dumps(_recipe_fields(value), sort_keys=True)


def _recipe_fields(value: Recipe) -> dict[str, Any]:
    operands = {role: _operand_fields(policy) for role, policy in value.operands().items()}
    about = {"name": value.name, "description": value.description, "shared_scales": value.shared_scales}
    # Absent at their defaults: configs of versions without these fields have the same text. "history" is 0.1's key.
    later = {"remainder": value.remainder, "history": value.amax_history_len}
    return about | {name: value for name, value in later.items() if value} | operands


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
    known = _formats()
    whole = ("description", "shared_scales", "remainder")
    fields: dict[str, Any] = {name: values[name] for name in whole if name in values}
    fields["amax_history_len"] = values.get("history", 0)
    for role in ROLES:
        fields[role] = OperandPolicy(**{**values[role], "format": known[values[role]["format"]]})
    return Recipe(values["name"], **fields)


def load_user_recipe(text: str) -> Recipe:
    """The recipe that the text names by file or spells out."""
    if text.startswith("{"):
        try:
            return recipe_from_fields(json.loads(text))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"recipe {text[:60]}...: not a recipe spelled out ({error})") from None
    value = load_object_from_file(text, "recipe")
    if not isinstance(value, Recipe):
        raise ValueError(f"recipe {text}: must be a halfbyte.Recipe, got {value!r}")
    return dataclasses.replace(value, name=pin_to_digest(text))
