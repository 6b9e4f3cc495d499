"""Batches for training and validation, from a prepared data set or random.

Row r of the global sequence depends only on (data, seed, r): shuffled, repeated and mixed for training, in stored order
for validation, drawn from a Philox generator for synthetic data. Global batch n is rows n*B to n*B + B-1. Host h of H
takes the h-th contiguous slice of it, so the slices in order of h are the global batch for any H. The whole state is
therefore one number, `{"next_index": n}`: a run resumes at any batch, on any number of hosts. Background threads read
ahead.
"""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from halfbyte.data.dataset import Dataset, Mixture, as_mixture
from halfbyte.data.encode import TRAIN, VALIDATION, row_dtype, rows_to_batch
from halfbyte.data.shard_files import ShardRows

Batch = dict[str, np.ndarray]
CLOSE_S = 5.0


MAX_SYNTHETIC_ROWS = 1 << 60


@dataclasses.dataclass(frozen=True)
class StoredRow:
    """A stored row, with its origin for the error message if a token is out of range."""

    rows: ShardRows | None
    index: int
    data: bytes


class GrainRowSource:
    """Rows of several shard sets as a Grain source, zero-padded (all padding) to a multiple of `padded_to` rows."""

    def __init__(self, parts: Sequence[ShardRows], *, padded_to: int = 1):
        self.parts = tuple(parts)
        self._starts = np.cumsum([0, *(len(rows) for rows in parts)]).tolist()
        self.count: int = self._starts[-1]
        self._padded = -(-self.count // padded_to) * padded_to

    def __len__(self) -> int:
        return self._padded

    def __getitem__(self, index: int) -> StoredRow:
        index = int(index)
        if index >= self.count:
            return StoredRow(None, index, bytes(self.parts[0].dtype.itemsize))
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        rows, row = self.parts[part], index - self._starts[part]
        return StoredRow(rows, row, rows[row])


class SyntheticRows:
    """Endless random rows as a sequence of structured records; row r is drawn from Philox keyed by (seed, r).

    Token ids follow p(id) ~ 1/(id+1), close to how text uses a vocabulary. A model can learn this marginal: its loss
    falls from ln(vocab) towards the entropy of the distribution.
    """

    def __init__(self, vocab: int, seq: int, seed: int, document_length: int | None):
        self.vocab, self.seed, self.dtype = vocab, seed, row_dtype(seq, vocab)
        length = document_length or seq + 1
        self.segments = np.arange(seq + 1) // length + 1

    def __len__(self) -> int:
        return MAX_SYNTHETIC_ROWS

    def __getitem__(self, index: int) -> np.ndarray:
        generator = np.random.Generator(np.random.Philox(key=[self.seed, int(index)]))
        uniform = generator.random(len(self.segments), dtype=np.float32)
        row = np.zeros(1, self.dtype)
        drawn = np.exp(uniform * np.float32(np.log(self.vocab + 1.0))).astype(np.int64) - 1
        row["tokens"] = np.minimum(drawn, self.vocab - 1)
        row["segments"] = self.segments
        return row


class Loader(AbstractContextManager["Loader"]):
    """Iterator over batches. `batches` is their number (None: endless); `close` stops the prefetch threads."""

    def __init__(
        self, pipeline: Any, *, batches: int | None, vocab_size: int, seq_len: int, threads: int, prefetch: int
    ):
        import grain

        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
        self._iterator = iter(pipeline.to_iter_dataset(options))
        self.batches = batches
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.wait_seconds = 0.0  # time spent in the latest `next`
        self.total_wait_seconds = 0.0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        begun = time.perf_counter()
        batch = next(self._iterator)
        self.wait_seconds = time.perf_counter() - begun
        self.total_wait_seconds += self.wait_seconds
        return batch

    def get_state(self) -> dict[str, int]:
        """`{"next_index": n}`: n batches have been taken."""
        return {"next_index": int(self._iterator.get_state()["next_index"])}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Sets the index of the next batch."""
        index = state.get("next_index")
        if not isinstance(index, int) or index < 0:
            raise ValueError(f"data state {dict(state)}: it must be {{'next_index': n}} with n >= 0")
        self._iterator.set_state({"next_index": index})

    def close(self) -> None:
        """Stop reading ahead. Waits up to `CLOSE_S` for the reads in progress: Grain's own `close` cancels only those
        that have not begun, and leaves its threads running."""
        executor = getattr(self._iterator, "_executor", None)  # Grain 0.2.18 has no public way to join its threads
        self._iterator.close()
        deadline = time.monotonic() + CLOSE_S
        for thread in tuple(executor._threads) if executor is not None else ():
            thread.join(max(0.0, deadline - time.monotonic()))

    def __exit__(self, *_: object) -> None:
        self.close()


def loader(
    data: Dataset | Mixture,
    *,
    batch: int,
    seed: int = 0,
    host: int = 0,
    hosts: int = 1,
    split: str = TRAIN,
    source: str | None = None,
    seq: int | None = None,
    vocab_size: int | None = None,
    max_batches: int | None = None,
    threads: int = 2,
    prefetch: int = 8,
) -> Loader:
    """Returns a loader of this host's slice of each global batch of `batch` rows, as NumPy arrays.

    Split `train` is reshuffled each epoch and never ends. `validation` is read once, in stored order: all sources or
    the one named by `source`. Its last batch is filled with padding rows, so that all batches have one shape and all
    hosts have equally many. ValueError if `seq` or `vocab_size` of the model do not fit the data.
    """
    mixture = as_mixture(data)
    check_host_batch(batch, host, hosts)
    _check_fits(mixture, seq=seq, vocab_size=vocab_size)
    if split == TRAIN:
        rows, batches = _training_rows(mixture, source, batch=batch, seed=seed), None
    else:
        rows, batches = _validation_rows(mixture, split, source, batch=batch)
    limit = min(max_batches or batches or 0, batches or max_batches or 0) or None
    pipeline = host_batches(rows, _batch_stacker(mixture), batch=batch, host=host, hosts=hosts, batches=limit)
    return Loader(
        pipeline,
        batches=limit,
        vocab_size=mixture.vocab_size,
        seq_len=mixture.seq_len,
        threads=threads,
        prefetch=prefetch,
    )


def synthetic(
    vocab: int,
    seq: int,
    batch: int,
    *,
    seed: int = 0,
    host: int = 0,
    hosts: int = 1,
    batches: int | None = None,
    document_length: int | None = None,
    threads: int = 2,
    prefetch: int = 8,
) -> Loader:
    """Returns a `Loader` of random batches that depend only on (seed, index); endless unless `batches` is given.

    `document_length` splits each row into documents of that many tokens; without it a row is one document.
    """
    import grain

    check_host_batch(batch, host, hosts)
    if vocab < 2 or seq < 1 or seed < 0 or (document_length is not None and document_length < 1):
        raise ValueError(
            f"synthetic data with vocab {vocab}, seq {seq}, seed {seed}, document_length {document_length}: too small"
        )
    rows = grain.MapDataset.source(SyntheticRows(vocab, seq, seed, document_length))
    pipeline = host_batches(
        rows, lambda drawn: rows_to_batch(np.concatenate(drawn)), batch=batch, host=host, hosts=hosts, batches=batches
    )
    return Loader(pipeline, batches=batches, vocab_size=vocab, seq_len=seq, threads=threads, prefetch=prefetch)


def validation_sources(data: Dataset | Mixture) -> tuple[str, ...]:
    """Returns the names of all sources with validation rows; a name in several data sets counts once."""
    return tuple(dict.fromkeys(name for dataset in as_mixture(data).datasets for name in dataset.sources(VALIDATION)))


def host_batches(rows: Any, stack: Any, *, batch: int, host: int, hosts: int, batches: int | None) -> Any:
    """Returns the batches of one host of a Grain sequence of rows: sub-batches n*hosts + host for n = 0, 1, ..."""
    host_rows = rows.batch(batch // hosts, drop_remainder=True, batch_fn=stack)[host::hosts]
    return host_rows if batches is None else host_rows[:batches]


def check_host_batch(batch: int, host: int, hosts: int) -> None:
    if batch < 1 or hosts < 1 or batch % hosts:
        raise ValueError(
            f"a global batch of {batch} rows does not divide among {hosts} hosts; choose a multiple of {hosts}"
        )
    if not 0 <= host < hosts:
        raise ValueError(f"host {host} of {hosts}: hosts are numbered 0 to {hosts - 1}")


def pad_vocab_size(vocab_size: int) -> int:
    """Rounds `vocab_size` up to a multiple that suits GEMMs: 128, or 16 up to a vocabulary of 1024."""
    step = 128 if vocab_size > 1024 else 16
    return -(-vocab_size // step) * step


def _check_fits(mixture: Mixture, *, seq: int | None, vocab_size: int | None) -> None:
    where = mixture.datasets[0].directory
    if seq is not None and seq != mixture.seq_len:
        raise ValueError(
            f"{where}: rows of {mixture.seq_len} tokens, the model reads {seq}; "
            f"train with --seq {mixture.seq_len} or prepare the data with --seq-len {seq}"
        )
    if vocab_size is None:
        return
    for dataset in mixture.datasets:
        for shard in dataset.manifest.shards:
            if shard.max_token >= vocab_size:
                raise ValueError(
                    f"{dataset.directory / shard.file}: holds token id {shard.max_token}, outside the model's "
                    f"vocabulary of {vocab_size}; give it the data set's: --model.vocab-size "
                    f"{pad_vocab_size(dataset.vocab_size)}"
                )


def _training_rows(mixture: Mixture, source: str | None, *, batch: int, seed: int) -> Any:
    import grain

    chosen = [(i, d.rows(TRAIN, source)) for i, d in enumerate(mixture.datasets) if d.num_rows(TRAIN, source)]
    count, where = sum(len(rows) for _, rows in chosen), mixture.datasets[0].directory
    if not chosen:
        known = dict.fromkeys(name for d in mixture.datasets for name in d.sources(TRAIN))
        raise ValueError(f"{where}: no source {source!r} in {TRAIN}; it has {', '.join(known)}")
    if count < batch:
        raise ValueError(
            f"{where}: {count} training rows of {mixture.seq_len} tokens are fewer than one global batch of {batch}; "
            "add text, prepare with a shorter --seq-len, or use a smaller --batch"
        )
    parts = [
        grain.MapDataset.source(GrainRowSource([rows])).seed(_derive_seed(seed, i)).shuffle().repeat(None)
        for i, rows in chosen
    ]
    return parts[0] if len(parts) == 1 else grain.MapDataset.mix(parts, [mixture.weights[i] for i, _ in chosen])


def _derive_seed(seed: int, number: int) -> int:
    """Returns a 32-bit seed for data set `number` of a mixture."""
    if seed < 0:
        raise ValueError(f"seed {seed}: it must not be negative")
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def _validation_rows(mixture: Mixture, split: str, source: str | None, *, batch: int) -> tuple[Any, int]:
    import grain

    having = [d for d in mixture.datasets if d.num_rows(split, source)]
    if not having:
        subject = f"source {source!r} has" if source else "there are"
        raise ValueError(
            f"{mixture.datasets[0].directory}: {subject} no {split} rows "
            f"(sources with some: {', '.join(validation_sources(mixture)) or 'none'}); "
            "prepare with --val-fraction or --validation FILES"
        )
    rows = GrainRowSource([d.rows(split, source) for d in having], padded_to=batch)
    return grain.MapDataset.source(rows), len(rows) // batch


def _batch_stacker(mixture: Mixture) -> Any:
    dtype, vocab_size = mixture.manifest.row_dtype, mixture.vocab_size

    def stack(records: Sequence[StoredRow]) -> Batch:
        rows = np.frombuffer(b"".join(record.data for record in records), dtype)
        if int(rows["tokens"].max()) >= vocab_size:
            _refuse_token(records, rows, vocab_size)
        return rows_to_batch(rows)

    return stack


def _refuse_token(records: Sequence[StoredRow], rows: np.ndarray, vocab_size: int) -> None:
    for record, row in zip(records, rows, strict=True):
        worst = int(row["tokens"].max())
        if record.rows is not None and worst >= vocab_size:
            where = record.rows.describe(record.index)
            raise ValueError(
                f"{where}: token id {worst} is outside the vocabulary of {vocab_size}; prepare the data set again"
            )
