"""Files written without following what somebody else may have laid at their place."""

import contextlib
import errno
import json
import os
import secrets
from pathlib import Path
from typing import Any

from .reading import regular


def no_follow(path: str, flags: int) -> int:
    """An `opener` for `open`: a `regular` file, and no symbolic link at the last part of the path."""
    try:
        return regular(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a symbolic link, and what it points to is not written; remove it") from None
        raise


def replace_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write `content` and rename it to `path`: a reader sees the old file or the new one, also after a power cut.

    The temporary name is new and unguessable; a symbolic link at `path` is replaced, never followed. When it fails (a
    full disk), `path` is as it was and nothing is left behind.
    """
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", opener=no_follow) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_json(path: str | os.PathLike[str], data: Any) -> None:
    """`data` as a file of JSON that people read too, by `replace_file`."""
    replace_file(path, json.dumps(data, indent=1) + "\n")
