"""A prepared data set, opened and verified; and mixtures of several.

Opening compares every file with the manifest before a single step is taken: sizes first, which is instant, then sha256.
"""

import concurrent.futures
import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from halfbyte.data.dataset_manifest import (
    SHARD_SUFFIX,
    TOKENIZER_FILE,
    DatasetManifest,
    ShardEntry,
    SourceTotals,
    read_manifest,
)
from halfbyte.data.encode import SPLITS, TRAIN
from halfbyte.data.shard_files import ShardRows, open_shard
from halfbyte.data.text_files import sha256_of
from halfbyte.data.tokenizer import MAX_TOKENIZER_BYTES, Tokenizer
from halfbyte.data.worker_pool import ProgressMeter
from halfbyte.io import expand_user, read_text

PROGRESS_THRESHOLD_BYTES = 4 << 30  # bytes of shards from which hashing takes long enough to show its progress


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A prepared data set. Made by `open_dataset`, which has verified it."""

    directory: Path
    manifest: DatasetManifest

    @property
    def vocab_size(self) -> int:
        return self.manifest.vocab_size

    @property
    def seq_len(self) -> int:
        return self.manifest.seq_len

    def tokenizer(self) -> Tokenizer:
        """The tokenizer it was made with."""
        stated = self.manifest.tokenizer
        text = read_text(self.directory / TOKENIZER_FILE, most=MAX_TOKENIZER_BYTES)
        return Tokenizer(text, eos=stated["eos"], bos=stated["bos"])

    def sources(self, split: str = TRAIN) -> tuple[str, ...]:
        """Names of the sources that have rows in `split`, in stored order."""
        totals = self._split(split)
        return tuple(name for name in self.manifest.sources if name in totals and totals[name].rows)

    def num_rows(self, split: str = TRAIN, source: str | None = None) -> int:
        return sum(totals.rows for name, totals in self._split(split).items() if source in (None, name))

    def rows(self, split: str = TRAIN, source: str | None = None) -> ShardRows:
        """Random access to the rows of a split, or of one source of it."""
        if source is not None and source not in self.sources(split):
            raise ValueError(
                f"{self.directory}: no source {source!r} in {split}; it has {', '.join(self.sources(split)) or 'none'}"
            )
        chosen = [s for s in self.manifest.shards if s.split == split and source in (None, s.source)]
        return ShardRows(self.directory, chosen, self.manifest.row_dtype)

    def read_rows(self, split: str = TRAIN, source: str | None = None) -> np.ndarray:
        """All rows at once, as a structured array (source, tokens, segments)."""
        return self.rows(split, source).read_all()

    def _split(self, split: str) -> dict[str, SourceTotals]:
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: a data set has {' and '.join(SPLITS)}")
        return self.manifest.splits[split]


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Several data sets read together, rows drawn in proportion to `weights`."""

    datasets: tuple[Dataset, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.datasets or len(self.datasets) != len(self.weights):
            raise ValueError(
                f"a mixture of {len(self.datasets)} data sets with {len(self.weights)} weights; give one weight each"
            )
        for dataset, weight in zip(self.datasets, self.weights, strict=True):
            if not weight > 0 or weight == float("inf"):
                raise ValueError(
                    f"weight {weight} of {dataset.directory}: it must be positive; leave out what should not be read"
                )
            self._check_agrees(dataset)

    def _check_agrees(self, other: Dataset) -> None:
        first = self.datasets[0]
        for field, a, b in (
            ("seq_len", first.seq_len, other.seq_len),
            ("tokenizer", first.manifest.tokenizer["sha256"], other.manifest.tokenizer["sha256"]),
        ):
            if a != b:
                raise ValueError(
                    f"{first.directory} and {other.directory} differ in {field} ({a} and {b}); "
                    "prepare both with the same tokenizer.json and --seq-len to mix them"
                )

    @property
    def manifest(self) -> DatasetManifest:
        """The first data set's: they agree in tokenizer, vocabulary and row length."""
        return self.datasets[0].manifest

    @property
    def vocab_size(self) -> int:
        return self.datasets[0].vocab_size

    @property
    def seq_len(self) -> int:
        return self.datasets[0].seq_len

    def tokenizer(self) -> Tokenizer:
        return self.datasets[0].tokenizer()


def open_dataset(directory: str | Path, *, verify: str = "full", progress: bool = False) -> Dataset:
    """The data set in `directory`, verified; ValueError names the file that is wrong and what to do.

    `verify="sizes"` skips the sha256 of shards, for a data set so large that another host verifies it.
    """
    if verify not in ("full", "sizes"):
        raise ValueError(f"verify {verify!r}: 'full' compares sha256, 'sizes' only presence and size")
    directory = expand_user(directory)
    manifest = read_manifest(directory)
    _check_listing(directory, manifest)
    _check_sizes(directory, manifest)
    _check_tokenizer(directory, manifest)
    if verify == "full":
        _check_contents(directory, manifest, progress=progress)
    for shard in manifest.shards:
        _check_shard_facts(directory, shard, manifest.vocab_size)
    if manifest.rows(TRAIN) == 0:
        raise ValueError(f"{directory}: the data set has no training rows; prepare it again from files that hold text")
    return Dataset(directory, manifest)


def _prepare_again_hint(directory: Path) -> str:
    return f"copy {directory} again from where it was made, or prepare it again with --overwrite"


def _check_listing(directory: Path, manifest: DatasetManifest) -> None:
    listed = Counter(shard.file for shard in manifest.shards)
    present = {path.name for path in directory.glob(f"*{SHARD_SUFFIX}")}
    for name, times in listed.items():
        if times > 1:
            raise ValueError(f"{directory / name}: listed twice in the manifest; {_prepare_again_hint(directory)}")
        if name not in present:
            raise ValueError(f"{directory / name}: shard missing; {_prepare_again_hint(directory)}")
    for name in sorted(present - listed.keys()):
        raise ValueError(f"{directory / name}: a shard that the manifest does not list (a duplicate?); remove it")


def _check_sizes(directory: Path, manifest: DatasetManifest) -> None:
    for shard in manifest.shards:
        size = (directory / shard.file).stat().st_size
        if size != shard.bytes:
            what = "shard truncated" if size < shard.bytes else "shard changed"
            said = f"{what}, {size} bytes instead of {shard.bytes}"
            raise ValueError(f"{directory / shard.file}: {said}; {_prepare_again_hint(directory)}")


def _check_tokenizer(directory: Path, manifest: DatasetManifest) -> None:
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise ValueError(f"{path}: missing; {_prepare_again_hint(directory)}")
    if sha256_of(path) != manifest.tokenizer["sha256"]:
        raise ValueError(
            f"{path}: changed since the data set was made (sha256 differs); {_prepare_again_hint(directory)}"
        )


def _check_contents(directory: Path, manifest: DatasetManifest, *, progress: bool) -> None:
    total = sum(shard.bytes for shard in manifest.shards)
    owner = {shard.sha256: shard.file for shard in manifest.shards}
    with (
        ProgressMeter(
            f"verifying {directory.name}", total, shown=progress and total >= PROGRESS_THRESHOLD_BYTES
        ) as meter,
        concurrent.futures.ThreadPoolExecutor(8) as threads,
    ):
        digests = threads.map(sha256_of, [directory / shard.file for shard in manifest.shards])
        for shard, digest in zip(manifest.shards, digests, strict=True):
            meter.advance(shard.bytes)
            if digest == shard.sha256:
                continue
            copied = (
                f"it is a duplicate of {owner[digest]}" if digest in owner else "its sha256 differs from the manifest"
            )
            raise ValueError(f"{directory / shard.file}: shard changed, {copied}; {_prepare_again_hint(directory)}")


def _check_shard_facts(directory: Path, shard: ShardEntry, vocab_size: int) -> None:
    path = directory / shard.file
    if shard.max_token >= vocab_size:
        raise ValueError(
            f"{path}: holds token id {shard.max_token}, outside the vocabulary of {vocab_size}; "
            f"{_prepare_again_hint(directory)}"
        )
    if (count := open_shard(path).num_records()) != shard.rows:
        raise ValueError(
            f"{path}: holds {count} rows, the manifest says {shard.rows}; {_prepare_again_hint(directory)}"
        )


def parse_mixture(spec: str) -> list[tuple[str, float]]:
    """[(directory, weight)] of 'DIR:0.7,DIR2:0.3'; a lone DIR has weight 1."""
    parts = [part.strip() for part in spec.split(",") if part.strip()]
    if not parts:
        raise ValueError(f"--data {spec!r}: names no directory; write DIR, or DIR:0.7,DIR2:0.3")
    return [_weighted(part, spec, alone=len(parts) == 1) for part in parts]


def _weighted(part: str, spec: str, *, alone: bool) -> tuple[str, float]:
    directory, _, weight = part.rpartition(":")
    try:
        return directory, float(weight if directory else "no weight")
    except ValueError:
        if alone:
            return part, 1.0
        raise ValueError(f"--data {spec}: no weight on {part!r}; write every part as DIR:WEIGHT") from None


def as_mixture(data: Dataset | Mixture) -> Mixture:
    """A single data set as a mixture of one."""
    return data if isinstance(data, Mixture) else Mixture((data,), (1.0,))


def open_mixture(
    spec: str | Sequence[tuple[str | Path, float]], *, verify: str = "full", progress: bool = False
) -> Mixture:
    """The data sets of 'DIR:0.7,DIR2:0.3' (or of (directory, weight) pairs), each verified."""
    pairs = parse_mixture(spec) if isinstance(spec, str) else list(spec)
    datasets = tuple(open_dataset(directory, verify=verify, progress=progress) for directory, _ in pairs)
    return Mixture(datasets, tuple(float(weight) for _, weight in pairs))
