"""Which Python files may run: those that the command names, or the caller's own code, and none that a file names.

A run directory, a plan and a config are data, wherever they come from. Text in them may say which program a recipe came
from, with the hash of its file; the program runs only if the person has named a file with this very content. Where it
lies by now does not matter.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

from halfbyte.io.files import read_bytes

MAX_PROGRAM_BYTES = 1 << 20
_NAMED: dict[str, str] = {}  # hash -> a file with this content that the person has named
_ONLY_NAMED: ContextVar[bool] = ContextVar("only named programs run", default=False)
_ENDS = re.compile(r"\.py(?=:)")
_STARTS = re.compile(r"[=,;\s]")


class UntrustedProgramError(ValueError):
    """A program that some file names, and not the command."""


class UntrustedPinnedProgramError(UntrustedProgramError):
    """One that the file names with its hash. Text that holds it is harmless: it cannot be run by accident."""


@contextlib.contextmanager
def trust_only_named_programs(arguments: Iterable[str] = ()) -> Iterator[None]:
    """Inside, text that names a program is believed only if one of `arguments` names a file with the same content
    (`--recipe mine.py:half`), or something outside did."""
    for path in (path for text in arguments for path in _paths(text) if Path(path).is_file()):
        _NAMED[program_digest(path)] = path
    token = _ONLY_NAMED.set(True)
    try:
        yield
    finally:
        _ONLY_NAMED.reset(token)


def _paths(text: str) -> Iterator[str]:
    """What may be a path that ends in `.py:`: from the beginning of the text, or from a `=`, `,`, `;` or blank on."""
    for end in _ENDS.finditer(text):
        yield from (text[at : end.end()] for at in (0, *(mark.end() for mark in _STARTS.finditer(text, 0, end.end()))))


def trust_program(path: str, what: str) -> str:
    """The hash of the file that `what` names, which may run from now on; NotNamed where only named programs may."""
    digest = program_digest(path)
    if not _ONLY_NAMED.get():
        _NAMED[digest] = path  # named last: a copy that was named before may be another by now
    elif digest not in _NAMED:
        raise UntrustedProgramError(_refusal(what))
    return digest


def trusted_program(digest: str, what: str) -> tuple[str, bytes]:
    """(path, content) of the named file with this hash; Pinned if nobody named it."""
    if digest not in _NAMED:
        raise UntrustedPinnedProgramError(_refusal(what))
    path = _NAMED[digest]
    source = _source(path)
    if _digest(source) != digest:
        raise ValueError(
            f"{what}: the file has changed since (it is {_digest(source)} now); put the old file back, or name it anew "
            "without the hash in a new run or with --allow-change"
        )
    return path, source


def program_digest(path: str) -> str:
    """16 hexadecimal digits of the SHA-256 of a Python file."""
    return _digest(_source(path))


def _refusal(what: str) -> str:
    return (
        f"{what} is a program, and nothing that a config, a plan or a checkpoint names is executed; look at the file, "
        "and if you trust it name it in the command: --recipe PATH/FILE.py:NAME (--policy, --candidates); it must be "
        "the file with this hash"
    )


def _digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:16]


def _source(path: str) -> bytes:
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}; a recipe or policy of your own is PATH/FILE.py:NAME")
    return read_bytes(path, most=MAX_PROGRAM_BYTES)
