"""config.json of Hugging Face `transformers` to and from `LlamaConfig`, and the quantization configs of its weights.

A field that the model cannot implement is refused by name, so that no imported model differs silently from the one that
was trained. Quantization configs are those of compressed-tensors and ModelOpt.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from halfbyte.hf.tensor_layouts import COMPRESSED_TENSORS, MODELOPT, Nvfp4Layout
from halfbyte.io import escape_control_chars
from halfbyte.models import FAMILIES, HfFamily, LlamaConfig, family_of
from halfbyte.ops.rope import RopeScaling

HF_FIELD_NAMES = {
    "vocab_size": "vocab_size",
    "embed": "hidden_size",
    "mlp": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_seq": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
}
"""Our field -> theirs, unless the family has another name (`models.FAMILIES`)."""

# Field -> the values under which it has no effect. An absent field has no effect either.
IGNORED_HF_FIELDS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, 1.0, None),
    "use_sliding_window": (False, None),
    "auto_map": (None, {}),
    "is_encoder_decoder": (False, None),
}
# Our activation -> names in `hidden_act`; the first is written, all are read. Their `gelu` is not the tanh form, and
# not every reader of these architectures knows relu2.
HIDDEN_ACTS = {"silu": ("silu", "swish"), "gelu": ("gelu_pytorch_tanh", "gelu_new")}
ROPE_FIELDS = {"rope_type", "type", "rope_theta"}
LLAMA3_FIELDS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


LAYOUT_OF_METHOD = {"compressed-tensors": COMPRESSED_TENSORS, "modelopt": MODELOPT}
"""quant_method -> layout of its tensors."""


def config_from_hf(fields: Mapping[str, Any], name: str = "imported") -> LlamaConfig:
    """Returns our config for the fields of a `config.json`; ValueError names a field that is not supported."""
    family = _family(fields)
    renamed = {field: fields[other] for field, other in family.extra_field_names.items() if other in fields}
    fields = renamed | dict(fields)
    for field, allowed in IGNORED_HF_FIELDS.items():
        if fields.get(field, allowed[0]) not in allowed:
            raise _unsupported_value_error(field, fields[field], allowed[0])
    field_names, heads = HF_FIELD_NAMES | dict(family.field_names), _read_int(fields, "num_attention_heads")
    missing: dict[str, Any] = {"num_key_value_heads": heads, "head_dim": _read_int(fields, "hidden_size") // heads}
    missing |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}
    missing |= family.missing_field_values
    values = missing | {field: value for field, value in fields.items() if value is not None or field not in missing}
    _check_attention(values)
    rope, types = _rope(fields), {field.name: field.type for field in dataclasses.fields(LlamaConfig)}
    cfg = LlamaConfig(
        name=name,
        rope_theta=_read_positive_float(rope, "rope_theta", family.missing_field_values.get("rope_theta", 10_000.0)),
        rope_scaling=_scaling(rope),
        **family.matching_fields,
        **{ours: FIELD_READERS[str(types[ours])](values, theirs) for ours, theirs in field_names.items()},
    )
    for field, value in family.derived_fields(cfg).items():
        if fields.get(field, family.missing_field_values.get(field, value)) != value and field not in IGNORED_HF_FIELDS:
            raise _unsupported_value_error(field, values.get(field), value)
    return cfg


def config_to_hf(cfg: LlamaConfig) -> dict[str, Any]:
    """Returns the fields of a `config.json` that `transformers` and the serving engines read as this model."""
    family = family_of(cfg)
    if cfg.activation not in HIDDEN_ACTS:
        raise ValueError(
            f"export: activation is {cfg.activation}, which has no name as hidden_act; only models with "
            f"{' or '.join(HIDDEN_ACTS)} can be exported"
        )
    scaling = cfg.rope_scaling
    rope = None if scaling is None else {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq,
    }  # fmt: skip
    field_names = HF_FIELD_NAMES | dict(family.field_names)
    fields = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{theirs: getattr(cfg, ours) for ours, theirs in field_names.items()},
        field_names["activation"]: HIDDEN_ACTS[cfg.activation][0],
        "rope_theta": cfg.rope_theta,
        "rope_scaling": rope,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        **family.derived_fields(cfg),
    }
    back = config_from_hf(fields, cfg.name)
    lost = [f"{ours} {value}" for ours, value in vars(cfg).items() if getattr(back, ours) != value]
    if lost:
        raise ValueError(
            f"export: {family.architecture} has no word for {', '.join(lost)}; "
            "this model can be trained and evaluated here, but no other program would compute it"
        )
    return fields


def quantization_config(method: str, ignore: Sequence[str], *, activations: bool, producer: str) -> dict[str, Any]:
    """Returns the `quantization_config` of config.json. `ignore`: linears that are not quantized."""
    if method == "modelopt":
        numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        group = {"targets": ["Linear"], "weights": numbers, "input_activations": numbers if activations else None}
        return modelopt_config(ignore, activations=activations, producer=producer)["quantization"] | {
            "quant_method": "modelopt",
            "config_groups": {"group_0": group},
        }
    weights = _tensor_group(dynamic=False)
    inputs = _tensor_group(dynamic="local") if activations else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": "nvfp4-pack-quantized"}},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def modelopt_config(ignore: Sequence[str], *, activations: bool, producer: str) -> dict[str, Any]:
    """Returns the content of hf_quant_config.json, which ModelOpt's readers look for next to config.json."""
    name, _, version = producer.partition(" ")
    return {
        "producer": {"name": name, "version": version},
        "quantization": {
            "quant_algo": "NVFP4" if activations else "W4A16_NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": list(ignore),
        },
    }


def detect_layout(fields: Mapping[str, Any]) -> Nvfp4Layout | None:
    """Returns the NVFP4 layout that a config.json states, None for unquantized weights; ValueError for any other."""
    config = fields.get("quantization_config")
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else None
    if method == "compressed-tensors" and _is_nvfp4(config):
        return LAYOUT_OF_METHOD["compressed-tensors"]
    if method == "modelopt" and "NVFP4" in str(config.get("quant_algo")):
        return LAYOUT_OF_METHOD["modelopt"]
    raise ValueError(
        f"import: quantization_config.quant_method is {str(method)[:40]!r}; "
        "quantized weights are read as NVFP4 in the layouts of compressed-tensors and modelopt"
    )


def _unsupported_value_error(field: str, value: Any, supported: Any) -> ValueError:
    return ValueError(
        f"import: {field} is {escape_control_chars(str(value))[:100]}, and only {supported} is implemented; "
        "this checkpoint cannot be imported"
    )


def _activation(fields: Mapping[str, Any], field: str) -> str:
    for ours, theirs in HIDDEN_ACTS.items():
        if fields[field] in theirs:
            return ours
    raise _unsupported_value_error(
        field, fields[field], " or ".join(name for names in HIDDEN_ACTS.values() for name in names)
    )


def _family(fields: Mapping[str, Any]) -> HfFamily:
    listed, known = fields.get("architectures"), {family.architecture: family for family in FAMILIES}
    if not isinstance(listed, list) or len(listed) != 1 or listed[0] not in known:
        raise ValueError(
            f"import: architectures is {escape_control_chars(str(listed))[:100]}; "
            f"implemented are {' and '.join(known)}, and nothing else can be imported"
        )
    return known[listed[0]]


def _check_attention(fields: Mapping[str, Any]) -> None:
    kinds = fields.get("layer_types") or []
    other = sorted({str(kind) for kind in kinds} - {"full_attention"}) if isinstance(kinds, list) else [str(kinds)]
    if other:
        raise ValueError(
            f"import: layer_types has {escape_control_chars(', '.join(other))[:100]}; "
            "only full_attention is implemented"
        )


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary fields of old and new `transformers`: rope_theta and rope_scaling, or rope_parameters."""
    rope: dict[str, Any] = {}
    if fields.get("rope_theta") is not None:
        rope["rope_theta"] = fields["rope_theta"]
    for field in ("rope_scaling", "rope_parameters"):
        values = fields.get(field)
        if values is not None and not isinstance(values, dict):
            raise ValueError(f"import: {field} must be an object, got {escape_control_chars(str(values))[:100]}")
        rope |= values or {}
    return rope


def _scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(
            f"import: rotary scaling of rope_type {escape_control_chars(str(kind))!r}; "
            "implemented are llama3 and default"
        )
    known = ROPE_FIELDS | (LLAMA3_FIELDS if kind == "llama3" else set())
    unknown = sorted(field for field in rope.keys() - known if rope[field] is not None)
    if unknown:
        raise ValueError(
            f"import: the rotary embedding has {escape_control_chars(', '.join(unknown))[:100]}, "
            "which is not implemented"
        )
    if kind == "default":
        return None
    return RopeScaling(
        factor=_read_positive_float(rope, "factor"),
        low_freq_factor=_read_positive_float(rope, "low_freq_factor"),
        high_freq_factor=_read_positive_float(rope, "high_freq_factor"),
        original_max_seq=_read_int(rope, "original_max_position_embeddings"),
    )


def _read_int(fields: Mapping[str, Any], field: str) -> int:
    value = fields.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ValueError(
            f"import: {field} must be a whole number of 1 or more, got {escape_control_chars(repr(value))[:100]}"
        )
    return value


def _read_bool(fields: Mapping[str, Any], field: str) -> bool:
    value = fields[field]
    if not isinstance(value, bool):
        raise ValueError(
            f"import: {field} must be true or false, got {escape_control_chars(repr(value))[:100]}; "
            "what a model computes depends on it: say it in config.json"
        )
    return value


def _read_positive_float(fields: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value: Any = fields.get(field)
    value = default if value is None else value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ValueError(f"import: {field} must be a number above 0, got {escape_control_chars(repr(value))[:100]}")
    return float(value)


FIELD_READERS: dict[str, Callable[[Mapping[str, Any], str], Any]] = {
    "int": _read_int,
    "float": _read_positive_float,
    "bool": _read_bool,
    "str": _activation,
}
"""Type of a `LlamaConfig` field -> reader of its value; the only string field is the activation."""


def _tensor_group(*, dynamic: bool | str) -> dict[str, Any]:
    return {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
        "dynamic": dynamic, "scale_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip


def _is_nvfp4(config: Mapping[str, Any]) -> bool:
    groups = [config, *(config.get("config_groups") or {}).values()]
    return any(group.get("format") == "nvfp4-pack-quantized" for group in groups if isinstance(group, Mapping))
