"""Who a run is: `run.json` holds the run's own name for itself, the hash of its data set's content, the hashes of the
files that others read, its seal, and the versions that it was trained with.

A checkpoint carries the same name, so that one of another run with equal shapes is not taken for this run's. A file
that was changed by hand or by a failing disk is noticed before it decides anything. A data set is what it holds, not
where it lies: it may move, and it may not be replaced under its name.
"""

import hashlib
import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jaxlib

from halfbyte.data.dataset import as_mixture
from halfbyte.data.files import sha256_of
from halfbyte.inputs import parse_json, read_json, replace_file, sealed_json, sealed_text
from halfbyte.inputs.kept import source_digest

from .jsonconfig import from_dict

FILE = "run.json"
ABSENT = "absent"  # in place of a hash, while a file is about to be written


@dataclass(frozen=True)
class Identity:
    """`run`: a random name. `data`: what the data set holds. `files`: the seal, name -> sha256 of its bytes, two while
    it is replaced. `made_with`: versions of the programs that trained it last. `saved`: whether the run has had a
    checkpoint."""

    run: str
    data: str
    files: Mapping[str, str] = field(default_factory=dict)
    made_with: Mapping[str, str] = field(default_factory=dict)
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


def file_hash(path: Path) -> str:
    """Returns the sha256 of a file; ABSENT where there is none."""
    return sha256_of(path) if path.exists() else ABSENT


def text_hash(text: str) -> str:
    """sha256 of a text as UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def versions() -> dict[str, str]:
    """Of the programs that decide what a step computes."""
    package = sys.modules[__name__.partition(".")[0]]  # a room does not import the whole
    told = {program.__name__: str(program.__version__) for program in (package, jax, jaxlib)}  # installed or not
    return told | {"code": source_digest()[:16]}


def save_identity(directory: Path, identity: Identity) -> None:
    """Write run.json, with its own CRC."""
    replace_file(directory / FILE, json.dumps(sealed_json("run", asdict(identity))) + "\n")


def load_identity(directory: Path) -> Identity | None:
    """The identity in a run directory; None where there is none. ValueError when it is damaged."""
    path = directory / FILE
    if not path.exists():
        return None
    text = sealed_text("run", read_json(path))
    if text is None:
        raise ValueError(
            f"{path} is damaged (it does not match its own CRC); restore it from a copy (without it nothing says "
            "whether the run's config, tokenizer and checkpoints are its own)"
        )
    try:
        values = parse_json(text, what=str(path))
        if "config_sha256" in values:  # of a version that sealed the config alone
            values["files"] = {"config.json": values.pop("config_sha256")}
        return from_dict(Identity, values)
    except (TypeError, AttributeError, ValueError):
        raise ValueError(
            f"{path} is not as this version writes it; read the run with the version that wrote it (without the file "
            "nothing would say whether its config, tokenizer and weights are its own)"
        ) from None
