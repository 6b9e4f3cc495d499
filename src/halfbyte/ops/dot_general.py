"""A stand-in for `lax.dot_general` in layers that let the caller choose it, as those of Flax Linen and NNX do.

The right operand is the weight. Where the random bits come from is the whole difficulty: a layer calls `dot_general`
with two arrays and says neither which layer it is nor which step it runs in. So the key is read at each call, and
folded with the call site:

| `key`                            | read at each call                    | call site                            |
|----------------------------------|--------------------------------------|--------------------------------------|
| the name of a Linen rng stream   | `make_rng` of the layer being called | the layer's path                     |
| a function, or an NNX rng stream | called, and must return a fresh key  | `site` if given, else the key alone  |
| a typed key (this step's)        | as it is                             | `site`, else the Linen layer's path  |

A counter of calls would be simpler and wrong: JAX traces a scanned or rematerialised body as often as it likes, so a
call's number is no property of the call. For a similar reason a plain key is refused inside `nn.scan` and `nn.vmap`:
the layers of a scan share one path, and a key that the scan does not split would give them all the same bits.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.ops.contraction import DimensionNumbers, linear, refusal
from halfbyte.recipe import Recipe, site_key

OTHERS = ("error", "plain")
ONCE = ("remat", "checkpoint", "jit")  # Linen transforms that run a layer once


@dataclass(frozen=True)
class Call:
    """One dot product that a layer asked for: what ran, and why it stayed plain if it did."""

    site: str
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    recipe: str | None
    why_plain: str = ""

    def __str__(self) -> str:
        shapes = f"{self.site or '(unnamed)'}: {list(self.lhs)} x {list(self.rhs)}"
        return f"{shapes} in {self.recipe}" if self.recipe else f"{shapes} plain: {self.why_plain}"


class _Record:
    """Every distinct call traced so far. One object a `dot_general`, shared by its copies, compared by identity."""

    def __init__(self) -> None:
        self.calls: dict[Call, None] = {}


@jax.tree_util.register_pytree_with_keys_class
class DotGeneral:
    """See `dot_general`. A pytree whose one child is the key, so that an NNX stream inside it is state of the model."""

    def __init__(
        self, recipe: Recipe, *, key: Any = None, site: str | None = None, backend: str = "auto", other: str = "error"
    ) -> None:
        if not isinstance(recipe, Recipe):
            raise TypeError(f"dot_general: recipe must be a Recipe, got {recipe!r}; use halfbyte.recipe(name)")
        if recipe.stochastic and key is None:
            raise ValueError(
                f"dot_general: recipe {recipe.name!r} rounds stochastically and needs key=: a Linen stream's name, "
                "a function, "
                "an NNX stream or this step's key"
            )
        if other not in OTHERS:
            raise ValueError(f"dot_general: other must be one of {', '.join(OTHERS)}, got {other!r}")
        self.recipe, self.key, self.site, self.backend, self.other = recipe, key, site, backend, other
        self._record = _Record()
        _tell_nnx(key)

    def at(self, site: str) -> DotGeneral:
        """The same dot_general with its call site named. The record of calls is shared."""
        return _rebuild((self.recipe, site, self.backend, self.other, self._record), self.key)

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every distinct dot product traced so far, in order, with what ran."""
        return tuple(self._record.calls)

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """`lax.dot_general(lhs, rhs, ...)` with all three of its GEMMs in the recipe."""
        site = self.site if self.site is not None else _linen_path()
        why = refusal(lhs.dtype, rhs.dtype, dimension_numbers)
        self._record.calls[Call(site or "", lhs.shape, rhs.shape, None if why else self.recipe.name, why or "")] = None
        if why is not None:
            self._accept_plain(site, dimension_numbers, why)
            return lax.dot_general(
                lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding
            )
        dtype = preferred_element_type or jnp.result_type(lhs.dtype, rhs.dtype)
        key = self._call_key(site) if self.recipe.stochastic else None
        dims = dimension_numbers[0]
        return linear(
            lhs, rhs, dims, recipe=self.recipe, key=key, backend=self.backend, dtype=dtype, out_sharding=out_sharding
        )

    def _accept_plain(self, site: str | None, dimension_numbers: DimensionNumbers, why: str) -> None:
        if self.other == "error":
            raise ValueError(
                f"dot_general at {site or 'an unnamed site'}: dimension_numbers={dimension_numbers} cannot run in "
                f"{self.recipe.name!r}: {why}; say other='plain' to let such dots run as lax.dot_general"
            )

    def _call_key(self, site: str | None) -> jax.Array:
        if isinstance(self.key, str):
            key = _linen_layer(self.key).make_rng(self.key)
        elif callable(self.key):
            key = self.key()
        else:
            key = self.key
            self._check_plain_key(site)
        return key if site is None else site_key(key, site)

    def _check_plain_key(self, site: str | None) -> None:
        if site is None:
            raise ValueError(
                "dot_general: with a plain key every call needs a site, or all layers would share random bits; "
                "pass site= (or "
                ".at(name)), or key= a stream"
            )
        repeating = _repeating_transforms()
        if self.site is None and repeating:
            raise ValueError(
                f"dot_general at {site}: a plain key inside nn.{repeating[0]} would give all of its layers the "
                "same random "
                "bits; pass key='NAME' and that rng stream to apply, with split_rngs={'NAME': True} for the transform"
            )

    def tree_flatten_with_keys(self) -> tuple[list, tuple]:
        """The key is the child if it is data (an array, a stream), static if it is a function or a name."""
        static = (self.recipe, self.site, self.backend, self.other, self._record)
        if self.key is None or isinstance(self.key, str) or _is_function(self.key):
            return [], (static, self.key)
        return [(jax.tree_util.GetAttrKey("key"), self.key)], (static, None)

    @classmethod
    def tree_unflatten(cls, aux: tuple, children: Any) -> DotGeneral:
        """The inverse of flattening; the child may be any object, as JAX's contract for pytrees asks."""
        static, fixed = aux
        return _rebuild(static, next(iter(children), fixed))


def dot_general(
    recipe: Recipe, *, key: Any = None, site: str | None = None, backend: str = "auto", other: str = "error"
) -> DotGeneral:
    """A function to be used in place of `lax.dot_general`, whose three GEMMs run in `recipe`; the right operand is
    the weight.

    `key` is needed if the recipe rounds stochastically: the name of a Linen rng stream, a function of no arguments,
    an NNX rng stream, or this step's typed key. `site` names the call site where no Linen layer does. Any contraction
    without batch dims runs in the recipe; what else is asked for is an error unless `other="plain"`. `calls` says
    what ran.
    """
    return DotGeneral(recipe, key=key, site=site, backend=backend, other=other)


def _rebuild(static: tuple, key: Any) -> DotGeneral:
    made = object.__new__(DotGeneral)
    made.recipe, made.site, made.backend, made.other, made._record = static
    made.key = key
    return made


def _is_function(key: Any) -> bool:
    return isinstance(key, Callable) and jax.tree_util.all_leaves([key])  # type: ignore[arg-type]


def _tell_nnx(key: Any) -> None:
    """NNX takes attributes of unknown type for static; a stream inside one must be seen as state of the model."""
    if type(key).__module__.startswith("flax.nnx"):
        sys.modules["flax.nnx"].register_data_type(DotGeneral)


def _linen_module() -> Any:
    """The Linen layer whose method is running, None outside Linen. Linen has no public name for it."""
    context = getattr(sys.modules.get("flax.linen.module"), "_context", None)
    stack = getattr(context, "module_stack", None)
    return stack[-1] if stack else None


def _linen_layer(stream: str) -> Any:
    module = _linen_module()
    if module is None:
        raise ValueError(
            f"dot_general: key={stream!r} names a Linen rng stream, but no Linen layer is being called; pass a "
            "function, an NNX "
            "stream or a key"
        )
    return module


def _linen_path() -> str | None:
    module = _linen_module()
    return None if module is None else "/".join(module.path)


def _repeating_transforms() -> list[str]:
    """The Linen transforms around the layer that may run it more than once under one path: scan, vmap, ..."""
    module = _linen_module()
    around = "" if module is None else "/".join(module.scope.debug_path)  # such as scan(remat(layers))/up
    return [name for name in re.findall(r"(\w+)\(", around) if name not in ONCE]
