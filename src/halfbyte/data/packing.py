"""Documents to fixed rows, and rows to batches.

A row holds `seq_len + 1` tokens: the model reads the first `seq_len` and predicts the last `seq_len`. Documents of one
source follow each other without gaps. `segments` numbers the documents inside a row from 1; a document that crosses the
end of a row goes on in the next one as segment 1. Only the last row of a source is padded: token 0, segment 0.

Nothing is lost and nothing is doubled: the tokens of all rows, padding removed, are the documents' tokens in order.
"""

from collections.abc import Iterator

import numpy as np

IGNORE = -1  # a target that is not scored


def row_dtype(seq_len: int, vocab_size: int) -> np.dtype:
    """The stored record: source id, tokens, segments; little-endian, 2 bytes an id where they suffice."""
    tokens = "<u2" if vocab_size <= 1 << 16 else "<u4"
    segments = "<u2" if seq_len + 1 < 1 << 16 else "<u4"
    return np.dtype([("source", "<u4"), ("tokens", tokens, (seq_len + 1,)), ("segments", segments, (seq_len + 1,))])


class Packer:
    """Packs one source's token stream into rows: `add` takes tokens and gives the rows they complete."""

    def __init__(self, dtype: np.dtype, source: int):
        self.dtype = dtype
        self.source = source
        self.width: int = dtype["tokens"].shape[0]
        self._tokens: list[np.ndarray] = []
        self._starts: list[np.ndarray] = []
        self._held = 0

    def add(self, tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """The rows completed by `tokens`; `starts` is True at the first token of each document."""
        self._tokens.append(tokens)
        self._starts.append(starts)
        self._held += len(tokens)
        return self._take(self._held // self.width) if self._held >= self.width else np.empty(0, self.dtype)

    def finish(self) -> np.ndarray:
        """The last, padded row; empty if nothing is left."""
        if self._held == 0:
            return np.empty(0, self.dtype)
        padding = self.width - self._held
        self._tokens.append(np.zeros(padding, self._tokens[0].dtype))
        self._starts.append(np.zeros(padding, bool))
        self._held = self.width
        rows = self._take(1)
        rows["segments"][:, self.width - padding :] = 0
        return rows

    def _take(self, count: int) -> np.ndarray:
        tokens, starts = np.concatenate(self._tokens), np.concatenate(self._starts)
        taken = count * self.width
        self._tokens, self._starts, self._held = [tokens[taken:]], [starts[taken:]], len(tokens) - taken
        rows = np.zeros(count, self.dtype)
        rows["source"] = self.source
        rows["tokens"] = tokens[:taken].reshape(count, self.width)
        begins = starts[:taken].reshape(count, self.width).copy()
        begins[:, 0] = True  # a document that continues is segment 1 of its new row
        rows["segments"] = np.cumsum(begins, axis=1)
        return rows


def unpack(rows: np.ndarray) -> Iterator[np.ndarray]:
    """The token runs of rows, one a segment, in order; a document over several rows comes as several runs."""
    for row in rows:
        segments = row["segments"].astype(np.int64)
        for segment in range(1, int(segments.max()) + 1):
            yield row["tokens"][segments == segment]


def rows_to_batch(rows: np.ndarray) -> dict[str, np.ndarray]:
    """tokens, targets, segments, positions: int32 [rows, seq_len]. Targets are -1 across documents and at padding."""
    tokens = rows["tokens"].astype(np.int32)
    segments = rows["segments"].astype(np.int32)
    inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    targets = np.where(inside, tokens[:, 1:], np.int32(IGNORE))
    return {
        "tokens": np.ascontiguousarray(tokens[:, :-1]),
        "targets": targets,
        "segments": np.ascontiguousarray(segments[:, :-1]),
        "positions": positions_of(segments[:, :-1]),
    }


def positions_of(segments: np.ndarray) -> np.ndarray:
    """0, 1, 2, ... from the start of each segment of a row; int32 [rows, seq_len]."""
    index = np.arange(segments.shape[1], dtype=np.int32)[None, :]
    begins = np.ones(segments.shape, bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return index - np.maximum.accumulate(np.where(begins, index, np.int32(0)), axis=1)
