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
from halfbyte.inputs.programs import NotNamed

from . import jsonconfig
from .changed import EDITED, data_changes, refuse_or_say
from .claim import IMPORTED
from .config import TrainConfig
from .identity import FILE, Identity, file_hash, fingerprint, load_identity

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


@dataclass(frozen=True)
class RunDirectory:
    """`values` are the fields of config.json, none in a directory that holds no run yet, and without the cache of
    compiled programs that it names; `identity` is None where there is no run.json."""

    path: Path
    values: Mapping[str, Any]
    identity: Identity | None

    @cached_property
    def config(self) -> TrainConfig:
        """The run's config; ValueError, naming the file, if its fields make none. Programs that it names run only if
        the command names them too."""
        try:
            return jsonconfig.from_file(TrainConfig, self.values, self.path / CONFIG)
        except NotNamed:
            raise
        except ValueError as error:
            self.refuse_changes()
            raise ValueError(f"{error}. {RESTORE}") from None

    @property
    def seal(self) -> Mapping[str, str]:
        """The files that a seal covers, with their hashes; none without run.json."""
        return self.identity.files if self.identity else {}

    def unsealed(self) -> list[str]:
        """The files that no seal covers, of those that a seal should cover."""
        there = [name for name in SEALED if (self.path / name).exists()] + origin_files(self.path)
        return [name for name in there if name not in self.seal]

    def changed(self, *, origin: bool = False) -> list[str]:
        """The sealed files, those of ORIGIN or all others, that are not what the run wrote. They are read in full."""
        return [name for name in self.seal if name.startswith(f"{ORIGIN}/") == origin and not self._is_whole(name)]

    def changes(self, *, origin: bool = False) -> list[str]:
        """Returns a clause about each of them, for `refuse_or_say`."""
        return [f"{self.path / name} is not what this run wrote" for name in self.changed(origin=origin)]

    def refuse_changes(self, *, origin: bool = False) -> None:
        """Raise ChangedRun if there is one."""
        refuse_or_say(self.changes(origin=origin), what=EDITED, remedy="restore the file from a copy")

    def _is_whole(self, name: str) -> bool:
        path = self.path / name
        size = path.stat().st_size if path.exists() else 0
        if name in SEALED and size > MOST_JSON:  # nobody would read it
            return False
        if size > SLOW:
            _note(f"comparing {path} ({size / 2**30:.1f} GiB) with the run's seal")
        return file_hash(path) in self.seal[name].split()

    def source(self) -> "Source":
        """The run's data; ValueError if it is not what the run was trained on."""
        from .source import open_source

        source = open_source(self.config)
        changes = data_changes(self.identity.data if self.identity else None, fingerprint(source.dataset))
        what = f"{self.config.data} holds something else than this run was trained on"
        refuse_or_say(changes, what=what, remedy="put the data set back")
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
    try:
        values = jsonconfig.read_values(directory / CONFIG) | {"compile_cache": ""}  # its compiled programs are not run
    except UnreadableFile as error:
        raise UnreadableFile(f"{error}. {RESTORE}") from None
    run = RunDirectory(directory, values, load_identity(directory))
    if strange := [name for name in run.seal if not _may_be_sealed(name)]:
        raise ValueError(f"{directory}: run.json seals {strange[0][:200]!r}, which is no file that a run seals")
    if check:
        run.refuse_changes()
    if unsealed := run.unsealed():
        why = "its run.json is gone" if run.identity is None else "an earlier version wrote it"
        (say or _note)(
            f"{directory}: no seal covers {', '.join(unsealed[:4])} ({why}): whether they are as written is not known"
        )
    return run


def config_values(path: Path) -> dict[str, Any]:
    """The fields of a config file. One that lies in a run directory is the run's, behind its seal."""
    if path.name != CONFIG or not any((path.parent / name).exists() for name in (FILE, "checkpoints", "metrics.jsonl")):
        return jsonconfig.read_values(path)
    return dict(open_directory(path.parent).values)


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
