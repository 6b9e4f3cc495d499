"""Copies a run directory to a bucket while the run trains (`train --copy-to URL`).

One object under the URL is ever replaced, by compare and swap: the head, which lists all others. Those are stored under
the run's name, with the sha256 of their content in their own, and are only created: first the parts of files, then the
head that lists them. A kill at any moment leaves a head whose objects are all there.
"""

import base64
import hashlib
import json
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from halfbyte.inputs import check_run_name, parse_json, printable, regular, replace_file

from .beside import reading
from .files import FILE_LIST, check_file_list
from .lock import LOCK
from .objects import ObjectChanged, Objects
from .record import one_line

HEAD, MIRROR_HEAD = "halfbyte-copy.json", "head.json"  # the second: of versions whose runs lived in buckets
NAME = "copy-name"  # in the run directory: tells it, with its inode, from a copy made by hand
NOT_COPIED = {"checkpoints", "damaged", "profile", "wandb", LOCK, NAME}
PART, GROWING_PART = 32 << 20, 1 << 20  # bytes of an object; of a growing file only the last part is sent again
MAX_HEAD = 256 << 20
WORKERS = 4  # files under way at once, each with one part in memory
LOOK_S, RETRY_S, PROGRESS_S = 0.5, 5.0, 10.0
PATIENCE_S = 300.0  # how long the end of a run waits for a store that does not answer
Files = dict[str, list[list[Any]]]  # path -> its parts: [sha256, bytes, generation as base64]
Say = Callable[[str], None]


def seal(content: dict[str, Any]) -> bytes:
    """JSON with its own sha256."""
    text = json.dumps(content, sort_keys=True)
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text}).encode()


def unseal(data: bytes, what: str) -> dict[str, Any]:
    """The head in sealed JSON, its paths and types checked. Raises ValueError, naming `what`, if it is none."""
    try:
        stored = parse_json(data, what=what, most=MAX_HEAD)
        if hashlib.sha256(stored["content"].encode()).hexdigest() != stored["sha256"]:
            raise ValueError(f"{what} is not what was written: its checksum differs")
        return check_head(parse_json(stored["content"], what=what, most=MAX_HEAD), what)
    except (KeyError, TypeError, AttributeError, UnicodeEncodeError):
        raise ValueError(f"{what} is not what was written: it is no head of a copy") from None


def check_head(head: dict[str, Any], what: str) -> dict[str, Any]:
    """`head`; KeyError, TypeError, AttributeError or ValueError if a reader could not use it as it is."""
    for key, kind in {"run": str, "session": str, "where": str, "writer": str, "delete": dict}.items():
        if not isinstance(head[key], kind):
            raise TypeError(key)
    for files in (head["files"], *(head["checkpoints"][str(int(step))] for step in head["checkpoints"])):
        for path, parts in files.items():
            if {*path.split("/")} & {"", ".", ".."} or "\n" in path or printable(path) != path:
                raise ValueError(f"{what} names a file outside of the run: {path!r}")
            if not all(re.fullmatch("[0-9a-f]{24,64}", digest) and size >= -1 for digest, size, _ in parts):
                raise TypeError(path)
    return head


def _keys(head: dict[str, Any]) -> dict[str, str]:
    """key -> generation of every object that a head lists."""
    listed = [head["files"], *head["checkpoints"].values()]
    parts = ((path, part) for files in listed for path, parts in files.items() for part in parts)
    return {f"{head['run']}/{path}@{digest}": generation for path, (digest, _, generation) in parts}


class Copy:
    """Copies the run in `directory` until `close`. With `keep`, deletes from the bucket what it wrote for checkpoints
    that are neither among the newest `keep` nor in the directory any more. Raises ValueError if the prefix is not this
    run's to write to."""

    def __init__(self, url: str, directory: Path, run: str, *, keep: int, take_over: bool, say: Say):
        check_run_name(run)
        self.url, self._directory, self._run, self._keep, self._say = url.rstrip("/"), directory, run, keep, say
        self._objects, self._failing, self._seen = Objects(url), "", set[str]()
        self._sent, self._shown, self._answered = 0, time.monotonic(), time.monotonic()
        self._head = self._claim(take_over)
        self._end, self._thread = threading.Event(), threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _claim(self, take_over: bool) -> dict[str, Any]:
        data, generation = self._objects.read(HEAD)
        fresh = {"run": self._run, "session": "", "writer": "", "files": {}, "checkpoints": {}, "delete": {}}
        head: dict[str, Any] = fresh if data is None else unseal(data, f"{self.url}/{HEAD}")
        if head["run"] != self._run or (data is None and self._objects.read(MIRROR_HEAD)[0] is not None):
            raise ValueError(f"--copy-to {self.url} holds another run; give this one another prefix")
        name = self._directory / NAME
        if not name.exists():
            replace_file(name, uuid.uuid4().hex)
        writer = f"{name.read_text()[:32]}-{name.stat().st_ino}"
        if head["session"] and head["writer"] != writer and not take_over:
            held = f"--copy-to {self.url} is being written from {head['where']}"
            raise ValueError(f"{held}; if that process has ended, add --copy-take-over")
        where = f"{socket.gethostname()}:{self._directory.absolute()}"
        head |= {"writer": writer, "where": where, "session": uuid.uuid4().hex}
        self._objects.write(HEAD, seal(head), generation)
        return head

    def _commit(self, **changes: Any) -> None:
        """Replaces the head. With `keep`, objects that it no longer lists are then deleted, each by name."""
        head = self._head | changes
        dropped, listed = self._head["delete"] | _keys(self._head) if self._keep else {}, _keys(head)
        own = {key: dropped[key] for key in dropped.keys() - listed if key.startswith(f"{self._run}/")}
        data, generation = self._objects.read(HEAD)
        if data is None or unseal(data, HEAD)["session"] != self._head["session"]:
            raise ObjectChanged(f"another process writes to {self.url}")
        self._objects.write(HEAD, seal(check_head(head | {"delete": own}, self.url)), generation)
        for key in own:
            if not self._objects.delete(key, base64.b64decode(own[key])):
                self._say(f"COPY: {self.url}/{key} is not as this run wrote it; it was not deleted")
        self._head = head | {"delete": {}}

    def _work(self) -> None:
        is_done = False
        while not is_done:
            is_end = self._end.wait(RETRY_S if self._failing else LOOK_S)
            try:
                while new := [step for step in self._checkpoints() if step not in self._head["checkpoints"]]:
                    self._copy_checkpoint(new[-1])  # the newest first: the run removes older ones
                if is_end:
                    self._commit(files=self._upload(self._files(), GROWING_PART), session="")
                if self._failing:
                    self._say(f"COPY: {self.url} answers again")
                self._failing, is_done = "", is_end
            except Exception as error:
                is_late = is_end and time.monotonic() - self._answered > PATIENCE_S
                is_done = isinstance(error, ObjectChanged) or is_late
                if is_done or not self._failing:
                    then = "this process copies nothing more" if is_done else f"tried again every {RETRY_S:.0f} s"
                    self._say(f"COPY: {one_line(error)}; training goes on, {then}")
                self._failing = one_line(error)
                time.sleep(RETRY_S if is_end and not is_done else 0)

    def _checkpoints(self) -> list[str]:
        """Steps of committed checkpoints in the run directory, oldest first."""
        lists = self._directory.glob(f"checkpoints/*/{FILE_LIST}")
        steps = {path.parent.name for path in lists if path.parent.name.isdigit()}
        self._seen |= steps
        return sorted(steps, key=int)

    def _copy_checkpoint(self, step: str) -> None:
        folder = self._directory / "checkpoints" / step
        with reading(folder):  # so that the run does not delete it
            check_file_list(folder)
            copied = self._upload((path for path in folder.rglob("*") if path.is_file()), PART)
        checkpoints = self._head["checkpoints"] | {step: copied}
        kept = {*sorted(checkpoints, key=int)[-self._keep :], *self._checkpoints()}  # all of them without `keep`
        checkpoints = {step: files for step, files in checkpoints.items() if step in kept}
        self._commit(checkpoints=checkpoints, files=self._upload(self._files(), GROWING_PART))
        self._say(f"copied checkpoint {step} to {self.url} ({self._sent / 2**20:,.1f} MiB in all)")

    def _files(self) -> list[Path]:
        """The run's files outside of its checkpoints."""
        top = [path for path in self._directory.iterdir() if path.name not in NOT_COPIED and path.suffix != ".tmp"]
        files = [inner for path in top for inner in (path, *path.rglob("*"))]
        return [path for path in files if path.is_file() and not path.is_symlink()]

    def _upload(self, paths: Iterable[Path], part: int) -> Files:
        names = sorted(path.relative_to(self._directory).as_posix() for path in paths)
        with ThreadPoolExecutor(WORKERS) as pool:
            return dict(zip(names, pool.map(lambda name: self._upload_file(name, part), names)))

    def _upload_file(self, name: str, part: int) -> list[list[Any]]:
        known = {digest: generation for digest, _, generation in self._head["files"].get(name, ())}
        parts = []
        with open(self._directory / name, "rb", opener=regular) as file:
            while data := file.read(part):
                digest = hashlib.sha256(data).hexdigest()
                if digest not in known:
                    generation = self._objects.write(f"{self._run}/{name}@{digest}", data)
                    known[digest] = base64.b64encode(generation).decode()
                    self._sent, self._answered = self._sent + len(data), time.monotonic()
                parts.append([digest, len(data), known[digest]])
                if time.monotonic() - self._shown > PROGRESS_S:
                    self._shown = time.monotonic()
                    self._say(f"copying to {self.url}: {self._sent / 2**20:,.0f} MiB sent so far, now {name}")
        return parts

    def close(self) -> list[str]:
        """Copies what is left and lets the prefix go. Returns, and reports, what is not in the bucket."""
        self._end.set()
        while self._thread.is_alive():
            self._thread.join(1.0)  # in pieces, so that Ctrl-C ends it
        missing = [f"checkpoint {step}" for step in sorted(self._seen - self._head["checkpoints"].keys(), key=int)]
        missing += ["the last rows and files"] if self._failing else []
        self._say(f"COPY: not in {self.url}: {', '.join(missing)}" if missing else f"copied to {self.url}")
        return missing
