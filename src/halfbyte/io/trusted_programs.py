"""Decides which Python files may run: those that the command or the caller's code names, none that only a file names.

A run directory, a plan and a config are data, of any origin. Text in them may name the program of a recipe, with the
hash of its file. The program runs only if the user has named a file with this content, under any path.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

from halfbyte.io.files import read_bytes

MAX_PROGRAM_BYTES = 1 << 20
_NAMED: dict[str, str] = {}  # hash -> a file with this content that the user has named
_ONLY_NAMED: ContextVar[bool] = ContextVar("only named programs run", default=False)
_ENDS = re.compile(r"\.py(?=:)")
_STARTS = re.compile(r"[=,;\s]")


class UntrustedProgramError(ValueError):
    """Raised for a program that a file names, and not the command."""


class UntrustedPinnedProgramError(UntrustedProgramError):
    """Raised for a program that a file names with its hash. Such text is harmless: nothing runs it by accident."""


@contextlib.contextmanager
def trust_only_named_programs(arguments: Iterable[str] = ()) -> Iterator[None]:
    """Context manager in which text may only name trusted programs.

    Trusted are files with the content of a file that one of `arguments` names (`--recipe mine.py:half`), and those that
    were named before, outside of this context.
    """
    for path in (path for text in arguments for path in _paths(text) if Path(path).is_file()):
        _NAMED[program_digest(path)] = path
    token = _ONLY_NAMED.set(True)
    try:
        yield
    finally:
        _ONLY_NAMED.reset(token)


def _paths(text: str) -> Iterator[str]:
    """Yields possible paths: substrings up to `.py`, from the start of the text or after `=`, `,`, `;` or blank."""
    for end in _ENDS.finditer(text):
        yield from (text[i : end.end()] for i in (0, *(mark.end() for mark in _STARTS.finditer(text, 0, end.end()))))


def trust_program(path: str, what: str) -> str:
    """Returns the hash of the file that `what` names, and trusts it from now on.

    Where only named programs may run, raises UntrustedProgramError unless it is one of them.
    """
    digest = program_digest(path)
    if not _ONLY_NAMED.get():
        _NAMED[digest] = path  # the last path: a file that was named before may have changed
    elif digest not in _NAMED:
        raise UntrustedProgramError(_refusal(what))
    return digest


def trusted_program(digest: str, what: str) -> tuple[str, bytes]:
    """Returns (path, content) of the named file with this hash; UntrustedPinnedProgramError if none was named."""
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
    """Returns the first 16 hexadecimal digits of the SHA-256 of a Python file."""
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
