"""A Hugging Face folder as a run directory: its config as ours, its tokenizer, and its files as they came.

The shards are checked and copied, not converted: what is read later, tensor by tensor onto the devices that need it
(`load_weights`), are the bytes that were imported, and they take no more space than there.
"""

import json
import re
import shutil
from pathlib import Path

from halfbyte.data.text_files import sha256_of
from halfbyte.hf.exporter import TOKENIZER, folder_tokenizer
from halfbyte.hf.hf_config import config_from_hf
from halfbyte.hf.hf_folder import HF_CONFIG_FILE, INDEX_FILE, HfFolder, resolve_inside
from halfbyte.hf.load_weights import ProgressFn, check_all_finite_tensors, check_tensors, storage_description
from halfbyte.io import dataclass_json, validated_output_path
from halfbyte.io.files import StagingDirectory, remove_stale, rename_into_place
from halfbyte.models import LlamaConfig
from halfbyte.train import TrainConfig
from halfbyte.train.run_directory import ORIGIN
from halfbyte.train.run_identity import (
    IMPORT_RECORD_FILE,
    RunIdentity,
    dataset_fingerprint,
    new_run_id,
    save_identity,
    software_versions,
)

MAX_DEFAULT_WINDOW = 2048


def import_hf_folder(directory: Path, out: Path, *, watch: ProgressFn | None = None) -> TrainConfig:
    """Make the run directory `out` of the model in `directory`: whole or not at all. Its config. `watch` gets (done,
    of): tensors that were looked at, then files."""
    out = validated_output_path(out, flag="--out")
    remove_stale(out)
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists; choose another --out")
    with HfFolder(directory) as folder:
        model = folder_config(folder)
        check_tensors(folder, model)
        check_all_finite_tensors(folder, watch)
        config = TrainConfig(name=model.name, model=model, recipe="bf16", data="synthetic")
        with StagingDirectory(out) as staging:
            files = copy_files(folder, staging / ORIGIN, watch)
            _write_import_record(folder, config, staging)
            files |= {path.name: sha256_of(path) for path in staging.iterdir() if path.is_file()}
            save_identity(staging, RunIdentity(new_run_id(), dataset_fingerprint(None), files, software_versions()))
            if not rename_into_place(staging, out, replace=False):
                raise ValueError(f"{out} appeared while the model was copied; nothing was changed")
    return config


def folder_config(folder: HfFolder) -> LlamaConfig:
    """The folder's model, under a name that a run can have."""
    name = re.sub(r"[^A-Za-z0-9._-]+|\.{2,}", "-", folder.directory.resolve().name).strip("-._")[:80]
    return config_from_hf(folder.config, name or "imported")


def copy_files(folder: HfFolder, out: Path, watch: ProgressFn | None) -> dict[str, str]:
    """The files of a model, and nothing else that lies beside them; name in the run -> sha256 of each."""
    index = [resolve_inside(folder.directory, INDEX_FILE)] if (folder.directory / INDEX_FILE).exists() else []
    files = [*folder.shards(), *folder.sidecar_files(), *index, resolve_inside(folder.directory, HF_CONFIG_FILE)]
    out.mkdir()
    hashes = {}
    for done, file in enumerate(files, 1):
        shutil.copyfile(file, out / file.name)
        hashes[f"{ORIGIN}/{file.name}"] = sha256_of(out / file.name)
        if watch is not None:
            watch(done, len(files))
    return hashes


def _write_import_record(folder: HfFolder, config: TrainConfig, out: Path) -> None:
    dtypes = {entry.dtype.name for entry in folder.entries.values()}
    kind = dtypes.pop() if len(dtypes) == 1 else ""
    facts = {"from": folder.directory.name, "weights": storage_description(folder), "dtype": kind}
    (out / IMPORT_RECORD_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if (folder.directory / TOKENIZER).exists():
        tokenizer = folder_tokenizer(folder)
        tokenizer.save(out / TOKENIZER)
        read = {"seq": min(config.model.max_seq, MAX_DEFAULT_WINDOW), "eos": tokenizer.eos, "bos": tokenizer.bos}
        (out / "data.json").write_text(json.dumps(read, indent=1) + "\n", encoding="utf-8")
    dataclass_json.save_config(config, out / HF_CONFIG_FILE)
