"""Documents of a chunk to tokens: which split each belongs to, packing to fixed rows, and rows to batches.

All functions are pure, so that a chunk gives the same result in any process.

A row holds `seq_len + 1` tokens: the model reads the first `seq_len` and predicts the last `seq_len`. Documents of one
source follow each other without gaps. `segments` numbers the documents inside a row from 1; a document that crosses the
end of a row continues in the next one as segment 1. Only the last row of a source is padded: token 0, segment 0. The
tokens of all rows, padding removed, are the documents' tokens in order: none is lost, none is repeated.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from halfbyte.data.text_files import InputChunk, find_cut, json_records, split_text
from halfbyte.data.tokenizer import Tokenizer

TRAIN, VALIDATION = "train", "validation"
SPLITS = (TRAIN, VALIDATION)


IGNORE = -1  # a target that is not scored


@dataclasses.dataclass(frozen=True)
class SourceSummary:
    """Summary of a source: document count, bytes of text, and its documents of smallest and largest key."""

    documents: int
    size: int
    smallest: int
    smallest_size: int
    largest: int

    @staticmethod
    def from_document(key: int, size: int) -> "SourceSummary":
        return SourceSummary(1, size, key, size, key)

    def merge(self, other: "SourceSummary") -> "SourceSummary":
        low = min(self, other, key=lambda s: s.smallest)
        return SourceSummary(
            self.documents + other.documents,
            self.size + other.size,
            low.smallest,
            low.smallest_size,
            max(self.largest, other.largest),
        )


@dataclasses.dataclass(frozen=True)
class SplitRule:
    """Assigns every document of the training files to a split. Fraction 0 keeps all for training.

    A document is held out if `document_key` / 2^64 < fraction. No order of files, number of workers or seed changes the
    result, and exact copies of a document are always in one split. Two amendments make small sources usable:

    - If the hash selects no document of a source, the tail of its document of smallest key is held out: `fraction` of
      the source's bytes, or the whole document if it is smaller than that and not the only one.
    - If the hash selects every document of a source, the document of largest key is kept for training.
    """

    fraction: float = 0.0
    sources: Mapping[str, SourceSummary] = dataclasses.field(default_factory=dict)

    def divide(self, source: str, key: int, *, start: int, data: bytes) -> list[tuple[str, bytes, bool]]:
        """Returns (split, bytes, starts a segment) for a chunk of a document that begins at byte `start` of it."""
        if self.fraction == 0.0:
            return [(TRAIN, data, start == 0)]
        cut = self._tail(source, key)
        if cut is None:
            return [(VALIDATION if self._hashed(source, key) else TRAIN, data, start == 0)]
        if start + len(data) <= cut:
            return [(TRAIN, data, start == 0)]
        if start >= cut:
            return [(VALIDATION, data, start == cut or start == 0)]
        offset = find_cut(data, cut - start)
        parts = [(TRAIN, data[:offset], start == 0), (VALIDATION, data[offset:], True)]
        return [part for part in parts if part[1]]

    def _hashed(self, source: str, key: int) -> bool:
        summary = self.sources[source]
        return self._below(key) and not (key == summary.largest and self._below(summary.largest))

    def _below(self, key: int) -> bool:
        return key < self.fraction * 2.0**64

    def _tail(self, source: str, key: int) -> int | None:
        """Returns the byte from which this document is held out, or None if the whole document is in one split."""
        summary = self.sources[source]
        is_only = summary.smallest == summary.largest
        if key != summary.smallest or (self._below(key) and not is_only):
            return None
        held_out = self.fraction * (summary.smallest_size if is_only else summary.size)
        return max(0, int(summary.smallest_size - held_out))


@dataclasses.dataclass(frozen=True)
class DocumentPart:
    """A contiguous run of a document's text that belongs to one split."""

    source: str
    split: str
    data: bytes
    starts_segment: bool  # a new segment starts here
    has_document_start: bool
    has_document_end: bool


@dataclasses.dataclass(frozen=True)
class TokenRun:
    """Tokens of one source and split in order; `starts` is True at the first token of each document."""

    tokens: np.ndarray
    starts: np.ndarray
    text_bytes: int


@dataclasses.dataclass(frozen=True)
class DocumentEncoder:
    """Encodes chunks. Small and picklable: the tokenizer itself is read from its file."""

    tokenizer_file: str
    eos: str
    bos: str
    default_source: str
    rule: SplitRule
    split: str = TRAIN  # where the rule's training side goes: "validation" for explicit validation files

    def held_out(self) -> "DocumentEncoder":
        """Returns the encoder for explicit validation files."""
        return dataclasses.replace(self, rule=SplitRule(), split=VALIDATION)

    def encode(self, chunk: InputChunk) -> dict[tuple[str, str], TokenRun]:
        """Returns the tokens of a chunk by (split, source)."""
        tokenizer = _tokenizer(self.tokenizer_file, self.eos, self.bos)
        parts = [p for p in split_documents(chunk, self.default_source, self.rule) if p.data]
        pieces = [split_text(p.data) for p in parts]
        encoded = iter(tokenizer.encode_batch([piece for group in pieces for piece in group]))
        gathered: dict[tuple[str, str], list[tuple[DocumentPart, list[int]]]] = {}
        for part, group in zip(parts, pieces, strict=True):
            ids = [tokenizer.bos_id] * part.has_document_start
            for _ in group:
                ids += next(encoded)
            ids += [tokenizer.eos_id] * part.has_document_end
            split = self.split if part.split == TRAIN else part.split
            gathered.setdefault((split, part.source), []).append((part, ids))
        return {key: _concat_runs(runs, tokenizer.vocab_size) for key, runs in gathered.items()}


class SequencePacker:
    """Packs one source's token stream into rows: `add` returns the rows that the new tokens complete."""

    def __init__(self, dtype: np.dtype, source: int):
        self.dtype = dtype
        self.source = source
        self.width: int = dtype["tokens"].shape[0]
        self._tokens: list[np.ndarray] = []
        self._starts: list[np.ndarray] = []
        self._pending = 0

    def add(self, tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Returns the rows that `tokens` complete; `starts` is True at the first token of each document."""
        self._tokens.append(tokens)
        self._starts.append(starts)
        self._pending += len(tokens)
        return self._take(self._pending // self.width) if self._pending >= self.width else np.empty(0, self.dtype)

    def finish(self) -> np.ndarray:
        """Returns the last, padded row; an empty array if no tokens are pending."""
        if self._pending == 0:
            return np.empty(0, self.dtype)
        padding = self.width - self._pending
        self._tokens.append(np.zeros(padding, self._tokens[0].dtype))
        self._starts.append(np.zeros(padding, bool))
        self._pending = self.width
        rows = self._take(1)
        rows["segments"][:, self.width - padding :] = 0
        return rows

    def _take(self, count: int) -> np.ndarray:
        tokens, starts = np.concatenate(self._tokens), np.concatenate(self._starts)
        taken = count * self.width
        self._tokens, self._starts, self._pending = [tokens[taken:]], [starts[taken:]], len(tokens) - taken
        rows = np.zeros(count, self.dtype)
        rows["source"] = self.source
        rows["tokens"] = tokens[:taken].reshape(count, self.width)
        begins = starts[:taken].reshape(count, self.width).copy()
        begins[:, 0] = True  # a document that continues is segment 1 of its new row
        rows["segments"] = np.cumsum(begins, axis=1)
        return rows


def split_documents(chunk: InputChunk, default_source: str, rule: SplitRule) -> Iterator[DocumentPart]:
    """Yields the parts of a chunk's documents, in order."""
    if chunk.kind == "text":
        if not chunk.data:
            return
        check_utf8(chunk)
        yield from _split_document(default_source, chunk.key, chunk.data, rule, start=chunk.start, last=chunk.last)
        return
    for data, source in json_records(chunk):
        if data.strip():
            yield from _split_document(
                source or default_source, document_key(data) if rule.fraction else 0, data, rule, start=0, last=True
            )


def check_utf8(chunk: InputChunk) -> None:
    try:
        chunk.data.decode()
    except UnicodeDecodeError as error:
        where = chunk.start + error.start
        raise ValueError(f"{chunk.name}: not UTF-8 text at byte {where}; convert it (iconv -t utf-8) first") from error


def summarize_chunk(chunk: InputChunk, default_source: str) -> dict[str, SourceSummary]:
    """Returns the summary of a jsonl chunk by source."""
    texts = ((data, source or default_source) for data, source in json_records(chunk) if data.strip())
    return merge_summaries(
        {source: SourceSummary.from_document(document_key(data), len(data))} for data, source in texts
    )


def merge_summaries(parts: Iterable[Mapping[str, SourceSummary]]) -> dict[str, SourceSummary]:
    merged: dict[str, SourceSummary] = {}
    for part in parts:
        for source, summary in part.items():
            merged[source] = merged[source].merge(summary) if source in merged else summary
    return merged


def document_key(data: bytes) -> int:
    """Returns the 64-bit hash of a document's text that decides its split."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def text_key(pieces: Iterator[InputChunk]) -> tuple[int, int]:
    """Returns key and size of a plain text file; the key equals `document_key` of its bytes."""
    digest, size = hashlib.blake2b(digest_size=8), 0
    for chunk in pieces:
        digest.update(chunk.data)
        size += len(chunk.data)
    return int.from_bytes(digest.digest(), "little"), size


def row_dtype(seq_len: int, vocab_size: int) -> np.dtype:
    """Returns the dtype of a stored row: source, tokens, segments; little-endian, 2 bytes per id where they suffice."""
    tokens = "<u2" if vocab_size <= 1 << 16 else "<u4"
    segments = "<u2" if seq_len + 1 < 1 << 16 else "<u4"
    return np.dtype([("source", "<u4"), ("tokens", tokens, (seq_len + 1,)), ("segments", segments, (seq_len + 1,))])


def split_rows_by_segment(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the tokens of each segment, in order; a document over several rows gives several segments."""
    for row in rows:
        segments = row["segments"].astype(np.int64)
        for segment in range(1, int(segments.max()) + 1):
            yield row["tokens"][segments == segment]


def rows_to_batch(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns tokens, targets, segments, positions: int32 [rows, seq_len].

    Targets are -1 across documents and at padding.
    """
    tokens = rows["tokens"].astype(np.int32)
    segments = rows["segments"].astype(np.int32)
    inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    targets = np.where(inside, tokens[:, 1:], np.int32(IGNORE))
    return {
        "tokens": np.ascontiguousarray(tokens[:, :-1]),
        "targets": targets,
        "segments": np.ascontiguousarray(segments[:, :-1]),
        "positions": segment_positions(segments[:, :-1]),
    }


def segment_positions(segments: np.ndarray) -> np.ndarray:
    """Returns 0, 1, 2, ... from the start of each segment of a row; int32 [rows, seq_len]."""
    index = np.arange(segments.shape[1], dtype=np.int32)[None, :]
    begins = np.ones(segments.shape, bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return index - np.maximum.accumulate(np.where(begins, index, np.int32(0)), axis=1)


def _concat_runs(runs: list[tuple[DocumentPart, list[int]]], vocab_size: int) -> TokenRun:
    tokens = np.concatenate([np.array(ids, np.uint32) for _, ids in runs])
    if len(tokens) and int(tokens.max()) >= vocab_size:
        raise ValueError(
            f"the tokenizer gave id {tokens.max()}, outside its vocabulary of {vocab_size}; use another tokenizer"
        )
    lengths = np.array([len(ids) for _, ids in runs])
    offsets = np.cumsum(lengths) - lengths
    starts = np.zeros(len(tokens), bool)
    starts[[start for (part, ids), start in zip(runs, offsets, strict=True) if part.starts_segment and ids]] = True
    return TokenRun(tokens, starts, sum(len(part.data) for part, _ in runs))


@functools.lru_cache(maxsize=1)
def _tokenizer(file: str, eos: str, bos: str) -> Tokenizer:
    return Tokenizer(Path(file).read_text(encoding="utf-8"), eos=eos, bos=bos)


def _split_document(
    source: str, key: int, data: bytes, rule: SplitRule, *, start: int, last: bool
) -> Iterator[DocumentPart]:
    parts = rule.divide(source, key, start=start, data=data)
    for i, (split, piece, begins) in enumerate(parts):
        yield DocumentPart(
            source,
            split,
            piece,
            begins,
            has_document_start=start == 0 and i == 0,
            has_document_end=last and i == len(parts) - 1,
        )
