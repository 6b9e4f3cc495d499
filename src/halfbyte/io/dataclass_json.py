"""Frozen dataclasses to JSON and back, and the difference of two of them field by field."""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from halfbyte.inputs import UnreadableFile, read_json, read_toml, read_yaml, replace_file
from halfbyte.inputs.programs import NotNamed, only_named

Config = TypeVar("Config")
MOST_CONFIG = 1 << 20
"""Bytes of a config file; the largest that is written has three thousand."""


@dataclasses.dataclass(frozen=True)
class Removed:
    """A field that earlier versions wrote into configs: its default there, and what replaces it."""

    default: Any
    instead: str


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain dict; tuples become lists."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(kind: type[Config], values: Mapping[str, Any], *, where: str = "") -> Config:
    """The dataclass `kind` from a nested dict. Unknown fields and wrong types are ValueErrors that name the path.

    A field in `kind.REMOVED` is ignored at its default; another value is a ValueError.
    """
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = {field.name for field in fields if field.init}
    removed: Mapping[str, Removed] = getattr(kind, "REMOVED", {})
    for name, value in values.items():
        if name in removed and value != removed[name].default:
            raise ValueError(f"{where}{name}={value!r}: this version has no {where}{name}; {removed[name].instead}")
        if name not in names | removed.keys():
            near = difflib.get_close_matches(name, names, n=1)
            raise ValueError(
                f"config has no field {where}{name}" + (f"; did you mean {where}{near[0]}?" if near else "")
            )
    built = {name: _value(hints[name], value, f"{where}{name}") for name, value in values.items() if name in names}
    needed = [field.name for field in fields if field.init and field.default is field.default_factory]  # both missing
    if lacking := [f"{where}{name}" for name in needed if name not in values]:
        raise ValueError(f"config lacks {' and '.join(lacking)}")
    try:
        return kind(**built)
    except TypeError as error:
        raise ValueError(f"config {where or kind.__name__}: {error}") from None


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
    wanted = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise ValueError(f"config field {where} must be {wanted}, got {value!r}")


def as_text(config: Any) -> str:
    """The JSON text of a config, as its file holds it."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def save(config: Any, path: Path) -> None:
    """Write JSON in one rename, so that no reader sees half a file."""
    replace_file(path, as_text(config))


def from_file(kind: type[Config], values: Mapping[str, Any], path: Path) -> Config:
    """The config of fields that come from a file. What is wrong with them is said with its name; programs that they
    name run only if the command names them too."""
    try:
        with only_named():
            return from_dict(kind, values)
    except NotNamed:
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_values(path: Path) -> dict[str, Any]:
    """The fields in a JSON, TOML or YAML file, by its suffix."""
    suffix = path.suffix.lower()
    read = read_toml if suffix == ".toml" else read_yaml if suffix in (".yaml", ".yml") else read_json
    values = read(path, most=MOST_CONFIG)
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise UnreadableFile(f"{path} must hold one JSON object or table of fields, got {type(values).__name__}")
    return values


def overlaid(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the fields of `values` in place of its own, groups field by field."""
    merged = dict(base)
    for name, value in values.items():
        inside = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = overlaid(merged[name], value) if inside else value
    return merged


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value})
    return flat


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted field, old, new) for every field that is not the same; a missing field reads None."""
    before, after = flatten(old), flatten(new)
    names = sorted(before.keys() | after.keys())
    return [(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)]
