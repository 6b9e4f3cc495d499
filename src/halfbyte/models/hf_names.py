"""Llama checkpoints of Hugging Face `transformers`: their names, layouts and config fields, and ours.

They keep one tensor a layer and weights as [out, in]; here layers are stacked and weights are [in, out]. Rotary
halves are laid out alike (pairs i and
i + head_dim/2), so nothing is permuted. Only NumPy is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from halfbyte.models.config import LlamaConfig
from halfbyte.models.params import Params, flatten, nest, param_specs
from halfbyte.ops.rope import RopeScaling

ARCHITECTURE = "LlamaForCausalLM"
LAYER_NAMES = {
    "layers/attention/norm": "input_layernorm",
    "layers/attention/q": "self_attn.q_proj",
    "layers/attention/k": "self_attn.k_proj",
    "layers/attention/v": "self_attn.v_proj",
    "layers/attention/o": "self_attn.o_proj",
    "layers/mlp/norm": "post_attention_layernorm",
    "layers/mlp/gate": "mlp.gate_proj",
    "layers/mlp/up": "mlp.up_proj",
    "layers/mlp/down": "mlp.down_proj",
}
OUTER_NAMES = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
TRANSPOSED = ("q", "k", "v", "o", "gate", "up", "down", "head")


def hf_names(path: str, layers: int) -> list[str]:
    """The names there of our parameter `path`: one, or one for each layer."""
    if path in OUTER_NAMES:
        return [OUTER_NAMES[path]]
    return [f"model.layers.{layer}.{LAYER_NAMES[path]}.weight" for layer in range(layers)]


def from_hf(cfg: LlamaConfig, tensors: Mapping[str, np.ndarray]) -> Params:
    """Our parameters, float32 NumPy, from a state dict. A missing name or a wrong shape is a ValueError that names
    it.
    """
    params = {}
    for path, spec in flatten(param_specs(cfg)).items():
        parts = [_read(tensors, name, path) for name in hf_names(path, cfg.layers)]
        value = np.stack(parts) if path in LAYER_NAMES else parts[0]
        if value.shape != spec.shape:
            raise ValueError(
                f"import: {path} has shape {value.shape}, but {cfg.name} wants {spec.shape}; "
                "is the config the one of this checkpoint?"
            )
        params[path] = value
    return nest(params)


def to_hf(cfg: LlamaConfig, params: Params) -> dict[str, np.ndarray]:
    """A state dict under their names, float32 NumPy. A tied head is left out, as they do."""
    tensors = {}
    for path, value in flatten(params).items():
        names = hf_names(path, cfg.layers)
        parts = np.asarray(value) if path in LAYER_NAMES else [np.asarray(value)]
        for name, part in zip(names, parts, strict=True):
            tensors[name] = np.ascontiguousarray(part.T) if _is_transposed(path) else part
    return tensors


def config_from_hf(fields: Mapping[str, Any], name: str = "imported") -> LlamaConfig:
    """Our config from the fields of their `config.json`. What this model cannot be (biases, another activation or
    rotary type) is a ValueError.
    """
    for field, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if fields.get(field, wanted) != wanted:
            raise ValueError(
                f"import: {field} is {fields[field]!r}, and only {wanted!r} is a Llama 3; "
                "this checkpoint cannot be imported"
            )
    heads = fields["num_attention_heads"]
    rope = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    return LlamaConfig(
        name=name,
        vocab_size=fields["vocab_size"],
        embed=fields["hidden_size"],
        mlp=fields["intermediate_size"],
        layers=fields["num_hidden_layers"],
        heads=heads,
        kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
        max_seq=fields["max_position_embeddings"],
        tied=bool(fields.get("tie_word_embeddings", False)),
        rope_theta=float(fields.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        rope_scaling=_scaling_from_hf(rope),
        norm_eps=float(fields["rms_norm_eps"]),
    )


def config_to_hf(cfg: LlamaConfig) -> dict[str, Any]:
    """The fields of a `config.json` that `transformers` reads as this model."""
    scaling = cfg.rope_scaling
    rope = None if scaling is None else {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq,
    }  # fmt: skip
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
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
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
    }


def _scaling_from_hf(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"import: rotary scaling of type {kind!r}; only 'llama3' and none are known here")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_seq=int(rope["original_max_position_embeddings"]),
    )


def _read(tensors: Mapping[str, np.ndarray], name: str, path: str) -> np.ndarray:
    if name not in tensors:
        raise ValueError(f"import: no tensor {name!r} in the checkpoint (for {path}); is it a whole {ARCHITECTURE}?")
    value = np.asarray(tensors[name]).astype(np.float32)
    return value.T if _is_transposed(path) else value


def _is_transposed(path: str) -> bool:
    return path.rsplit("/", 1)[-1] in TRANSPOSED
