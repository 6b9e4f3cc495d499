"""A small corpus of three sources and a data set prepared from it, shared by the tests of this room."""

import json
import random
from pathlib import Path

import pytest

from halfbyte.data import open_dataset, prepare

WORDS = (
    "the a of union state people congress law 4-bit naïve 数 and to we shall not year nation\n peace; war, tax".split(
        " "
    )
)


def make_documents(count: int, *, seed: int, length: int = 120) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, length))) for _ in range(count)]


def write_jsonl(path: Path, documents: list[str], source: str | None = None) -> Path:
    records = [{"text": text} if source is None else {"text": text, "source": source} for text in documents]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_jsonl(folder / "laws.jsonl", make_documents(60, seed=1), "laws")
    write_jsonl(folder / "news.jsonl", make_documents(40, seed=2), "news")
    (folder / "book.txt").write_text("\n".join(make_documents(30, seed=3)), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def prepared(corpus, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "set"
    prepare(corpus, tokenizer="bpe:320", out=out, seq_len=32, val_fraction=0.2, workers=1, shard_bytes=8000)
    return out


@pytest.fixture(scope="session")
def dataset(prepared):
    return open_dataset(prepared)
