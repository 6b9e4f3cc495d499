"""Weights that a run begins with (`halfbyte train --init-from`): another run's, or a Hugging Face folder's."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any, cast

import jax
from jax.sharding import Mesh

from halfbyte import data, models
from halfbyte.data.tokenizer import MOST_FILE, parsed
from halfbyte.inputs import read_text
from halfbyte.interchange.folder import COMPANIONS, CONFIG, Folder, inside, is_folder
from halfbyte.interchange.importing import folder_config
from halfbyte.interchange.loading import load_params
from halfbyte.interchange.opening import restore_params
from halfbyte.interchange.tokenizer_files import TOKENIZER
from halfbyte.models import Params
from halfbyte.sharding import DEFAULT_RULES
from halfbyte.train import TrainConfig
from halfbyte.train.reading import ORIGIN, open_directory


def initial_config(source: Path) -> TrainConfig:
    """What a run that begins with `source` starts from: the run's own config, or defaults around a folder's model."""
    if not is_folder(source):
        return open_directory(source).config
    with Folder(source) as folder:
        model = folder_config(folder)
    return TrainConfig(name=model.name, model=model, data="synthetic")


def initial_params(source: Path, config: TrainConfig, mesh: Mesh, directory: Path) -> Params:
    """The weights of `source` on the `mesh` of a run. A model of another shape is a ValueError, and so is data that was
    read by another tokenizer.

    An imported model's small files go along into the run `directory`, so that an export has them.
    """
    has, wanted = initial_config(source).model, config.model
    if dataclasses.replace(has, name=wanted.name) != wanted:
        fields = [f.name for f in dataclasses.fields(has) if getattr(has, f.name) != getattr(wanted, f.name)]
        listed = ", ".join(f"{f} {getattr(has, f)} -> {getattr(wanted, f)}" for f in fields if f != "name")
        raise ValueError(f"init_from {source}: the run's model is not the one whose weights it begins with: {listed}")
    check_tokenizers(source, config.data)
    params = _verified(source, wanted, mesh)
    if jax.process_index() == 0:
        _copy_origin(source, directory)
    return params


def _verified(source: Path, model: models.LlamaConfig, mesh: Mesh) -> Params:
    """The weights; what else the run seals of an imported model is compared with them."""
    if not is_folder(source):
        restored = restore_params(open_directory(source), mesh=mesh, rules=DEFAULT_RULES, step=None)
        return cast(Params, restored.items["params"])
    models.check_mesh(model, mesh)
    with Folder(source) as folder:
        return load_params(folder, model, mesh=mesh)


def check_tokenizers(source: Path, spec: str) -> None:
    """ValueError if the model learnt other ids than those that the data of `spec` is made of."""
    file = source / TOKENIZER
    if spec == "synthetic" or not file.is_file():
        return
    dataset: Any = data.demo_dataset() if spec == "demo" else data.open_mixture(spec, verify="sizes")
    texts = (read_text(file, most=MOST_FILE), dataset.tokenizer().text)
    first, second = (parsed(text).get_vocab() for text in texts)
    if first != second:
        raise ValueError(
            f"init_from {source}: the data was prepared with another tokenizer than the model learnt, so its ids would "
            f"mean other words; prepare it with `halfbyte data prepare FILES --tokenizer {file} --out DIR`"
        )


def _copy_origin(source: Path, directory: Path) -> None:
    origin = source if is_folder(source) else source / ORIGIN
    if not (origin / CONFIG).is_file() or (directory / ORIGIN).exists():
        return
    (directory / ORIGIN).mkdir()
    for name in (CONFIG, *COMPANIONS):
        if (origin / name).is_file():
            shutil.copyfile(inside(origin, name), directory / ORIGIN / name)
