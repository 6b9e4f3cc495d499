"""What a run has left on its disk, read without Halfbyte: the bytes of every array, the rows, the files of a folder.

Nothing that a checkpoint says about itself is believed: arrays are read with TensorStore, and hashed here.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import tensorstore

ITEMS = ("params", "optimizer", "progress")


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints of a run, by their names; [] where there is none yet."""
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit())


def arrays(checkpoint: Path) -> dict[str, Any]:
    """Every array of a checkpoint, by item and name."""
    found = {}
    for item in ITEMS:
        store = {"driver": "ocdbt", "base": f"file://{checkpoint / item}/"}
        keys = [key.decode() for key in tensorstore.KvStore.open(store).result().list().result()]
        for name in sorted(key.removesuffix("zarr.json") for key in keys if key.endswith("/zarr.json")):
            array = tensorstore.open({"driver": "zarr3", "kvstore": {**store, "path": name}}).result()
            found[f"{item}/{name.rstrip('/')}"] = array.read().result()
    return found


def saved_state(folder: Path) -> tuple[int, dict[str, str]]:
    """(step, sha256 of each array's type, shape and bytes) of the newest checkpoint."""
    newest = checkpoint_steps(folder)[-1]
    found = arrays(folder / "checkpoints" / str(newest))
    return newest, {name: digest(f"{x.dtype}{x.shape}".encode() + x.tobytes()) for name, x in found.items()}


def differing(one: dict[str, str], other: dict[str, str]) -> str:
    """The arrays that two states do not share, for a person."""
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return f"{len(names)} of {len(one)} arrays differ: {', '.join(names[:3])}"


def losses(folder: Path) -> list[float]:
    """The loss of every step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if [row["step"] for row in rows] != list(range(1, len(rows) + 1)):
        raise AssertionError(f"{folder}: the rows are not one a step")
    return [row["loss"] for row in rows]


def contents(folder: Path) -> dict[str, str]:
    """sha256 of every file under a folder, by its path there; {} where there is none."""
    return {str(path.relative_to(folder)): digest(path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
