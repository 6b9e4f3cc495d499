"""ArrayRecord shards: written one source at a time with fixed options, read by row number.

The bytes of a shard depend on its rows alone. ArrayRecord itself notices a flipped bit when a record is read; the
sha256 in the manifest notices it before the first step.
"""

import bisect
import contextlib
import functools
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from array_record.python import array_record_module

from halfbyte.data.files import sha256_of
from halfbyte.data.manifest import SHARD_SUFFIX, Shard

GROUP_BYTES = 16 << 10  # rows compressed together: small enough to read one at random, large enough to compress
SHARD_BYTES = 256 << 20


class ShardWriter:
    """Writes the rows of one source and split into numbered shards of at most `shard_bytes` (before compression)."""

    def __init__(self, directory: Path, split: str, source: str, number: int, *, dtype: np.dtype, shard_bytes: int):
        self.directory, self.split, self.source, self.number = directory, split, source, number
        self.rows_per_shard = max(1, shard_bytes // dtype.itemsize)
        self.options = f"group_size:{min(16, max(1, GROUP_BYTES // dtype.itemsize))}"
        self.shards: list[Shard] = []
        self._writer: array_record_module.ArrayRecordWriter | None = None
        self._rows = self._tokens = self._max = 0

    def write(self, rows: np.ndarray) -> None:
        while len(rows):
            if self._writer is None:
                self._path.touch()  # raises as Python does where no file can be made; the library only says 'no'
                self._writer = array_record_module.ArrayRecordWriter(str(self._path), self.options)
            taken, rows = np.split(rows, [self.rows_per_shard - self._rows])
            for row in taken:
                self._writer.write(row.tobytes())
            self._rows += len(taken)
            self._tokens += int(np.count_nonzero(taken["segments"]))
            self._max = max(self._max, int(taken["tokens"].max()))
            if self._rows == self.rows_per_shard:
                self.close()

    def close(self) -> None:
        """Finishes the open shard, if any, and notes it in `shards`."""
        if self._writer is None:
            return
        self._writer.close()
        path = self._path
        size, digest = path.stat().st_size, sha256_of(path)
        entry = Shard(path.name, self.split, self.source, self._rows, self._tokens, self._max, size, digest)
        self.shards.append(entry)
        self._writer = None
        self._rows = self._tokens = self._max = 0

    @property
    def _path(self) -> Path:
        return self.directory / f"{self.split}-{self.number:03d}-{len(self.shards):05d}{SHARD_SUFFIX}"


class Rows:
    """Random access to the rows of several shards, in order: `rows[i]` is the stored record, as bytes."""

    def __init__(self, directory: Path, shards: Sequence[Shard], dtype: np.dtype):
        self.directory, self.shards, self.dtype = directory, tuple(shards), dtype
        ends = np.cumsum([shard.rows for shard in shards], dtype=np.int64)
        self._ends: list[int] = ends.tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> bytes:
        shard, row = self.locate(index)
        with _naming(self.directory / self.shards[shard].file, f", row {row}"):
            return self._reader(shard).read([row])[0]

    def locate(self, index: int) -> tuple[int, int]:
        """(shard number, row inside it)."""
        shard = bisect.bisect_right(self._ends, index)
        return shard, index - (self._ends[shard] - self.shards[shard].rows)

    def describe(self, index: int) -> str:
        """Where row `index` is stored, for messages."""
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
            with _naming(self.directory / shard.file):
                parts += self._reader(i).read(0, shard.rows)
        return np.frombuffer(b"".join(parts), self.dtype)

    def _reader(self, shard: int) -> array_record_module.ArrayRecordReader:
        path = self.directory / self.shards[shard].file
        with _naming(path):
            found = path.stat()
            return _kept_open(path, found.st_ino, found.st_mtime_ns)


def open_shard(path: Path) -> array_record_module.ArrayRecordReader:
    """A reader for random access: no read-ahead, no threads of its own."""
    with _naming(path):
        return array_record_module.ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:0")


def most_open() -> int:
    """Half of the file handles that this process may have, at most 4,096."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if soft == resource.RLIM_INFINITY else max(1, min(4096, soft // 2))


@functools.lru_cache(maxsize=most_open())
def _kept_open(path: Path, inode: int, changed_ns: int) -> array_record_module.ArrayRecordReader:
    """A shard that is open, over all data sets of the process: the most recently read ones are. A data set of thousands
    of shards needs no more handles than one of a hundred. A file that was replaced, by inode and time, is another file;
    a reader that is put away while another thread reads from it lives until that read is done."""
    return open_shard(path)


@contextlib.contextmanager
def _naming(path: Path, where: str = "") -> Iterator[None]:
    """What ArrayRecord says of a damaged file, as a ValueError that names it."""
    try:
        yield
    except (RuntimeError, IndexError, FileNotFoundError) as error:
        raise ValueError(
            f"{path}{where}: shard damaged ({error}); copy it again or prepare the data set again"
        ) from error
