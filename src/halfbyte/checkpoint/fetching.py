"""Reads the copy of a run in a bucket back into a run directory (`halfbyte fetch URL DIR`)."""

import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from halfbyte.inputs import no_follow, parse_json

from .copying import HEAD, MAX_HEAD, MIRROR_HEAD, PROGRESS_S, WORKERS, Files, check_head, unseal
from .lock import LOCK, RunLock
from .objects import Objects


def listing(objects: Objects) -> tuple[str, dict[str, Any]]:
    """Returns (with what the keys begin, the head). Raises ValueError if there is none, or if it was changed."""
    data, _ = objects.read(HEAD)
    if data is not None:
        head = unseal(data, f"{objects.url}/{HEAD}")
        return f"{head['run']}/", head
    data, _ = objects.read(MIRROR_HEAD)
    if data is None:
        raise ValueError(f"{objects.url} holds no copy of a run; name the URL that was given to --copy-to")
    return "", _mirror(data, f"{objects.url}/{MIRROR_HEAD}")


def _mirror(data: bytes, what: str) -> dict[str, Any]:
    """The head of a run that an earlier version kept in a bucket, as a head of now: parts are whole files."""
    try:
        found = parse_json(data, what=what, most=MAX_HEAD)["files"]
        head: dict[str, Any] = {"run": "", "session": "", "where": "", "writer": "", "delete": {}, "files": {}}
        head["checkpoints"] = {}
        for path, key in found.items():
            step = path.split("/")[1] if path.startswith("checkpoints/") else None
            files = head["files"] if step is None else head["checkpoints"].setdefault(step, {})
            files[path] = [[key.removeprefix(f"{path}@"), -1, ""]]
        return check_head(head, what)
    except (KeyError, TypeError, AttributeError, IndexError):
        raise ValueError(f"{what} is not what a run writes") from None


def fetch(url: str, directory: Path, *, step: int | None = None, say: Callable[[str], None]) -> dict[str, Any]:
    """Downloads a run with one checkpoint, the newest or that of `step`, into a directory that is new or empty.
    Everything is verified and appears at once; a broken download is resumed by the next. Returns what was fetched."""
    objects = Objects(url)
    prefix, head = listing(objects)
    steps = sorted(map(int, head["checkpoints"]))
    if not steps or (step is not None and step not in steps):
        held = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"{objects.url} has no checkpoint{'' if step is None else f' of step {step}'}; it has: {held}")
    chosen = steps[-1] if step is None else step
    files: Files = head["files"] | head["checkpoints"][str(chosen)]
    if directory.is_symlink() or (directory.exists() and (not directory.is_dir() or any(directory.iterdir()))):
        raise ValueError(f"{directory} holds something else; name a new directory")
    arriving = directory.with_name(f".{directory.name}.fetching")
    if arriving.is_symlink():
        raise ValueError(f"{arriving} is a symbolic link; remove it")
    with RunLock(arriving), ThreadPoolExecutor(WORKERS) as pool:
        size, shown = sum(max(part[1], 0) for parts in files.values() for part in parts), time.monotonic()
        say(f"fetching checkpoint {chosen} of {objects.url}: {len(files)} files, {size / 2**20:,.1f} MiB")
        done = pool.map(lambda path: _download(objects, prefix, path, files[path], arriving), sorted(files))
        for number, _ in enumerate(done, 1):
            if time.monotonic() - shown > PROGRESS_S:
                shown = time.monotonic()
                say(f"fetching: {number} of {len(files)} files")
        there = {path.relative_to(arriving).as_posix() for path in arriving.rglob("*") if not path.is_dir()}
        if other := there - files.keys() - {LOCK}:
            raise ValueError(f"{arriving} holds {min(other)!r}, which is not in the copy; remove that directory")
        os.replace(arriving, directory)
    return {"url": objects.url, "run": head["run"], "step": chosen, "files": len(files), "bytes": size}


def _download(objects: Objects, prefix: str, path: str, parts: list[list[Any]], arriving: Path) -> None:
    """Writes one file, part by part. What is there already, and is what it should be, is not fetched again."""
    place = arriving / path
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.parent.resolve() != arriving.resolve() / Path(path).parent:
        raise ValueError(f"{place.parent} leads out of {arriving}; remove that directory")
    with open(place, "r+b" if place.exists() else "x+b", opener=no_follow) as file:
        for digest, size, _ in parts:
            at = file.tell()
            if not _matches(file.read(size), digest):
                data, _ = objects.read(f"{prefix}{path}@{digest}")
                if data is None or not _matches(data, digest):
                    what = "is missing" if data is None else "is not what was written"
                    raise ValueError(f"{objects.url}/{prefix}{path}@{digest} {what}; fetch another step, or restore it")
                file.seek(at)
                file.write(data)
        file.truncate()
        os.fsync(file.fileno())


def _matches(data: bytes, digest: str) -> bool:
    return hashlib.sha256(data).hexdigest().startswith(digest)
