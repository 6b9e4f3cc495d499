"""Files of unknown origin as bytes, text and JSON, with limits of size and depth that are checked before anything is
parsed.

JSON is read strictly: UTF-8, no NaN or Infinity, no key twice in one object. Python's own reader accepts all three, and
takes a deep file with a RecursionError.
"""

import errno
import itertools
import json
import os
import re
import stat
import tomllib
from typing import Any, NoReturn

MIB = 1 << 20
MOST_JSON = 64 * MIB
"""Bytes of a config, manifest or record. The manifest of a data set of 100,000 shards has 30 MB."""
MOST_DEPTH = 64
"""Objects and arrays inside each other. Nothing that Halfbyte writes is deeper than 10."""

_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_BRACKETS = b"[]{}"
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in _BRACKETS)


class UnreadableFile(ValueError):
    """A file that is too large, too deep, or not what its name says."""


def regular(path: str, flags: int) -> int:
    """An `opener` for `open`: a regular file, or UnreadableFile. A pipe, which might never have another end, is not
    waited for. `metrics.jsonl`, a checkpoint's files, a lock: whatever lies in a directory of unknown origin."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a pipe without a reader, a socket
            raise
        raise UnreadableFile(f"{path} is not a regular file") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnreadableFile(f"{path} is not a regular file")
    return descriptor


def read_bytes(path: str | os.PathLike[str], *, most: int = MOST_JSON) -> bytes:
    """The content of a regular file of at most `most` bytes. A pipe or a device, which might never end, is refused."""
    with open(path, "rb", opener=regular) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UnreadableFile(f"{path} has more than {most:,} bytes, the most that is read of such a file")
    return content


def read_text(path: str | os.PathLike[str], *, most: int = MOST_JSON) -> str:
    """The content as UTF-8."""
    try:
        return read_bytes(path, most=most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def read_json(path: str | os.PathLike[str], *, most: int = MOST_JSON) -> Any:
    """The value in a JSON file."""
    return parse_json(read_bytes(path, most=most), what=str(path), most=most)


def parse_json(content: str | bytes, *, what: str, most: int = MOST_JSON, depth: int = MOST_DEPTH) -> Any:
    """The value in JSON text; UnreadableFile, naming `what` it is of, when it is too large, too deep or damaged."""
    encoded = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    if len(encoded) > most:
        raise UnreadableFile(f"{what} has {len(encoded):,} bytes of JSON, more than the {most:,} that are read")
    if (found := nesting(encoded)) > depth:
        raise UnreadableFile(f"{what} is nested {found:,} levels deep, more than the {depth} that are read")
    try:
        return json.loads(encoded.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"{what} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        raise UnreadableFile(f"{what} is not JSON: {error}") from None


def read_toml(path: str | os.PathLike[str], *, most: int = MOST_JSON) -> Any:
    """The table in a TOML file."""
    try:
        found = tomllib.loads(read_text(path, most=most))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UnreadableFile(f"{path} is not TOML: {error}") from None
    return _shallow(found, str(path))


def read_yaml(path: str | os.PathLike[str], *, most: int = MOST_JSON) -> Any:
    """The value in a YAML file: plain values only, no tags and no aliases, which could stand for a billion others."""
    import yaml

    text = read_text(path, most=most)
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise UnreadableFile(f"{path} uses aliases (*name), which are not read; write the value out")
        return _shallow(yaml.safe_load(text), str(path))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, UnreadableFile):
            raise
        raise UnreadableFile(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def _shallow(value: Any, what: str) -> Any:
    """`value`, if it is not nested too deeply; level by level, without recursion."""
    level = [value]
    for _ in range(MOST_DEPTH):
        holders = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        level = [item for holder in holders for item in holder]
        if not level:
            return value
    raise UnreadableFile(f"{what} is nested more than {MOST_DEPTH} levels deep")


def nesting(content: bytes) -> int:
    """How deep objects and arrays lie inside each other, brackets inside strings aside. One pass, no recursion."""
    brackets = _STRINGS.sub(b"", content).translate(None, _NOT_BRACKETS)
    return max(itertools.accumulate(1 if byte in b"[{" else -1 for byte in brackets), default=0)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
