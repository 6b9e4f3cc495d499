"""Packs a prepared data set into one folder that travels to a machine without the data readers, and reads it there.

    python benchmarks/quiet_data.py DATA OUT --seeds 0,1,2,3

OUT holds the training rows (xz), the validation rows by source, and for each seed the order of the first epoch as
`halfbyte.data.loader` shuffles it, so that a run over the packed rows reads the batches of `halfbyte train --seed`.
`read` needs NumPy and the standard library only.
"""

import argparse
import hashlib
import json
import lzma
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PARTS = 8  # files of training rows: one thread each compresses and decompresses
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lp": 1, "lc": 2, "pb": 1, "dict_size": 1 << 25}]  # 16-bit tokens


class Rows(NamedTuple):
    """Packed rows: tokens and segments u16[rows, seq + 1]; the order of the training rows per seed; the names of the
    validation sources and the source of each validation row."""

    tokens: np.ndarray
    segments: np.ndarray
    held_tokens: np.ndarray
    held_segments: np.ndarray
    held_source: np.ndarray
    sources: list[str]
    orders: dict[int, np.ndarray]
    digest: str


def compress(array: np.ndarray) -> bytes:
    return lzma.compress(np.ascontiguousarray(array).tobytes(), format=lzma.FORMAT_XZ, filters=FILTERS)


def order_of(seed: int, rows: int) -> np.ndarray:
    """Indices of the first epoch's rows, as the loader of a single data set yields them."""
    import grain

    from halfbyte.data.batch_loader import _derive_seed

    shuffled = grain.MapDataset.source(np.arange(rows)).seed(_derive_seed(seed, 0)).shuffle()
    return np.asarray([shuffled[index] for index in range(rows)], np.uint32)


def write(data: Path, out: Path, seeds: list[int]) -> None:
    """Pack the data set `data` into `out`."""
    from halfbyte.data import open_dataset

    dataset = open_dataset(data)
    rows, out = dataset.read_rows("train"), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    sources = list(dataset.sources("validation"))
    held = [dataset.read_rows("validation", source) for source in sources]
    parts = np.array_split(np.arange(len(rows)), PARTS)
    with ThreadPoolExecutor(2) as threads:
        packed = threads.map(lambda part: compress(rows["tokens"][part].astype("<u2")), parts)
        for number, content in enumerate(packed):
            (out / f"tokens-{number}.xz").write_bytes(content)
    (out / "segments.xz").write_bytes(compress(rows["segments"].astype("<u2")))
    (out / "held-tokens.xz").write_bytes(compress(np.concatenate([part["tokens"] for part in held]).astype("<u2")))
    (out / "held-segments.xz").write_bytes(compress(np.concatenate([part["segments"] for part in held]).astype("<u2")))
    for seed in seeds:
        (out / f"order-{seed}.xz").write_bytes(compress(order_of(seed, len(rows)).astype("<u4")))
    facts = {
        "rows": len(rows), "seq": dataset.seq_len, "vocab_size": dataset.vocab_size, "seeds": seeds,
        "sources": {source: len(part) for source, part in zip(sources, held, strict=True)},
        "files": {path.name: digest_of(path) for path in sorted(out.glob("*.xz"))},
    }  # fmt: skip
    (out / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read(folder: Path) -> Rows:
    """The packed rows; ValueError if a file is not the one that was written."""
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    for name, digest in facts["files"].items():
        if digest_of(folder / name) != digest:
            raise ValueError(f"{folder / name}: changed since it was packed; pack the data set again")
    width = facts["seq"] + 1

    def array(name: str, dtype: str = "<u2") -> np.ndarray:
        return np.frombuffer(lzma.decompress((folder / name).read_bytes()), dtype)

    with ThreadPoolExecutor(PARTS) as threads:
        tokens = list(threads.map(array, [f"tokens-{number}.xz" for number in range(PARTS)]))
    orders = {seed: array(f"order-{seed}.xz", "<u4") for seed in facts["seeds"]}
    return Rows(
        np.concatenate(tokens).reshape(-1, width), array("segments.xz").reshape(-1, width),
        array("held-tokens.xz").reshape(-1, width), array("held-segments.xz").reshape(-1, width),
        np.repeat(np.arange(len(facts["sources"])), list(facts["sources"].values())), list(facts["sources"]), orders,
        hashlib.sha256(json.dumps(facts["files"]).encode()).hexdigest()[:16],
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0,1,2,3")
    given = parser.parse_args()
    write(given.data, given.out, [int(seed) for seed in given.seeds.split(",")])
