"""What a model is: its sizes (`LlamaConfig`), its parameters (`param_specs`: all that there is to say about them, from
initialisation to what Hugging Face calls them), and its family's words in config.json (`FAMILIES`).

    embed        [vocab, embed]
    layers/attention/{norm, q, k, v, o}    each stacked [layers, ...]; weights are [in, out], so y = x @ w
    layers/attention/{q_norm, k_norm}      of a Qwen3, [layers, head_dim]
    layers/mlp/{norm, gate, up, down}
    final_norm   [embed]
    head         [embed, vocab]            absent when tied: the head is embed, transposed

Initialisation: normal, standard deviation 1/sqrt(fan in), and 1/sqrt(2 layers) of that for `o` and `down`, which
write into the residual stream. An embedding that is not also the head has deviation 1: the token itself then weighs as
much in the residual stream as what the layers add to it (the demo run learns as much in 300 steps as in 400 with
1/sqrt(embed)). The last norm makes the head's input of unit size, so logits start with variance 1 and the loss at
ln(vocab) + 1/2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from halfbyte.inputs import check_real, check_whole
from halfbyte.models.spec import ParamSpec, Specs
from halfbyte.nn.rope import RopeScaling
from halfbyte.ops.activation import ACTIVATIONS

MOST_LAYERS = 10_000
MOST_PARAMETERS = 10**14
"""A hundred times the largest model that was ever trained; more is a slip, and no machine could hold its shapes."""


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama 3 model, or of a Qwen3: a Llama whose queries and keys are normed head by head (`qk_norm`).

    Nothing here says how it is trained or in which precision.
    """

    name: str
    vocab_size: int
    embed: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_seq: int
    tied: bool = False
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    activation: str = "silu"

    def __post_init__(self) -> None:
        for field in ("vocab_size", "embed", "mlp", "layers", "heads", "kv_heads", "head_dim", "max_seq"):
            most = {"layers": MOST_LAYERS}.get(field, 2**31 - 1)
            check_whole(f"model {self.name}: {field}", getattr(self, field), least=1, most=most)
        eps = self.norm_eps
        check_real(f"model {self.name}: norm_eps", eps, holds=0 < eps < 1, wanted="above 0 (and below 1)")
        check_real(f"model {self.name}: rope_theta", self.rope_theta, holds=self.rope_theta > 0, wanted="above 0")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model {self.name}: heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"model {self.name}: activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model {self.name}: head_dim must be even for rotary embedding, got {self.head_dim}")

        if (size := self._least_parameters()) > MOST_PARAMETERS:
            raise ValueError(
                f"model {self.name}: {size:.1e} parameters, more than the {MOST_PARAMETERS:.0e} that are served; "
                f"layers {self.layers}, embed {self.embed}, mlp {self.mlp}, vocab_size {self.vocab_size}: one is wrong"
            )

    def _least_parameters(self) -> int:
        """The matrices alone, from the numbers, before a single shape is built."""
        attention = 2 * self.embed * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.embed * self.mlp) + self.vocab_size * self.embed

    def replace(self, **changes: object) -> LlamaConfig:
        """The same model with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def param_specs(cfg: LlamaConfig) -> Specs:
    """The model's parameters as a nested dict of `ParamSpec`: kind, logical axes and Hugging Face name of each."""
    q_width, kv_width = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    residual = 1 / math.sqrt(2 * cfg.layers)
    sizes = {"embed": cfg.embed, "heads": q_width, "kv_heads": kv_width, "mlp": cfg.mlp}

    def linear(module: str, inputs: str, outputs: str, gain: float = 1.0) -> ParamSpec:
        shape = (cfg.layers, sizes[inputs], sizes[outputs])
        return ParamSpec(shape, ("layers", inputs, outputs), gain / math.sqrt(shape[1]), "linear", module)

    def norm(module: str, axis: str = "width", size: int = cfg.embed) -> ParamSpec:
        return ParamSpec((cfg.layers, size), ("layers", axis), None, "norm", module)

    attention = {
        "norm": norm("input_layernorm"),
        "q": linear("self_attn.q_proj", "embed", "heads"),
        "k": linear("self_attn.k_proj", "embed", "kv_heads"),
        "v": linear("self_attn.v_proj", "embed", "kv_heads"),
        "o": linear("self_attn.o_proj", "heads", "embed", residual),
    }
    if cfg.qk_norm:
        attention["q_norm"] = norm("self_attn.q_norm", "head_dim", cfg.head_dim)
        attention["k_norm"] = norm("self_attn.k_norm", "head_dim", cfg.head_dim)
    mlp = {
        "norm": norm("post_attention_layernorm"),
        "gate": linear("mlp.gate_proj", "embed", "mlp"),
        "up": linear("mlp.up_proj", "embed", "mlp"),
        "down": linear("mlp.down_proj", "mlp", "embed", residual),
    }
    own, unit = (cfg.vocab_size, cfg.embed), 1 / math.sqrt(cfg.embed)
    specs: Specs = {
        "embed": ParamSpec(own, ("vocab", "embed"), unit if cfg.tied else 1.0, "embedding", "model.embed_tokens"),
        "layers": {"attention": attention, "mlp": mlp},
        "final_norm": ParamSpec((cfg.embed,), ("width",), None, "norm", "model.norm"),
    }
    if not cfg.tied:
        specs["head"] = ParamSpec(own[::-1], ("embed", "vocab"), unit, "head", "lm_head")
    return specs


@dataclasses.dataclass(frozen=True)
class Family:
    """What Hugging Face `transformers` calls a family, and how its config.json differs from a Llama's.

    marks: our fields that tell it from the families after it in `FAMILIES`.
    words: our field -> theirs, where a Llama has none or another.
    absent: what a field of theirs means that config.json leaves out; None: it must be there.
    settled: their fields that have one value here, which is written, and demanded where config.json has the field.
    """

    architecture: str
    model_type: str
    marks: Mapping[str, Any]
    words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settled: Callable[[LlamaConfig], Mapping[str, Any]] = lambda cfg: {}


QWEN3 = Family(
    "Qwen3ForCausalLM", "qwen3", {"qk_norm": True},
    absent={"num_key_value_heads": None, "head_dim": 128},
    settled=lambda cfg: {"use_sliding_window": False},
)  # fmt: skip
LLAMA = Family("LlamaForCausalLM", "llama", {"qk_norm": False}, settled=lambda cfg: {"mlp_bias": False})
FAMILIES = (QWEN3, LLAMA)
