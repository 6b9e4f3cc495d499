"""Validation of numbers, names and paths that users give, and escaping of text of unknown origin.

A value that no program could use is refused with a ValueError where it is written down.
"""

import math
import os
import re
import unicodedata
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

INT32_MAX = 2**31 - 1
"""Upper bound of sizes and counts; a larger value is a typing error."""
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

MAX_NAME_BYTES = 255 - 40
"""Limit of one part of a path in bytes: file systems allow 255, and temporary names have a prefix and a suffix."""
MAX_PATH_BYTES = 4096 - 512
"""Limit of a whole path in bytes, without the files below it."""

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_URL = re.compile(r"(s3|gs):/+")
_OVERRIDES = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029")


def check_int(field: str, value: Any, *, least: int = 0, most: int = INT32_MAX, zero: str = "") -> None:
    """Raises ValueError unless `value` is an int from `least` to `most`. The message names `zero`, what 0 means."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field} must be a whole number, got {value!r}")
    if value > most:
        raise ValueError(f"{field} must be at most {most:,}, got {_format_number(value)}")
    if value < least:
        raise ValueError(f"{field} must be {least}{f' ({zero})' if zero else ''} or more, got {_format_number(value)}")


def check_float(field: str, value: Any, *, holds: bool, wanted: str) -> None:
    """Raises ValueError unless `value` is a finite number and `holds`; `wanted` states the condition in the message."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not holds:
        raise ValueError(f"{field} must be {wanted}, got {_format_number(value)}")


def check_choices(config: Any, *, group: str = "") -> None:
    """Raises ValueError unless each field of a dataclass annotated by a Literal holds one of its choices.

    `group` is the prefix of the field's name in the message.
    """
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise ValueError(f"{group}{name} must be one of {', '.join(get_args(hint))}, got {value!r}")


def check_run_name(name: str) -> None:
    """Raises ValueError unless `name` can be part of a directory's name inside the run root."""
    if not _RUN_NAME.fullmatch(name) or ".." in name:
        raise ValueError(
            f"name must be 1 to 100 of the characters A-Z a-z 0-9 . _ -, without '..', and begin with a letter or a "
            f"digit, got {name[:120]!r}; where a run is written is said by --run-dir"
        )


def validated_output_path(path: str | os.PathLike[str], *, flag: str) -> Path:
    """Returns the expanded path; ValueError, which names the flag, if no file system could hold it."""
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
    if longest > MAX_NAME_BYTES or len(os.fsencode(os.path.abspath(text))) > MAX_PATH_BYTES:
        raise ValueError(
            f"{flag} {text[:40]}...: the path is too long ({len(encoded):,} bytes, its longest part {longest:,}); "
            f"a part may have {MAX_NAME_BYTES} and the whole {MAX_PATH_BYTES:,}"
        )
    return expand_user(text)


def refuse_url(path: str | os.PathLike[str]) -> None:
    """Raises ValueError if the run directory `path` is the URL of a bucket (a `Path` has lost one of its slashes)."""
    if match := _URL.match(os.fspath(path)):
        url = f"{match[1]}://{os.fspath(path)[match.end() :]}"
        raise ValueError(
            f"{url} is in a bucket, and a run directory is local: `halfbyte fetch {url} DIR` downloads a run, "
            f"`halfbyte train --run-dir DIR --copy-to {url}` trains one and copies it there"
        )


def user_cache() -> Path:
    """Returns $HALFBYTE_CACHE, else `halfbyte` in the user's cache directory."""
    if named := os.environ.get("HALFBYTE_CACHE"):
        return expand_user(named)
    return expand_user(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "halfbyte"


def expand_user(path: str | os.PathLike[str]) -> Path:
    """Returns the path with a leading ~ or ~user replaced; ValueError if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{os.fspath(path)!r}: there is no such home directory; write ./~... for a file of that name"
        ) from None


def seconds_of(text: str, field: str) -> float:
    """Returns the seconds in `30m`, `2h` or `90s`."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([smhd])\s*", text)
    seconds = float(match[1]) * SECONDS[match[2]] if match else 0.0
    if not 0 < seconds < 1e9:
        raise ValueError(f"{field} must be a time such as 30m or 2h, got {text!r}")
    return seconds


def escape_control_chars(text: str) -> str:
    """Returns `text` with control characters, direction overrides and lone surrogates escaped (`\\x1b`).

    The result can neither move the cursor nor hide text. Newlines and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(map(_escape_char, text))


def _escape_char(char: str) -> str:
    if char in "\n\t" or (char not in _OVERRIDES and unicodedata.category(char) not in ("Cc", "Cs")):
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _format_number(value: Any) -> str:
    """Returns `repr` of a number; an integer above 10**40 as its number of digits."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"a number of {int(math.log10(abs(value))) + 1} digits"
    return repr(value)
