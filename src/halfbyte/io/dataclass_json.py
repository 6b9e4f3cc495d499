"""Converts frozen dataclasses to JSON and back, and compares two of them field by field."""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from halfbyte.io.files import UnreadableFile, atomic_write, read_json, read_toml, read_yaml
from halfbyte.io.trusted_programs import UntrustedProgramError, trust_only_named_programs
from halfbyte.renamed import warn_renamed

Config = TypeVar("Config")
CONFIG_FILE = "config.json"
"""Config file of a run directory. Old field names in it do not warn: no person wrote them."""
MAX_CONFIG_BYTES = 1 << 20
"""Limit of a config file in bytes; the largest that is written has three thousand."""


@dataclasses.dataclass(frozen=True)
class Removed:
    """A field that earlier versions wrote into configs: its default there, and what replaces it."""

    default: Any
    instead: str


def to_dict(config: Any) -> dict[str, Any]:
    """Returns the dataclass as a nested plain dict; tuples become lists."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(kind: type[Config], values: Mapping[str, Any], *, where: str = "") -> Config:
    """Returns the dataclass `kind` from a nested dict. ValueError, with the field's path, for unknown fields or types.

    A field in `kind.REMOVED` is ignored if it has its default; another value is a ValueError. An old name in
    `kind.RENAMED` sets the field of the new name, and takes precedence over the new name.
    """
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = {field.name for field in fields if field.init}
    removed: Mapping[str, Removed] = getattr(kind, "REMOVED", {})
    values = rename_old_fields(kind, values)
    for name, value in values.items():
        if name in removed and value != removed[name].default:
            raise ValueError(f"{where}{name}={value!r}: this version has no {where}{name}; {removed[name].instead}")
        if name not in names | removed.keys():
            near = difflib.get_close_matches(name, names, n=1)
            raise ValueError(
                f"config has no field {where}{name}" + (f"; did you mean {where}{near[0]}?" if near else "")
            )
    arguments = {name: _value(hints[name], value, f"{where}{name}") for name, value in values.items() if name in names}
    # Both are MISSING if a field has no default.
    required = [field.name for field in fields if field.init and field.default is field.default_factory]
    if missing := [f"{where}{name}" for name in required if name not in values]:
        raise ValueError(f"config lacks {' and '.join(missing)}")
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ValueError(f"config {where or kind.__name__}: {error}") from None


def rename_old_fields(kind: type, values: Mapping[str, Any], *, warn_as: str = "") -> dict[str, Any]:
    """Returns `values` with the old names in `kind.RENAMED` replaced by the new ones, in nested dataclasses too.

    With `warn_as`, the name of the file, each old name warns once.
    """
    new_of: Mapping[str, str] = getattr(kind, "RENAMED", {})
    hints = typing.get_type_hints(kind)
    renamed: dict[str, Any] = {}
    for name, value in sorted(values.items(), key=lambda item: item[0] in new_of):  # last: old names have precedence
        new = new_of.get(name, name)
        if new != name and warn_as:
            warn_renamed(f"{warn_as}: {name}", new)
        group = [o for o in (hints.get(new), *typing.get_args(hints.get(new))) if dataclasses.is_dataclass(o)]
        nested = isinstance(value, Mapping) and len(group) == 1
        renamed[new] = rename_old_fields(typing.cast(type, group[0]), value, warn_as=warn_as) if nested else value
    return renamed


def _value(hint: Any, value: Any, where: str) -> Any:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(value, Mapping):
            return from_dict(typing.cast(type, option), value, where=where + ".")
        if typing.get_origin(option) is tuple and isinstance(value, list):
            return tuple(value)
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        is_plain = option in (int, str, bool, float, types.NoneType) and type(value) is option
        is_choice = typing.get_origin(option) is typing.Literal and value in typing.get_args(option)
        is_text = option == Mapping[str, str] and isinstance(value, dict) and {*map(type, value.values())} <= {str}
        if option is Any or is_plain or is_choice or is_text:
            return value
    types_text = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise ValueError(f"config field {where} must be {types_text}, got {value!r}")


def config_to_json(config: Any) -> str:
    """Returns the JSON text of a config file."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def save_config(config: Any, path: Path) -> None:
    """Writes a config file with `atomic_write`, so that no reader sees an incomplete file."""
    atomic_write(path, config_to_json(config))


def from_file(kind: type[Config], values: Mapping[str, Any], path: Path) -> Config:
    """Returns the config of `values` from a file. Errors name the file.

    Programs that the values name only run if the command names them too.
    """
    try:
        with trust_only_named_programs():
            return from_dict(
                kind, rename_old_fields(kind, values, warn_as="" if path.name == CONFIG_FILE else str(path))
            )
    except UntrustedProgramError:
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_values(path: Path) -> dict[str, Any]:
    """Reads the fields of a JSON, TOML or YAML file, by its suffix."""
    suffix = path.suffix.lower()
    read = read_toml if suffix == ".toml" else read_yaml if suffix in (".yaml", ".yml") else read_json
    values = read(path, most=MAX_CONFIG_BYTES)
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise UnreadableFile(f"{path} must hold one JSON object or table of fields, got {type(values).__name__}")
    return values


def merge_fields(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` updated by the fields of `values`, recursively in groups."""
    merged = dict(base)
    for name, value in values.items():
        inside = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = merge_fields(merged[name], value) if inside else value
    return merged


def flatten_dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a dict dotted name -> value of a nested dict."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(
            flatten_dotted(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        )
    return flat


def field_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Returns (dotted field, old, new) of every field that differs; None for a missing field."""
    before, after = flatten_dotted(old), flatten_dotted(new)
    names = sorted(before.keys() | after.keys())
    return [(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)]
