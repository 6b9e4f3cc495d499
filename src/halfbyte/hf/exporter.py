"""Exports a model as a Hugging Face folder: safetensors shards, index, tokenizer files and config.json.

Tensors are built and written one at a time, into a hidden directory next to the target that is renamed at the end. The
last file written is config.json, without which no reader takes the folder for a model.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import tokenizers
from tokenizers import processors

from halfbyte.data import Tokenizer
from halfbyte.data.tokenizer import MAX_TOKENIZER_BYTES, MAX_VOCAB, parse_tokenizer
from halfbyte.hf.hf_config import LAYOUT_OF_METHOD, config_from_hf, config_to_hf, modelopt_config, quantization_config
from halfbyte.hf.hf_folder import (
    HF_CONFIG_FILE,
    INDEX_FILE,
    SIDECAR_FILES,
    SINGLE_SHARD_FILE,
    HfFolder,
    resolve_inside,
    write_safetensors,
)
from halfbyte.hf.tensor_layouts import (
    HfTensor,
    InputAmaxes,
    TensorGroup,
    hf_tensors,
    nvfp4_groups,
    unquantized_groups,
    weight_amaxes,
    weight_policy,
)
from halfbyte.io import read_json, read_text
from halfbyte.io.files import StagingDirectory, remove_stale, rename_into_place
from halfbyte.models import FUSED_GROUPS, LlamaConfig, Params
from halfbyte.recipes import ResolvedPolicy

ExportFormat = Literal["hf", "compressed-tensors", "modelopt"]
ProgressFn = Callable[[int, int], None]
EXPORT_DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)
}  # fmt: skip
PRODUCER = "halfbyte 0.2.0"

MODELOPT_CONFIG = "hf_quant_config.json"
RUN_FILE = "run.json"
TOKENIZER = "tokenizer.json"
METADATA = {"format": "pt"}  # `transformers` refuses a file without it
GB = 10**9


@dataclass(frozen=True)
class ExportModel:
    """A model to export. `origin`: folder of an imported model, whose config and small files are exported again."""

    config: LlamaConfig
    params: Params
    tokenizer: Tokenizer | None = None
    origin: Path | None = None


@dataclass(frozen=True)
class FusedScaleMismatch:
    """Linears of a layer that engines fuse, with unequal tensor scales; `ratio` is the largest over the smallest."""

    group: str
    layer: int
    ratio: float


@dataclass(frozen=True)
class ExportResult:
    """Result of an export: bytes of tensors, number of quantized linears, and fused groups with unequal scales."""

    nbytes: int
    quantized: int
    mismatches: list[FusedScaleMismatch] = field(default_factory=list)


def export_model(
    model: ExportModel, out: Path, *, to: ExportFormat, dtype: str = "bfloat16", resolved: ResolvedPolicy | None = None,
    input_amax: InputAmaxes | None = None, shard_bytes: int = 5 * GB, replace: bool = False,
    watch: ProgressFn | None = None,
) -> ExportResult:  # fmt: skip
    """Exports `model` to the folder `out`.

    The NVFP4 formats need the resolved policy of the weights, and write activation scales (W4A4) if `input_amax` is
    given.
    """
    kind = EXPORT_DTYPES[dtype]
    if to == "hf":
        parts, quantized = unquantized_groups(model.config, model.params, kind), set[str]()
    else:
        assert resolved is not None
        quantized = quantized_module_names(model.config, resolved)
        layout = LAYOUT_OF_METHOD[to]
        parts = nvfp4_groups(model.config, model.params, resolved, layout, dtype=kind, input_amax=input_amax)
    fields, files = config_fields(model, dtype), sidecar_files(model)
    if quantized:
        ignore = [site.module for site in hf_linear_modules(model.config) if site.module not in quantized]
        options: dict[str, Any] = {"activations": input_amax is not None, "producer": PRODUCER}
        fields["quantization_config"] = quantization_config(to, ignore, **options)
        if to == "modelopt":
            files[MODELOPT_CONFIG] = json.dumps(modelopt_config(ignore, **options), indent=2) + "\n"
    groups: list[TensorGroup] = list(parts)
    size = write_hf_folder(out, groups, fields, files, shard_bytes=shard_bytes, replace=replace, watch=watch)
    mismatches = [] if resolved is None else fused_mismatches(model.config, model.params, resolved)
    return ExportResult(size, len(quantized), mismatches)


def hf_linear_modules(cfg: LlamaConfig) -> list[HfTensor]:
    """Returns the linears of the model in `transformers`, with the head even if it is tied."""
    linears = [site for site in hf_tensors(cfg) if site.transposed]
    return linears if not cfg.tied else [*linears, HfTensor("lm_head", "embed", None, (), "head")]


def quantized_module_names(cfg: LlamaConfig, resolved: ResolvedPolicy) -> set[str]:
    """Returns the modules whose weights become codes; ValueError if there is none."""
    modules = {site.module for site in hf_tensors(cfg) if weight_policy(resolved, site) is not None}
    if not modules:
        raise ValueError(
            "this model was not trained with NVFP4 weights, so there are no codes to export; "
            "give --recipe nvfp4 (and --policy all_linear) to round the weights now, or --format hf"
        )
    return modules


def fused_mismatches(cfg: LlamaConfig, params: Params, resolved: ResolvedPolicy) -> list[FusedScaleMismatch]:
    """Returns the fused groups with unequal tensor scales: an engine uses one, which changes the other weights."""
    by_layer = {(site.path, site.layer): site for site in hf_tensors(cfg)}
    amaxes = {path: np.asarray(value) for path, value in weight_amaxes(cfg, params, resolved).items()}
    mismatches = []
    for where, names in ((where, names) for where, sets in FUSED_GROUPS.items() for names in sets):
        group = [path for path in (f"layers/{where}/{name}" for name in names) if path in amaxes]
        name = "/".join(by_layer[path, 0].module.rpartition(".")[2] for path in group)
        for layer in range(cfg.layers):
            quantized = [path for path in group if weight_policy(resolved, by_layer[path, layer]) is not None]
            if len(quantized) < 2:
                continue
            values = np.stack([amaxes[path][layer] for path in quantized])  # [linears], or [linears, experts]
            high, low = values.max(0), values.min(0)
            if np.any(high != low):
                mismatches.append(FusedScaleMismatch(name, layer, float(np.max(high / np.maximum(low, 1e-38)))))
    return mismatches


def config_fields(model: ExportModel, dtype: str) -> dict[str, Any]:
    """Returns the fields of config.json: the imported ones if they still describe the model, else ours."""
    fields: dict[str, Any] = read_json(model.origin / HF_CONFIG_FILE) if model.origin else {}
    if not fields or config_from_hf(fields, model.config.name) != model.config:
        fields = config_to_hf(model.config)
    if model.tokenizer is not None:
        fields.setdefault("bos_token_id", model.tokenizer.bos_id)
        fields.setdefault("eos_token_id", model.tokenizer.eos_id)
    fields.pop("quantization_config", None)
    fields.pop("torch_dtype", None)
    return fields | {"dtype": dtype}


def sidecar_files(model: ExportModel) -> dict[str, str | bytes | Path]:
    """Returns tokenizer and generation config: the imported files unchanged, or files of our tokenizer."""
    if model.origin is not None:
        return {name: model.origin / name for name in SIDECAR_FILES if (model.origin / name).is_file()}
    return {} if model.tokenizer is None else dict(tokenizer_files(model.tokenizer, model.config.max_seq))


def tokenizer_files(tokenizer: Tokenizer, max_seq: int) -> dict[str, str]:
    """Returns the content, by name, of the files that `AutoTokenizer` and `generate` read.

    Documents begin with bos in training, scoring and generation here. The exported tokenizer therefore adds bos itself,
    so that `tokenizer(text)` in `transformers` gives the ids that the model was trained on.
    """
    exported = tokenizers.Tokenizer.from_str(tokenizer.text)
    exported.post_processor = processors.TemplateProcessing(
        single=f"{tokenizer.bos} $A",
        pair=f"{tokenizer.bos} $A $B",
        special_tokens=[(tokenizer.bos, tokenizer.bos_id)],
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos,
        "eos_token": tokenizer.eos,
        "model_max_length": max_seq,
        "clean_up_tokenization_spaces": False,
    }
    generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "do_sample": False}
    configs = {"tokenizer_config.json": config, "generation_config.json": generation}
    return {TOKENIZER: exported.to_str(), **{name: json.dumps(c, indent=2) + "\n" for name, c in configs.items()}}


def folder_tokenizer(folder: HfFolder) -> Tokenizer:
    """Returns the folder's tokenizer, with the bos and eos that its configs name."""
    if not (folder.directory / TOKENIZER).exists():
        raise ValueError(
            f"{folder.directory} has no {TOKENIZER}, the one kind of tokenizer that is read; "
            "`AutoTokenizer.from_pretrained(...).save_pretrained(...)` writes it"
        )
    text = read_text(resolve_inside(folder.directory, TOKENIZER), most=MAX_TOKENIZER_BYTES)
    parsed = parse_tokenizer(text)
    markers = {kind: _marker(folder, kind, parsed) for kind in ("eos", "bos")}
    return Tokenizer(text, eos=markers["eos"], bos=markers["bos"])


def write_hf_folder(
    out: Path, parts: Iterable[TensorGroup], config: Mapping[str, Any], files: Mapping[str, str | bytes | Path], *,
    shard_bytes: int = 5 * GB, replace: bool = False, watch: ProgressFn | None = None,
) -> int:  # fmt: skip
    """Writes the model to `out` and returns the bytes of its tensors. `files` are written (or copied) by name.

    An existing target is refused, or replaced in one rename if `replace` and it holds a model.
    """
    check_output_directory(out, replace=replace)
    shards = assign_shards(list(parts), shard_bytes)
    with StagingDirectory(out) as staging:
        size = write_shards(staging, shards, watch)
        for name, content in files.items():
            _write_file(staging / name, content)
        _write_file(staging / HF_CONFIG_FILE, json.dumps(dict(config), indent=2) + "\n")
        if not rename_into_place(staging, out, replace=replace, check=lambda: _refuse_target(out, replace=replace)):
            raise ValueError(f"{out} appeared while the export was written; nothing was changed")
    return size


def check_output_directory(out: Path, *, replace: bool) -> None:
    """Raises ValueError if `out` exists, unless `replace` and it holds an export and nothing else.

    Removes the staging directories of killed exports.
    """
    remove_stale(out)
    _refuse_target(out, replace=replace)


def assign_shards(parts: Sequence[TensorGroup], shard_bytes: int) -> list[list[TensorGroup]]:
    """Assigns groups to shards in order, as many per shard as fit into `shard_bytes`; a group is never split."""
    shards: list[list[TensorGroup]] = [[]]
    size = 0
    for part in parts:
        if shards[-1] and size + part.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += part.nbytes
    return shards


def write_shards(folder: Path, shards: Sequence[Sequence[TensorGroup]], watch: ProgressFn | None = None) -> int:
    """Writes every shard, and the index of several. Returns the bytes of all tensors."""
    total = sum(len(shard) for shard in shards)
    done, weight_map = 0, {}

    def arrays(shard: Sequence[TensorGroup]) -> Iterator[np.ndarray]:
        nonlocal done
        for part in shard:
            yield from part.build()
            done += 1
            if watch is not None:
                watch(done, total)

    for number, shard in enumerate(shards, 1):
        name = SINGLE_SHARD_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        planned = [plan for part in shard for plan in part.planned]
        write_safetensors(folder / name, planned, arrays(shard), METADATA)
        weight_map.update(dict.fromkeys((plan.name for plan in planned), name))
    size = sum(part.nbytes for shard in shards for part in shard)
    if len(shards) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        _write_file(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")
    return size


def _refuse_target(out: Path, *, replace: bool) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not replace:
        raise ValueError(f"{out} exists; choose another --out, or give --overwrite to replace an earlier export")
    if (
        out.is_symlink()
        or not out.is_dir()
        or not ((out / HF_CONFIG_FILE).is_file() and list(out.glob("*.safetensors")))
    ):
        raise ValueError(f"{out} exists and is no exported model; it is not overwritten, choose another --out")
    others = sorted(path.name for path in out.iterdir() if not _is_exported(path.name))
    if others:
        raise ValueError(f"{out} holds {others[0]}, which no export writes; it stays as it is, choose another --out")
    if (out.parent / RUN_FILE).exists():  # the imported weights of a run
        raise ValueError(f"{out} is part of the run in {out.parent}; it is not overwritten, choose another --out")


def _is_exported(name: str) -> bool:
    return name in {HF_CONFIG_FILE, INDEX_FILE, MODELOPT_CONFIG, *SIDECAR_FILES} or name.endswith(".safetensors")


def _write_file(path: Path, content: str | bytes | Path) -> None:
    if isinstance(content, Path):
        shutil.copyfile(content, path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def _marker(folder: HfFolder, kind: str, parsed: tokenizers.Tokenizer) -> str | None:
    """Returns the token of bos or eos.

    By id in generation_config.json or config.json, else by name in tokenizer_config.json.
    """
    configs = [_optional_config(folder, "generation_config.json"), folder.config]
    for number in (config.get(f"{kind}_token_id") for config in configs):
        number = number[0] if isinstance(number, list) and number else number
        if type(number) is int and 0 <= number < MAX_VOCAB:
            token = parsed.id_to_token(number)
            if token is not None:
                return str(token)
    named = _optional_config(folder, "tokenizer_config.json").get(f"{kind}_token")
    named = named.get("content") if isinstance(named, dict) else named
    return named if isinstance(named, str) else None


def _optional_config(folder: HfFolder, name: str) -> dict[str, Any]:
    if not (folder.directory / name).exists():
        return {}
    fields = read_json(resolve_inside(folder.directory, name))
    return fields if isinstance(fields, dict) else {}
