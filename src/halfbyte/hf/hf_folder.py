"""Untrusted Hugging Face folders: config.json, safetensors shards and the small files; writing of safetensors files.

Nothing in a folder is trusted. Shards are plain names of regular files inside the folder (no path, no link that leads
out). The index and the shards must name the same tensors, each once. A pickle is never opened, because reading one runs
its code. A safetensors file is

    8 bytes    little-endian length N of the header
    N bytes    JSON: name -> {dtype, shape, data_offsets}, and `__metadata__`, a dict of strings
    the rest   the tensors' bytes, row-major, one after the other
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from halfbyte.io import escape_control_chars, open_regular_file, parse_json, read_json

HF_CONFIG_FILE = "config.json"
MAX_HF_CONFIG_BYTES = 1 << 20
SINGLE_SHARD_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SIDECAR_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
"""Files that are imported and exported unchanged."""

MAX_HEADER_BYTES = 16 << 20
"""Bytes of a header; the safetensors library accepts six times as many. Dense models have at most two million."""
MAX_TENSORS = 50_000
"""Tensors of a file; a Llama of 126 layers in NVFP4 has four thousand."""
MAX_DIMS = 32
SAFETENSORS_DTYPES: dict[str, np.dtype] = {
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
DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """Metadata of a stored tensor; byte offsets `start` and `stop` count from the end of the header."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile(AbstractContextManager["SafetensorsFile"]):
    """An open safetensors file whose header has been checked. `entries` are by name; `read` returns NumPy arrays.

    `safetensors.safe_open` checks the header against the file before a byte of a tensor is read: shape x dtype against
    offsets, and that the tensors cover the rest of the file without gap or overlap. Reading is our own, without mmap,
    one tensor or some of its rows at a time: the library's NumPy reader has no float8, and a mapped file that is
    truncated while it is read ends the process (SIGBUS).
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: BinaryIO = open(path, "rb", opener=open_regular_file)  # noqa: SIM115 (closed by `close`)
        try:
            self._data, self.entries = _read_header(self._file, path)
        except BaseException:
            self._file.close()
            raise

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Returns a tensor, or some rows of its first dim. Allocates only the result."""
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


class HfFolder(AbstractContextManager["HfFolder"]):
    """An open Hugging Face folder: `config` (the fields of config.json) and the tensors of all shards by name."""

    def __init__(self, directory: Path):
        self.directory = directory
        if not directory.is_dir():
            raise ValueError(f"{directory} is not a directory; give the folder that holds config.json and safetensors")
        self.config: dict[str, Any] = read_json(resolve_inside(directory, HF_CONFIG_FILE), most=MAX_HF_CONFIG_BYTES)
        if not isinstance(self.config, dict):
            raise ValueError(
                f"{directory / HF_CONFIG_FILE} must hold one JSON object, got {type(self.config).__name__}"
            )
        self._stack = ExitStack()
        try:
            self._shard_of: dict[str, SafetensorsFile] = self._open_shards()
        except BaseException:
            self._stack.close()
            raise

    def _open_shards(self) -> dict[str, SafetensorsFile]:
        listed = shard_names(self.directory)
        shard_of: dict[str, SafetensorsFile] = {}
        for shard in dict.fromkeys(listed.values()) or [SINGLE_SHARD_FILE]:
            file = self._stack.enter_context(SafetensorsFile(resolve_inside(self.directory, shard)))
            for name in file.entries:
                if name in shard_of:
                    both = f"{shard_of[name].path.name} and {shard}"
                    raise ValueError(f"tensor {escape_control_chars(name)!r} lies in two shards, {both}")
                shard_of[name] = file
            if len(shard_of) > MAX_TENSORS:
                raise ValueError(f"{self.directory} holds more than {MAX_TENSORS:,} tensors, the most that are read")
        if listed:
            _check_index(listed, shard_of)
        return shard_of

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Returns dtype and shape of every tensor by name."""
        return {name: file.entries[name] for name, file in self._shard_of.items()}

    def shards(self) -> list[Path]:
        """Returns the shard files in the order of opening."""
        return list(dict.fromkeys(file.path for file in self._shard_of.values()))

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Returns a tensor, or some rows of its first dim."""
        return self._shard_of[name].read(name, rows)

    def sidecar_files(self) -> Iterator[Path]:
        """Yields the existing tokenizer and generation files."""
        for name in SIDECAR_FILES:
            if (self.directory / name).exists():
                yield resolve_inside(self.directory, name)

    def close(self) -> None:
        self._stack.close()

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class TensorToWrite:
    """Name, dtype and shape of a tensor to write."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def is_hf_folder(directory: Path) -> bool:
    """Returns True if the directory has a config.json that names an architecture."""
    if not (directory / HF_CONFIG_FILE).is_file():
        return False
    fields = read_json(directory / HF_CONFIG_FILE, most=MAX_HF_CONFIG_BYTES)
    return isinstance(fields, dict) and ("architectures" in fields or "model_type" in fields)


def resolve_inside(directory: Path, name: str) -> Path:
    """Returns the path of file `name` of the folder; ValueError if `name` is a path, or a link out of the folder."""
    if not name or Path(name).name != name or "\\" in name or "\0" in name or name in (".", ".."):
        raise ValueError(
            f"{directory}: {escape_control_chars(name)[:200]!r} is not the plain name of a file in this folder"
        )
    path = directory / name
    if not path.exists():
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link to nothing; download the file again")
        raise ValueError(f"{directory} has no {escape_control_chars(name)}; is the download complete?")
    if path.resolve().parent != directory.resolve():
        raise ValueError(
            f"{path} is a symbolic link that leads out of the folder, to {path.resolve()}; "
            "copy the files themselves into one folder (cp -L), or download with --local-dir"
        )
    return path


def shard_names(directory: Path) -> Mapping[str, str]:
    """Returns the index (tensor -> shard); empty for a folder of one file. A folder of pickles is refused."""
    if (directory / INDEX_FILE).exists():
        index = read_json(resolve_inside(directory, INDEX_FILE))
        listed = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(listed, dict) or not listed or not all(isinstance(shard, str) for shard in listed.values()):
            raise ValueError(f"{directory / INDEX_FILE}: weight_map must map tensor names to shard files")
        return listed
    if (directory / SINGLE_SHARD_FILE).exists():
        return {}
    pickles = sorted(path.name for pattern in PICKLE_PATTERNS for path in directory.glob(pattern))
    if pickles:
        raise ValueError(
            f"{directory} holds pickles ({', '.join(pickles[:3])}) and no safetensors. Reading a pickle runs the code "
            "in it, so it is refused; convert the weights to safetensors where you trust them"
        )
    raise ValueError(
        f"{directory} has neither {SINGLE_SHARD_FILE} nor {INDEX_FILE}; it holds no weights that can be read"
    )


def write_safetensors(
    path: Path, planned: list[TensorToWrite], tensors: Iterator[np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes `planned` with the arrays that `tensors` yields in the same order, one at a time."""
    with open(path, "xb") as file:
        file.write(encode_header(planned, metadata))
        for plan, array in zip(planned, tensors, strict=True):
            if (array.dtype, array.shape) != (plan.dtype, plan.shape):
                raise AssertionError(f"{plan.name}: planned {plan.dtype} {plan.shape}, got {array.dtype} {array.shape}")
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def encode_header(planned: Iterable[TensorToWrite], metadata: Mapping[str, str]) -> bytes:
    """Returns length and header of a file with these tensors, padded so that their bytes begin at a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for plan in planned:
        offsets = [offset, offset + plan.nbytes]
        header[plan.name] = {"dtype": DTYPE_NAMES[plan.dtype], "shape": list(plan.shape), "data_offsets": offsets}
        offset = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _fill(file: BinaryIO, array: np.ndarray, path: Path, name: str) -> None:
    view = memoryview(array.reshape(-1).view(np.uint8).data)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise ValueError(f"{path} ended while {name} was read; it changed since it was opened")
        done += count


def _read_header(file: BinaryIO, path: Path) -> tuple[int, dict[str, TensorEntry]]:
    """Returns the offset of the tensors' bytes, and the entries. Size limits are checked before any parsing."""
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(
            f"{path}: the header claims {length:,} bytes, but at most {MAX_HEADER_BYTES:,} are read; "
            "it is damaged or no safetensors file"
        )
    text = file.read(length)
    if text.count(b'"dtype"') > MAX_TENSORS:
        raise ValueError(f"{path}: the header lists more than {MAX_TENSORS:,} tensors, the most that are read")
    try:
        with safe_open(path, framework="numpy"):
            header = parse_json(text, what=f"the header of {path}", most=MAX_HEADER_BYTES, depth=8)
    except SafetensorError as error:
        reason = escape_control_chars(str(error).removeprefix("Error while deserializing header: "))[:400]
        raise ValueError(f"{path} is damaged or no safetensors file: {reason}; get it again") from None
    header.pop("__metadata__", None)
    return 8 + length, {name: _entry(name, value, path) for name, value in header.items()}


def _entry(name: str, value: Mapping[str, Any], path: Path) -> TensorEntry:
    """Returns the entry of a tensor whose fields `safe_open` has checked; it allows other fields and more dtypes."""
    where = f"{path}: tensor {escape_control_chars(name)[:200]!r}"
    if others := value.keys() - {"dtype", "shape", "data_offsets"}:
        raise ValueError(
            f"{where} has the field {escape_control_chars(min(others))[:40]!r}, which is no field of the format"
        )
    if (dtype := value["dtype"]) not in SAFETENSORS_DTYPES:
        raise ValueError(f"{where} has dtype {dtype}; known are {', '.join(SAFETENSORS_DTYPES)}")
    if (dims := len(value["shape"])) > MAX_DIMS:
        raise ValueError(f"{where} has {dims:,} dims; at most {MAX_DIMS} are read")
    return TensorEntry(name, SAFETENSORS_DTYPES[dtype], tuple(value["shape"]), *value["data_offsets"])


def _check_index(listed: Mapping[str, str], shard_of: Mapping[str, SafetensorsFile]) -> None:
    for name, shard in listed.items():
        if name not in shard_of or shard_of[name].path.name != shard:
            where = f"it lies in {shard_of[name].path.name}" if name in shard_of else "no shard holds it"
            tensor, file = escape_control_chars(name)[:200], escape_control_chars(shard)[:200]
            raise ValueError(f"{INDEX_FILE} says that {tensor!r} is in {file}, but {where}")
    extra = sorted(set(shard_of) - set(listed))
    if extra:
        first = escape_control_chars(extra[0])
        raise ValueError(f"{INDEX_FILE} does not list {len(extra)} tensors that the shards hold, first {first!r}")
