"""Names and paths of what is written, and text of unknown origin as a terminal may show it."""

import os
import re
import unicodedata
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

LONGEST_NAME = 255 - 40
"""Bytes of one part of a path: file systems take 255, and a name in the making carries a prefix and a suffix."""
LONGEST_PATH = 4096 - 512
"""Bytes of a whole path, with room for what lies under it."""

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_URL = re.compile(r"(s3|gs):/+")
_OVERRIDES = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029")


def printable(text: str) -> str:
    """`text` with control characters, direction overrides and lone surrogates spelled out (`\\x1b`), so that it can
    neither move the cursor nor hide. Newlines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(char: str) -> str:
    if char in "\n\t" or (char not in _OVERRIDES and unicodedata.category(char) not in ("Cc", "Cs")):
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def check_run_name(name: str) -> None:
    """ValueError unless `name` can be a part of a directory's name: it must not lead out of the run root."""
    if not _RUN_NAME.fullmatch(name) or ".." in name:
        raise ValueError(
            f"name must be 1 to 100 of the characters A-Z a-z 0-9 . _ -, without '..', and begin with a letter or a "
            f"digit, got {name[:120]!r}; where a run is written is said by --run-dir"
        )


def check_choices(config: Any, *, group: str = "") -> None:
    """ValueError unless each field of a dataclass that is annotated by a Literal holds one of its choices. `group` is
    what comes before the field's name."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise ValueError(f"{group}{name} must be one of {', '.join(get_args(hint))}, got {value!r}")


def check_output(path: str | os.PathLike[str], *, flag: str) -> Path:
    """The path as it may be written to; ValueError, naming the flag, when no file system could hold it."""
    text = os.fspath(path)
    if not text:
        raise ValueError(f"{flag} is empty; name a directory")
    refuse_url(text)
    if any(unicodedata.category(char) == "Cc" for char in text):
        raise ValueError(f"{flag} {text!r}: the path holds a control character; take another name")
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        raise ValueError(f"{flag} {text!r}: the path is not valid Unicode; take another name") from None
    longest = max(map(len, encoded.split(b"/")))
    if longest > LONGEST_NAME or len(os.fsencode(os.path.abspath(text))) > LONGEST_PATH:
        raise ValueError(
            f"{flag} {text[:40]}...: the path is too long ({len(encoded):,} bytes, its longest part {longest:,}); "
            f"a part may have {LONGEST_NAME} and the whole {LONGEST_PATH:,}"
        )
    return home_expanded(text)


def refuse_url(path: str | os.PathLike[str]) -> None:
    """ValueError if `path`, of a run directory, is the address of a bucket (a `Path` has lost one slash of it)."""
    if match := _URL.match(os.fspath(path)):
        url = f"{match[1]}://{os.fspath(path)[match.end() :]}"
        raise ValueError(
            f"{url} is in a bucket, and a run directory is local: `halfbyte fetch {url} DIR` downloads a run, "
            f"`halfbyte train --run-dir DIR --copy-to {url}` trains one and copies it there"
        )


def user_cache() -> Path:
    """$HALFBYTE_CACHE, else `halfbyte` in the user's cache directory."""
    if named := os.environ.get("HALFBYTE_CACHE"):
        return home_expanded(named)
    return home_expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "halfbyte"


def home_expanded(path: str | os.PathLike[str]) -> Path:
    """The path with a leading ~ or ~user replaced; ValueError where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{os.fspath(path)!r}: there is no such home directory; write ./~... for a file of that name"
        ) from None
