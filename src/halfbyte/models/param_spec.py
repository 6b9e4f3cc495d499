"""What is declared of a parameter, and trees of declarations.

A parameter says what it is. Nothing is concluded from its number of dims: a router has the dims of a linear, and a
stack of experts has one more.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

KINDS = {"linear": 2, "experts": 3, "router": 2, "balance": 1, "norm": 1, "embedding": 2, "head": 2}
"""Kind -> the dims of one layer's. `balance` is a router's bias: state among the weights, which no gradient moves."""
GEMMS = ("linear", "experts")
"""Kinds that a policy may quantize: matrices [in, out], for experts one each."""
Specs = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter: `axes` names its dims logically, `init` is the standard deviation of a normal (None: ones), `kind`
    is one of `KINDS`, `module` what Hugging Face `transformers` calls it (inside its layer, if it is stacked).
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: float | None
    kind: str = ""
    module: str = ""
    active: int = 1
    """Of experts: how many a token passes."""
    dtype: Any = jnp.float32

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def stacked(self) -> bool:
        """Whether the first dim is the layers'."""
        return self.axes[:1] == ("layers",)

    @property
    def experts(self) -> int:
        """Of experts: how many there are; 0 for anything else."""
        return self.shape[self.stacked] if self.kind == "experts" else 0

    @property
    def decay(self) -> bool:
        """Whether weight decay applies: to all but norms and what balances experts."""
        return self.kind not in ("norm", "balance")

    def check(self, path: str) -> None:
        """ValueError unless it says what it is, and its dims are that kind's."""
        if self.kind not in KINDS:
            raise ValueError(
                f"parameter {path} {list(self.shape)} declares kind {self.kind!r}, which is none of "
                f"{', '.join(KINDS)}; say what it is beside its axes, where the family's parameters are declared"
            )
        dims = KINDS[self.kind] + self.stacked
        if not len(self.shape) == len(self.axes) == dims:
            raise ValueError(
                f"parameter {path} is declared as {self.kind}, which has {dims} dims here, but its shape is "
                f"{list(self.shape)} and its axes are {self.axes}"
            )

    def make(self, key: jax.Array) -> jax.Array:
        """A freshly initialised array."""
        if not self.init:
            return jnp.full(self.shape, self.init is None, self.dtype)
        return jax.random.normal(key, self.shape, self.dtype) * jnp.asarray(self.init, self.dtype)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Path -> leaf, with `/` between names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(flatten(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value})
    return flat


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


def map_specs(function: Any, specs: Specs) -> dict[str, Any]:
    """The same nested dict with `function` of every spec."""
    return jax.tree.map(function, specs, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))
