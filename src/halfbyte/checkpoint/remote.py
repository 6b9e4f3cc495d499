"""A run in an object store: a run directory here, and a copy of it there from which any machine goes on.

A run locks, appends and renames; an object store does none of it. So the run lives in a directory of this machine's
cache, and what it holds is copied after each checkpoint: first the files, each under a name that says what is in it,
then one object, `head.json`, which lists them. That object is the commit, and the lease as well. It is only ever
replaced by whoever has seen it last (compare and swap), so of two writers one wins and the other knows; and a holder
replaces it every few seconds, so one that stays the same has lost its holder. No clock is compared with another's.

A kill at any moment leaves a head whose files are all there. A store that does not answer stops nothing: the copy is
tried again, and said. If a run dies before it is back, the directory here is ahead of the store and goes on.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.inputs import replace_file
from halfbyte.inputs.names import user_cache

from .bucket import URL, Bucket, HeadTaken, StoreFailed
from .files import FILE_LIST
from .lock import LOCK, RunDirectoryHeld, RunLock
from .record import one_line

HEAD, SIDECAR = "head.json", "store.json"
BEAT, LEASE = 5.0, 30.0  # seconds: a holder writes its head so often; one that stays the same for so long is dead
WAIT = "wait for it, stop it, or give another --run-dir"
LOOK, ROWS = 0.5, 60.0  # seconds between two looks for a new checkpoint, and between two copies of the rows
PATIENCE = 600.0  # seconds that the end of a run waits for a store that does not answer
_LEFT_OUT = re.compile(r"^(?:profile|wandb)/|(?:^|/)[^/]*\.tmp[^/]*(?:/|$)")


def is_url(text: str | os.PathLike[str]) -> bool:
    """Whether a run directory was named by the address of a store."""
    return "://" in str(text)


@dataclass
class Head:
    """What a run in a store holds, path -> object; which copy of it that is; and who holds the run, if anybody does."""

    files: dict[str, str] = field(default_factory=dict)
    copy: str = ""
    holder: dict[str, Any] | None = None

    def has_checkpoints(self) -> bool:
        return any(path.startswith("checkpoints/") for path in self.files)

    def text(self) -> bytes:
        return json.dumps(
            {"files": self.files, "copy": self.copy, "holder": self.holder, "beat": uuid.uuid4().hex}
        ).encode()

    @classmethod
    def read(cls, bucket: Bucket) -> "tuple[Head, bytes]":
        """(the head, an empty one where there is none; its generation)."""
        data, generation = bucket.read(HEAD)
        try:
            found = json.loads(data) if data is not None else {}
            return cls(dict(found.get("files", {})), str(found.get("copy", "")), found.get("holder")), generation
        except (ValueError, AttributeError, TypeError):
            raise ValueError(f"{bucket.url}/{HEAD} is not what a run writes; give another --run-dir") from None


def home_of(url: str) -> Path:
    """The folder of this machine's cache that belongs to a store: the run directory, and what is known of the copy."""
    return user_cache() / "stores" / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]


def local_directory(url: str) -> Path:
    """Where a run of a store lives on this machine."""
    found = URL.fullmatch(url)
    name = (found[3].strip("/") or found[2]) if found else ""
    return home_of(url) / (name.rpartition("/")[2] or "run")


def shown(directory: Path) -> str:
    """The address by which a run directory was named: its store's, if it has one."""
    home = directory.absolute().parent
    known = _sidecar(home) if home.parent == (user_cache() / "stores").absolute() else {}
    return str(known.get("url", directory))


def _sidecar(home: Path) -> Mapping[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((home / SIDECAR).read_text())
        return found if isinstance(found, dict) else {}
    return {}


def fetch(url: str, *, say: Callable[[str], None]) -> Path:
    """The run directory of a store on this machine, as its last copy is; or as it is, where it went on from that copy.
    A directory that another machine has overtaken is set aside. Raises RunDirectoryHeld while a process here holds it.
    """
    bucket, home, directory = Bucket(url), home_of(url), local_directory(url)
    head, _ = Head.read(bucket)
    home.mkdir(parents=True, exist_ok=True)
    with RunLock(home):
        if directory.exists():
            with RunLock(directory):
                pass
        if head.copy in _sidecar(home).get("copies", []) and directory.exists():
            return directory
        if head.files or directory.exists():
            arriving = home / "arriving.tmp"
            shutil.rmtree(arriving, ignore_errors=True)
            _download(bucket, head, arriving)
            _set_aside(directory, say)
            arriving.rename(directory)
        _remember(home, bucket.url, [head.copy])
    if head.files:
        say(f"fetched {len(head.files)} files of {bucket.url} into {directory}")
    return directory


def _download(bucket: Bucket, head: Head, target: Path) -> None:
    target.mkdir(parents=True)
    for path, name in head.files.items():
        data, _ = bucket.read(name)
        if data is None or name != _object(path, data):
            what = "is not there" if data is None else "is not what was written"
            raise ValueError(
                f"{bucket.url}/{name} {what}; put it back from a copy of the bucket, or start over elsewhere"
            )
        place = (target / path).resolve()
        if not place.is_relative_to(target.resolve()):
            raise ValueError(f"{bucket.url}/{HEAD} names a file outside of the run: {path}")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


def _set_aside(directory: Path, say: Callable[[str], None]) -> None:
    if directory.exists():
        aside = directory.with_name(f"{directory.name}.overtaken-{uuid.uuid4().hex[:8]}")
        directory.rename(aside)
        say(f"another machine has gone on with this run; what was here is kept in {aside}")


def _remember(home: Path, url: str, copies: list[str]) -> None:
    replace_file(home / SIDECAR, json.dumps({"url": url, "copies": copies}))


def _object(path: str, data: bytes) -> str:
    """The name of an object: the path, and what is in it."""
    return f"{path}@{hashlib.sha256(data).hexdigest()[:24]}"


def _link_tree(checkpoint: Path, target: Path) -> None:
    """The files of a finished checkpoint in another place; FileNotFoundError while it is being removed."""
    for place in (p for p in checkpoint.rglob("*") if p.is_file() and not p.is_symlink()):
        made = target / place.relative_to(checkpoint)
        made.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(place, made)
        except OSError:  # a file system without links
            shutil.copy2(place, made)
    for name in json.loads((target / FILE_LIST).read_text()):
        (target / name).stat()


def _machine() -> str:
    """Where process numbers mean the same: this host, and its namespace of processes where it has several."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


class Mirror(contextlib.AbstractContextManager["Mirror"]):
    """Holds the run of a store, and copies its directory there, until closed. Raises RunDirectoryHeld, naming the
    holder, where another process is alive; waits, and says so, where that is not known.
    """

    def __init__(self, url: str, directory: Path, *, say: Callable[[str], None]):
        self.bucket, self.directory, self.home, self._say = Bucket(url), directory, home_of(url), say
        self.holder = {"host": _machine(), "pid": os.getpid(), "name": uuid.uuid4().hex}
        self._known: dict[str, tuple[tuple[int, int], str]] = {}  # path -> (when and how large, its object)
        self._end, self._lock, self._saying = threading.Event(), threading.Lock(), threading.Lock()
        self._failing, self._answered, self.lost = "", 0.0, False
        self._claim()
        self._tried = [self._head.copy]
        for name in set(self.bucket.names()) - {*self._head.files.values(), HEAD}:
            self.bucket.remove(name)  # of a copy that was never finished
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._beats, self._copies)]
        for thread in self._threads:
            thread.start()

    def _claim(self) -> None:
        head, seen = Head.read(self.bucket)
        if head.holder and not self._is_dead_here(head.holder):
            who = f"pid {head.holder.get('pid')} on {head.holder.get('host')}"
            self._say(f"{self.bucket.url} was last held by {who}; waiting up to {LEASE:.0f} s to see whether it lives")
            until, now = time.monotonic() + LEASE, seen
            while now == seen and time.monotonic() < until:
                time.sleep(BEAT)
                head, now = Head.read(self.bucket)
            if now != seen and head.holder:
                raise RunDirectoryHeld(f"{self.bucket.url} is held by another process ({who})", WAIT)
            seen = now
        if head.copy not in _sidecar(self.home).get("copies", [""]):
            raise RunDirectoryHeld(f"{self.bucket.url} was changed by another process a moment ago", "start again")
        head.holder, self._seen = self.holder, seen
        try:
            self._commit(head)
        except HeadTaken as error:
            raise RunDirectoryHeld(str(error), WAIT) from None

    def _is_dead_here(self, holder: Mapping[str, Any]) -> bool:
        """Whether the holder was a process of this machine that has ended."""
        if holder.get("host") != _machine() or not isinstance(holder.get("pid"), int):
            return False
        try:
            os.kill(holder["pid"], 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return holder["pid"] == os.getpid()

    def _beats(self) -> None:
        while not self._end.wait(BEAT):
            self._try(self._beat)

    def _copies(self) -> None:
        """A copy after each checkpoint, and now and then one of the rows."""
        done, since = list[Path](), time.monotonic()
        while not self._end.wait(LOOK):
            finished = self._finished()
            pause = BEAT if self._failing else ROWS
            if (finished != done and not self._failing) or time.monotonic() - since >= pause:
                done, since = finished if self._try(self._copy) else done, time.monotonic()

    def _try(self, work: Callable[[], None]) -> bool:
        """Whether `work` was done; said, once, if the store does not answer."""
        begun = time.monotonic()
        try:
            work()
        except HeadTaken as error:
            if not self.lost:
                self._say(f"STORE: {error}: this run ends here; what it has is in {self.directory}")
                os.kill(os.getpid(), signal.SIGTERM)
            self.lost = True
            self._end.set()
            return False
        except FileNotFoundError:  # an old checkpoint was being removed; the next copy finds it gone
            return False
        except (OSError, ValueError) as error:
            self._answers(one_line(error), begun)
            return False
        self._answers("", begun)
        return True

    def _answers(self, failing: str, begun: float) -> None:
        """Say when that changes; what one thread began to ask before the store answered another is no news."""
        with self._saying:
            if failing and begun < self._answered:
                return
            if failing and not self._failing:
                self._say(f"STORE: {failing}; training goes on, the copy is tried again every {BEAT:.0f} s")
            if self._failing and not failing:
                self._say(f"STORE: {self.bucket.url} answers again")
            self._failing, self._answered = failing, self._answered if failing else time.monotonic()

    def _beat(self) -> None:
        with self._lock:
            self._commit(self._head)

    def _copy(self) -> None:
        """Bring what the directory holds to the store, commit it, and remove what nothing names any more."""
        files = self._upload()
        with self._lock:
            if files == self._head.files:
                return
            before, head = self._head, Head(files, uuid.uuid4().hex, self.holder)
            if before.has_checkpoints() and not head.has_checkpoints():
                raise OSError(errno.EIO, f"{self.directory} has lost its checkpoints; those in {self.bucket.url} stay")
            self._tried.append(head.copy)  # any of these may be the store's when this process dies
            _remember(self.home, self.bucket.url, self._tried)
            self._commit(head)
            self._tried = [head.copy]
        for name in set(before.files.values()) - set(files.values()):
            self.bucket.remove(name)

    def _commit(self, head: Head) -> None:
        """Replace the head that this process has written last. A write whose answer was lost may have been made."""
        for _ in range(2):
            try:
                self._head, self._seen = head, self.bucket.swap(HEAD, head.text(), self._seen)
                return
            except (HeadTaken, StoreFailed):
                self._head, self._seen = Head.read(self.bucket)
                if self._head.holder != self.holder:
                    raise HeadTaken(f"another process has taken the run in {self.bucket.url}") from None
                if (self._head.copy, self._head.files) == (head.copy, head.files):
                    return
        raise StoreFailed(f"{self.bucket.url} did not take the last copy")

    def _upload(self) -> dict[str, str]:
        """path -> object of every file of the run."""
        leaving, around = self._snapshot()
        files, there = dict[str, str](), set(self._head.files.values())
        for place in sorted(p for p in leaving.rglob("*") if p.is_file()):
            path, status = place.relative_to(leaving).as_posix(), place.stat()
            kind, (known, name) = (status.st_mtime_ns, status.st_size), self._known.get(path, ((0, -1), ""))
            if known != kind or name not in there:
                name = self._write(path, place.read_bytes(), there)
                self._known[path] = kind, name
            files[path] = name
        shutil.rmtree(leaving, ignore_errors=True)
        return files | {path: self._write(path, data, there) for path, data in around.items()}

    def _write(self, path: str, data: bytes, there: set[str]) -> str:
        name = _object(path, data)
        if name not in there:
            self.bucket.write(name, data)
        return name

    def _snapshot(self) -> tuple[Path, dict[str, bytes]]:
        """(a folder with links to the finished checkpoints, what the other files hold at the same moment): run.json
        says whether there are any, and metrics.jsonl has the rows of their steps. Links, because a run removes its old
        checkpoints, if need be faster than a store takes them.
        """
        leaving = self.home / "leaving.tmp"
        while True:
            shutil.rmtree(leaving, ignore_errors=True)
            leaving.mkdir()
            folders = self._finished()
            for folder in folders:
                _link_tree(folder, leaving / folder.relative_to(self.directory))
            others = [p for p in self.directory.rglob("*") if not p.is_relative_to(self.directory / "checkpoints")]
            paths = {p.relative_to(self.directory).as_posix(): p for p in others if p.is_file() and not p.is_symlink()}
            around = {
                name: p.read_bytes() for name, p in paths.items() if not _LEFT_OUT.search(name) and p.name != LOCK
            }
            if folders == self._finished():
                return leaving, around

    def _finished(self) -> list[Path]:
        folders = sorted(path for path in self.directory.glob("checkpoints/*") if path.name.isdigit())
        return [path for path in folders if (path / FILE_LIST).exists()]

    def close(self) -> None:
        """Copy what is left, and let go. Waits for a store that does not answer; OSError if it stays so, or if another
        process has the run.
        """
        self._end.set()
        for thread in self._threads:
            thread.join()
        until, is_there = time.monotonic() + PATIENCE, self._try(self._copy)
        if not is_there and not self.lost:
            self._say(f"STORE: waiting at most {PATIENCE:.0f} s for {self.bucket.url} to take the end of this run")
        while not is_there and not self.lost and time.monotonic() < until:
            time.sleep(BEAT)
            is_there = self._try(self._copy)
        if self.lost or self._failing:
            why = "another process has the run" if self.lost else self._failing
            raise OSError(
                errno.EIO, f"{self.bucket.url} lacks the end of this run ({why}); it is whole in {self.directory}"
            )
        self._head.holder = None
        with contextlib.suppress(OSError):
            self.bucket.swap(HEAD, self._head.text(), self._seen)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A run that was interrupted for good waits for nothing; one that failed ends with its own error."""
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            return self._end.set()
        try:
            self.close()
        except OSError as error:
            if kind is None:
                raise
            self._say(f"STORE: {one_line(error)}")
