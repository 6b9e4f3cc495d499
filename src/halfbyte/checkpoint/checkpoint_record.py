"""Record, checksums and files of a checkpoint.

The record holds names, shapes, dtypes and checksums of all leaves, and what the caller adds. It is stored as one JSON
string with its own CRC, so that a corrupt record cannot pass for a different, valid one.

The array format does not notice lost bits, so the record has two 32-bit words per array:

    word_j(a) = sum over elements of mix_j(bits(a[i]) + hash_j(i))        mod 2^32,  j = 0, 1

`mix` is a bijection of 32-bit words, so that a change of one element always changes the sum; the index is hashed in, so
that swapped elements change it too. Sums of integers do not depend on their order: the words are the same on any mesh
and any number of hosts. The small files next to the arrays (names, shapes, shardings) are verified by
`check_file_list`.
"""

import contextlib
import json
import math
import os
import shutil
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.io import (
    UnreadableFile,
    atomic_write,
    check_int,
    open_regular_file,
    parse_json,
    read_json,
    sealed_json,
    sealed_text,
)

LAYOUT = 1
MAX_PLAUSIBLE_VALUE = 2.0**63
"""Larger values have no square in float32: the norm over one is infinite, and what it divides is zero. A model with
such a value computes the same for every text, with a gradient of zero and finite numbers everywhere."""
PRIMES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)
MIXERS = ((0x7FEB352D, 0x846CA68B), (0x2C1B3C6D, 0x297A2D39))
FILE_LIST = "halfbyte-files.json"
MAX_HASHED_BYTES = 1 << 20
MAX_METADATA_BYTES = 64 << 20
"""Limit of a file that is not array data: it is read whole into memory."""
ARRAYS = "d"
"""Directory of the array data; the record has a checksum of each array."""
UNFINISHED = "*.orbax-checkpoint-tmp*"


class CorruptCheckpointError(Exception):
    """Raised if the bytes of a checkpoint are not those that were written. The message names the file or the arrays."""


class MissingCheckpointFileError(CorruptCheckpointError):
    """Raised if a file of a checkpoint is missing: the checkpoint is corrupt, or its run is deleting it."""


class CheckpointLoadError(CorruptCheckpointError):
    """Raised if a checkpoint could not be loaded: by corrupt bytes, or by a transient fault of the storage."""


class NonFiniteCheckpointError(CorruptCheckpointError):
    """Raised if the bytes of a checkpoint are those that were written, but some values are not finite."""


class CheckpointReadError(Exception):
    """Raised if the storage could not read a checkpoint. It may be intact: it is never quarantined."""


class CheckpointStructureError(ValueError):
    """Raised if an intact checkpoint does not match the state to restore into."""


@dataclass(frozen=True)
class ArrayDigest:
    """Checksum of one array in memory, sixteen hexadecimal digits, and its number of non-finite values."""

    checksum: str
    not_finite: int


@dataclass(frozen=True)
class CheckpointRecord:
    """Record of a checkpoint: step, leaves by item (`params`, `optimizer`, ...), and `extra`.

    `extra` is JSON of the caller (config, data state).
    """

    step: int
    leaves: Mapping[str, Mapping[str, Mapping[str, Any]]]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Returns the bytes of all leaves, computed from the record."""
        leaves = (leaf for item in self.leaves.values() for leaf in item.values())
        return sum(math.prod(leaf["shape"]) * jnp.dtype(leaf["dtype"]).itemsize for leaf in leaves)

    def to_json(self) -> dict[str, Any]:
        """Returns `{"record": text, "crc32": number}`."""
        body = {"layout": LAYOUT, "step": self.step, "leaves": self.leaves, "extra": self.extra}
        return sealed_json("record", body)

    @classmethod
    def from_json(cls, stored: Any) -> "CheckpointRecord":
        """Parses a record. Raises CorruptCheckpointError if it is missing or not what was written."""
        text = sealed_text("record", stored)
        if text is None:
            raise CorruptCheckpointError("its record is missing, or does not match its own CRC")
        try:
            body = parse_json(text, what="its record")
            if body["layout"] != LAYOUT:
                raise CheckpointStructureError(f"checkpoint layout {body['layout']}, but this version reads {LAYOUT}")
            check_int("step", body["step"], most=2**62)
            _check_leaves(body["leaves"])
            return cls(step=body["step"], leaves=body["leaves"], extra=dict(body["extra"]))
        except CheckpointStructureError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # any content can have a valid CRC
            raise CorruptCheckpointError(f"its record is none: {type(error).__name__} {error}") from None


def leaf_metadata(items: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns shape and dtype of every leaf, by item and path."""
    return {
        item: {name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for name, leaf in named_leaves(tree).items()}
        for item, tree in items.items()
    }


def leaf_metadata_with_checksums(items: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns shape, dtype and checksum of every leaf in memory, by item and path. Raises NonFiniteCheckpointError,
    with the names of the leaves, if a value is not finite: such a state is not saved."""
    metadata = leaf_metadata(items)
    nonfinite: dict[str, int] = {}
    for item, tree in items.items():
        for name, digest in checksum_tree(tree).items():
            metadata[item][name]["checksum"] = digest.checksum
            if digest.not_finite:
                nonfinite[f"{item}/{name}"] = digest.not_finite
    check_all_finite(nonfinite)
    return metadata


def check_structure(record: CheckpointRecord, abstract: Mapping[str, Any]) -> None:
    """Raises CheckpointStructureError, with one line per leaf, if shapes, dtypes or names differ from `abstract`."""
    lines = []
    for item, expected in leaf_metadata(abstract).items():
        stored = record.leaves.get(item)
        if stored is None:
            lines.append(f"{item}: not in the checkpoint")
            continue
        for name in sorted(set(stored) | set(expected)):
            actual, needed = _summary(stored.get(name)), _summary(expected.get(name))
            if actual != needed:
                lines.append(f"{item}/{name}: checkpoint has {actual}, this run wants {needed}")
    if lines:
        shown = "\n  ".join(lines[:12] + ([f"... and {len(lines) - 12} more"] if len(lines) > 12 else []))
        raise CheckpointStructureError(f"the checkpoint of step {record.step} does not fit this run:\n  {shown}")


def check_all_finite(not_finite: Mapping[str, int]) -> None:
    """Raises NonFiniteCheckpointError if any leaf holds values that are not finite, or too large."""
    if not_finite:
        listing = ", ".join(f"{count} in {name}" for name, count in list(not_finite.items())[:4])
        raise NonFiniteCheckpointError(
            f"it holds values that are not finite, or too large to be squared: {listing} ({len(not_finite)} arrays)"
        )


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns leaves by path, `a/b/0`, in tree order: the names that a checkpoint stores, verifies and reports."""
    return {"/".join(map(_key_name, path)): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def checksum_tree(tree: Any) -> dict[str, ArrayDigest]:
    """Returns the digest of every leaf by path, in one pass. Every process of a distributed array must call it, and
    gets the same."""
    digests = jax.device_get(_inspect(named_leaves(tree)))
    return {
        name: ArrayDigest("".join(f"{int(word):08x}" for word in words), int(count))
        for name, (words, count) in digests.items()
    }


def array_checksum(x: jax.Array) -> jax.Array:
    """Returns uint32 [2]: the two words of an array of any dtype of 1, 2 or 4 bytes."""
    bits = _bits(x)
    words = [
        jnp.sum(_mix_hash(bits + _index_hash(x.shape, salt), mixers), dtype=jnp.uint32)
        for salt, mixers in enumerate(MIXERS)
    ]
    return jnp.stack(words)


def count_nonfinite(x: jax.Array) -> jax.Array:
    """Returns an int32 scalar: how many values of a float array are NaN, infinite or not below MAX_PLAUSIBLE_VALUE; 0
    for any other dtype."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros((), jnp.int32)
    return jnp.sum(~(jnp.abs(x.astype(jnp.float32)) < MAX_PLAUSIBLE_VALUE), dtype=jnp.int32)


def shorten_error(error: BaseException) -> str:
    """Returns the text of an error on one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "..."


def write_file_list(directory: Path) -> None:
    """Writes the list of all files of a committed checkpoint. By one rename: a kill leaves the list whole or absent."""
    atomic_write(directory / FILE_LIST, json.dumps(_file_sizes_and_crcs(directory), indent=0, sort_keys=True))


def check_file_list(directory: Path) -> int:
    """Returns the bytes of all files. Raises CorruptCheckpointError, with the first file that is missing or has another
    size or CRC. Files of array data have a size only: their arrays are verified by checksums when they are read.
    A save that was interrupted before its list was written has none."""
    files = _file_sizes_and_crcs(directory)
    total = sum(facts["bytes"] for facts in files.values())
    listed = directory / FILE_LIST
    if not listed.exists():
        return total
    try:
        expected = read_json(listed)
        listing = {name: (facts["bytes"], facts.get("crc32")) for name, facts in expected.items()}
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise CorruptCheckpointError(f"file {FILE_LIST} is damaged: {shorten_error(error)}") from error
    except OSError as error:
        raise CheckpointReadError(f"file {FILE_LIST}: {shorten_error(error)}") from error
    for name, (size, digest) in listing.items():
        if name not in files:
            raise MissingCheckpointFileError(f"file {name} is missing")
        if files[name]["bytes"] != size:
            raise CorruptCheckpointError(f"file {name} has {files[name]['bytes']} bytes instead of {size}")
        if digest is not None and files[name].get("crc32") != digest:
            raise CorruptCheckpointError(f"file {name} is not what was written (its CRC differs)")
    return total


def check_checkpoint_files_regular(directory: Path) -> None:
    """Raises UnreadableFile for what Orbax would block on or read whole when it lists the directory: neither a file nor
    a directory (a pipe), or a file that is not array data and far too large."""
    paths = (Path(folder, name) for folder, folders, files in os.walk(directory) for name in (*folders, *files))
    for path in sorted(paths):  # os.walk leaves out a folder that is deleted meanwhile; rglob would raise
        try:
            status = path.stat()
        except FileNotFoundError:  # deleted meanwhile
            continue
        if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
            raise UnreadableFile(f"{path} is not a regular file; remove it, or restore it from a copy")
        if stat.S_ISREG(status.st_mode) and status.st_size > MAX_METADATA_BYTES and path.parent.name != ARRAYS:
            size = f"{status.st_size:,} bytes, more than {MAX_METADATA_BYTES:,}"
            raise UnreadableFile(f"{path} has {size}; remove its checkpoint, or restore it from a copy")


def check_readable(directory: Path, *, arrays: bool = True) -> None:
    """Raises CheckpointReadError if the file system cannot read some file, whatever its content."""
    for path in sorted(directory.rglob("*")):
        try:
            if path.is_file() and (arrays or path.parent.name != ARRAYS):
                with open(path, "rb", opener=open_regular_file) as file:
                    while file.read(1 << 24):
                        pass
        except OSError as error:
            raise CheckpointReadError(f"file {path.relative_to(directory)}: {shorten_error(error)}") from error


def remove_unfinished(directory: Path) -> list[str]:
    """Deletes the directories of unfinished saves; returns their names."""
    unfinished = sorted(directory.glob(UNFINISHED))
    for path in unfinished:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in unfinished]


def remove_checkpoints(directory: Path, steps: Sequence[int], *, committed: Sequence[int]) -> None:
    """Deletes the unfinished saves of `steps`, and the directory if it is empty then. Of committed checkpoints it only
    deletes those of the steps `committed`: others may come from a backup that was restored into this directory.
    """
    for step in steps:
        for path in (directory / str(step), *directory.glob(str(step) + UNFINISHED.removeprefix("*"))):
            if step in committed or not (path / FILE_LIST).exists():
                shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


def _check_leaves(leaves: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Validates the types of all that a restore reads from a record. Raises TypeError, KeyError or ValueError."""
    for item in leaves.values():
        for leaf in item.values():
            for size in leaf["shape"]:
                check_int("shape", size, most=2**62)
            if not isinstance(leaf["dtype"], str) or "checksum" not in leaf:
                raise TypeError(f"a leaf without dtype and checksum: {str(leaf)[:80]}")
            if not jnp.issubdtype(leaf["dtype"], jnp.number) and leaf["dtype"] != "bool":
                raise TypeError(f"a leaf of {leaf['dtype'][:80]!r}, which are no numbers")


def _summary(leaf: Mapping[str, Any] | None) -> str:
    if leaf is None:
        return "nothing"
    return f"{leaf['dtype']}[{','.join(map(str, leaf['shape']))}]"


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


@jax.jit
def _inspect(leaves: dict[str, jax.Array]) -> dict[str, tuple[jax.Array, jax.Array]]:
    return {name: (array_checksum(leaf), count_nonfinite(leaf)) for name, leaf in leaves.items()}


def _bits(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, words).astype(jnp.uint32)


def _index_hash(shape: tuple[int, ...], salt: int) -> jax.Array:
    index = jnp.full(shape, salt, jnp.uint32)
    for dim in range(len(shape)):
        step = jnp.uint32(PRIMES[dim % len(PRIMES)])
        index = index * jnp.uint32(31) + lax.broadcasted_iota(jnp.uint32, shape, dim) * step
    return index


def _mix_hash(h: jax.Array, multipliers: tuple[int, int]) -> jax.Array:
    h = (h ^ (h >> 16)) * jnp.uint32(multipliers[0])
    h = (h ^ (h >> 15)) * jnp.uint32(multipliers[1])
    return h ^ (h >> 16)


def _file_sizes_and_crcs(directory: Path) -> dict[str, dict[str, int]]:
    try:
        files = [path for path in sorted(directory.rglob("*")) if path.is_file() and FILE_LIST not in path.name]
        return {str(path.relative_to(directory)): _describe(path) for path in files}
    except OSError as error:
        raise CheckpointReadError(shorten_error(error)) from error


def _describe(path: Path) -> dict[str, int]:
    size = path.stat().st_size
    hashed = size <= MAX_HASHED_BYTES and path.parent.name != ARRAYS
    return {"bytes": size, "crc32": zlib.crc32(path.read_bytes())} if hashed else {"bytes": size}
