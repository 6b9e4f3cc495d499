"""Declaration of a parameter (`ParamSpec`) and trees of declarations.

A parameter declares its kind. The kind is not inferred from the number of dims: a router has the dims of a linear, and
a stack of experts has one more.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

PARAM_KIND_NDIMS = {"linear": 2, "experts": 3, "router": 2, "balance": 1, "norm": 1, "embedding": 2, "head": 2}
"""Kind -> number of dims without the layer dim. `balance` is the bias of a router: state that no gradient updates."""
GEMM_KINDS = ("linear", "experts")
"""Kinds that a policy may quantize: matrices [in, out], one per expert."""
Specs = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Spec of one parameter: shape, logical `axes`, `init` as standard deviation of a normal (None: ones).

    `kind` is a key of `PARAM_KIND_NDIMS`. `module` is the name in Hugging Face `transformers`, within its layer if the
    parameter is stacked.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: float | None
    kind: str = ""
    module: str = ""
    active_experts: int = 1
    """Of experts: the number to which a token is routed; else 1."""
    dtype: Any = jnp.float32

    @property
    def size(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.shape)

    @property
    def stacked(self) -> bool:
        """Returns True if the first dim is that of layers."""
        return self.axes[:1] == ("layers",)

    @property
    def experts(self) -> int:
        """Returns the number of experts; 0 for any other kind."""
        return self.shape[self.stacked] if self.kind == "experts" else 0

    @property
    def decay(self) -> bool:
        """Returns True if weight decay applies: to all kinds but norms and router biases."""
        return self.kind not in ("norm", "balance")

    def check(self, path: str) -> None:
        """Raises ValueError unless `kind` is known and shape and axes have the dims of that kind."""
        if self.kind not in PARAM_KIND_NDIMS:
            raise ValueError(
                f"parameter {path} {list(self.shape)} declares kind {self.kind!r}, which is none of "
                f"{', '.join(PARAM_KIND_NDIMS)}; say what it is beside its axes, "
                "where the family's parameters are declared"
            )
        dims = PARAM_KIND_NDIMS[self.kind] + self.stacked
        if not len(self.shape) == len(self.axes) == dims:
            raise ValueError(
                f"parameter {path} is declared as {self.kind}, which has {dims} dims here, but its shape is "
                f"{list(self.shape)} and its axes are {self.axes}"
            )

    def initialize(self, key: jax.Array) -> jax.Array:
        """Returns an initial array of `dtype`: normal with deviation `init`, ones if it is None, zeros if it is 0."""
        if not self.init:
            return jnp.full(self.shape, self.init is None, self.dtype)
        return jax.random.normal(key, self.shape, self.dtype) * jnp.asarray(self.init, self.dtype)


def flatten_specs(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a dict path -> leaf of a nested dict, with `/` between names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(flatten_specs(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value})
    return flat


def unflatten_specs(flat: dict[str, Any]) -> dict[str, Any]:
    """Returns the nested dict of a dict path -> leaf; the inverse of `flatten_specs`."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def map_specs(function: Any, specs: Specs) -> dict[str, Any]:
    """Applies `function` to every spec of a nested dict."""
    return jax.tree.map(function, specs, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))
