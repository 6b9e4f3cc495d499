"""Where tokens end up: one packer and one shard writer for every (split, source)."""

import collections
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from halfbyte.data.encoding import Run
from halfbyte.data.manifest import Shard, SourceTotals
from halfbyte.data.packing import Packer, row_dtype
from halfbyte.data.shards import ShardWriter
from halfbyte.data.splitting import SPLITS

MOST_SOURCES = 256


class Sinks:
    """Takes runs in order; sources are numbered as they first appear."""

    def __init__(self, directory: Path, seq_len: int, vocab_size: int, shard_bytes: int):
        self.directory, self.vocab_size, self.shard_bytes = directory, vocab_size, shard_bytes
        self.dtype = row_dtype(seq_len, vocab_size)
        self.sources: dict[str, int] = {}
        self._sinks: dict[tuple[str, str], tuple[Packer, ShardWriter]] = {}
        self._documents: collections.Counter[tuple[str, str]] = collections.Counter()
        self._text_bytes: collections.Counter[tuple[str, str]] = collections.Counter()

    def take(self, runs: Mapping[tuple[str, str], Run]) -> None:
        for place, run in runs.items():
            if run.tokens.max(initial=0) >= self.vocab_size:
                raise ValueError(f"token {run.tokens.max()} is outside the tokenizer's vocabulary of {self.vocab_size}")
            packer, writer = self._sink(place)
            writer.write(packer.add(run.tokens, run.starts))
            self._documents[place] += int(np.count_nonzero(run.starts))
            self._text_bytes[place] += run.text_bytes

    def finish(self) -> tuple[list[Shard], dict[str, dict[str, SourceTotals]]]:
        """Every shard, by split, source and number; and the totals of each split by source."""
        splits: dict[str, dict[str, SourceTotals]] = {split: {} for split in SPLITS}
        shards: list[Shard] = []
        for place in ((split, source) for split in SPLITS for source in self.sources):
            if place not in self._sinks:
                continue
            packer, writer = self._sinks[place]
            writer.write(packer.finish())
            writer.close()
            shards += writer.shards
            tokens, rows = sum(s.tokens for s in writer.shards), sum(s.rows for s in writer.shards)
            splits[place[0]][place[1]] = SourceTotals(self._documents[place], self._text_bytes[place], tokens, rows)
        return shards, splits

    def _sink(self, place: tuple[str, str]) -> tuple[Packer, ShardWriter]:
        if place in self._sinks:
            return self._sinks[place]
        split, source = place
        number = self.sources.setdefault(source, len(self.sources))
        if number >= MOST_SOURCES:
            raise ValueError(
                f"more than {MOST_SOURCES} different values of 'source' (the last: {source!r}); rows never mix "
                "sources, so a source should be a collection, not a document: rewrite or drop the field"
            )
        writer = ShardWriter(self.directory, split, source, number, dtype=self.dtype, shard_bytes=self.shard_bytes)
        self._sinks[place] = Packer(self.dtype, number), writer
        return self._sinks[place]
