"""A folder that other people's programs load: shards and their index, config.json last, the whole renamed into place.

Tensors are made and written one at a time. Until the rename everything lies in a hidden directory beside the target,
and config.json, without which no reader takes it for a model, is the last file in it.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.data.staging import Staging, clear_left, publish
from halfbyte.interchange.folder import COMPANIONS, CONFIG, INDEX, SINGLE
from halfbyte.interchange.layouts import Part
from halfbyte.interchange.tensor_file import write_tensors

MODELOPT_CONFIG = "hf_quant_config.json"
RUN_FILE = "run.json"
METADATA = {"format": "pt"}  # `transformers` refuses a file that does not say so
GB = 10**9
Watch = Callable[[int, int], None]


def write_folder(
    out: Path, parts: Iterable[Part], config: Mapping[str, Any], files: Mapping[str, str | bytes | Path], *,
    shard_bytes: int = 5 * GB, replace: bool = False, watch: Watch | None = None,
) -> int:  # fmt: skip
    """Write the model to `out`; the bytes of its tensors. `files` are written (or copied) beside the weights as named.

    A target that exists is refused, or replaced in one rename if `replace` and it holds a model.
    """
    check_target(out, replace=replace)
    shards = plan_shards(list(parts), shard_bytes)
    with Staging(out) as staging:
        size = write_shards(staging, shards, watch)
        for name, content in files.items():
            _write_file(staging / name, content)
        _write_file(staging / CONFIG, json.dumps(dict(config), indent=2) + "\n")
        if not publish(staging, out, replace=replace, check=lambda: _refuse_target(out, replace=replace)):
            raise ValueError(f"{out} appeared while the export was written; nothing was changed")
    return size


def check_target(out: Path, *, replace: bool) -> None:
    """Raises ValueError if `out` exists, unless `replace` and it holds an export and nothing else. What was left of
    exports that were killed is removed."""
    clear_left(out)
    _refuse_target(out, replace=replace)


def _refuse_target(out: Path, *, replace: bool) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not replace:
        raise ValueError(f"{out} exists; choose another --out, or give --overwrite to replace an earlier export")
    if out.is_symlink() or not out.is_dir() or not ((out / CONFIG).is_file() and list(out.glob("*.safetensors"))):
        raise ValueError(f"{out} exists and is no exported model; it is not overwritten, choose another --out")
    others = sorted(path.name for path in out.iterdir() if not _is_exported(path.name))
    if others:
        raise ValueError(f"{out} holds {others[0]}, which no export writes; it stays as it is, choose another --out")
    if (out.parent / RUN_FILE).exists():  # the imported weights of a run
        raise ValueError(f"{out} is part of the run in {out.parent}; it is not overwritten, choose another --out")


def _is_exported(name: str) -> bool:
    return name in {CONFIG, INDEX, MODELOPT_CONFIG, *COMPANIONS} or name.endswith(".safetensors")


def plan_shards(parts: Sequence[Part], shard_bytes: int) -> list[list[Part]]:
    """Parts in order, as many a shard as fit into `shard_bytes`; a part is never split."""
    shards: list[list[Part]] = [[]]
    size = 0
    for part in parts:
        if shards[-1] and size + part.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += part.nbytes
    return shards


def write_shards(folder: Path, shards: Sequence[Sequence[Part]], watch: Watch | None = None) -> int:
    """Every shard, and the index if there is more than one; the bytes of all tensors."""
    total = sum(len(shard) for shard in shards)
    done, where = 0, {}

    def arrays(shard: Sequence[Part]) -> Iterator[np.ndarray]:
        nonlocal done
        for part in shard:
            yield from part.make()
            done += 1
            if watch is not None:
                watch(done, total)

    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        planned = [plan for part in shard for plan in part.planned]
        write_tensors(folder / name, planned, arrays(shard), METADATA)
        where.update(dict.fromkeys((plan.name for plan in planned), name))
    size = sum(part.nbytes for shard in shards for part in shard)
    if len(shards) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
        _write_file(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return size


def _write_file(path: Path, content: str | bytes | Path) -> None:
    if isinstance(content, Path):
        shutil.copyfile(content, path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
