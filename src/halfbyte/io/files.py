"""Bounded reads of files of unknown origin, atomic writes, and directories that appear complete or not at all.

Limits of size and depth are checked before anything is parsed. JSON is read strictly: UTF-8, no NaN or Infinity, no
duplicate key in an object; Python's own reader accepts all three, and fails on deep nesting with a RecursionError.
Writes never follow a symbolic link at their target.

A `StagingDirectory` is created hidden next to its target and renamed into place in one call. If the target exists, the
two exchange their names, so that a kill at any moment leaves the old or the new directory. Where a file system cannot
exchange names (NFS), the old directory is moved away first; after a kill at that point `remove_stale` restores it. The
process that writes a staging directory holds a lock on it, which the kernel releases when the process ends in any way:
the lock distinguishes a stale directory from one in use.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import tomllib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NoReturn

MIB = 1 << 20
MAX_JSON_BYTES = 64 * MIB
"""Limit of a config, manifest or record in bytes. The manifest of a data set of 100,000 shards has 30 MB."""
MAX_JSON_DEPTH = 64
"""Limit of nested objects and arrays. No file of Halfbyte has more than 10 levels."""

PARTIAL, REPLACED = "partial", "replaced"
# Part of the names of staging directories: locks may be visible on one host only.
HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
TARGET_EXISTS_ERRNOS = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
AT_FDCWD, EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


LockOwner = Literal["mine", "another's", "nobody's"]

_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_BRACKETS = b"[]{}"
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in _BRACKETS)


class UnreadableFile(ValueError):
    """Raised for a file that is too large, nested too deeply, or of another type than expected."""


def open_regular_file(path: str, flags: int) -> int:
    """`opener` for `open` that raises UnreadableFile unless `path` is a regular file; does not block on a pipe.

    For any file in a directory of unknown origin: `metrics.jsonl`, the files of a checkpoint, a lock.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a pipe without a reader, a socket
            raise
        raise UnreadableFile(f"{path} is not a regular file") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnreadableFile(f"{path} is not a regular file")
    return descriptor


def open_no_follow(path: str, flags: int) -> int:
    """`opener` for `open`: as `open_regular_file`, and the last part of the path must not be a symbolic link."""
    try:
        return open_regular_file(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a symbolic link, and what it points to is not written; remove it") from None
        raise


def read_bytes(path: str | os.PathLike[str], *, most: int = MAX_JSON_BYTES) -> bytes:
    """Returns the content of a regular file of at most `most` bytes; UnreadableFile for a pipe or a device."""
    with open(path, "rb", opener=open_regular_file) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UnreadableFile(f"{path} has more than {most:,} bytes, the most that is read of such a file")
    return content


def read_text(path: str | os.PathLike[str], *, most: int = MAX_JSON_BYTES) -> str:
    """Returns the content decoded as UTF-8."""
    try:
        return read_bytes(path, most=most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def read_json(path: str | os.PathLike[str], *, most: int = MAX_JSON_BYTES) -> Any:
    """Returns the value in a JSON file."""
    return parse_json(read_bytes(path, most=most), what=str(path), most=most)


def parse_json(content: str | bytes, *, what: str, most: int = MAX_JSON_BYTES, depth: int = MAX_JSON_DEPTH) -> Any:
    """Returns the value of JSON text; UnreadableFile, which names `what`, if it is too large, too deep or damaged."""
    encoded = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    if len(encoded) > most:
        raise UnreadableFile(f"{what} has {len(encoded):,} bytes of JSON, more than the {most:,} that are read")
    if (levels := nesting_depth(encoded)) > depth:
        raise UnreadableFile(f"{what} is nested {levels:,} levels deep, more than the {depth} that are read")
    try:
        return json.loads(
            encoded.decode("utf-8"), object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_nan_constant
        )
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"{what} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        raise UnreadableFile(f"{what} is not JSON: {error}") from None


def read_toml(path: str | os.PathLike[str], *, most: int = MAX_JSON_BYTES) -> Any:
    """Returns the table in a TOML file."""
    try:
        table = tomllib.loads(read_text(path, most=most))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UnreadableFile(f"{path} is not TOML: {error}") from None
    return _validated_depth(table, str(path))


def read_yaml(path: str | os.PathLike[str], *, most: int = MAX_JSON_BYTES) -> Any:
    """Returns the value in a YAML file: no tags, and no aliases, which could expand to a billion values."""
    import yaml

    text = read_text(path, most=most)
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise UnreadableFile(f"{path} uses aliases (*name), which are not read; write the value out")
        return _validated_depth(yaml.safe_load(text), str(path))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, UnreadableFile):
            raise
        raise UnreadableFile(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def nesting_depth(content: bytes) -> int:
    """Returns the nesting depth of objects and arrays in JSON text, in one pass without recursion."""
    brackets = _STRINGS.sub(b"", content).translate(None, _NOT_BRACKETS)
    return max(itertools.accumulate(1 if byte in b"[{" else -1 for byte in brackets), default=0)


def atomic_write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes `content` and renames it to `path`: a reader sees the old file or the new one, also after a power cut.

    The temporary name is new and unguessable; a symbolic link at `path` is replaced, never followed. On failure (a
    full disk) `path` is unchanged and the temporary file is removed.
    """
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", opener=open_no_follow) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Writes `data` as indented JSON with `atomic_write`."""
    atomic_write(path, json.dumps(data, indent=1) + "\n")


def sealed_json(name: str, value: Any) -> dict[str, Any]:
    """Returns `{name: JSON text of value, "crc32": CRC of the text}`; `sealed_text` detects damage and edits."""
    text = json.dumps(value, separators=(",", ":"))
    return {name: text, "crc32": zlib.crc32(text.encode())}


def sealed_text(name: str, stored: Any) -> str | None:
    """Returns the JSON text of a `sealed_json` record; None if `stored` is anything else or its CRC differs."""
    text = stored.get(name) if isinstance(stored, dict) else None
    is_whole = isinstance(text, str) and zlib.crc32(text.encode("utf-8", "surrogatepass")) == stored.get("crc32")
    return text if is_whole else None


class StagingDirectory:
    """Context manager of a locked hidden directory next to `out`, removed at exit unless it was renamed away."""

    def __init__(self, out: Path):
        self.out = out
        self._locked = contextlib.ExitStack()

    def __enter__(self) -> Path:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        while True:
            prefix = f"{_prefix(self.out, PARTIAL)}{HOST}-"
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=self.out.parent))
            # `remove_stale` of another process may be first.
            if self._locked.enter_context(_lock(self.path)) != "another's":
                return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._locked.close()


def remove_stale(out: Path) -> None:
    """Removes, and reports, the staging directories next to `out` of killed processes of this host.

    A target that was moved away is restored if `out` does not exist. A lock of another host may not be visible here
    (NFS with `local_lock`, Lustre with `localflock`): directories of other hosts are reported and not removed.
    """
    for kind in (REPLACED, PARTIAL):
        for path in sorted(out.parent.glob(".*")):
            if not path.name.startswith(_prefix(out, kind)):
                continue
            with _lock(path) as owner:
                lost = kind == REPLACED and not out.exists()  # the only copy; a process that is replacing it retries
                if owner == "mine" and not path.name.startswith(f"{_prefix(out, kind)}{HOST}-"):
                    owner = "nobody's"
                if owner == "mine" or (owner == "nobody's" and lost):
                    _clear(path, out, kind)
                elif owner == "nobody's":
                    print(f"{path}: left behind, or still being made; remove it if nobody makes it", file=sys.stderr)


def rename_into_place(staging: Path, out: Path, *, replace: bool, check: Callable[[], object] = lambda: None) -> bool:
    """Renames `staging` to `out`. Returns False if `out` exists and `replace` is not set: another process was first.

    Only the target that existed when `check` was called is replaced; `check` raises if it must be kept.
    """
    staging.chmod(0o755)
    while True:
        try:
            staging.rename(out)
            return True
        except OSError as error:
            if error.errno not in TARGET_EXISTS_ERRNOS:
                raise
        if not replace:
            return False
        with contextlib.suppress(FileNotFoundError):  # another process moved it first
            seen = out.lstat()
            check()
            if exchange_directories(staging, out):
                if os.path.samestat(staging.lstat(), seen):
                    return True
                exchange_directories(staging, out)  # something else was moved there since the check
            elif _replace_in_two_renames(staging, out, seen):
                return True


def exchange_directories(one: Path, other: Path) -> bool:
    """Exchanges the names of two directories in one call. Returns False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EXDEV):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _validated_depth(value: Any, what: str) -> Any:
    """Returns `value`; UnreadableFile if it is nested too deeply. Level by level, without recursion."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        holders = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        level = [item for holder in holders for item in holder]
        if not level:
            return value
    raise UnreadableFile(f"{what} is nested more than {MAX_JSON_DEPTH} levels deep")


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {duplicate!r} stands twice in one object")
    return unique


def _reject_nan_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _clear(path: Path, out: Path, kind: str) -> None:
    if kind == REPLACED and not out.exists():
        path.rename(out)
        print(f"{out}: put back; a process was killed while it replaced it", file=sys.stderr)
        return
    print(f"{path}: removed; a process that was killed has left it half made", file=sys.stderr)
    shutil.rmtree(path, ignore_errors=True)


def _replace_in_two_renames(staging: Path, out: Path, seen: os.stat_result) -> bool:
    """Returns False if another process was first between the two renames, or `out` is no longer `seen`."""
    replaced = out.with_name(_prefix(out, REPLACED) + staging.name.removeprefix(_prefix(out, PARTIAL)))
    with _lock(out):
        out.rename(replaced)
        if not os.path.samestat(replaced.lstat(), seen):
            replaced.rename(out)
            return False
        try:
            staging.rename(out)
        except BaseException as error:
            if getattr(error, "errno", None) not in TARGET_EXISTS_ERRNOS:
                replaced.rename(out)
                raise
        shutil.rmtree(replaced, ignore_errors=True)
    return not staging.exists()


def _prefix(out: Path, kind: str) -> str:
    return f".{out.name}.{kind}-"


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[LockOwner]:
    """Holds the directory's lock and yields its owner.

    "another's": a process holds it or has removed the directory. "nobody's": the file system has no locks (NFS).
    """
    descriptor = -1
    owner: LockOwner = "another's"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner = "mine" if os.path.samestat(os.fstat(descriptor), os.lstat(path)) else "another's"
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        owner = "nobody's"
    try:
        yield owner
    finally:
        if descriptor >= 0:
            os.close(descriptor)
