"""Parameters of a model from their specs: initialization, sharding, masks, counts, GEMM shapes and FLOPs.

All functions derive from `flat_param_specs`. Initialization does not depend on the mesh.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from halfbyte.distributed import (
    DEFAULT_RULES,
    LogicalAxisRules,
    axis_size,
    check_model_dims,
    check_sharded,
    named_sharding,
)
from halfbyte.models.config import LlamaConfig, param_specs
from halfbyte.models.param_spec import GEMM_KINDS, ParamSpec, flatten_specs, map_specs, unflatten_specs

FLOPS_FORMULA = "maxtext-2026-06"  # logged with every TFLOP/s figure: figures of one formula are comparable

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class LinearShape:
    """GEMM shape of one linear: `count` layers, each [tokens, k] x [k, n] in fprop."""

    path: str
    count: int
    tokens: int
    k: int
    n: int
    axes: tuple[str | None, ...] = dataclasses.field(default=(None, None), compare=False)
    """Logical axes of its weight [k, n]."""
    experts: int = 0
    """Number of expert matrices among which the tokens are divided; 0: a single matrix."""

    @property
    def flops(self) -> int:
        """Returns the FLOPs of fprop, dgrad and wgrad over all layers."""
        return 6 * self.count * self.tokens * self.k * self.n


def flat_param_specs(cfg: LlamaConfig) -> dict[str, ParamSpec]:
    """Returns the validated spec of every parameter by path."""
    flat = flatten_specs(param_specs(cfg))
    for path, spec in flat.items():
        spec.check(path)
    return flat


def init(cfg: LlamaConfig, key: jax.Array) -> Params:
    """Returns initial float32 parameters.

    The bits of a leaf depend only on the key and its path, so they are the same on any mesh (jit with `out_shardings`).
    """

    def init_leaf(path: str, spec: ParamSpec) -> jax.Array:
        return spec.initialize(jax.random.fold_in(key, zlib.crc32(path.encode()) & 0x7FFFFFFF))

    return unflatten_specs({path: init_leaf(path, spec) for path, spec in flat_param_specs(cfg).items()})


def abstract_params(cfg: LlamaConfig, mesh: Mesh | None = None, rules: LogicalAxisRules = DEFAULT_RULES) -> Params:
    """Returns the parameters as `jax.ShapeDtypeStruct`s, with shardings if there is a mesh. Allocates nothing."""

    def abstract(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else named_sharding(spec.axes, mesh, rules)
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)

    return map_specs(abstract, unflatten_specs(flat_param_specs(cfg)))


def param_shardings(cfg: LlamaConfig, mesh: Mesh) -> dict[str, Any]:
    """Returns the `NamedSharding` of every parameter."""
    return map_specs(
        lambda spec: named_sharding(spec.axes, mesh, DEFAULT_RULES), unflatten_specs(flat_param_specs(cfg))
    )


def weight_decay_mask(cfg: LlamaConfig) -> dict[str, Any]:
    """Returns True for every parameter to which weight decay applies: all but norms and router biases."""
    return unflatten_specs({path: spec.decay for path, spec in flat_param_specs(cfg).items()})


def matrix_mask(cfg: LlamaConfig) -> dict[str, Any]:
    """Returns True for the matrices of linears, stacked or not: those that a matrix optimizer updates."""
    return unflatten_specs({path: spec.kind in GEMM_KINDS for path, spec in flat_param_specs(cfg).items()})


def count_params(cfg: LlamaConfig) -> int:
    """Returns the number of parameters."""
    return sum(spec.size for spec in flat_param_specs(cfg).values())


def check_dense(cfg: LlamaConfig, what: str) -> None:
    """Raises ValueError if the model has experts: `what` supports one matrix per linear and layer."""
    if cfg.experts:
        raise ValueError(
            f"{what}: {cfg.name} has {cfg.experts} experts a layer, and this knows one matrix a linear; "
            "do without it, on one device; docs/experts.md says what is built for experts"
        )


def count_active_params(cfg: LlamaConfig) -> int:
    """Returns the number of parameters active for a token: of experts, those it is routed to."""
    return sum(spec.size * spec.active_experts // max(spec.experts, 1) for spec in flat_param_specs(cfg).values())


def linear_sites(cfg: LlamaConfig) -> tuple[str, ...]:
    """Returns the paths of the model's linears as policies match them, with the head even if it is tied."""
    return (*(path for path, spec in flat_param_specs(cfg).items() if spec.kind in GEMM_KINDS), "head")


def check_mesh(
    cfg: LlamaConfig,
    mesh: Mesh | AbstractMesh | None,
    *,
    batch: int | None = None,
    seq: int | None = None,
    rules: LogicalAxisRules = DEFAULT_RULES,
) -> None:
    """Raises ValueError unless the model divides evenly over `mesh` into whole 16-element blocks.

    With `batch` and `seq`, a global batch of `batch` sequences of `seq` tokens must divide evenly as well.
    """
    if mesh is not None and mesh.size > 1:
        _check_experts(cfg, mesh, rules)
    check_sharded(cfg.heads, "heads", mesh, what=f"heads of {cfg.name}", rules=rules)
    check_sharded(cfg.kv_heads, "kv_heads", mesh, what=f"kv_heads of {cfg.name}", rules=rules)
    check_model_dims({path: (s.shape, s.axes) for path, s in flat_param_specs(cfg).items()}, mesh, rules)
    if batch is not None:
        check_sharded(batch, "batch", mesh, what="the global batch", rules=rules)
    if seq is not None:
        check_sharded(seq, "residual_seq", mesh, what="the sequence length", rules=rules, multiple=16)


def _check_experts(cfg: LlamaConfig, mesh: Mesh | AbstractMesh, rules: LogicalAxisRules) -> None:
    """Raises ValueError if the mesh does not fit the model's number of experts."""
    if rules != DEFAULT_RULES:
        check_dense(cfg, f"mesh of {mesh.size} devices outside training")
    if cfg.experts and axis_size(mesh, "context") > 1:
        raise ValueError(f"mesh: context does not serve {cfg.name}, which has experts; use another axis: expert")
    if not cfg.experts and axis_size(mesh, "expert") > 1:
        raise ValueError(
            f"mesh: expert={axis_size(mesh, 'expert')}, and {cfg.name} has no experts; use data or fsdp instead"
        )
    if cfg.experts % mesh.size:
        raise ValueError(
            f"mesh: {cfg.name} has {cfg.experts} experts, which its {mesh.size} devices do not share evenly; use a "
            f"number of devices that divides {cfg.experts}"
        )


def linear_shapes(cfg: LlamaConfig, batch: int, seq: int) -> list[LinearShape]:
    """Returns every linear of the model for a batch of `batch` sequences of `seq` tokens, the head last."""
    tokens = batch * seq
    sites = [
        LinearShape(path, cfg.layers, tokens * spec.active_experts, k, n, spec.axes[-2:], spec.experts)
        for path, spec in flat_param_specs(cfg).items()
        if spec.kind in GEMM_KINDS
        for k, n in (spec.shape[-2:],)
    ]
    return [*sites, LinearShape("head", 1, tokens, cfg.embed, cfg.vocab_size)]


def flops_by_component(cfg: LlamaConfig, seq: int) -> dict[str, float]:
    """Returns training FLOPs per token of `mlp` (active experts), `qkv`, `o`, `attention`, `router` and `head`.

    Counted as in MaxText, for B sequences of S tokens: ffn 6BSdF, qkv 2BSd(H+2K)h, output projection 2BSdHh, attention
    4BS^2Hh/2 (causal), head 2BSdV. The first four count per layer, and all count 3 times for forward and backward.
    Rematerialized work is not counted.
    """
    d, width = cfg.embed, cfg.heads * cfg.head_dim
    per_layer = {
        "mlp": 6 * d * cfg.active_mlp,
        "qkv": 2 * d * (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim,
        "o": 2 * d * width,
        "attention": 4 * seq * width / 2,
    }
    if cfg.experts:
        per_layer["router"] = 2 * d * cfg.experts
    components = {name: 3.0 * cfg.layers * flops for name, flops in per_layer.items()}
    return components | {"head": 3.0 * 2 * d * cfg.vocab_size}


def flops_per_token(cfg: LlamaConfig, seq: int) -> float:
    """Returns training FLOPs per token, forward and backward, in sequences of `seq` tokens."""
    return sum(flops_by_component(cfg, seq).values())
