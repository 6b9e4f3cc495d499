"""A run directory opened for reading: the one way in for every command that reads one.

A run directory is data, and it may come from anywhere. It holds regular files and directories and nothing else; what
its seal (`run.json`) covers is what the run wrote, or it is not used; what no seal covers is said; the data set is the
one that it was trained on; and no program runs because a file in it says so (`inputs/programs.py`).
"""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.inputs import MOST_JSON, UnreadableFile, printable, refuse_url
from halfbyte.inputs.programs import NotNamed, only_named

from . import jsonconfig
from .claim import IMPORTED
from .config import TrainConfig
from .identity import ABSENT, FILE, Identity, fingerprint, hash_of, load_identity

if TYPE_CHECKING:
    from .source import Source

CONFIG, ORIGIN = "config.json", "huggingface"
SEALED = (CONFIG, "tokenizer.json", "data.json", IMPORTED)
"""What readers take from a run beside its checkpoints, which have checksums of their own, and ORIGIN: the files of the
folder that it was imported, or begun, from."""
SLOW = 1 << 28  # bytes that take a while to hash
RESTORE = "If the file was edited or damaged, restore it from a copy; a new run needs another directory"
UNREAD = ("wandb",)
"""Directories that others fill, with links, and that nobody reads here."""


class ChangedFile(ValueError):
    """A file that is not what the run wrote."""


@dataclass(frozen=True)
class RunDirectory:
    """`values` are the fields of config.json; `identity` is None where there is no run.json."""

    path: Path
    values: Mapping[str, Any]
    identity: Identity | None

    @cached_property
    def config(self) -> TrainConfig:
        """The run's config; ValueError, naming the file, if its fields make none. Programs that it names run only if
        the command names them too, and compiled ones that it would load are left alone."""
        try:
            with only_named():
                return jsonconfig.from_dict(TrainConfig, {**self.values, "compile_cache": ""})
        except NotNamed:
            raise
        except jsonconfig.RemovedField as error:
            raise ValueError(f"{self.path / CONFIG}: {error}") from None
        except ValueError as error:
            self.refuse_changes()
            raise ValueError(f"{self.path / CONFIG}: {error}. {RESTORE}") from None

    def files(self) -> list[str]:
        """The names of what a seal covers, or should: those that are there, and those that the seal has."""
        there = [name for name in SEALED if (self.path / name).exists()] + origin_files(self.path)
        return list(dict.fromkeys([*there, *(self.identity.files if self.identity else ())]))

    def unsealed(self) -> list[str]:
        """Those that no seal covers."""
        return [name for name in self.files() if self.identity is None or name not in self.identity.files]

    def changed(self, *, origin: bool = False) -> list[str]:
        """Those of SEALED, or of ORIGIN, that are not what the run wrote. They are read in full."""
        names = [name for name in self.files() if name.startswith(f"{ORIGIN}/") == origin]
        return [name for name in names if self.identity and name in self.identity.files and not self._is_whole(name)]

    def refuse_changes(self, *, origin: bool = False) -> None:
        """ChangedFile if there is one."""
        if changed := self.changed(origin=origin):
            raise ChangedFile(
                f"{self.path / changed[0]} is not what this run wrote: it was edited, or the disk has changed it; "
                "restore the file from a copy"
            )

    def _is_whole(self, name: str) -> bool:
        assert self.identity is not None
        path = self.path / name
        size = path.stat().st_size if path.exists() else 0
        if name in SEALED and size > MOST_JSON:  # nobody would read it
            return False
        if size > SLOW:
            _note(f"comparing {path} ({size / 2**30:.1f} GiB) with the run's seal")
        return self.identity.holds(name, hash_of(path) if path.exists() else ABSENT)

    def source(self) -> "Source":
        """The run's data; ValueError if it is not what the run was trained on."""
        from .source import open_source

        source = open_source(self.config)
        content = fingerprint(source.dataset)
        if self.identity is not None and self.identity.data != content:
            raise ChangedFile(
                f"{self.config.data} holds something else than this run was trained on ({self.identity.data}, now "
                f"{content}); put the data set back"
            )
        return source


def open_directory(directory: Path, *, check: bool = True, say: Callable[[str], None] | None = None) -> RunDirectory:
    """The run in `directory`. ValueError if there is none, if something in it is neither file nor directory, or, with
    `check`, if a file is not what the run wrote. What no seal covers is said."""
    if not (directory / CONFIG).is_file():
        refuse_url(directory)
        if directory.is_file():
            raise ValueError(f"{directory} is a file, and a run is a directory; name the one that holds {CONFIG}")
        what = "there is no such directory" if not directory.is_dir() else f"it holds no {CONFIG}"
        raise ValueError(f"{directory} is not a run: {what}; `halfbyte train --run-dir {directory}` makes one")
    refuse_strange_files(directory)
    run = RunDirectory(directory, _values(directory), load_identity(directory))
    if strange := [name for name in (run.identity.files if run.identity else ()) if not _may_be_sealed(name)]:
        raise ValueError(f"{directory}: run.json seals {strange[0][:200]!r}, which is no file that a run seals")
    if check:
        run.refuse_changes()
    if unsealed := run.unsealed():
        why = "its run.json is gone" if run.identity is None else "an earlier version wrote it"
        (say or _note)(
            f"{directory}: no seal covers {', '.join(unsealed[:4])} ({why}): whether they are as written is not known"
        )
    return run


def _values(directory: Path) -> dict[str, Any]:
    try:
        return jsonconfig.read_values(directory / CONFIG)
    except UnreadableFile as error:
        raise UnreadableFile(f"{error}. {RESTORE}") from None


def config_values(path: Path) -> dict[str, Any]:
    """The fields of a config file. One that lies in a run directory is the run's, behind its seal."""
    if path.name != CONFIG or not any((path.parent / name).exists() for name in (FILE, "checkpoints", "metrics.jsonl")):
        return jsonconfig.read_values(path)
    return {**open_directory(path.parent).values, "compile_cache": ""}


def refuse_strange_files(directory: Path) -> None:
    """ValueError for a link, a pipe or a device anywhere in a run directory: it would lead out, or never end."""
    waiting, unread = [os.fspath(directory)], [directory / name for name in UNREAD]
    while waiting:
        with suppress(FileNotFoundError), os.scandir(waiting.pop()) as entries:  # a run removes checkpoints meanwhile
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting += [entry.path] if Path(entry.path) not in unread else []
                elif not entry.is_file(follow_symlinks=False):
                    what = "a symbolic link" if entry.is_symlink() else "neither a file nor a directory"
                    raise ValueError(f"{entry.path} is {what}; a run directory holds files and directories: remove it")


def _may_be_sealed(name: str) -> bool:
    folder, _, inside = name.rpartition("/")
    return name in SEALED or (folder == ORIGIN and inside not in ("", ".", ".."))


def origin_files(directory: Path) -> list[str]:
    """The files of ORIGIN, by their names in the run directory."""
    folder = directory / ORIGIN
    return sorted(f"{ORIGIN}/{path.name}" for path in folder.iterdir()) if folder.is_dir() else []


def _note(text: str) -> None:
    print(printable(f"NOTE: {text}"), file=sys.stderr, flush=True)
