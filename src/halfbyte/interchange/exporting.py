"""A model written in the formats that other people's programs load."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from halfbyte.data import Tokenizer
from halfbyte.inputs import read_json
from halfbyte.interchange.folder import COMPANIONS, CONFIG
from halfbyte.interchange.hf_config import config_from_hf, config_to_hf
from halfbyte.interchange.hf_names import Site, sites
from halfbyte.interchange.layouts import Amaxes, Part, nvfp4_parts, plain_parts, weight_amaxes, weight_policy
from halfbyte.interchange.quantization_config import LAYOUTS, modelopt_config, quantization_config
from halfbyte.interchange.tokenizer_files import tokenizer_files
from halfbyte.interchange.writing import GB, MODELOPT_CONFIG, Watch, write_folder
from halfbyte.models import FUSED, LlamaConfig, Params
from halfbyte.recipe import Resolved

Format = Literal["hf", "compressed-tensors", "modelopt"]
DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)
}  # fmt: skip
PRODUCER = "halfbyte 0.1.0"


@dataclass(frozen=True)
class Model:
    """What is exported. `origin`: where the config and small files of an imported model lie, which go out again."""

    config: LlamaConfig
    params: Params
    tokenizer: Tokenizer | None = None
    origin: Path | None = None


@dataclass(frozen=True)
class Mismatch:
    """A fused group whose linears have different tensor scales, in one layer: the largest over the smallest."""

    group: str
    layer: int
    ratio: float


@dataclass(frozen=True)
class Exported:
    """What was written: bytes of tensors, how many linears are quantized, and groups that an engine would distort."""

    nbytes: int
    quantized: int
    mismatches: list[Mismatch] = field(default_factory=list)


def export_model(
    model: Model, out: Path, *, to: Format, dtype: str = "bfloat16", resolved: Resolved | None = None,
    input_amax: Amaxes | None = None, shard_bytes: int = 5 * GB, replace: bool = False, watch: Watch | None = None,
) -> Exported:  # fmt: skip
    """`model` as a folder `out`. The NVFP4 formats need the policy that says which weights are quantized, and write
    activation scales (W4A4) where `input_amax` has the largest magnitude of each linear's input.
    """
    kind = DTYPES[dtype]
    if to == "hf":
        parts, quantized = plain_parts(model.config, model.params, kind), set[str]()
    else:
        assert resolved is not None
        quantized = quantized_modules(model.config, resolved)
        layout = LAYOUTS[to]
        parts = nvfp4_parts(model.config, model.params, resolved, layout, dtype=kind, input_amax=input_amax)
    fields, files = config_fields(model, dtype), companion_files(model)
    if quantized:
        ignore = [site.module for site in linears(model.config) if site.module not in quantized]
        said: dict[str, Any] = {"activations": input_amax is not None, "producer": PRODUCER}
        fields["quantization_config"] = quantization_config(to, ignore, **said)
        if to == "modelopt":
            files[MODELOPT_CONFIG] = json.dumps(modelopt_config(ignore, **said), indent=2) + "\n"
    listed: list[Part] = list(parts)
    size = write_folder(out, listed, fields, files, shard_bytes=shard_bytes, replace=replace, watch=watch)
    found = [] if resolved is None else fused_mismatches(model.config, model.params, resolved)
    return Exported(size, len(quantized), found)


def linears(cfg: LlamaConfig) -> list[Site]:
    """The linears of the model as `transformers` has them: a tied head is one too."""
    found = [site for site in sites(cfg) if site.transposed]
    return found if not cfg.tied else [*found, Site("lm_head", "embed", None, (), "head")]


def quantized_modules(cfg: LlamaConfig, resolved: Resolved) -> set[str]:
    """The modules whose weights become codes; ValueError if there is none."""
    found = {site.module for site in sites(cfg) if weight_policy(resolved, site) is not None}
    if not found:
        raise ValueError(
            "this model was not trained with NVFP4 weights, so there are no codes to export; "
            "give --recipe nvfp4 (and --policy all_linear) to round the weights now, or --format hf"
        )
    return found


def fused_mismatches(cfg: LlamaConfig, params: Params, resolved: Resolved) -> list[Mismatch]:
    """Where linears that an engine fuses have different tensor scales: it takes one, and the others' weights change."""
    by_layer = {(site.path, site.layer): site for site in sites(cfg)}
    amaxes = {path: np.asarray(value) for path, value in weight_amaxes(cfg, params, resolved).items()}
    found = []
    for where, names in ((where, names) for where, sets in FUSED.items() for names in sets):
        group = [path for path in (f"layers/{where}/{name}" for name in names) if path in amaxes]
        name = "/".join(by_layer[path, 0].module.rpartition(".")[2] for path in group)
        for layer in range(cfg.layers):
            joined = [path for path in group if weight_policy(resolved, by_layer[path, layer]) is not None]
            if len(joined) < 2:
                continue
            values = np.stack([amaxes[path][layer] for path in joined])  # [linears], or [linears, experts]
            most, least = values.max(0), values.min(0)
            if np.any(most != least):
                found.append(Mismatch(name, layer, float(np.max(most / np.maximum(least, 1e-38)))))
    return found


def config_fields(model: Model, dtype: str) -> dict[str, Any]:
    """config.json: the imported one if it still describes the model, else ours."""
    fields: dict[str, Any] = read_json(model.origin / CONFIG) if model.origin else {}
    if not fields or config_from_hf(fields, model.config.name) != model.config:
        fields = config_to_hf(model.config)
    if model.tokenizer is not None:
        fields.setdefault("bos_token_id", model.tokenizer.bos_id)
        fields.setdefault("eos_token_id", model.tokenizer.eos_id)
    fields.pop("quantization_config", None)
    fields.pop("torch_dtype", None)
    return fields | {"dtype": dtype}


def companion_files(model: Model) -> dict[str, str | bytes | Path]:
    """Tokenizer and generation config: the imported files as they came, or made from our tokenizer."""
    if model.origin is not None:
        return {name: model.origin / name for name in COMPANIONS if (model.origin / name).is_file()}
    return {} if model.tokenizer is None else dict(tokenizer_files(model.tokenizer, model.config.max_seq))
