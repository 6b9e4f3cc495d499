"""A Hugging Face folder as a run directory: config, weights as the checkpoint of step 0, tokenizer, and the small files
that go out again when the model is exported.
"""

import json
import re
import shutil
from pathlib import Path

from jax.sharding import Mesh

from halfbyte import models
from halfbyte.checkpoint import Checkpoints
from halfbyte.data.staging import Staging, publish
from halfbyte.inputs import check_output
from halfbyte.interchange.folder import CONFIG, Folder
from halfbyte.interchange.hf_config import config_from_hf
from halfbyte.interchange.loading import Watch, check_tensors, load_params, stored_as
from halfbyte.interchange.tokenizer_files import TOKENIZER, folder_tokenizer
from halfbyte.models import LlamaConfig
from halfbyte.sharding import DEFAULT_RULES, Rules
from halfbyte.train import TrainConfig, jsonconfig
from halfbyte.train.claim import IMPORTED

ORIGIN = "huggingface"
LONGEST_WINDOW = 2048


def import_folder(
    directory: Path, out: Path, *, mesh: Mesh | None = None, rules: Rules = DEFAULT_RULES, watch: Watch | None = None
) -> TrainConfig:
    """Make the run directory `out` of the model in `directory`: whole or not at all. Its config."""
    out = check_output(out, flag="--out")
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists; choose another --out")
    with Folder(directory) as folder:
        model = folder_config(folder)
        check_tensors(folder, model)
        models.check_mesh(model, mesh, rules=rules)
        config = TrainConfig(name=model.name, model=model, recipe="bf16", data="synthetic")
        with Staging(out) as staging:
            _write_facts(folder, config, staging)
            params = load_params(folder, model, mesh=mesh, rules=rules, watch=watch)
            _write_checkpoint(config, params, staging)
            if not publish(staging, out, replace=False):
                raise ValueError(f"{out} appeared while the model was read; nothing was changed")
    return config


def folder_config(folder: Folder) -> LlamaConfig:
    """The folder's model, under a name that a run can have."""
    name = re.sub(r"[^A-Za-z0-9._-]+|\.{2,}", "-", folder.directory.resolve().name).strip("-._")[:80]
    return config_from_hf(folder.config, name or "imported")


def _write_facts(folder: Folder, config: TrainConfig, out: Path) -> None:
    jsonconfig.save(config, out / CONFIG)
    (out / ORIGIN).mkdir()
    (out / ORIGIN / CONFIG).write_text(json.dumps(folder.config, indent=2) + "\n", encoding="utf-8")
    for file in folder.companions():
        shutil.copyfile(file, out / ORIGIN / file.name)
    dtypes = {entry.dtype.name for entry in folder.entries.values()}
    facts = {
        "from": folder.directory.name,
        "weights": stored_as(folder),
        "dtype": dtypes.pop() if len(dtypes) == 1 else "",
    }
    (out / IMPORTED).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if (folder.directory / TOKENIZER).exists():
        tokenizer = folder_tokenizer(folder)
        tokenizer.save(out / TOKENIZER)
        read = {"seq": min(config.model.max_seq, LONGEST_WINDOW), "eos": tokenizer.eos, "bos": tokenizer.bos}
        (out / "data.json").write_text(json.dumps(read, indent=1) + "\n", encoding="utf-8")


def _write_checkpoint(config: TrainConfig, params: models.Params, out: Path) -> None:
    store = Checkpoints(out / "checkpoints", say=lambda text: None)
    store.save(0, {"params": params}, extra={"config": jsonconfig.to_dict(config), "data": None})
    if not store.close():
        raise RuntimeError("the weights could not be written")
