"""What a preparation is asked for: which files, read how, for which place."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from halfbyte.data.files import MOST_SOURCE, InputFile, find_files
from halfbyte.data.manifest import VERSION
from halfbyte.data.tokenizer import END_OF_TEXT, Tokenizer, bpe_size, byte_tokenizer, load_tokenizer
from halfbyte.inputs import check_output


class Reading(TypedDict, total=False):
    """What documents are read, and how."""

    val_fraction: float
    validation: Sequence[str | Path]
    default_source: str
    eos: str | None
    bos: str | None
    unchecked: bool
    column: str


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request of `prepare`, looked at."""

    out: Path
    inputs: list[InputFile]
    held_out: list[InputFile]
    tokenizer: Tokenizer | None  # None: it is to be trained
    settings: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.inputs + self.held_out)


def asked(files: Sequence[str | Path] | str | Path, tokenizer: str | Path, out: str | Path, reading: Reading) -> Asked:
    """The request: files found, tokenizer loaded; ValueError where it cannot be met."""
    column, source = reading.get("column", "text"), reading.get("default_source", "default")
    fraction, place = reading.get("val_fraction", 0.01), _output(out)
    if not 0.0 <= fraction < 1.0:
        raise ValueError(f"val_fraction {fraction}: it is the share of documents held out, from 0 up to (not with) 1")
    if not 0 < len(source) <= MOST_SOURCE:
        raise ValueError(f"--source must have 1 to {MOST_SOURCE} characters, got {len(source)}")
    given = [files] if isinstance(files, str | Path) else list(files)
    found, held_out = (
        find_files(names, unchecked=reading.get("unchecked", False), column=column)
        for names in (given, reading.get("validation", ()))
    )
    apart = {file.path.resolve() for file in held_out}
    inputs = [file for file in found if file.path.resolve() not in apart]
    if not inputs:
        raise ValueError("no training files: name at least one file that is not a validation file")
    named = _named_tokenizer(str(tokenizer), eos=reading.get("eos"), bos=reading.get("bos"))
    settings = {
        "version": VERSION,
        "tokenizer": named.sha256 if named else str(tokenizer),
        "markers": [named.bos, named.eos] if named else None,
        "val_fraction": 0.0 if held_out else fraction,
        "default_source": source,
        **({} if column == "text" else {"column": column}),
    }
    return Asked(place, inputs, held_out, named, settings)


def _output(out: str | Path) -> Path:
    """The directory to make; ValueError where nothing can be made, and for a link, which a rename would not follow."""
    path = check_output(out, flag="--out")
    if path.is_symlink():
        raise ValueError(
            f"--out {path}: a symbolic link to {os.readlink(path)}; the data set takes the place of its --out in one "
            "rename, which does not follow links: name the directory itself"
        )
    return path


def _named_tokenizer(spec: str, *, eos: str | None, bos: str | None) -> Tokenizer | None:
    """The tokenizer that exists already, or None for 'bpe:N'."""
    ours = spec == "bytes" or bpe_size(spec) is not None
    if ours and (eos or bos):
        raise ValueError(f"--eos and --bos name markers of a tokenizer.json; {spec} has {END_OF_TEXT}: leave them out")
    if ours:
        return byte_tokenizer() if spec == "bytes" else None
    return load_tokenizer(spec, eos=eos, bos=bos)
