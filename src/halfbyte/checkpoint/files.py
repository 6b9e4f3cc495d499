"""The files of a committed checkpoint: which there are, how large, and the hash of those around the arrays.

Arrays are verified by their own checksums when they are read; the small files around them (names, shapes, shardings)
are verified here. Damage and a disk that cannot be read are told apart.
"""

import contextlib
import json
import os
import shutil
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path

from halfbyte.inputs import UnreadableFile, read_json, regular, replace_file

from .record import DamagedCheckpoint, MissingFile, UnreadableCheckpoint, one_line

FILE_LIST = "halfbyte-files.json"
SMALL = 1 << 20
MOST_AROUND = 64 << 20
"""Bytes of a file around the arrays: it is read in one piece."""
ARRAYS = "d"
"""Where the array database keeps its data; each array has a checksum of its own."""
UNFINISHED = "*.orbax-checkpoint-tmp*"


def write_file_list(directory: Path) -> None:
    """Write down every file of a committed checkpoint. One rename: a kill leaves the list whole or absent."""
    replace_file(directory / FILE_LIST, json.dumps(_facts(directory), indent=0, sort_keys=True))


def check_file_list(directory: Path) -> int:
    """Bytes of all files. Raise DamagedCheckpoint naming the first file that is missing, has another size or another
    hash. A save cut off before its list was written has none."""
    found = _facts(directory)
    held = sum(facts["bytes"] for facts in found.values())
    listed = directory / FILE_LIST
    if not listed.exists():
        return held
    try:
        expected = read_json(listed)
        wanted = {name: (facts["bytes"], facts.get("crc32")) for name, facts in expected.items()}
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise DamagedCheckpoint(f"file {FILE_LIST} is damaged: {one_line(error)}") from error
    except OSError as error:
        raise UnreadableCheckpoint(f"file {FILE_LIST}: {one_line(error)}") from error
    for name, (size, digest) in wanted.items():
        if name not in found:
            raise MissingFile(f"file {name} is missing")
        if found[name]["bytes"] != size:
            raise DamagedCheckpoint(f"file {name} has {found[name]['bytes']} bytes instead of {size}")
        if digest is not None and found[name].get("crc32") != digest:
            raise DamagedCheckpoint(f"file {name} is not what was written (its CRC differs)")
    return held


def refuse_irregular(directory: Path) -> None:
    """Raise UnreadableFile if something under it is there that Orbax would wait for or read whole when it looks at the
    directory: neither a file nor a directory (a pipe), or a file around the arrays that is far too large."""
    inside = (Path(at, name) for at, folders, files in os.walk(directory) for name in (*folders, *files))
    for path in sorted(inside):  # os.walk leaves out a folder that is deleted meanwhile; rglob would raise
        try:
            found = path.stat()
        except FileNotFoundError:  # deleted meanwhile
            continue
        if not stat.S_ISDIR(found.st_mode) and not stat.S_ISREG(found.st_mode):
            raise UnreadableFile(f"{path} is not a regular file; remove it, or restore it from a copy")
        if stat.S_ISREG(found.st_mode) and found.st_size > MOST_AROUND and path.parent.name != ARRAYS:
            size = f"{found.st_size:,} bytes, more than {MOST_AROUND:,}"
            raise UnreadableFile(f"{path} has {size}; remove its checkpoint, or restore it from a copy")


def check_readable(directory: Path, *, arrays: bool = True) -> None:
    """Raise UnreadableCheckpoint if the file system cannot give back some file, whatever is in it."""
    for path in sorted(directory.rglob("*")):
        try:
            if path.is_file() and (arrays or path.parent.name != ARRAYS):
                with open(path, "rb", opener=regular) as file:
                    while file.read(1 << 24):
                        pass
        except OSError as error:
            raise UnreadableCheckpoint(f"file {path.relative_to(directory)}: {one_line(error)}") from error


def remove_unfinished(directory: Path) -> list[str]:
    """Delete what saves that never ended have left behind; their names."""
    left = sorted(directory.glob(UNFINISHED))
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in left]


def remove_saves(directory: Path, steps: Sequence[int], *, committed: Sequence[int]) -> None:
    """Deletes what the saves of `steps` left unfinished, and the directory if it is empty then. Of committed
    checkpoints only those of the steps `committed` go: others may come from a backup that was restored to this place.
    """
    for step in steps:
        for path in (directory / str(step), *directory.glob(str(step) + UNFINISHED.removeprefix("*"))):
            if step in committed or not (path / FILE_LIST).exists():
                shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


def _facts(directory: Path) -> dict[str, dict[str, int]]:
    try:
        files = [path for path in sorted(directory.rglob("*")) if path.is_file() and FILE_LIST not in path.name]
        return {str(path.relative_to(directory)): _describe(path) for path in files}
    except OSError as error:
        raise UnreadableCheckpoint(one_line(error)) from error


def _describe(path: Path) -> dict[str, int]:
    size = path.stat().st_size
    hashed = size <= SMALL and path.parent.name != ARRAYS
    return {"bytes": size, "crc32": zlib.crc32(path.read_bytes())} if hashed else {"bytes": size}
