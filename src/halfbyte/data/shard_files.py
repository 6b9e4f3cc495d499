"""ArrayRecord shards: token runs packed to rows and written by (split, source), read by row number.

The bytes of a shard depend only on its rows: each source is written by itself, with fixed options. ArrayRecord detects
a flipped bit when a record is read; the sha256 in the manifest detects it before the first step.
"""

import bisect
import collections
import contextlib
import errno
import functools
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from array_record.python import array_record_module

from halfbyte.data.dataset_manifest import SHARD_SUFFIX, ShardEntry, SourceTotals
from halfbyte.data.encode import SPLITS, SequencePacker, TokenRun, row_dtype
from halfbyte.data.text_files import sha256_of

GROUP_BYTES = 16 << 10  # rows compressed together: small enough to read one at random, large enough to compress
SHARD_BYTES = 256 << 20


MAX_SOURCES = 256


class ShardWriter:
    """Writes the rows of one source and split into numbered shards of at most `shard_bytes` (before compression)."""

    def __init__(self, directory: Path, split: str, source: str, number: int, *, dtype: np.dtype, shard_bytes: int):
        self.directory, self.split, self.source, self.number = directory, split, source, number
        self.rows_per_shard = max(1, shard_bytes // dtype.itemsize)
        self.options = f"group_size:{min(16, max(1, GROUP_BYTES // dtype.itemsize))}"
        self.shards: list[ShardEntry] = []
        self._writer: array_record_module.ArrayRecordWriter | None = None
        self._rows = self._tokens = self._max = 0

    def write(self, rows: np.ndarray) -> None:
        while len(rows):
            if self._writer is None:
                self._path.touch()  # raises an error that names the cause; the library's does not
                self._writer = array_record_module.ArrayRecordWriter(str(self._path), self.options)
            taken, rows = np.split(rows, [self.rows_per_shard - self._rows])
            with system_errors(self._path):
                for row in taken:
                    self._writer.write(row.tobytes())
            self._rows += len(taken)
            self._tokens += int(np.count_nonzero(taken["segments"]))
            self._max = max(self._max, int(taken["tokens"].max()))
            if self._rows == self.rows_per_shard:
                self.close()

    def close(self) -> None:
        """Finishes the open shard, if any, and appends it to `shards`."""
        if self._writer is None:
            return
        path = self._path
        with system_errors(path):
            self._writer.close()
        size, digest = path.stat().st_size, sha256_of(path)
        entry = ShardEntry(path.name, self.split, self.source, self._rows, self._tokens, self._max, size, digest)
        self.shards.append(entry)
        self._writer = None
        self._rows = self._tokens = self._max = 0

    @property
    def _path(self) -> Path:
        return self.directory / f"{self.split}-{self.number:03d}-{len(self.shards):05d}{SHARD_SUFFIX}"


@contextlib.contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """Raises OSError for an error of the operating system (a full disk, a file size limit), which ArrayRecord raises as
    RuntimeError with its text."""
    try:
        yield
    except RuntimeError as error:
        codes = (code for code in errno.errorcode if f"failed: {os.strerror(code)}" in str(error))
        if code := next(codes, 0):
            raise OSError(code, os.strerror(code), str(path)) from error
        raise


class RunWriters:
    """Packs and writes token runs: one packer and one shard writer per (split, source).

    Sources are numbered in the order of their first run.
    """

    def __init__(self, directory: Path, seq_len: int, vocab_size: int, shard_bytes: int):
        self.directory, self.vocab_size, self.shard_bytes = directory, vocab_size, shard_bytes
        self.dtype = row_dtype(seq_len, vocab_size)
        self.sources: dict[str, int] = {}
        self._sinks: dict[tuple[str, str], tuple[SequencePacker, ShardWriter]] = {}
        self._documents: collections.Counter[tuple[str, str]] = collections.Counter()
        self._text_bytes: collections.Counter[tuple[str, str]] = collections.Counter()

    def write_runs(self, runs: Mapping[tuple[str, str], TokenRun]) -> None:
        for key, run in runs.items():
            if run.tokens.max(initial=0) >= self.vocab_size:
                raise ValueError(f"token {run.tokens.max()} is outside the tokenizer's vocabulary of {self.vocab_size}")
            packer, writer = self._sink(key)
            writer.write(packer.add(run.tokens, run.starts))
            self._documents[key] += int(np.count_nonzero(run.starts))
            self._text_bytes[key] += run.text_bytes

    def finish(self) -> tuple[list[ShardEntry], dict[str, dict[str, SourceTotals]]]:
        """Closes all writers. Returns the shards in order, and the totals of each split by source."""
        splits: dict[str, dict[str, SourceTotals]] = {split: {} for split in SPLITS}
        shards: list[ShardEntry] = []
        for key in ((split, source) for split in SPLITS for source in self.sources):
            if key not in self._sinks:
                continue
            packer, writer = self._sinks[key]
            writer.write(packer.finish())
            writer.close()
            shards += writer.shards
            tokens, rows = sum(s.tokens for s in writer.shards), sum(s.rows for s in writer.shards)
            splits[key[0]][key[1]] = SourceTotals(self._documents[key], self._text_bytes[key], tokens, rows)
        return shards, splits

    def _sink(self, key: tuple[str, str]) -> tuple[SequencePacker, ShardWriter]:
        if key in self._sinks:
            return self._sinks[key]
        split, source = key
        number = self.sources.setdefault(source, len(self.sources))
        if number >= MAX_SOURCES:
            raise ValueError(
                f"more than {MAX_SOURCES} different values of 'source' (the last: {source!r}); rows never mix "
                "sources, so a source should be a collection, not a document: rewrite or drop the field"
            )
        writer = ShardWriter(self.directory, split, source, number, dtype=self.dtype, shard_bytes=self.shard_bytes)
        self._sinks[key] = SequencePacker(self.dtype, number), writer
        return self._sinks[key]


class ShardRows:
    """Random access to the rows of several shards, in order: `rows[i]` is the stored record, as bytes."""

    def __init__(self, directory: Path, shards: Sequence[ShardEntry], dtype: np.dtype):
        self.directory, self.shards, self.dtype = directory, tuple(shards), dtype
        ends = np.cumsum([shard.rows for shard in shards], dtype=np.int64)
        self._ends: list[int] = ends.tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> bytes:
        shard, row = self.locate(index)
        with _name_shard_in_errors(self.directory / self.shards[shard].file, f", row {row}"):
            return self._reader(shard).read([row])[0]

    def locate(self, index: int) -> tuple[int, int]:
        """Returns the shard number of row `index` and the row inside that shard."""
        shard = bisect.bisect_right(self._ends, index)
        return shard, index - (self._ends[shard] - self.shards[shard].rows)

    def describe(self, index: int) -> str:
        """Returns file and row where row `index` is stored, for messages."""
        shard, row = self.locate(index)
        return f"{self.directory / self.shards[shard].file}, row {row}"

    def blocks(self, stride: int = 1) -> Iterator[np.ndarray]:
        """Structured arrays of at most 1,024 rows, in order: every row, or every `stride`-th."""
        for start in range(0, len(self), 1024 * stride):
            chosen = range(start, min(start + 1024 * stride, len(self)), stride)
            yield np.frombuffer(b"".join(self[i] for i in chosen), self.dtype)

    def read_all(self) -> np.ndarray:
        """Every row, as one structured array."""
        parts = []
        for i, shard in enumerate(self.shards):
            with _name_shard_in_errors(self.directory / shard.file):
                parts += self._reader(i).read(0, shard.rows)
        return np.frombuffer(b"".join(parts), self.dtype)

    def _reader(self, shard: int) -> array_record_module.ArrayRecordReader:
        path = self.directory / self.shards[shard].file
        with _name_shard_in_errors(path):
            status = path.stat()
            return _cached_reader(path, status.st_ino, status.st_mtime_ns)


def open_shard(path: Path) -> array_record_module.ArrayRecordReader:
    """Returns a reader for random access: no read-ahead, no threads of its own."""
    with _name_shard_in_errors(path):
        return array_record_module.ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:0")


def max_open_files() -> int:
    """Returns half of the file handles that this process may have, at most 4,096."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if soft == resource.RLIM_INFINITY else max(1, min(4096, soft // 2))


@functools.lru_cache(maxsize=max_open_files())
def _cached_reader(path: Path, inode: int, changed_ns: int) -> array_record_module.ArrayRecordReader:
    """Returns an open reader from the process-wide LRU cache, which bounds the file handles of data sets of any size.

    Inode and time in the key: a file that was replaced gets a new reader. A reader that is evicted while another thread
    reads from it lives until that read is done.
    """
    return open_shard(path)


@contextlib.contextmanager
def _name_shard_in_errors(path: Path, where: str = "") -> Iterator[None]:
    """Raises ArrayRecord's error about a damaged file as a ValueError that names the file."""
    try:
        yield
    except (RuntimeError, IndexError, FileNotFoundError) as error:
        raise ValueError(
            f"{path}{where}: shard damaged ({error}); copy it again or prepare the data set again"
        ) from error
