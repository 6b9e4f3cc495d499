"""Which documents are held out for validation, decided by the documents themselves.

A document's key is a 64-bit hash of its text. It is held out when key / 2^64 < fraction: no order of files, number of
workers or seed changes the answer, and exact copies of a document never land on both sides. Two amendments make small
sources usable:

- a source of which the hash takes no document gives the tail of its document of smallest key: `fraction` of the
  source's bytes, or the whole document if it is smaller than that and not the only one;
- a source of which the hash takes every document keeps the document of largest key for training.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping

from halfbyte.data.files import cut_before

TRAIN, VALIDATION = "train", "validation"
SPLITS = (TRAIN, VALIDATION)


def key_of(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a source holds: document count, bytes of text, and its documents of smallest and largest key."""

    documents: int
    size: int
    smallest: int
    smallest_size: int
    largest: int

    @staticmethod
    def of(key: int, size: int) -> "Summary":
        return Summary(1, size, key, size, key)

    def merge(self, other: "Summary") -> "Summary":
        low = min(self, other, key=lambda s: s.smallest)
        return Summary(
            self.documents + other.documents,
            self.size + other.size,
            low.smallest,
            low.smallest_size,
            max(self.largest, other.largest),
        )


def merge_summaries(parts: Iterable[Mapping[str, Summary]]) -> dict[str, Summary]:
    merged: dict[str, Summary] = {}
    for part in parts:
        for source, summary in part.items():
            merged[source] = merged[source].merge(summary) if source in merged else summary
    return merged


@dataclasses.dataclass(frozen=True)
class SplitRule:
    """Says for every document of the training files which split it belongs to. Fraction 0 keeps all for training."""

    fraction: float = 0.0
    sources: Mapping[str, Summary] = dataclasses.field(default_factory=dict)

    def divide(self, source: str, key: int, *, start: int, data: bytes) -> list[tuple[str, bytes, bool]]:
        """(split, bytes, begins a run) of a piece of a document that starts at byte `start` of the document."""
        if self.fraction == 0.0:
            return [(TRAIN, data, start == 0)]
        cut = self._tail(source, key)
        if cut is None:
            return [(VALIDATION if self._hashed(source, key) else TRAIN, data, start == 0)]
        if start + len(data) <= cut:
            return [(TRAIN, data, start == 0)]
        if start >= cut:
            return [(VALIDATION, data, start == cut or start == 0)]
        at = cut_before(data, cut - start)
        parts = [(TRAIN, data[:at], start == 0), (VALIDATION, data[at:], True)]
        return [part for part in parts if part[1]]

    def _hashed(self, source: str, key: int) -> bool:
        summary = self.sources[source]
        return self._below(key) and not (key == summary.largest and self._below(summary.largest))

    def _below(self, key: int) -> bool:
        return key < self.fraction * 2.0**64

    def _tail(self, source: str, key: int) -> int | None:
        """The byte at which the tail of this document is held out, or None if the document goes one way as a whole."""
        summary = self.sources[source]
        alone = summary.smallest == summary.largest
        if key != summary.smallest or (self._below(key) and not alone):
            return None
        wanted = self.fraction * (summary.smallest_size if alone else summary.size)
        return max(0, int(summary.smallest_size - wanted))
