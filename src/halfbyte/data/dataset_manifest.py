"""The manifest of a prepared data set: every fact needed to trust its files.

It holds no path, time or machine name, so one request gives one manifest, byte for byte. `checksum` is the sha256 of
the rest: a manifest that was edited or damaged is refused like a damaged shard.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from halfbyte.data.encode import SPLITS, row_dtype
from halfbyte.io import UnreadableFile, check_int, read_json

MANIFEST_FORMAT = "halfbyte-rows"
MANIFEST_VERSION = 1
MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
SHARD_SUFFIX = ".array_record"
Entry = TypeVar("Entry", "ShardEntry", "SourceTotals")


@dataclasses.dataclass(frozen=True)
class ShardEntry:
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
class DatasetManifest:
    """A data set on paper. `splits` maps split -> source -> totals; `request` is what `prepare` was asked for."""

    seq_len: int
    vocab_size: int
    tokenizer: dict[str, Any]
    sources: tuple[str, ...]
    splits: dict[str, dict[str, SourceTotals]]
    shards: tuple[ShardEntry, ...]
    request: dict[str, Any]

    @property
    def row_dtype(self) -> np.dtype:
        return row_dtype(self.seq_len, self.vocab_size)

    def rows(self, split: str) -> int:
        return sum(totals.rows for totals in self.splits[split].values())

    def tokens(self, split: str) -> int:
        return sum(totals.tokens for totals in self.splits[split].values())

    def to_json(self) -> str:
        body = {"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION, **dataclasses.asdict(self)}
        return (
            json.dumps({**body, "checksum": manifest_digest(body)}, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        )


def manifest_digest(body: dict[str, Any]) -> str:
    """sha256 of a manifest without its `checksum`, in canonical JSON."""
    return hashlib.sha256(canonical_json(body).encode()).hexdigest()


def canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def read_manifest(directory: Path) -> DatasetManifest:
    """The manifest in `directory`; ValueError if there is none, or if it is damaged or of another version."""
    path = directory / MANIFEST_FILE
    if not path.is_file():
        raise ValueError(
            f"{directory}: no prepared data set here ({MANIFEST_FILE} is missing); "
            "make one with `halfbyte data prepare`"
        )
    try:
        body = read_json(path)
    except UnreadableFile as error:
        raise ValueError(f"{path}: damaged ({error}); prepare the data set again") from error
    if not isinstance(body, dict) or body.get("format") != MANIFEST_FORMAT:
        raise ValueError(f"{path}: not the manifest of a prepared data set; make one with `halfbyte data prepare`")
    if body.get("version") != MANIFEST_VERSION:
        raise ValueError(
            f"{path}: format version {body.get('version')}, this program reads {MANIFEST_VERSION}; prepare it again"
        )
    stated = body.pop("checksum", None)
    if stated != manifest_digest(body):
        raise ValueError(
            f"{path}: changed since it was written (its checksum does not match); prepare the data set again"
        )
    try:
        return _from_body(body)
    except (KeyError, TypeError, AttributeError, ValueError) as error:  # a checksum can be made for any content
        raise ValueError(f"{path}: not the manifest of a data set ({error}); prepare the data set again") from None


def _from_body(body: dict[str, Any]) -> DatasetManifest:
    """The manifest, every type and number looked at: KeyError, TypeError or ValueError where it is none."""
    check_int("seq_len", body["seq_len"], least=2)
    check_int("vocab_size", body["vocab_size"], least=1)
    for name in ("sha256", "bos", "eos"):
        _typed(f"tokenizer.{name}", body["tokenizer"][name], "str")
    for source in body["sources"]:
        _typed("sources", source, "str")
    return DatasetManifest(
        seq_len=body["seq_len"],
        vocab_size=body["vocab_size"],
        tokenizer=dict(body["tokenizer"]),
        sources=tuple(body["sources"]),
        splits={split: {s: _entry(SourceTotals, t) for s, t in body["splits"][split].items()} for split in SPLITS},
        shards=tuple(_entry(ShardEntry, shard) for shard in body["shards"]),
        request=dict(body["request"]),
    )


def _entry(kind: type[Entry], values: dict[str, Any]) -> Entry:
    made = kind(**values)
    for field in dataclasses.fields(made):
        _typed(field.name, getattr(made, field.name), str(field.type))
    return made


def _typed(field: str, value: Any, kind: str) -> None:
    if "int" in kind:
        check_int(field, value, most=2**62)
    elif not isinstance(value, str):
        raise TypeError(f"{field} must be text, got {value!r}")
