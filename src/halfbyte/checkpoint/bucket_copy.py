"""Copies a run directory to a bucket while the run trains (`train --copy-to URL`), and fetches it from there.

Only one object under the URL is ever replaced, by compare and swap: the head, which lists all other objects. Their keys
have the run's name and the sha256 of their content, and they are only created: first the parts of files, then the head
that lists them. A kill at any moment leaves a head whose objects all exist.
"""

import base64
import hashlib
import json
import os
import re
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.checkpoint_record import (
    FILE_LIST,
    CheckpointReadError,
    check_file_list,
    shorten_error,
    write_file_list,
)
from halfbyte.checkpoint.locks import LOCK_FILE, RunLock, hold_for_reading
from halfbyte.checkpoint.object_store import ObjectChanged, Objects
from halfbyte.io import (
    atomic_write,
    check_run_name,
    escape_control_chars,
    open_no_follow,
    open_regular_file,
    parse_json,
)

HEAD, OLD_HEAD = "halfbyte-copy.json", "head.json"  # the second: of versions whose runs lived in buckets
FIELDS = {"run": str, "session": str, "writer": str, "where": str, "files": dict, "checkpoints": dict, "delete": dict}
NAME = "copy-name"  # in the run directory: with its inode it distinguishes the directory from a manual copy
DIGEST, STEP = re.compile("[0-9a-f]{64}"), re.compile("0|[1-9][0-9]{0,17}")
NOT_COPIED = {"checkpoints", "damaged", "profile", "wandb", LOCK_FILE, NAME}
PART, GROWING_PART = 32 << 20, 1 << 20  # bytes; of a growing file the last part is sent again
MAX_PART, MAX_HEAD = 1 << 30, 256 << 20  # bytes that are read at most
MAX_DEPTH = 32  # directories of a path; Python's functions for trees of directories recurse
WORKERS = 4  # files that are transferred concurrently, one part of each in memory
LOOK_S, RETRY_S = 0.5, 5.0
PATIENCE_S = 300.0  # how long the end of a run waits for a store that does not answer
Files = dict[str, list[list[Any]]]  # path -> its parts: [sha256, bytes, generation as base64]
Say = Callable[[str], None]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def is_inside(path: str) -> bool:
    """Returns True if a path stays inside of a run directory, is one line and at most MAX_DEPTH deep."""
    names = path.split("/")
    is_plain = escape_control_chars(path) == path and "\n" not in path
    return is_plain and len(names) <= MAX_DEPTH and not {*names} & {"", ".", ".."}


def seal(head: dict[str, Any]) -> bytes:
    """Returns the head as JSON with its sha256."""
    text = json.dumps(head, sort_keys=True)
    return json.dumps({"sha256": sha256(text.encode()), "content": text}).encode()


def read_head(objects: Objects) -> tuple[dict[str, Any] | None, bytes]:
    """Returns (head, None if the prefix is free; generation). Raises ValueError if the head is not what was sealed."""
    data, generation = objects.read(HEAD)
    if data is None:
        if objects.read(OLD_HEAD)[0] is not None:
            raise ValueError(f"{objects.url} holds the run of an earlier version: docs/buckets.md says how to read it")
        return None, generation
    with suppress(LookupError, TypeError, AttributeError, ValueError):  # any error that unexpected JSON can raise
        stored = parse_json(data, what=HEAD, most=MAX_HEAD)
        head = parse_json(stored["content"], what=HEAD, most=MAX_HEAD)
        listed = [head["files"], *(head["checkpoints"][str(int(step))] for step in head["checkpoints"])]
        parts = [part for files in listed for path in files for part in files[path]]
        paths = {path for files in listed for path in files} | head["delete"].keys() | ({head["run"]} - {""})
        generations = [*(generation for _, _, generation in parts), *head["delete"].values()]
        is_good = all(is_inside(path) for path in paths)
        is_good = is_good and all(DIGEST.fullmatch(sha) for sha, _, _ in parts)
        is_good = is_good and all(type(size) is int and 0 < size <= MAX_PART for _, size, _ in parts)
        is_good = is_good and all(base64.b64decode(generation, validate=True) for generation in generations)
        is_good = is_good and all(isinstance(head[name], kind) for name, kind in FIELDS.items())
        if is_good and sha256(stored["content"].encode()) == stored["sha256"]:
            return (head if head["run"] else None), generation  # without a run: released
    raise ValueError(f"{objects.url}/{HEAD} is not what was written")


class Copy:
    """Copies the run in `directory` until `close`. With `keep`, deletes from the bucket what it wrote for checkpoints
    that are neither among the newest `keep` nor in the directory any more; those of every `keep_every`-th step stay, as
    in the run (0: none). Raises ValueError if the prefix is not this run's to write to."""

    def __init__(self, url: str, directory: Path, run: str, *, keep: int, keep_every: int, take_over: bool, say: Say):
        check_run_name(run)
        self.url, self._directory, self._run, self._say = url.rstrip("/"), directory.absolute(), run, say
        self._keep, self._keep_every = keep, keep_every
        self._objects, self._waiting = Objects(url), set[str]()  # the second: steps of checkpoints to be copied
        self._failing, self._answered = False, time.monotonic()
        self._read = dict[str, tuple[Any, list[list[Any]]]]()  # path -> its state when it was read last, and its parts
        self._strange = set[str]()  # paths that cannot be copied
        self._head = self._claim(take_over)
        self._there = self._keys(self._head)  # and parts that no head lists yet: a retry does not send them
        for mark in directory.glob("checkpoints/*/_CHECKPOINT_METADATA"):  # Orbax has committed this one
            if STEP.fullmatch(mark.parent.name) and not (mark.parent / FILE_LIST).exists():  # killed before its list
                self._waiting.add(mark.parent.name)
                with suppress(OSError, CheckpointReadError):  # `close` reports that it was not copied
                    write_file_list(mark.parent)
        self._end, self._thread = threading.Event(), threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _claim(self, take_over: bool) -> dict[str, Any]:
        existing, generation = read_head(self._objects)
        if existing and existing["run"] != self._run:
            is_empty = not existing["checkpoints"] and not existing["files"]
            if not (is_empty and take_over):
                ended = ", or, if that run has ended before its first checkpoint, add --copy-take-over"
                held = f"--copy-to {self.url} holds another run; give this one another prefix"
                raise ValueError(held + (ended if is_empty else ""))
            existing = None
        head: dict[str, Any] = existing or {name: kind() for name, kind in FIELDS.items()} | {"run": self._run}
        name = self._directory / NAME
        if not name.exists():
            atomic_write(name, uuid.uuid4().hex)
        if not (writer := self._writer()):
            raise ValueError(f"{name} is not a file; remove it, and the run gets another one")
        if head["session"] and head["writer"] != writer and not take_over:
            held = f"--copy-to {self.url} is being written from {head['where']}"
            raise ValueError(f"{held}; if that process has ended, add --copy-take-over")
        newest = max(head["checkpoints"], key=int, default=None)
        if newest and head["writer"] != writer and not self._is_copied(newest, head):
            other = f"--copy-to {self.url} holds checkpoint {newest} of this run, and {self._directory} does not"
            raise ValueError(f"{other}: fetch it and go on from there, or give another prefix")
        where = f"{socket.gethostname()}:{self._directory}"
        head |= {"writer": writer, "where": where, "session": uuid.uuid4().hex}
        self._objects.write(HEAD, seal(head), generation)
        self._objects.check_conditions(HEAD, seal(head))
        return head

    def _writer(self) -> str:
        """Identifies the run directory: a manual copy of it has another inode. Returns "" if it was removed."""
        name = self._directory / NAME
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return f"{name.read_bytes()[:32].hex()}-{name.stat().st_ino}"
        return ""

    def _check_directory(self) -> None:
        if self._writer() != self._head["writer"]:
            raise ObjectChanged(f"{self._directory} was replaced while it was copied")

    def _commit(self, **changes: Any) -> None:
        """Replaces the head. With `keep`, objects that it no longer lists are then deleted, each by name. Raises
        ObjectChanged if the prefix or the run directory is no longer that of this process."""
        head, (stored, generation) = self._head | changes, read_head(self._objects)
        own_sessions = {self._head["session"], head["session"]}  # the second: the answer to an earlier attempt was lost
        if stored is None or stored["session"] not in own_sessions or stored["writer"] != self._head["writer"]:
            raise ObjectChanged(f"another process writes to {self.url}")
        if head["run"]:
            self._check_directory()
        listed, before = self._keys(head), self._head["delete"] | self._keys(self._head)
        dropped = before if self._keep else {}
        head["delete"] = {k: dropped[k] for k in dropped.keys() - listed if k.startswith(f"{self._run}/")}
        if len(sealed := seal(head)) > MAX_HEAD:
            raise ObjectChanged(f"{self.url} holds more than its list can name; give --copy-keep or another prefix")
        try:
            self._objects.write(HEAD, sealed, generation)
        except ObjectChanged as error:  # perhaps by a write of this process that it gave up: the next attempt will see
            raise OSError(str(error)) from None
        self._head, self._there = head, listed  # before the deletions: the next commit repeats failed ones
        for key, written in head["delete"].items():
            try:
                self._objects.write(key, None, base64.b64decode(written))
            except ObjectChanged as error:
                self._say(f"COPY: {error}")
        self._head = head | {"delete": {}}

    def _keys(self, head: dict[str, Any]) -> dict[str, str]:
        """Returns key -> generation of every object that a head lists."""
        parts = ((p, part) for f in [head["files"], *head["checkpoints"].values()] for p in f for part in f[p])
        return {f"{self._run}/{path}@{digest}": generation for path, (digest, _, generation) in parts}

    def _work(self) -> None:
        is_done = False
        while not is_done:
            is_end = self._end.wait(RETRY_S if self._failing else LOOK_S)
            try:
                self._copy(is_end)
                self._failing, is_done = False, is_end
            except Exception as error:
                is_late = is_end and time.monotonic() - self._answered > PATIENCE_S
                is_done = isinstance(error, ObjectChanged) or is_late
                then = "this process copies nothing more" if is_done else f"tried again every {RETRY_S:.0f} s"
                if is_done or not self._failing:
                    self._say(f"COPY: {shorten_error(error)}; training goes on, {then}")
                self._failing = True
                time.sleep(RETRY_S if is_end and not is_done else 0)

    def _copy(self, is_end: bool) -> None:
        if not (self._writer() or self._head["checkpoints"] or self._head["files"]):
            if is_end:  # the run has failed before its first checkpoint, and has removed its directory
                self._commit(run="", session="", writer="", where="")
            return
        self._check_directory()
        while new := [step for step in self._checkpoints() if step in self._waiting]:
            folder = self._directory / "checkpoints" / new[-1]  # the newest first: the run removes older ones
            with hold_for_reading(folder):  # but not this one, now
                check_file_list(folder)
                paths = [*folder.rglob("*")]
                if bad := [path for path in paths if path.is_symlink() or not is_inside(self._name(path))]:
                    what = "is a symbolic link or has an unprintable name, and is not copied; put a plain file there"
                    raise ValueError(f"{escape_control_chars(str(bad[0]))!r} {what}")
                copied = self._upload(paths, PART)
            checkpoints = self._head["checkpoints"] | {new[-1]: copied}
            kept_steps = {*sorted(checkpoints, key=int)[-self._keep :], *self._checkpoints()}  # all without `keep`
            kept_steps |= {step for step in checkpoints if self._keep_every and int(step) % self._keep_every == 0}
            checkpoints = {step: files for step, files in checkpoints.items() if step in kept_steps}
            self._commit(checkpoints=checkpoints, files=self._upload_around())
            self._waiting.discard(new[-1])
            self._say(f"copied checkpoint {new[-1]} to {self.url}")
        if is_end:
            self._read.clear()  # the last pass reads all files: their timestamps may be wrong
            self._commit(files=self._upload_around())
            self._commit(session="")  # the prefix is free once the deletions of the commit before are done

    def _checkpoints(self) -> list[str]:
        """Returns the steps of committed checkpoints in the run directory, oldest first."""
        lists = self._directory.glob(f"checkpoints/*/{FILE_LIST}")
        steps = sorted((path.parent.name for path in lists if STEP.fullmatch(path.parent.name)), key=int)
        self._waiting |= {step for step in steps if not self._is_copied(step, self._head)}
        return steps

    def _is_copied(self, step: str, head: dict[str, Any]) -> bool:
        """Returns True if this checkpoint, not another of the same step, is in the bucket: their file lists differ."""
        name = f"checkpoints/{step}/{FILE_LIST}"
        list_path, parts = self._directory / name, head["checkpoints"].get(step, {}).get(name)
        return bool(parts) and list_path.exists() and sha256(list_path.read_bytes()) == parts[0][0]

    def _upload_around(self) -> Files:
        """Uploads the run's files outside of its checkpoints. Returns them with those that were copied before and are
        not in the directory now: a file that was removed by mistake stays in the bucket, unless a directory has its
        name now, or a file that of its directory (`fetch` could not create both)."""
        top = [path for path in self._directory.iterdir() if path.name not in NOT_COPIED]
        top = [path for path in top if not (path.name.startswith(".") and path.suffix == ".tmp")]  # `replace_file`
        below = (Path(at, name) for path in top for at, _, names in os.walk(path) for name in names)
        names = {self._name(path): path for path in (*top, *below)}
        strange = {name for name in names if not is_inside(name)}
        for name in sorted(strange - self._strange):
            limit = f"a name that is not printable, or more than {MAX_DEPTH} directories"
            self._say(f"COPY: {escape_control_chars(name)[:200]!r} is not copied; rename it ({limit})")
        self._strange = strange
        plain = [path for name, path in names.items() if name not in strange]
        copied, before = self._upload(plain, GROWING_PART), self._head["files"]
        folders = {folder for path in {Path(path).parent for path in copied} for folder in (path, *path.parents)}
        removed = {path: {*map(str, Path(path).parents)} for path in before.keys() - copied.keys()}
        stay = {p for p, above in removed.items() if Path(p) not in folders and not above & copied.keys()}
        return {path: before[path] for path in stay} | copied

    def _upload(self, paths: Iterable[Path], part: int) -> Files:
        """Uploads the regular files among `paths`. Those that the head lists, and that have not changed since they were
        read, are not read again."""
        states = dict[str, Any]()
        for path in paths:
            with suppress(FileNotFoundError):  # removed meanwhile
                facts = path.lstat()
                if stat.S_ISREG(facts.st_mode):
                    state = (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
                    states[self._name(path)] = state
        listed = self._head["files"]  # of other files the parts may have been deleted
        new = [name for name, facts in states.items() if self._read.get(name) != (facts, listed.get(name))]
        with ThreadPoolExecutor(WORKERS) as pool:
            for name, parts in zip(new, pool.map(lambda name: self._upload_file(name, part), new)):
                self._read[name] = states[name], parts
        return {name: self._read[name][1] for name in states}

    def _name(self, path: Path) -> str:
        return os.fspath(path)[len(os.fspath(self._directory)) + 1 :]  # relative_to takes eight times as long

    def _upload_file(self, name: str, part: int) -> list[list[Any]]:
        parts = list[list[Any]]()
        with open(self._directory / name, "rb", opener=open_regular_file) as file:
            while data := file.read(part):
                key = f"{self._run}/{name}@{(digest := sha256(data))}"
                if key not in self._there:
                    generation = self._objects.write(key, data)
                    self._there[key], self._answered = base64.b64encode(generation).decode(), time.monotonic()
                parts.append([digest, len(data), self._there[key]])
        return parts

    def committed(self, step: int) -> None:
        """Takes note of a checkpoint: the run may remove it before an upload in progress has ended."""
        self._waiting.add(str(step))
        if self._end.is_set() and not self._thread.is_alive():
            self._say(f"COPY: not in {self.url}: checkpoint {step}, which was written after the copy had ended")

    def close(self) -> dict[str, Any]:
        """Copies what is left and releases the prefix. Reports, and returns, what is not in the bucket: `missing` is in
        the run directory, `removed` are the steps of checkpoints that the run has removed before they were copied."""
        self._answered = time.monotonic()  # start of the time that the end of the run waits for the store
        self._end.set()
        while self._thread.is_alive():
            self._thread.join(1.0)  # with a timeout, so that Ctrl-C can end it
        self._checkpoints()
        present = {path.name for path in self._directory.glob("checkpoints/*")}
        missing = [f"checkpoint {step}" for step in sorted(self._waiting & present, key=int)]
        missing += [f"file {escape_control_chars(name)[:200]!r}" for name in sorted(self._strange)]
        missing += ["the last rows and files"] if self._failing else []
        removed = sorted(map(int, self._waiting - present))
        lacks = missing + [f"checkpoint {step}, which the run has removed" for step in removed]
        free = f"{self.url} is free again: this run has ended before its first checkpoint"
        done = f"copied to {self.url}" if self._head["run"] else free
        self._say(f"COPY: not in {self.url}: {', '.join(lacks)}" if lacks else done)
        return {"url": self.url, "missing": missing, "removed": removed}


def fetch(url: str, directory: Path, *, step: int | None, say: Say) -> dict[str, Any]:
    """Downloads a run with one checkpoint, the newest or that of `step`, into a directory that is new or empty.
    Files are verified and appear in one rename; the next call resumes a broken download. Returns what was fetched."""
    if directory.name in ("", ".."):
        raise ValueError(f"{directory} cannot be replaced by a download; name a new directory")
    objects = Objects(url)
    head, _ = read_head(objects)
    if head is None:
        raise ValueError(f"{objects.url} holds no copy of a run; name the URL that was given to --copy-to")
    if directory.is_symlink() or (directory.exists() and (not directory.is_dir() or any(directory.iterdir()))):
        raise ValueError(f"{directory} holds something else; name a new directory")
    arriving = directory.with_name(f".{directory.name}.fetching")
    if arriving.is_symlink():
        raise ValueError(f"{arriving} is a symbolic link; remove it")
    steps = sorted(map(int, head["checkpoints"]))
    chosen = step if step is not None else max(steps, default=None)
    if chosen not in steps:
        raise ValueError(f"{objects.url} has no checkpoint {chosen or ''}; it has: {steps or 'none'}")
    files: Files = head["files"] | head["checkpoints"][str(chosen)]
    size = sum(size for parts in files.values() for _, size, _ in parts)
    say(f"fetching checkpoint {chosen} of {objects.url}: {len(files)} files, {size / 2**20:,.1f} MiB")
    what = f"the download into {directory}"
    with RunLock(arriving, flag="DIR", what=what), ThreadPoolExecutor(WORKERS) as pool:
        _refuse_others(arriving, files.keys())
        list(pool.map(lambda path: _download(objects, head["run"], path, files[path], arriving, say), files))
        _refuse_others(arriving, files.keys())
        os.replace(arriving, directory)
    return {"url": objects.url, "run": head["run"], "step": chosen, "files": len(files), "bytes": size}


def _refuse_others(arriving: Path, expected: Set[str]) -> None:
    """Raises ValueError if a download that was resumed holds files or links that are not in the copy."""
    paths = (path for path in arriving.rglob("*") if path.is_symlink() or not path.is_dir())
    present = {path.relative_to(arriving).as_posix() for path in paths}
    if other := present - expected - {LOCK_FILE}:
        name = f"{arriving} holds {min(other)!r}, which is not in this copy"
        raise ValueError(f"{name}; give the --step that this download began with, or remove that directory")


def _download(objects: Objects, run: str, path: str, parts: list[list[Any]], arriving: Path, say: Say) -> None:
    """Downloads one file, part by part. Skips parts that an earlier download has written correctly."""
    target = arriving / path
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.parent.resolve() != arriving.resolve() / Path(path).parent:
        raise ValueError(f"{target.parent} leads out of {arriving}; remove that directory")
    with open(target, "r+b" if target.exists() else "x+b", opener=open_no_follow) as file:
        for number, (digest, size, _) in enumerate(parts, 1):
            offset = file.tell()
            if sha256(file.read(size)) != digest:
                data, _ = objects.read(f"{run}/{path}@{digest}")
                if data is None or sha256(data) != digest:
                    what = "is missing" if data is None else "is not what was written"
                    raise ValueError(f"{objects.url}/{run}/{path}@{digest} {what}; fetch another step, or restore it")
                file.seek(offset)
                file.write(data)
            if number % 32 == 0:
                say(f"fetching: {number / len(parts):.0%} of {path}")
        file.truncate()
        os.fsync(file.fileno())
