"""config.json of Hugging Face `transformers` and our `LlamaConfig`, both ways.

What a field asks for and the model cannot do is refused by the field's name: a model that is silently not the one that
was trained is worth less than none.
"""

import math
from collections.abc import Mapping
from typing import Any

from halfbyte.inputs import printable
from halfbyte.models import LlamaConfig
from halfbyte.nn.rope import RopeScaling

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
"""Architecture -> model_type."""

# Field -> the values under which it changes nothing. A field that is absent changes nothing either.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, 1.0, None),
    "use_sliding_window": (False, None),
    "auto_map": (None, {}),
    "is_encoder_decoder": (False, None),
}
# Ours -> what `hidden_act` calls it, as it is written and as it is read. Their `gelu` is not the tanh form; relu2 is a
# name that not every reader of these architectures knows.
HIDDEN_ACTS = {"silu": ("silu", "swish"), "gelu": ("gelu_pytorch_tanh", "gelu_new")}
ROPE_FIELDS = {"rope_type", "type", "rope_theta"}
LLAMA3_FIELDS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


def config_from_hf(fields: Mapping[str, Any], name: str = "imported") -> LlamaConfig:
    """Our config from the fields of their `config.json`; ValueError names a field that is no Llama's or Qwen3's."""
    architecture = _architecture(fields)
    for field, allowed in NEUTRAL.items():
        if fields.get(field, allowed[0]) not in allowed:
            raise ValueError(
                f"import: {field} is {printable(str(fields[field]))[:100]}, and only {allowed[0]} is implemented; "
                "this checkpoint cannot be imported"
            )
    _check_attention(fields)
    heads, qwen3 = _whole(fields, "num_attention_heads"), architecture == "Qwen3ForCausalLM"
    rope = _rope(fields)
    return LlamaConfig(
        name=name,
        vocab_size=_whole(fields, "vocab_size"),
        embed=_whole(fields, "hidden_size"),
        mlp=_whole(fields, "intermediate_size"),
        layers=_whole(fields, "num_hidden_layers"),
        heads=heads,
        kv_heads=_whole(fields, "num_key_value_heads", None if qwen3 else heads),
        head_dim=_whole(fields, "head_dim", 128 if qwen3 else _whole(fields, "hidden_size") // heads),
        max_seq=_whole(fields, "max_position_embeddings"),
        tied=bool(fields.get("tie_word_embeddings", False)),
        rope_theta=_positive(rope, "rope_theta", 10_000.0),
        rope_scaling=_scaling(rope),
        norm_eps=_positive(fields, "rms_norm_eps", 1e-6),
        qk_norm=qwen3,
        activation=_activation(fields.get("hidden_act", "silu")),
    )


def config_to_hf(cfg: LlamaConfig) -> dict[str, Any]:
    """The fields of a `config.json` that `transformers` and the serving engines read as this model."""
    architecture = "Qwen3ForCausalLM" if cfg.qk_norm else "LlamaForCausalLM"
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
    fields = {
        "architectures": [architecture],
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.embed,
        "intermediate_size": cfg.mlp,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "max_position_embeddings": cfg.max_seq,
        "tie_word_embeddings": cfg.tied,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": rope,
        "rms_norm_eps": cfg.norm_eps,
        "hidden_act": HIDDEN_ACTS[cfg.activation][0],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    return fields | ({"use_sliding_window": False} if cfg.qk_norm else {"mlp_bias": False})


def _activation(hidden_act: Any) -> str:
    for ours, theirs in HIDDEN_ACTS.items():
        if hidden_act in theirs:
            return ours
    implemented = ", ".join(name for names in HIDDEN_ACTS.values() for name in names)
    raise ValueError(
        f"import: hidden_act is {printable(str(hidden_act))[:100]}, and only {implemented} are implemented; this "
        "checkpoint cannot be imported"
    )


def _architecture(fields: Mapping[str, Any]) -> str:
    listed = fields.get("architectures")
    if not isinstance(listed, list) or len(listed) != 1 or listed[0] not in ARCHITECTURES:
        raise ValueError(
            f"import: architectures is {printable(str(listed))[:100]}; "
            f"implemented are {' and '.join(ARCHITECTURES)}, and nothing else can be imported"
        )
    architecture: str = listed[0]
    return architecture


def _check_attention(fields: Mapping[str, Any]) -> None:
    kinds = fields.get("layer_types") or []
    other = sorted({str(kind) for kind in kinds} - {"full_attention"}) if isinstance(kinds, list) else [str(kinds)]
    if other:
        raise ValueError(
            f"import: layer_types has {printable(', '.join(other))[:100]}; only full_attention is implemented"
        )


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary fields of both generations of `transformers`: rope_theta and rope_scaling, or rope_parameters."""
    found: dict[str, Any] = {}
    if fields.get("rope_theta") is not None:
        found["rope_theta"] = fields["rope_theta"]
    for field in ("rope_scaling", "rope_parameters"):
        values = fields.get(field)
        if values is not None and not isinstance(values, dict):
            raise ValueError(f"import: {field} must be an object, got {printable(str(values))[:100]}")
        found |= values or {}
    return found


def _scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(
            f"import: rotary scaling of rope_type {printable(str(kind))!r}; implemented are llama3 and default"
        )
    unknown = sorted(
        {field for field in rope if rope[field] is not None}
        - ROPE_FIELDS
        - (LLAMA3_FIELDS if kind == "llama3" else set())
    )
    if unknown:
        raise ValueError(
            f"import: the rotary embedding has {printable(', '.join(unknown))[:100]}, which is not implemented"
        )
    if kind == "default":
        return None
    return RopeScaling(
        factor=_positive(rope, "factor"),
        low_freq_factor=_positive(rope, "low_freq_factor"),
        high_freq_factor=_positive(rope, "high_freq_factor"),
        original_max_seq=_whole(rope, "original_max_position_embeddings"),
    )


def _whole(fields: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = fields.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ValueError(f"import: {field} must be a whole number of 1 or more, got {printable(repr(value))[:100]}")
    return value


def _positive(fields: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value: Any = fields.get(field)
    value = default if value is None else value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ValueError(f"import: {field} must be a number above 0, got {printable(repr(value))[:100]}")
    return float(value)
