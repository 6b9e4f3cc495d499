"""A Hugging Face folder as it lies on disk: config.json, safetensors shards and the small files beside them.

Nothing in it is believed. Shards are plain names of regular files inside the folder (no path, no link that leads out);
the index and the shards must name the same tensors, each once; a pickle is never opened, because reading one runs it.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.inputs import printable, read_json
from halfbyte.interchange.tensor_file import MOST_TENSORS, Entry, TensorFile

CONFIG = "config.json"
MOST_CONFIG = 1 << 20
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
"""Files that travel with a model unchanged."""


class Folder(AbstractContextManager["Folder"]):
    """An open folder: `config` (the fields of config.json) and the tensors of all shards by name."""

    def __init__(self, directory: Path):
        self.directory = directory
        if not directory.is_dir():
            raise ValueError(f"{directory} is not a directory; give the folder that holds config.json and safetensors")
        self.config: dict[str, Any] = read_json(inside(directory, CONFIG), most=MOST_CONFIG)
        if not isinstance(self.config, dict):
            raise ValueError(f"{directory / CONFIG} must hold one JSON object, got {type(self.config).__name__}")
        self._stack = ExitStack()
        try:
            self._shard_of: dict[str, TensorFile] = self._open_shards()
        except BaseException:
            self._stack.close()
            raise

    def _open_shards(self) -> dict[str, TensorFile]:
        listed = shard_names(self.directory)
        found: dict[str, TensorFile] = {}
        for shard in dict.fromkeys(listed.values()) or [SINGLE]:
            file = self._stack.enter_context(TensorFile(inside(self.directory, shard)))
            for name in file.entries:
                if name in found:
                    raise ValueError(
                        f"tensor {printable(name)!r} lies in two shards, {found[name].path.name} and {shard}"
                    )
                found[name] = file
            if len(found) > MOST_TENSORS:
                raise ValueError(f"{self.directory} holds more than {MOST_TENSORS:,} tensors, the most that are read")
        if listed:
            _check_index(listed, found)
        return found

    @property
    def entries(self) -> dict[str, Entry]:
        """Every tensor's dtype and shape."""
        return {name: file.entries[name] for name, file in self._shard_of.items()}

    def shards(self) -> list[Path]:
        """The shard files, in the order in which they were opened."""
        return list(dict.fromkeys(file.path for file in self._shard_of.values()))

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """One tensor, or some of its first dim."""
        return self._shard_of[name].read(name, rows)

    def companions(self) -> Iterator[Path]:
        """The tokenizer's and the generation's files that are there."""
        for name in COMPANIONS:
            if (self.directory / name).exists():
                yield inside(self.directory, name)

    def close(self) -> None:
        self._stack.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def is_folder(directory: Path) -> bool:
    """Whether this directory looks like a Hugging Face model: a config.json that names an architecture."""
    if not (directory / CONFIG).is_file():
        return False
    fields = read_json(directory / CONFIG, most=MOST_CONFIG)
    return isinstance(fields, dict) and ("architectures" in fields or "model_type" in fields)


def inside(directory: Path, name: str) -> Path:
    """The regular file `name` of the folder; ValueError if the name is a path, or a link that leads out of it."""
    if not name or Path(name).name != name or "\\" in name or "\0" in name or name in (".", ".."):
        raise ValueError(f"{directory}: {printable(name)[:200]!r} is not the plain name of a file in this folder")
    path = directory / name
    if not path.exists():
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link to nothing; download the file again")
        raise ValueError(f"{directory} has no {printable(name)}; is the download complete?")
    if path.resolve().parent != directory.resolve():
        raise ValueError(
            f"{path} is a symbolic link that leads out of the folder, to {path.resolve()}; "
            "copy the files themselves into one folder (cp -L), or download with --local-dir"
        )
    return path


def shard_names(directory: Path) -> Mapping[str, str]:
    """Tensor -> shard, as the index has it; empty for a folder of one file. A folder of pickles is refused."""
    if (directory / INDEX).exists():
        index = read_json(inside(directory, INDEX))
        listed = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(listed, dict) or not listed or not all(isinstance(shard, str) for shard in listed.values()):
            raise ValueError(f"{directory / INDEX}: weight_map must map tensor names to shard files")
        return listed
    if (directory / SINGLE).exists():
        return {}
    pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
    if pickles:
        raise ValueError(
            f"{directory} holds pickles ({', '.join(pickles[:3])}) and no safetensors. Reading a pickle runs the code "
            "in it, so it is refused; convert the weights to safetensors where you trust them"
        )
    raise ValueError(f"{directory} has neither {SINGLE} nor {INDEX}; it holds no weights that can be read")


def _check_index(listed: Mapping[str, str], found: Mapping[str, TensorFile]) -> None:
    for name, shard in listed.items():
        if name not in found or found[name].path.name != shard:
            where = f"it lies in {found[name].path.name}" if name in found else "no shard holds it"
            raise ValueError(f"{INDEX} says that {printable(name)[:200]!r} is in {printable(shard)[:200]}, but {where}")
    extra = sorted(set(found) - set(listed))
    if extra:
        raise ValueError(
            f"{INDEX} does not list {len(extra)} tensors that the shards hold, first {printable(extra[0])!r}"
        )
