"""Model configurations: sizes (`LlamaConfig`), parameter specs, Hugging Face families and published presets.

embed        [vocab, embed]
layers/attention/{norm, q, k, v, o}    each stacked [layers, ...]; weights are [in, out], so y = x @ w
layers/attention/{q_norm, k_norm}      of Qwen3, [layers, head_dim]
layers/mlp/{norm, gate, up, down}
layers/mlp/{norm, router, expert_gate, expert_up, expert_down}   with experts, each stacked [layers, experts, ...]
layers/mlp/router_bias                 of a sigmoid router, [layers, experts]
layers/mlp/{shared_gate, shared_up, shared_down}   with shared experts
final_norm   [embed]
head         [embed, vocab]            absent if tied: the head is embed, transposed
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

from halfbyte.io import check_float, check_int
from halfbyte.models.param_spec import ParamSpec, Specs
from halfbyte.ops.activation import ACTIVATIONS
from halfbyte.ops.rope import RopeScaling

EXPERT_SITES = ("expert_gate", "expert_up", "expert_down")
SHARED_SITES = ("shared_gate", "shared_up", "shared_down")
ROUTERS = ("softmax", "sigmoid")
MAX_LAYERS = 10_000
MAX_EXPERTS = 1 << 18
"""Experts of all layers in total: each is three tensors of a Hugging Face folder."""
MAX_PARAMETERS = 10**14
"""A hundred times the largest model that was ever trained; a larger count is a typing error."""


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama 3 or Qwen3 model; training and precision are configured elsewhere.

    Qwen3 is a Llama with RMS norms of queries and keys per head (`qk_norm`), or of all heads jointly (`joint_qk_norm`,
    OLMoE). With `experts`, each MLP is a mixture of that many experts of width `mlp`. A token is routed to
    `experts_per_token` of them, weighted by the router's softmax over all experts; with `norm_topk` the weights are
    normalized to sum 1. A "sigmoid" `router` has a bias that balances the load. Every token also passes
    `shared_experts`, as one MLP of `shared_experts` times the width `mlp`.
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
            most = {"layers": MAX_LAYERS}.get(field, 2**31 - 1)
            check_int(f"model {self.name}: {field}", getattr(self, field), least=1, most=most)
        eps = self.norm_eps
        check_float(f"model {self.name}: norm_eps", eps, holds=0 < eps < 1, wanted="above 0 (and below 1)")
        check_float(f"model {self.name}: rope_theta", self.rope_theta, holds=self.rope_theta > 0, wanted="above 0")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model {self.name}: heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"model {self.name}: activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}"
            )
        check_int(f"model {self.name}: experts", self.experts, most=65536, zero="one MLP a layer")
        if self.layers * self.experts > MAX_EXPERTS:
            raise ValueError(
                f"model {self.name}: {self.layers:,} layers of {self.experts:,} experts; {MAX_EXPERTS:,} experts are "
                "the most that a model may have: take fewer layers or experts"
            )
        if not (self.experts == self.experts_per_token == 0 or 1 <= self.experts_per_token <= self.experts):
            raise ValueError(
                f"model {self.name}: experts_per_token must be between 1 and experts ({self.experts}), and 0 without "
                f"experts, got {self.experts_per_token}"
            )
        check_int(f"model {self.name}: shared_experts", self.shared_experts, most=65536, zero="none")
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

        if (size := self._min_parameters()) > MAX_PARAMETERS:
            raise ValueError(
                f"model {self.name}: {size:.1e} parameters, more than the {MAX_PARAMETERS:.0e} that are served; "
                f"layers {self.layers}, embed {self.embed}, mlp {self.mlp}, vocab_size {self.vocab_size}: one is wrong"
            )

    def _min_parameters(self) -> int:
        """Returns the number of elements of the matrices, computed before any array shape is built."""
        attention = 2 * self.embed * self.head_dim * (self.heads + self.kv_heads)
        mlp = max(self.experts + self.shared_experts, 1) * 3 * self.embed * self.mlp
        return self.layers * (attention + mlp) + self.vocab_size * self.embed

    @property
    def active_mlp(self) -> int:
        """Returns the MLP width that a token passes: the sum over its routed and shared experts."""
        return self.mlp * max(self.experts_per_token + self.shared_experts, 1)

    def replace(self, **changes: object) -> LlamaConfig:
        """Returns the same model with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def param_specs(cfg: LlamaConfig) -> Specs:
    """Returns the model's parameters as a nested dict of `ParamSpec`: shape, axes, kind, Hugging Face name of each.

    Initialization is normal with standard deviation 1/sqrt(fan in), and 1/sqrt(2 layers) of that for `o` and `down`,
    which write into the residual stream. An embedding that is not also the head has deviation 1: the token itself then
    weighs as much in the residual stream as what the layers add to it (the demo run learns as much in 300 steps as in
    400 with 1/sqrt(embed)). The last norm gives the head an input of unit size, so logits start with variance 1 and the
    loss at ln(vocab) + 1/2.
    """
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
    table_shape, unit = (cfg.vocab_size, cfg.embed), 1 / math.sqrt(cfg.embed)
    specs: Specs = {
        "embed": ParamSpec(
            table_shape, ("vocab", "embed"), unit if cfg.tied else 1.0, "embedding", "model.embed_tokens"
        ),
        "layers": {"attention": attention, "mlp": mlp},
        "final_norm": ParamSpec((cfg.embed,), ("width",), None, "norm", "model.norm"),
    }
    if not cfg.tied:
        specs["head"] = ParamSpec(table_shape[::-1], ("embed", "vocab"), unit, "head", "lm_head")
    return specs


def _expert_specs(cfg: LlamaConfig, mlp: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Returns the specs of router and experts; `*` in a module name is the expert's number.

    The router's bias and shared experts have the names of DeepSeek-V3, because no family here has them.
    """
    router, *modules = family_of(cfg).experts
    shape, unit = (cfg.layers, cfg.embed, cfg.experts), 1 / math.sqrt(cfg.embed)
    specs = {"router": ParamSpec(shape, ("layers", None, None), unit, "router", router)}
    if cfg.router == "sigmoid":
        bias, module = (cfg.layers, cfg.experts), f"{router}.e_score_correction_bias"
        specs["router_bias"] = ParamSpec(bias, ("layers", None), 0.0, "balance", module)
    for name, module in zip(("gate", "up", "down"), modules, strict=True):
        spec = mlp[name]
        specs[f"expert_{name}"] = dataclasses.replace(
            spec, shape=(cfg.layers, cfg.experts, *spec.shape[1:]), axes=("layers", "expert", *spec.axes[1:]),
            kind="experts", module=module, active_experts=cfg.experts_per_token,
        )  # fmt: skip
    return specs | (_shared_specs(cfg) if cfg.shared_experts else {})


def _shared_specs(cfg: LlamaConfig) -> dict[str, ParamSpec]:
    """Returns the specs of the shared experts: the MLP of a dense model of their total width."""
    width = cfg.mlp * cfg.shared_experts
    dense = param_specs(cfg.replace(mlp=width, experts=0, experts_per_token=0, router=ROUTERS[0], shared_experts=0))
    specs = {name: dense["layers"]["mlp"][name.removeprefix("shared_")] for name in SHARED_SITES}
    return {n: dataclasses.replace(s, module=s.module.replace("mlp.", "mlp.shared_experts.")) for n, s in specs.items()}


@dataclasses.dataclass(frozen=True)
class HfFamily:
    """Names of a family in Hugging Face `transformers`, and the differences of its config.json from Llama's.

    matching_fields: values of our fields that distinguish it from the families after it in `FAMILIES`.
    field_names: our field -> theirs, where it differs from Llama's or Llama has none.
    missing_field_values: their field -> its value if config.json has no such field; None: the field is required.
    derived_fields: their fields with one supported value, which is written, and required where config.json has one.
    experts: modules of the router and of an expert's gate, up and down; empty: a family without experts.
    extra_field_names: their field -> its name in other versions of `transformers`.
    """

    architecture: str
    model_type: str
    matching_fields: Mapping[str, Any]
    field_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    missing_field_values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    derived_fields: Callable[[LlamaConfig], Mapping[str, Any]] = lambda cfg: {}
    experts: tuple[str, ...] = ()
    extra_field_names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def matches(self, cfg: LlamaConfig) -> bool:
        """Returns True if a model is of this family."""
        fields_match = all(getattr(cfg, name) == value for name, value in self.matching_fields.items())
        return fields_match and bool(self.experts) == bool(cfg.experts)


QWEN3 = HfFamily(
    "Qwen3ForCausalLM", "qwen3", {"qk_norm": True, "joint_qk_norm": False},
    missing_field_values={"num_key_value_heads": None, "head_dim": 128},
    derived_fields=lambda cfg: {"use_sliding_window": False},
)  # fmt: skip
LLAMA = HfFamily("LlamaForCausalLM", "llama", {"qk_norm": False}, derived_fields=lambda cfg: {"mlp_bias": False})
MOE_FIELD_NAMES = {"experts": "num_experts", "experts_per_token": "num_experts_per_tok", "norm_topk": "norm_topk_prob"}
MOE_MODULE_NAMES = ("mlp.gate", *(f"mlp.experts.*.{name}_proj" for name in ("gate", "up", "down")))
QWEN3_MOE = HfFamily(
    "Qwen3MoeForCausalLM", "qwen3_moe", QWEN3.matching_fields, {"mlp": "moe_intermediate_size"} | MOE_FIELD_NAMES,
    missing_field_values={"num_key_value_heads": None, "norm_topk_prob": None},
    derived_fields=lambda cfg: {"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    experts=MOE_MODULE_NAMES, extra_field_names={"num_experts": "num_local_experts"},
)  # fmt: skip
OLMOE = HfFamily(
    "OlmoeForCausalLM", "olmoe", {"qk_norm": True, "joint_qk_norm": True}, MOE_FIELD_NAMES,
    missing_field_values={"norm_topk_prob": None, "rms_norm_eps": 1e-5},
    derived_fields=lambda cfg: {"clip_qkv": None}, experts=MOE_MODULE_NAMES,
)  # fmt: skip
MIXTRAL = HfFamily(
    "MixtralForCausalLM", "mixtral", {"qk_norm": False, "norm_topk": True},
    {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    missing_field_values={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    derived_fields=lambda cfg: {"sliding_window": None},
    experts=("block_sparse_moe.gate", *(f"block_sparse_moe.experts.*.{name}" for name in ("w1", "w3", "w2"))),
)  # fmt: skip
FAMILIES = (QWEN3, LLAMA, QWEN3_MOE, OLMOE, MIXTRAL)


def family_of(cfg: LlamaConfig) -> HfFamily:
    """Returns the family of a model; ValueError if no family matches."""
    for family in FAMILIES:
        if family.matches(cfg):
            return family
    raise ValueError(
        f"model {cfg.name}: no family has experts={cfg.experts}, qk_norm={cfg.qk_norm}, "
        f"joint_qk_norm={cfg.joint_qk_norm} and norm_topk={cfg.norm_topk} together; experts are those of Qwen3-MoE "
        "(qk_norm), OLMoE (qk_norm and joint_qk_norm) or Mixtral (norm_topk alone)"
    )


def preset(name: str) -> LlamaConfig:
    """Returns the preset `name`; the ValueError for an unknown name suggests the nearest ones."""
    if name not in _PRESETS:
        near = difflib.get_close_matches(name, _PRESETS, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"model: no preset {name!r}; {hint}the presets are {', '.join(_PRESETS)}")
    return _PRESETS[name]


def presets() -> dict[str, LlamaConfig]:
    """Returns every preset by name, smallest first."""
    return dict(_PRESETS)


def _small(name: str, *, embed: int, mlp: int, layers: int, heads: int) -> LlamaConfig:
    """Returns a small Llama of the low-rank and low-bit training literature: vocabulary 32,768, context 2,048."""
    return LlamaConfig(
        name=name, vocab_size=32768, embed=embed, mlp=mlp, layers=layers, heads=heads, kv_heads=heads,
        head_dim=embed // heads, max_seq=2048, rope_theta=10_000.0,
    )  # fmt: skip


def _llama3(
    name: str, *, embed: int, mlp: int, layers: int, heads: int, factor: float | None, tied: bool = False
) -> LlamaConfig:
    """Returns a published Llama 3: vocabulary 128,256, 8 key heads, theta 500,000.

    `factor` is the rotary scaling of the 3.1 and 3.2 releases, which extends 8,192 positions to 131,072.
    """
    return LlamaConfig(
        name=name, vocab_size=128256, embed=embed, mlp=mlp, layers=layers, heads=heads, kv_heads=8,
        head_dim=embed // heads, max_seq=131072 if factor else 8192, tied=tied,
        rope_scaling=RopeScaling(factor) if factor else None,
    )  # fmt: skip


def _qwen3(name: str, *, embed: int, mlp: int, layers: int, heads: int, tied: bool) -> LlamaConfig:
    """Returns a published Qwen3 (its Base release): vocabulary 151,936, 8 key heads of 128, theta 1,000,000."""
    return LlamaConfig(
        name=name, vocab_size=151936, embed=embed, mlp=mlp, layers=layers, heads=heads, kv_heads=8, head_dim=128,
        max_seq=32768, tied=tied, rope_theta=1_000_000.0, norm_eps=1e-6, qk_norm=True,
    )  # fmt: skip


def _qwen3_moe(name: str, *, embed: int, mlp: int, layers: int, heads: int, kv_heads: int) -> LlamaConfig:
    """Returns a published Qwen3-MoE: 128 experts, 8 per token, with normalized weights."""
    dense = _qwen3(name, embed=embed, mlp=mlp, layers=layers, heads=heads, tied=False)
    return dense.replace(kv_heads=kv_heads, experts=128, experts_per_token=8, norm_topk=True, max_seq=40960)


_DEMO = LlamaConfig(
    name="demo", vocab_size=1024, embed=128, mlp=640, layers=4, heads=4, kv_heads=2, head_dim=32, max_seq=512,
    rope_theta=10_000.0,
)  # fmt: skip
_OLMOE = LlamaConfig(
    name="olmoe-1b-7b", vocab_size=50304, embed=2048, mlp=1024, layers=16, heads=16, kv_heads=16, head_dim=128,
    max_seq=4096, rope_theta=10_000.0, qk_norm=True, joint_qk_norm=True, experts=64, experts_per_token=8,
)  # fmt: skip
_MIXTRAL = LlamaConfig(
    name="mixtral-8x7b", vocab_size=32000, embed=4096, mlp=14336, layers=32, heads=32, kv_heads=8, head_dim=128,
    max_seq=32768, rope_theta=1e6, experts=8, experts_per_token=2, norm_topk=True,
)  # fmt: skip
_PRESETS = {
    config.name: config
    for config in (
        _DEMO,
        _DEMO.replace(name="moe-demo", mlp=128, qk_norm=True, experts=8, experts_per_token=2, norm_topk=True),
        _small("llama-60m", embed=512, mlp=1376, layers=8, heads=8),
        _small("llama-125m", embed=768, mlp=2048, layers=12, heads=12),
        # An MLP of 2736 elsewhere: 2752 is a multiple of 32, as native FP4 needs.
        _small("llama-350m", embed=1024, mlp=2752, layers=24, heads=16),
        _qwen3("qwen3-0.6b", embed=1024, mlp=3072, layers=28, heads=16, tied=True),
        _llama3("llama3.2-1b", embed=2048, mlp=8192, layers=16, heads=32, factor=32.0, tied=True),
        _qwen3("qwen3-1.7b", embed=2048, mlp=6144, layers=28, heads=16, tied=True),
        _OLMOE,
        _llama3("llama3-8b", embed=4096, mlp=14336, layers=32, heads=32, factor=None),
        _qwen3("qwen3-8b", embed=4096, mlp=12288, layers=36, heads=32, tied=False),
        _qwen3_moe("qwen3-30b-a3b", embed=2048, mlp=768, layers=48, heads=32, kv_heads=4),
        _MIXTRAL,
        _llama3("llama3.1-70b", embed=8192, mlp=28672, layers=80, heads=64, factor=8.0),
        _qwen3_moe("qwen3-235b-a22b", embed=4096, mlp=1536, layers=94, heads=64, kv_heads=4),
        _llama3("llama3.1-405b", embed=16384, mlp=53248, layers=126, heads=128, factor=8.0),
    )
}
