"""What a worker process does with a chunk: read its documents, say where each belongs, turn them into tokens.

Pure functions of their arguments, so that a chunk gives the same result in any process.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from halfbyte.data.files import Chunk, json_records, pieces_of
from halfbyte.data.splitting import TRAIN, VALIDATION, SplitRule, Summary, key_of, merge_summaries
from halfbyte.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Part:
    """A run of a document's text that goes to one split as a whole."""

    source: str
    split: str
    data: bytes
    begins: bool  # a new segment starts here
    opens: bool  # it holds the beginning of the document
    closes: bool  # it holds the end of the document


@dataclasses.dataclass(frozen=True)
class Run:
    """Tokens of one source and split in order; `starts` is True at the first token of each document."""

    tokens: np.ndarray
    starts: np.ndarray
    text_bytes: int


@dataclasses.dataclass(frozen=True)
class Encoder:
    """How chunks become tokens. Small and picklable; the tokenizer itself stays in a file."""

    tokenizer_file: str
    eos: str
    bos: str
    default_source: str
    rule: SplitRule
    split: str = TRAIN  # where the rule's training side goes: "validation" for explicit validation files

    def held_out(self) -> "Encoder":
        """The same for explicit validation files."""
        return dataclasses.replace(self, rule=SplitRule(), split=VALIDATION)

    def encode(self, chunk: Chunk) -> dict[tuple[str, str], Run]:
        """The tokens of a chunk by (split, source)."""
        tokenizer = _tokenizer(self.tokenizer_file, self.eos, self.bos)
        parts = [p for p in parts_of(chunk, self.default_source, self.rule) if p.data]
        pieces = [pieces_of(p.data) for p in parts]
        encoded = iter(tokenizer.encode_batch([piece for group in pieces for piece in group]))
        gathered: dict[tuple[str, str], list[tuple[Part, list[int]]]] = {}
        for part, group in zip(parts, pieces, strict=True):
            ids = [tokenizer.bos_id] * part.opens
            for _ in group:
                ids += next(encoded)
            ids += [tokenizer.eos_id] * part.closes
            split = self.split if part.split == TRAIN else part.split
            gathered.setdefault((split, part.source), []).append((part, ids))
        return {place: _joined(runs, tokenizer.vocab_size) for place, runs in gathered.items()}


def _joined(runs: list[tuple[Part, list[int]]], vocab_size: int) -> Run:
    tokens = np.concatenate([np.array(ids, np.uint32) for _, ids in runs])
    if len(tokens) and int(tokens.max()) >= vocab_size:
        raise ValueError(
            f"the tokenizer gave id {tokens.max()}, outside its vocabulary of {vocab_size}; use another tokenizer"
        )
    lengths = np.array([len(ids) for _, ids in runs])
    offsets = np.cumsum(lengths) - lengths
    starts = np.zeros(len(tokens), bool)
    starts[[at for (part, ids), at in zip(runs, offsets, strict=True) if part.begins and ids]] = True
    return Run(tokens, starts, sum(len(part.data) for part, _ in runs))


@functools.lru_cache(maxsize=1)
def _tokenizer(file: str, eos: str, bos: str) -> Tokenizer:
    return Tokenizer(Path(file).read_text(encoding="utf-8"), eos=eos, bos=bos)


def parts_of(chunk: Chunk, default_source: str, rule: SplitRule) -> Iterator[Part]:
    """The parts of a chunk's documents, in order."""
    if chunk.kind == "text":
        if not chunk.data:
            return
        check_utf8(chunk)
        yield from _divided(default_source, chunk.key, chunk.data, rule, start=chunk.start, last=chunk.last)
        return
    for data, source in json_records(chunk):
        if data.strip():
            yield from _divided(
                source or default_source, key_of(data) if rule.fraction else 0, data, rule, start=0, last=True
            )


def _divided(source: str, key: int, data: bytes, rule: SplitRule, *, start: int, last: bool) -> Iterator[Part]:
    parts = rule.divide(source, key, start=start, data=data)
    for i, (split, piece, begins) in enumerate(parts):
        yield Part(source, split, piece, begins, opens=start == 0 and i == 0, closes=last and i == len(parts) - 1)


def check_utf8(chunk: Chunk) -> None:
    try:
        chunk.data.decode()
    except UnicodeDecodeError as error:
        where = chunk.start + error.start
        raise ValueError(f"{chunk.name}: not UTF-8 text at byte {where}; convert it (iconv -t utf-8) first") from error


def summarize(chunk: Chunk, default_source: str) -> dict[str, Summary]:
    """Per-source summary of a jsonl chunk."""
    texts = ((data, source or default_source) for data, source in json_records(chunk) if data.strip())
    return merge_summaries({source: Summary.of(key_of(data), len(data))} for data, source in texts)


def text_key(pieces: Iterator[Chunk]) -> tuple[int, int]:
    """(key, bytes) of a plain text file, equal to `key_of` its bytes."""
    digest, size = hashlib.blake2b(digest_size=8), 0
    for chunk in pieces:
        digest.update(chunk.data)
        size += len(chunk.data)
    return int.from_bytes(digest.digest(), "little"), size
