"""Request of `halfbyte data prepare`: input files, how they are read, tokenizer and output directory, validated."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from halfbyte.data.dataset_manifest import MANIFEST_VERSION
from halfbyte.data.text_files import MAX_SOURCE_CHARS, InputFile, find_files
from halfbyte.data.tokenizer import END_OF_TEXT, Tokenizer, bpe_size, byte_tokenizer, load_tokenizer
from halfbyte.io import validated_output_path


class ReadOptions(TypedDict, total=False):
    """Which documents are read, and how."""

    val_fraction: float
    validation: Sequence[str | Path]
    default_source: str
    eos: str | None
    bos: str | None
    unchecked: bool
    column: str
    text: Sequence[str]


@dataclasses.dataclass(frozen=True)
class PrepareRequest:
    """A validated request of `prepare`."""

    out: Path
    inputs: list[InputFile]
    held_out: list[InputFile]
    tokenizer: Tokenizer | None  # None: to be trained
    settings: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.inputs + self.held_out)


def build_request(
    files: Sequence[str | Path] | str | Path, tokenizer: str | Path, out: str | Path, reading: ReadOptions
) -> PrepareRequest:
    """Finds the files and loads the tokenizer. ValueError if the request cannot be met."""
    column, source = reading.get("column", "text"), reading.get("default_source", "default")
    fraction, directory = reading.get("val_fraction", 0.01), _output(out)
    if not 0.0 <= fraction < 1.0:
        raise ValueError(f"val_fraction {fraction}: it is the share of documents held out, from 0 up to (not with) 1")
    if not 0 < len(source) <= MAX_SOURCE_CHARS:
        raise ValueError(f"--source must have 1 to {MAX_SOURCE_CHARS} characters, got {len(source)}")
    arguments = [files] if isinstance(files, str | Path) else list(files)
    text = tuple(reading.get("text", ()))
    training, held_out = (
        find_files(names, unchecked=reading.get("unchecked", False), column=column, text=text)
        for names in (arguments, reading.get("validation", ()))
    )
    held_out_paths = {file.path.resolve() for file in held_out}
    inputs = [file for file in training if file.path.resolve() not in held_out_paths]
    if not inputs:
        raise ValueError("no training files: name at least one file that is not a validation file")
    named = _named_tokenizer(str(tokenizer), eos=reading.get("eos"), bos=reading.get("bos"))
    settings = {
        "version": MANIFEST_VERSION,
        "tokenizer": named.sha256 if named else str(tokenizer),
        "markers": [named.bos, named.eos] if named else None,
        "val_fraction": 0.0 if held_out else fraction,
        "default_source": source,
        **({} if column == "text" else {"column": column}),
        **({"text": sorted(text)} if text else {}),
    }
    return PrepareRequest(directory, inputs, held_out, named, settings)


def _output(out: str | Path) -> Path:
    """Returns the output directory. ValueError if it cannot be created or is a link, which a rename does not follow."""
    path = validated_output_path(out, flag="--out")
    if path.is_symlink():
        raise ValueError(
            f"--out {path}: a symbolic link to {os.readlink(path)}; the data set takes the place of its --out in one "
            "rename, which does not follow links: name the directory itself"
        )
    return path


def _named_tokenizer(spec: str, *, eos: str | None, bos: str | None) -> Tokenizer | None:
    """Returns the existing tokenizer that `spec` names, or None for 'bpe:N'."""
    is_ours = spec == "bytes" or bpe_size(spec) is not None
    if is_ours and (eos or bos):
        raise ValueError(f"--eos and --bos name markers of a tokenizer.json; {spec} has {END_OF_TEXT}: leave them out")
    if is_ours:
        return byte_tokenizer() if spec == "bytes" else None
    return load_tokenizer(spec, eos=eos, bos=bos)
