"""A safetensors file, read with distrust and written in one pass.

    8 bytes    little-endian length N of the header
    N bytes    JSON: name -> {dtype, shape, data_offsets}, and `__metadata__`, a dict of strings
    the rest   the tensors' bytes, row-major, one after the other

`safetensors.safe_open` checks the header against the file before a byte of a tensor is read: shape x dtype against
offsets, and that the tensors cover the rest of the file without gap or overlap. Reading is our own: one tensor, or some
of its rows, at a time, and nothing is mapped. The library's NumPy reader has no float8, and a mapped file that is cut
while it is read ends the process (SIGBUS).
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from halfbyte.inputs import parse_json, printable, regular

MOST_HEADER = 16 << 20
"""Bytes of a header; the format's own library takes six times as many. Dense models have two million at most."""
MOST_TENSORS = 50_000
"""Tensors of a file; a Llama of 126 layers in NVFP4 has four thousand."""
MOST_DIMS = 32
DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor: where its bytes lie (`start` and `stop` count from the end of the header)."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile(AbstractContextManager["TensorFile"]):
    """An open safetensors file whose header has been checked. `entries` by name; `read` gives NumPy arrays."""

    def __init__(self, path: Path):
        self.path = path
        self._file: BinaryIO = open(path, "rb", opener=regular)  # noqa: SIM115 (closed by `close`)
        try:
            self._data, self.entries = _read_header(self._file, path)
        except BaseException:
            self._file.close()
            raise

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """The tensor, or some of its first dim. Allocates what it returns and nothing else."""
        entry = self.entries[name]
        shape, offset = entry.shape, entry.start
        if entry.shape:
            first, last, _ = rows.indices(entry.shape[0])
            row_bytes = math.prod(entry.shape[1:]) * entry.dtype.itemsize
            shape, offset = (max(last - first, 0), *entry.shape[1:]), entry.start + first * row_bytes
        array = np.empty(shape, entry.dtype)
        self._file.seek(self._data + offset)
        _fill(self._file, array, self.path, name)
        return array

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _fill(file: BinaryIO, array: np.ndarray, path: Path, name: str) -> None:
    view = memoryview(array.reshape(-1).view(np.uint8).data)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise ValueError(f"{path} ended while {name} was read; it changed since it was opened")
        done += count


def _read_header(file: BinaryIO, path: Path) -> tuple[int, dict[str, Entry]]:
    """Returns where the tensors' bytes begin, and the entries. The limits of size come before any parsing."""
    length = int.from_bytes(file.read(8), "little")
    if length > MOST_HEADER:
        raise ValueError(
            f"{path}: the header claims {length:,} bytes, but at most {MOST_HEADER:,} are read; "
            "it is damaged or no safetensors file"
        )
    text = file.read(length)
    if text.count(b'"dtype"') > MOST_TENSORS:
        raise ValueError(f"{path}: the header lists more than {MOST_TENSORS:,} tensors, the most that are read")
    try:
        with safe_open(path, framework="numpy"):
            header = parse_json(text, what=f"the header of {path}", most=MOST_HEADER, depth=8)
    except SafetensorError as error:
        reason = printable(str(error).removeprefix("Error while deserializing header: "))[:400]
        raise ValueError(f"{path} is damaged or no safetensors file: {reason}; get it again") from None
    header.pop("__metadata__", None)
    return 8 + length, {name: _entry(name, value, path) for name, value in header.items()}


def _entry(name: str, value: Mapping[str, Any], path: Path) -> Entry:
    """Returns the entry of a tensor whose fields `safe_open` has checked; it allows other fields and more dtypes."""
    where = f"{path}: tensor {printable(name)[:200]!r}"
    if others := value.keys() - {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where} has the field {printable(min(others))[:40]!r}, which is no field of the format")
    if (dtype := value["dtype"]) not in DTYPES:
        raise ValueError(f"{where} has dtype {dtype}; known are {', '.join(DTYPES)}")
    if (dims := len(value["shape"])) > MOST_DIMS:
        raise ValueError(f"{where} has {dims:,} dims; at most {MOST_DIMS} are read")
    return Entry(name, DTYPES[dtype], tuple(value["shape"]), *value["data_offsets"])


# Writing


@dataclass(frozen=True)
class Planned:
    """A tensor that is going to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path, planned: list[Planned], tensors: Iterator[np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write `planned` with the arrays that `tensors` yields, one at a time and in this order."""
    with open(path, "xb") as file:
        file.write(header_bytes(planned, metadata))
        for plan, array in zip(planned, tensors, strict=True):
            if (array.dtype, array.shape) != (plan.dtype, plan.shape):
                raise AssertionError(f"{plan.name}: planned {plan.dtype} {plan.shape}, got {array.dtype} {array.shape}")
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def header_bytes(planned: Iterable[Planned], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file with these tensors, padded so that their bytes begin at a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for plan in planned:
        offsets = [at, at + plan.nbytes]
        header[plan.name] = {"dtype": NAMES[plan.dtype], "shape": list(plan.shape), "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
