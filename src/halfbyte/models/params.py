"""Parameters as their declarations say: made, laid out on a mesh, counted. `declared` is what everything reads."""

from __future__ import annotations

import zlib
from typing import Any

import jax
from jax.sharding import Mesh

from halfbyte.models.config import LlamaConfig, param_specs
from halfbyte.models.spec import GEMMS, ParamSpec, flatten, map_specs, nest
from halfbyte.sharding import DEFAULT_RULES, Rules, axis_size, check_model_dims, check_sharded, named_sharding

Params = dict[str, Any]


def declared(cfg: LlamaConfig) -> dict[str, ParamSpec]:
    """Path -> spec of every parameter; ValueError names one that does not say what it is."""
    flat = flatten(param_specs(cfg))
    for path, spec in flat.items():
        spec.check(path)
    return flat


def init(cfg: LlamaConfig, key: jax.Array) -> Params:
    """Fresh float32 parameters. A leaf's bits depend on the key and on its path alone, so they are the same on any
    mesh (jit it with `out_shardings`).
    """

    def made(path: str, spec: ParamSpec) -> jax.Array:
        return spec.make(jax.random.fold_in(key, zlib.crc32(path.encode()) & 0x7FFFFFFF))

    return nest({path: made(path, spec) for path, spec in declared(cfg).items()})


def abstract_params(cfg: LlamaConfig, mesh: Mesh | None = None, rules: Rules = DEFAULT_RULES) -> Params:
    """The parameters as `jax.ShapeDtypeStruct`s, with their shardings if there is a mesh: nothing is allocated."""

    def abstract(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else named_sharding(spec.axes, mesh, rules)
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)

    return map_specs(abstract, nest(declared(cfg)))


def param_shardings(cfg: LlamaConfig, mesh: Mesh) -> dict[str, Any]:
    """The `NamedSharding` of every parameter."""
    return map_specs(lambda spec: named_sharding(spec.axes, mesh, DEFAULT_RULES), nest(declared(cfg)))


def decay_mask(cfg: LlamaConfig) -> dict[str, Any]:
    """True for every parameter that weight decay applies to: all but the norms."""
    return nest({path: spec.decay for path, spec in declared(cfg).items()})


def matrix_mask(cfg: LlamaConfig) -> dict[str, Any]:
    """True for the matrices of linears, stacked or not: what an optimizer of matrices takes."""
    return nest({path: spec.kind in GEMMS for path, spec in declared(cfg).items()})


def count_params(cfg: LlamaConfig) -> int:
    """The number of parameters."""
    return sum(spec.size for spec in declared(cfg).values())


def refuse_experts(cfg: LlamaConfig, what: str) -> None:
    """ValueError if the model has experts: `what` reads one matrix a linear and layer."""
    if cfg.experts:
        raise ValueError(
            f"{what}: {cfg.name} has {cfg.experts} experts a layer, and this knows one matrix a linear; "
            "do without it, on one device; docs/experts.md says what is built for experts"
        )


def count_active(cfg: LlamaConfig) -> int:
    """The number of parameters that a token passes: of experts, those that are chosen."""
    return sum(spec.size * spec.active // max(spec.experts, 1) for spec in declared(cfg).values())


def linear_sites(cfg: LlamaConfig) -> tuple[str, ...]:
    """The paths of the model's linears, as policies match them. The head is one even when its weight is the
    embedding's.
    """
    return (*(path for path, spec in declared(cfg).items() if spec.kind in GEMMS), "head")


def check_mesh(
    cfg: LlamaConfig,
    mesh: Mesh | None,
    *,
    batch: int | None = None,
    seq: int | None = None,
    rules: Rules = DEFAULT_RULES,
) -> None:
    """Nothing if the model (and a global batch of `batch` sequences of `seq`) splits evenly over `mesh` into whole
    16-element blocks; else a ValueError.
    """
    if mesh is not None and mesh.size > 1:
        _check_experts(cfg, mesh, rules)
    check_sharded(cfg.heads, "heads", mesh, what=f"heads of {cfg.name}", rules=rules)
    check_sharded(cfg.kv_heads, "kv_heads", mesh, what=f"kv_heads of {cfg.name}", rules=rules)
    check_model_dims({path: (s.shape, s.axes) for path, s in declared(cfg).items()}, mesh, rules)
    if batch is not None:
        check_sharded(batch, "batch", mesh, what="the global batch", rules=rules)
    if seq is not None:
        check_sharded(seq, "residual_seq", mesh, what="the sequence length", rules=rules, multiple=16)


def _check_experts(cfg: LlamaConfig, mesh: Mesh, rules: Rules) -> None:
    """ValueError where the experts of a model, or its having none, do not fit the mesh."""
    if rules != DEFAULT_RULES:
        refuse_experts(cfg, f"mesh of {mesh.size} devices outside training")
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
