"""One nested dict of `ParamSpec` says all there is to say about a model's parameters: initialisation, sharding,
weight decay, paths, counts.

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
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from halfbyte.models.config import LlamaConfig
from halfbyte.sharding import DEFAULT_RULES, Rules, check_model_dims, check_sharded, named_sharding

Specs = dict[str, Any]
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter: `axes` names its dims logically, `init` is the standard deviation of a normal (None: ones),
    `decay` says whether weight decay applies.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: float | None
    dtype: Any = jnp.float32
    decay: bool = True

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def make(self, key: jax.Array) -> jax.Array:
        """A freshly initialised array."""
        if self.init is None:
            return jnp.ones(self.shape, self.dtype)
        return jax.random.normal(key, self.shape, self.dtype) * jnp.asarray(self.init, self.dtype)


def param_specs(cfg: LlamaConfig) -> Specs:
    """The model's parameters as a nested dict of `ParamSpec`."""
    q_width, kv_width = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    residual = 1 / math.sqrt(2 * cfg.layers)

    def linear(inputs: int, outputs: int, axes: tuple[str, str], gain: float = 1.0) -> ParamSpec:
        return ParamSpec((cfg.layers, inputs, outputs), ("layers", *axes), gain / math.sqrt(inputs))

    norm = ParamSpec((cfg.layers, cfg.embed), ("layers", "width"), None, decay=False)
    head_norm = ParamSpec((cfg.layers, cfg.head_dim), ("layers", "head_dim"), None, decay=False)
    specs: Specs = {
        "embed": ParamSpec(
            (cfg.vocab_size, cfg.embed), ("vocab", "embed"), 1 / math.sqrt(cfg.embed) if cfg.tied else 1.0
        ),
        "layers": {
            "attention": {
                "norm": norm,
                "q": linear(cfg.embed, q_width, ("embed", "heads")),
                "k": linear(cfg.embed, kv_width, ("embed", "kv_heads")),
                "v": linear(cfg.embed, kv_width, ("embed", "kv_heads")),
                "o": linear(q_width, cfg.embed, ("heads", "embed"), residual),
            },
            "mlp": {
                "norm": norm,
                "gate": linear(cfg.embed, cfg.mlp, ("embed", "mlp")),
                "up": linear(cfg.embed, cfg.mlp, ("embed", "mlp")),
                "down": linear(cfg.mlp, cfg.embed, ("mlp", "embed"), residual),
            },
        },
        "final_norm": ParamSpec((cfg.embed,), ("width",), None, decay=False),
    }
    if cfg.qk_norm:
        specs["layers"]["attention"] |= {"q_norm": head_norm, "k_norm": head_norm}
    if not cfg.tied:
        specs["head"] = ParamSpec((cfg.embed, cfg.vocab_size), ("embed", "vocab"), 1 / math.sqrt(cfg.embed))
    return specs


def init(cfg: LlamaConfig, key: jax.Array) -> Params:
    """Fresh float32 parameters. A leaf's bits depend on the key and on its path alone, so they are the same on any
    mesh (jit it with `out_shardings`).
    """
    return nest({path: spec.make(_path_key(key, path)) for path, spec in flatten(param_specs(cfg)).items()})


def abstract_params(cfg: LlamaConfig, mesh: Mesh | None = None, rules: Rules = DEFAULT_RULES) -> Params:
    """The parameters as `jax.ShapeDtypeStruct`s, with their shardings if there is a mesh: nothing is allocated."""

    def abstract(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else named_sharding(spec.axes, mesh, rules)
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)

    return map_specs(abstract, param_specs(cfg))


def param_shardings(cfg: LlamaConfig, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> dict[str, Any]:
    """The `NamedSharding` of every parameter."""

    def sharding(spec: ParamSpec) -> NamedSharding:
        return named_sharding(spec.axes, mesh, rules)

    return map_specs(sharding, param_specs(cfg))


def decay_mask(cfg: LlamaConfig) -> dict[str, Any]:
    """True for every parameter that weight decay applies to: all but the norms."""
    return map_specs(lambda spec: spec.decay, param_specs(cfg))


def count_params(cfg: LlamaConfig) -> int:
    """The number of parameters."""
    return sum(spec.size for spec in flatten(param_specs(cfg)).values())


def linear_sites(cfg: LlamaConfig) -> tuple[str, ...]:
    """The paths of the model's linears, as policies match them. The head is one even when its weight is the
    embedding's.
    """
    layered = tuple(
        path for path, spec in flatten(param_specs(cfg)).items() if path.startswith("layers/") and len(spec.shape) == 3
    )
    return (*layered, "head")


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
    check_sharded(cfg.heads, "heads", mesh, what=f"heads of {cfg.name}", rules=rules)
    check_sharded(cfg.kv_heads, "kv_heads", mesh, what=f"kv_heads of {cfg.name}", rules=rules)
    check_model_dims({path: (s.shape, s.axes) for path, s in flatten(param_specs(cfg)).items()}, mesh, rules)
    if batch is not None:
        check_sharded(batch, "batch", mesh, what="the global batch", rules=rules)
    if seq is not None:
        check_sharded(seq, "residual_seq", mesh, what="the sequence length", rules=rules, multiple=16)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Path -> leaf, with `/` between names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(flatten(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value})
    return flat


def map_specs(function: Any, specs: Specs) -> dict[str, Any]:
    """The same nested dict with `function` of every spec."""
    return jax.tree.map(function, specs, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """The nested dict of path -> leaf: what `flatten` undoes."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def _path_key(key: jax.Array, path: str) -> jax.Array:
    return jax.random.fold_in(key, zlib.crc32(path.encode()) & 0x7FFFFFFF)
