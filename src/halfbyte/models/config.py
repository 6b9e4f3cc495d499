"""What a model is: its sizes (`LlamaConfig`), its parameters (`param_specs`: all that there is to say about them, from
initialisation to what Hugging Face calls them), and its family's words in config.json (`FAMILIES`).

    embed        [vocab, embed]
    layers/attention/{norm, q, k, v, o}    each stacked [layers, ...]; weights are [in, out], so y = x @ w
    layers/attention/{q_norm, k_norm}      of a Qwen3, [layers, head_dim]
    layers/mlp/{norm, gate, up, down}
    layers/mlp/{norm, router, expert_gate, expert_up, expert_down}   with experts, each stacked [layers, experts, ...]
    layers/mlp/router_bias                 of a sigmoid router, [layers, experts]
    layers/mlp/{shared_gate, shared_up, shared_down}   with shared experts
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

EXPERT_SITES = ("expert_gate", "expert_up", "expert_down")
SHARED_SITES = ("shared_gate", "shared_up", "shared_down")
ROUTERS = ("softmax", "sigmoid")
MOST_LAYERS = 10_000
MOST_EXPERTS = 1 << 18
"""Of all layers together: each is three tensors of a folder."""
MOST_PARAMETERS = 10**14
"""A hundred times the largest model that was ever trained; more is a slip, and no machine could hold its shapes."""


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama 3 model, or of a Qwen3: a Llama whose queries and keys are normed head by head (`qk_norm`),
    or all heads as one (`joint_qk_norm`, OLMoE).

    With `experts` there are so many in the place of each MLP, each `mlp` wide, and a token passes `experts_per_token`
    of them, weighed by the router's softmax over all; divided by the sum of the chosen if `norm_topk`. A `router` of
    sigmoids has a bias that balances the choice. Beside them every token passes `shared_experts`, as one MLP that is so
    many times `mlp` wide.

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
    joint_qk_norm: bool = False
    router: str = "softmax"
    shared_experts: int = 0
    experts: int = 0
    experts_per_token: int = 0
    norm_topk: bool = False

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
        check_whole(f"model {self.name}: experts", self.experts, most=65536, zero="one MLP a layer")
        if self.layers * self.experts > MOST_EXPERTS:
            raise ValueError(
                f"model {self.name}: {self.layers:,} layers of {self.experts:,} experts; {MOST_EXPERTS:,} experts are "
                "the most that a model may have: take fewer layers or experts"
            )
        if not (self.experts == self.experts_per_token == 0 or 1 <= self.experts_per_token <= self.experts):
            raise ValueError(
                f"model {self.name}: experts_per_token must be between 1 and experts ({self.experts}), and 0 without "
                f"experts, got {self.experts_per_token}"
            )
        check_whole(f"model {self.name}: shared_experts", self.shared_experts, most=65536, zero="none")
        if self.router not in ROUTERS:
            raise ValueError(f"model {self.name}: router must be one of {', '.join(ROUTERS)}, got {self.router!r}")
        if self.experts:
            family_of(self)
        elif self.router != ROUTERS[0] or self.shared_experts:
            raise ValueError(
                f"model {self.name}: router {self.router} and shared_experts {self.shared_experts} are for models with "
                "experts, and this has none; set experts and experts_per_token too"
            )
        if self.joint_qk_norm and not self.qk_norm:
            raise ValueError(f"model {self.name}: joint_qk_norm says how queries and keys are normed; set qk_norm too")
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
        mlp = max(self.experts + self.shared_experts, 1) * 3 * self.embed * self.mlp
        return self.layers * (attention + mlp) + self.vocab_size * self.embed

    @property
    def active_mlp(self) -> int:
        """The MLP width that a token passes: of all its experts together."""
        return self.mlp * max(self.experts_per_token + self.shared_experts, 1)

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
        q_axes, k_axes = ("heads", q_width), ("kv_heads", kv_width)
        head = ("head_dim", cfg.head_dim)
        attention["q_norm"] = norm("self_attn.q_norm", *(q_axes if cfg.joint_qk_norm else head))
        attention["k_norm"] = norm("self_attn.k_norm", *(k_axes if cfg.joint_qk_norm else head))
    mlp = {
        "norm": norm("post_attention_layernorm"),
        "gate": linear("mlp.gate_proj", "embed", "mlp"),
        "up": linear("mlp.up_proj", "embed", "mlp"),
        "down": linear("mlp.down_proj", "mlp", "embed", residual),
    }
    if cfg.experts:
        mlp = {"norm": mlp["norm"], **_expert_specs(cfg, mlp)}
    own, unit = (cfg.vocab_size, cfg.embed), 1 / math.sqrt(cfg.embed)
    specs: Specs = {
        "embed": ParamSpec(own, ("vocab", "embed"), unit if cfg.tied else 1.0, "embedding", "model.embed_tokens"),
        "layers": {"attention": attention, "mlp": mlp},
        "final_norm": ParamSpec((cfg.embed,), ("width",), None, "norm", "model.norm"),
    }
    if not cfg.tied:
        specs["head"] = ParamSpec(own[::-1], ("embed", "vocab"), unit, "head", "lm_head")
    return specs


def _expert_specs(cfg: LlamaConfig, mlp: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Router and experts, each expert with the linears of `mlp`; `*` in a module stands for the expert's number. A
    router's bias and shared experts have the names of DeepSeek-V3, which no family here has.
    """
    router, *modules = family_of(cfg).experts
    shape, unit = (cfg.layers, cfg.embed, cfg.experts), 1 / math.sqrt(cfg.embed)
    specs = {"router": ParamSpec(shape, ("layers", None, None), unit, "router", router)}
    if cfg.router == "sigmoid":
        bias, module = (cfg.layers, cfg.experts), f"{router}.e_score_correction_bias"
        specs["router_bias"] = ParamSpec(bias, ("layers", None), 0.0, "balance", module)
    for name, module in zip(("gate", "up", "down"), modules, strict=True):
        one = mlp[name]
        specs[f"expert_{name}"] = dataclasses.replace(
            one, shape=(cfg.layers, cfg.experts, *one.shape[1:]), axes=("layers", "expert", *one.axes[1:]),
            kind="experts", module=module, active=cfg.experts_per_token,
        )  # fmt: skip
    return specs | (_shared_specs(cfg) if cfg.shared_experts else {})


def _shared_specs(cfg: LlamaConfig) -> dict[str, ParamSpec]:
    """Shared experts: the MLP of a dense model that is as wide as they are together."""
    wide = cfg.mlp * cfg.shared_experts
    dense = param_specs(cfg.replace(mlp=wide, experts=0, experts_per_token=0, router=ROUTERS[0], shared_experts=0))
    own = {name: dense["layers"]["mlp"][name.removeprefix("shared_")] for name in SHARED_SITES}
    return {n: dataclasses.replace(s, module=s.module.replace("mlp.", "mlp.shared_experts.")) for n, s in own.items()}


@dataclasses.dataclass(frozen=True)
class Family:
    """What Hugging Face `transformers` calls a family, and how its config.json differs from a Llama's.

    marks: our fields that tell it from the families after it in `FAMILIES`.
    words: our field -> theirs, where a Llama has none or another.
    absent: what a field of theirs means that config.json leaves out; None: it must be there.
    settled: their fields that have one value here, which is written, and demanded where config.json has the field.
    experts: modules of the router and of an expert's gate, up and down; empty: a family without experts.
    also: their field -> what other versions of `transformers` call it.
    """

    architecture: str
    model_type: str
    marks: Mapping[str, Any]
    words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settled: Callable[[LlamaConfig], Mapping[str, Any]] = lambda cfg: {}
    experts: tuple[str, ...] = ()
    also: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def covers(self, cfg: LlamaConfig) -> bool:
        """Whether a model is of this family."""
        marked = all(getattr(cfg, ours) == mark for ours, mark in self.marks.items())
        return marked and bool(self.experts) == bool(cfg.experts)


QWEN3 = Family(
    "Qwen3ForCausalLM", "qwen3", {"qk_norm": True, "joint_qk_norm": False},
    absent={"num_key_value_heads": None, "head_dim": 128},
    settled=lambda cfg: {"use_sliding_window": False},
)  # fmt: skip
LLAMA = Family("LlamaForCausalLM", "llama", {"qk_norm": False}, settled=lambda cfg: {"mlp_bias": False})
EACH = {"experts": "num_experts", "experts_per_token": "num_experts_per_tok", "norm_topk": "norm_topk_prob"}
NAMED = ("mlp.gate", *(f"mlp.experts.*.{name}_proj" for name in ("gate", "up", "down")))
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM", "qwen3_moe", QWEN3.marks, {"mlp": "moe_intermediate_size"} | EACH,
    absent={"num_key_value_heads": None, "norm_topk_prob": None},
    settled=lambda cfg: {"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []}, experts=NAMED,
    also={"num_experts": "num_local_experts"},
)  # fmt: skip
OLMOE = Family(
    "OlmoeForCausalLM", "olmoe", {"qk_norm": True, "joint_qk_norm": True}, EACH,
    absent={"norm_topk_prob": None, "rms_norm_eps": 1e-5},
    settled=lambda cfg: {"clip_qkv": None}, experts=NAMED,
)  # fmt: skip
MIXTRAL = Family(
    "MixtralForCausalLM", "mixtral", {"qk_norm": False, "norm_topk": True},
    {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    absent={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    settled=lambda cfg: {"sliding_window": None},
    experts=("block_sparse_moe.gate", *(f"block_sparse_moe.experts.*.{name}" for name in ("w1", "w3", "w2"))),
)  # fmt: skip
FAMILIES = (QWEN3, LLAMA, QWEN3_MOE, OLMOE, MIXTRAL)


def family_of(cfg: LlamaConfig) -> Family:
    """The family of a model; ValueError where none has its marks."""
    for family in FAMILIES:
        if family.covers(cfg):
            return family
    raise ValueError(
        f"model {cfg.name}: no family has experts={cfg.experts}, qk_norm={cfg.qk_norm}, "
        f"joint_qk_norm={cfg.joint_qk_norm} and norm_topk={cfg.norm_topk} together; experts are those of Qwen3-MoE "
        "(qk_norm), OLMoE (qk_norm and joint_qk_norm) or Mixtral (norm_topk alone)"
    )
