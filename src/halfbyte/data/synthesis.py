"""Batches without files, for speed runs and tests.

Row r is drawn from a Philox generator keyed by (seed, r): any row can be made on any host at any time. Token ids follow
p(id) ~ 1/(id+1), close to how text uses a vocabulary, so a model has something to learn (the marginal) and loss falls
from ln(vocab) towards the entropy of that law.
"""

import numpy as np

from halfbyte.data.loading import Loader, check_division, divide
from halfbyte.data.packing import row_dtype, rows_to_batch

MOST_ROWS = 1 << 60


class SyntheticRows:
    """Endless random rows as a sequence of structured records."""

    def __init__(self, vocab: int, seq: int, seed: int, document_length: int | None):
        self.vocab, self.seed, self.dtype = vocab, seed, row_dtype(seq, vocab)
        length = document_length or seq + 1
        self.segments = np.arange(seq + 1) // length + 1

    def __len__(self) -> int:
        return MOST_ROWS

    def __getitem__(self, index: int) -> np.ndarray:
        generator = np.random.Generator(np.random.Philox(key=[self.seed, int(index)]))
        uniform = generator.random(len(self.segments), dtype=np.float32)
        row = np.zeros(1, self.dtype)
        drawn = np.exp(uniform * np.float32(np.log(self.vocab + 1.0))).astype(np.int64) - 1
        row["tokens"] = np.minimum(drawn, self.vocab - 1)
        row["segments"] = self.segments
        return row


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
    """Random batches with the interface of `loader`, a function of (seed, index); endless unless `batches` is given.

    `document_length` cuts each row into documents of that many tokens; without it a row is one document.
    """
    import grain

    check_division(batch, host, hosts)
    if vocab < 2 or seq < 1 or seed < 0 or (document_length is not None and document_length < 1):
        raise ValueError(
            f"synthetic data with vocab {vocab}, seq {seq}, seed {seed}, document_length {document_length}: too small"
        )
    rows = grain.MapDataset.source(SyntheticRows(vocab, seq, seed, document_length))
    pipeline = divide(
        rows, lambda drawn: rows_to_batch(np.concatenate(drawn)), batch=batch, host=host, hosts=hosts, batches=batches
    )
    return Loader(pipeline, batches=batches, vocab_size=vocab, seq_len=seq, threads=threads, prefetch=prefetch)
