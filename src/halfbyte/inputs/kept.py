"""What was found by compiling once is kept in the user's cache, as plain JSON behind its CRC.

Its name is made of what was asked, the source of this package, the versions of the compiler and the variables that it
listens to: nothing that was changed is answered from the past. A file that is damaged counts as none. Of two processes
that ask for the same at once, one compiles and the other waits for it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from .names import user_cache
from .reading import read_json
from .sealing import sealed_json, sealed_text
from .writing import no_follow, replace_file

PACKAGE = Path(__file__).parents[1]
HEARD = ("XLA_FLAGS", "JAX_")  # beginnings of variables that JAX and XLA listen to
PLACES = ("JAX_COMPILATION_CACHE_DIR", "JAX_PLATFORMS")  # of them, those that change no program for another device
COMPILER = ("jax", "nvidia-", "numpy")


def kept(room: str, facts: Mapping[str, Any], make: Callable[[], Any], *, say: Callable[[str], None]) -> Any:
    """The JSON value that `make` returned for these facts, now or in an earlier call."""
    path = _path(room, facts)
    with _alone(path, say):
        text = _load(path)
        if text is None:
            sealed = sealed_json("kept", make())
            text = sealed["kept"]
            try:
                replace_file(path, json.dumps(sealed))
            except OSError as error:
                say(f"not kept for the next call: {path} cannot be written ({error.strerror}); set HALFBYTE_CACHE")
    return json.loads(text)


def is_kept(room: str, facts: Mapping[str, Any]) -> bool:
    """Whether an earlier call has it."""
    return _load(_path(room, facts)) is not None


def _path(room: str, facts: Mapping[str, Any]) -> Path:
    return user_cache() / room / f"{_key(facts)}.json"


@contextlib.contextmanager
def _alone(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Held by one process at a time; by nobody where no lock can be made, which costs a second compilation at most."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            held = stack.enter_context(open(path.with_suffix(".lock"), "ab", opener=no_follow))
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another process compiles the same step; waiting for it ...")
                fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _load(path: Path) -> str | None:
    try:
        return sealed_text("kept", read_json(path))
    except (OSError, ValueError):
        return None


def _key(facts: Mapping[str, Any]) -> str:
    heard = {name: value for name, value in os.environ.items() if name.startswith(HEARD) and name not in PLACES}
    asked = json.dumps([facts, heard, source_digest(), _versions()], sort_keys=True, default=str)
    return hashlib.sha256(asked.encode()).hexdigest()[:32]


@cache
def _versions() -> list[str]:
    found = {f"{each.name} {each.version}" for each in distributions() if (each.name or "").startswith(COMPILER)}
    return [platform.python_version(), *sorted(found)]


@cache
def source_digest() -> str:
    """Of this package's own source files: two checkouts of one version may differ."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(file.relative_to(PACKAGE)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
