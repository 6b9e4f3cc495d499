"""Who a run is, beside its config: `run.json` holds the run's own name for itself, the hash of its config.json and the
hash of its data set's content.

A checkpoint carries the same name, so that one of another run with equal shapes is not taken for this run's. A config
that was changed by hand or by a failing disk is noticed before it decides anything. A data set is what it holds, not
where it lies: it may move, and it may not be replaced under its name.
"""

import hashlib
import json
import secrets
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfbyte.data.dataset import as_mixture
from halfbyte.inputs import read_bytes, read_json, replace_file

FILE = "run.json"


@dataclass(frozen=True)
class Identity:
    """`run`: a random name. `config_sha256`: of config.json's bytes, two while it is replaced. `data`: what the data
    set holds. `saved`: whether the run has had a checkpoint."""

    run: str
    config_sha256: str
    data: str
    saved: bool = False


def fingerprint(dataset: Any) -> str:
    """Hash of what a data set holds; `synthetic` where there is none. The same wherever it lies."""
    if dataset is None:
        return "synthetic"
    mixture = as_mixture(dataset)
    parts = [
        [hashlib.sha256(part.manifest.to_json().encode()).hexdigest(), weight]
        for part, weight in zip(mixture.datasets, mixture.weights, strict=True)
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def new_name() -> str:
    """A name that no other run has."""
    return secrets.token_hex(8)


def text_hash(text: str) -> str:
    """sha256 of a text as UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def hash_of(path: Path) -> str:
    """sha256 of a small file."""
    return hashlib.sha256(read_bytes(path)).hexdigest()


def save_identity(directory: Path, identity: Identity) -> None:
    """Write run.json, with its own CRC."""
    text = json.dumps(asdict(identity), sort_keys=True)
    replace_file(directory / FILE, json.dumps({"run": text, "crc32": zlib.crc32(text.encode())}) + "\n")


def load_identity(directory: Path) -> Identity | None:
    """The identity in a run directory; None where there is none (a run of an earlier version). ValueError when it is
    damaged."""
    path = directory / FILE
    if not path.exists():
        return None
    stored = read_json(path)
    text = stored.get("run") if isinstance(stored, dict) else None
    if not isinstance(text, str) or zlib.crc32(text.encode()) != stored.get("crc32"):
        raise ValueError(
            f"{path} is damaged (it does not match its own CRC); restore it from a copy, or delete it: then the run "
            "goes on without knowing whether its config and checkpoints are its own"
        )
    try:
        return Identity(**json.loads(text))
    except (TypeError, ValueError):
        raise ValueError(f"{path} was written by another version; delete it to go on without it") from None
