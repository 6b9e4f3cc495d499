"""config.json of Hugging Face `transformers` and our `LlamaConfig`, both ways.

What a field asks for and the model cannot do is refused by the field's name: a model that is silently not the one that
was trained is worth less than none.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from halfbyte.inputs import printable
from halfbyte.models import FAMILIES, Family, LlamaConfig, family_of
from halfbyte.nn.rope import RopeScaling

WORDS = {
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
"""Our field -> theirs, where the family has no other word (`models.FAMILIES`)."""

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
    """Our config from the fields of their `config.json`; ValueError names a field that no family here has."""
    family = _family(fields)
    fields = {ours: fields[theirs] for ours, theirs in family.also.items() if theirs in fields} | dict(fields)
    for field, allowed in NEUTRAL.items():
        if fields.get(field, allowed[0]) not in allowed:
            raise _unserved(field, fields[field], allowed[0])
    words, heads = WORDS | dict(family.words), _whole(fields, "num_attention_heads")
    absent: dict[str, Any] = {"num_key_value_heads": heads, "head_dim": _whole(fields, "hidden_size") // heads}
    absent |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu", **family.absent}
    said = absent | {field: value for field, value in fields.items() if value is not None or field not in absent}
    _check_attention(said)
    rope, types = _rope(fields), {field.name: field.type for field in dataclasses.fields(LlamaConfig)}
    cfg = LlamaConfig(
        name=name,
        rope_theta=_positive(rope, "rope_theta", family.absent.get("rope_theta", 10_000.0)),
        rope_scaling=_scaling(rope),
        **family.marks,
        **{ours: READ[str(types[ours])](said, theirs) for ours, theirs in words.items()},
    )
    for field, value in family.settled(cfg).items():
        if fields.get(field, family.absent.get(field, value)) != value and field not in NEUTRAL:
            raise _unserved(field, said.get(field), value)
    return cfg


def _unserved(field: str, found: Any, served: Any) -> ValueError:
    return ValueError(
        f"import: {field} is {printable(str(found))[:100]}, and only {served} is implemented; "
        "this checkpoint cannot be imported"
    )


def config_to_hf(cfg: LlamaConfig) -> dict[str, Any]:
    """The fields of a `config.json` that `transformers` and the serving engines read as this model."""
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
    words = WORDS | dict(family.words)
    fields = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{theirs: getattr(cfg, ours) for ours, theirs in words.items()},
        words["activation"]: HIDDEN_ACTS[cfg.activation][0],
        "rope_theta": cfg.rope_theta,
        "rope_scaling": rope,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        **family.settled(cfg),
    }
    back = config_from_hf(fields, cfg.name)
    lost = [f"{ours} {value}" for ours, value in vars(cfg).items() if getattr(back, ours) != value]
    if lost:
        raise ValueError(
            f"export: {family.architecture} has no word for {', '.join(lost)}; "
            "this model can be trained and evaluated here, but no other program would compute it"
        )
    return fields


def _activation(fields: Mapping[str, Any], field: str) -> str:
    for ours, theirs in HIDDEN_ACTS.items():
        if fields[field] in theirs:
            return ours
    raise _unserved(field, fields[field], " or ".join(name for names in HIDDEN_ACTS.values() for name in names))


def _family(fields: Mapping[str, Any]) -> Family:
    listed, known = fields.get("architectures"), {family.architecture: family for family in FAMILIES}
    if not isinstance(listed, list) or len(listed) != 1 or listed[0] not in known:
        raise ValueError(
            f"import: architectures is {printable(str(listed))[:100]}; "
            f"implemented are {' and '.join(known)}, and nothing else can be imported"
        )
    return known[listed[0]]


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
    known = ROPE_FIELDS | (LLAMA3_FIELDS if kind == "llama3" else set())
    unknown = sorted(field for field in rope.keys() - known if rope[field] is not None)
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


def _whole(fields: Mapping[str, Any], field: str) -> int:
    value = fields.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ValueError(f"import: {field} must be a whole number of 1 or more, got {printable(repr(value))[:100]}")
    return value


def _flag(fields: Mapping[str, Any], field: str) -> bool:
    value = fields[field]
    if not isinstance(value, bool):
        raise ValueError(
            f"import: {field} must be true or false, got {printable(repr(value))[:100]}; what a model computes depends "
            "on it: say it in config.json"
        )
    return value


def _positive(fields: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value: Any = fields.get(field)
    value = default if value is None else value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ValueError(f"import: {field} must be a number above 0, got {printable(repr(value))[:100]}")
    return float(value)


READ: dict[str, Callable[[Mapping[str, Any], str], Any]] = {
    "int": _whole,
    "float": _positive,
    "bool": _flag,
    "str": _activation,
}
"""Type of a field of ours -> how its value is read; the only word among them is an activation's."""
