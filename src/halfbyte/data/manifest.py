"""The manifest of a prepared data set: every fact needed to trust its files.

It holds no path, time or machine name, so one request gives one manifest, byte for byte. `checksum` is the sha256 of
the rest: a manifest that was edited or damaged is refused like a damaged shard.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.data.packing import row_dtype

FORMAT = "halfbyte-rows"
VERSION = 1
FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
SHARD_SUFFIX = ".array_record"


@dataclasses.dataclass(frozen=True)
class Shard:
    """One ArrayRecord file: rows of one source of one split."""

    file: str
    split: str
    source: str
    rows: int
    tokens: int
    max_token: int
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class SourceTotals:
    """What one source contributes to one split. `text_bytes` is UTF-8 text; `tokens` counts markers, not padding."""

    documents: int
    text_bytes: int
    tokens: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A data set on paper. `splits` maps split -> source -> totals; `request` is what `prepare` was asked for."""

    seq_len: int
    vocab_size: int
    tokenizer: dict[str, Any]
    sources: tuple[str, ...]
    splits: dict[str, dict[str, SourceTotals]]
    shards: tuple[Shard, ...]
    request: dict[str, Any]

    @property
    def row_dtype(self) -> np.dtype:
        return row_dtype(self.seq_len, self.vocab_size)

    def rows(self, split: str) -> int:
        return sum(totals.rows for totals in self.splits[split].values())

    def tokens(self, split: str) -> int:
        return sum(totals.tokens for totals in self.splits[split].values())

    def to_json(self) -> str:
        body = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return json.dumps({**body, "checksum": checksum(body)}, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def checksum(body: dict[str, Any]) -> str:
    """sha256 of a manifest without its `checksum`, in canonical JSON."""
    return hashlib.sha256(canonical(body).encode()).hexdigest()


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def read_manifest(directory: Path) -> Manifest:
    """The manifest in `directory`; ValueError if there is none, or if it is damaged or of another version."""
    path = directory / FILE
    if not path.is_file():
        raise ValueError(
            f"{directory}: no prepared data set here ({FILE} is missing); make one with `halfbyte data prepare`"
        )
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged, it is not JSON ({error}); prepare the data set again") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ValueError(f"{path}: not the manifest of a prepared data set; make one with `halfbyte data prepare`")
    if body.get("version") != VERSION:
        raise ValueError(
            f"{path}: format version {body.get('version')}, this program reads {VERSION}; prepare it again"
        )
    stated = body.pop("checksum", None)
    if stated != checksum(body):
        raise ValueError(
            f"{path}: changed since it was written (its checksum does not match); prepare the data set again"
        )
    return _from_body(body)


def _from_body(body: dict[str, Any]) -> Manifest:
    return Manifest(
        seq_len=body["seq_len"],
        vocab_size=body["vocab_size"],
        tokenizer=body["tokenizer"],
        sources=tuple(body["sources"]),
        splits={
            split: {source: SourceTotals(**totals) for source, totals in sources.items()}
            for split, sources in body["splits"].items()
        },
        shards=tuple(Shard(**shard) for shard in body["shards"]),
        request=body["request"],
    )
