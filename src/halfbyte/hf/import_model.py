"""A Hugging Face folder as a run directory: its config as ours, its tokenizer, and its files as they came.

The shards are checked and copied, not converted: what is read later, tensor by tensor onto the devices that need it
(`loading`), are the bytes that were imported, and they take no more room than there.
"""

import json
import re
import shutil
from pathlib import Path

from halfbyte.data.files import sha256_of
from halfbyte.data.staging import Staging, clear_left, publish
from halfbyte.inputs import check_output
from halfbyte.interchange.folder import CONFIG, INDEX, Folder, inside
from halfbyte.interchange.hf_config import config_from_hf
from halfbyte.interchange.loading import Watch, check_tensors, refuse_not_finite, stored_as
from halfbyte.interchange.tokenizer_files import TOKENIZER, folder_tokenizer
from halfbyte.models import LlamaConfig
from halfbyte.train import TrainConfig, jsonconfig
from halfbyte.train.claim import IMPORTED
from halfbyte.train.identity import Identity, fingerprint, new_name, save_identity, versions
from halfbyte.train.reading import ORIGIN

LONGEST_WINDOW = 2048


def import_folder(directory: Path, out: Path, *, watch: Watch | None = None) -> TrainConfig:
    """Make the run directory `out` of the model in `directory`: whole or not at all. Its config. `watch` gets (done,
    of): tensors that were looked at, then files."""
    out = check_output(out, flag="--out")
    clear_left(out)
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists; choose another --out")
    with Folder(directory) as folder:
        model = folder_config(folder)
        check_tensors(folder, model)
        refuse_not_finite(folder, watch)
        config = TrainConfig(name=model.name, model=model, recipe="bf16", data="synthetic")
        with Staging(out) as staging:
            files = copy_files(folder, staging / ORIGIN, watch)
            _write_facts(folder, config, staging)
            files |= {path.name: sha256_of(path) for path in staging.iterdir() if path.is_file()}
            save_identity(staging, Identity(new_name(), fingerprint(None), files, versions()))
            if not publish(staging, out, replace=False):
                raise ValueError(f"{out} appeared while the model was copied; nothing was changed")
    return config


def folder_config(folder: Folder) -> LlamaConfig:
    """The folder's model, under a name that a run can have."""
    name = re.sub(r"[^A-Za-z0-9._-]+|\.{2,}", "-", folder.directory.resolve().name).strip("-._")[:80]
    return config_from_hf(folder.config, name or "imported")


def copy_files(folder: Folder, out: Path, watch: Watch | None) -> dict[str, str]:
    """The files of a model, and nothing else that lies beside them; name in the run -> sha256 of each."""
    index = [inside(folder.directory, INDEX)] if (folder.directory / INDEX).exists() else []
    files = [*folder.shards(), *folder.companions(), *index, inside(folder.directory, CONFIG)]
    out.mkdir()
    hashes = {}
    for done, file in enumerate(files, 1):
        shutil.copyfile(file, out / file.name)
        hashes[f"{ORIGIN}/{file.name}"] = sha256_of(out / file.name)
        if watch is not None:
            watch(done, len(files))
    return hashes


def _write_facts(folder: Folder, config: TrainConfig, out: Path) -> None:
    dtypes = {entry.dtype.name for entry in folder.entries.values()}
    kind = dtypes.pop() if len(dtypes) == 1 else ""
    facts = {"from": folder.directory.name, "weights": stored_as(folder), "dtype": kind}
    (out / IMPORTED).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if (folder.directory / TOKENIZER).exists():
        tokenizer = folder_tokenizer(folder)
        tokenizer.save(out / TOKENIZER)
        read = {"seq": min(config.model.max_seq, LONGEST_WINDOW), "eos": tokenizer.eos, "bos": tokenizer.bos}
        (out / "data.json").write_text(json.dumps(read, indent=1) + "\n", encoding="utf-8")
    jsonconfig.save(config, out / CONFIG)
