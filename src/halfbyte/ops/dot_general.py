"""A stand-in for `lax.dot_general` in layers that let the caller choose it, as those of Flax Linen and NNX do.

The right operand is the weight; inside `jnp.einsum`, which may turn its two operands around, the second one. Where the
random bits come from is the whole difficulty: a layer calls `dot_general` with two arrays and says neither which layer
it is nor which step it runs in. So the key is read at each call, and folded with the call site:

| `key`                            | read at each call                    | call site                            |
|----------------------------------|--------------------------------------|--------------------------------------|
| the name of a Linen rng stream   | `make_rng` of the layer being called | the layer's path                     |
| a function, or an NNX rng stream | called, and must return a fresh key  | `site` if given, else the key alone  |
| a typed key (this step's)        | as it is                             | `site`, else the Linen layer's path  |

A counter of calls would be simpler and wrong: JAX traces a scanned or rematerialised body as often as it likes, so a
call's number is no property of the call. For a similar reason a key is refused inside a loop that does not change it
(`lax.scan`, `nn.scan` without `split_rngs`): all layers of a scan share one site, and would round with the same bits.
Under `shard_map` the device's place is folded in. Only the backward pass of the published recipes rounds
stochastically, so without a Linen stream a layer still runs forward, as `init` and an evaluation do; its gradient says
which stream is missing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from halfbyte.ops.contraction import DimensionNumbers, Rounded, linear, refusal, weight_first
from halfbyte.ops.first_order import needs_stream
from halfbyte.ops.surroundings import einsum_turned, loop_with_one_key
from halfbyte.recipe import Recipe, as_recipe, site_key

OTHERS = ("error", "plain")
WEIGHTS = ("right", "left")


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
    """See `dot_general`. A pytree whose one child is the key if that is data, so that an NNX stream inside it is state
    of the model; whatever stands in the child's place, it stays one.
    """

    def __init__(self, static: tuple, key: Any) -> None:
        self._static, self.key = static, key
        self.has_child, self.recipe, self.backend, self.other, self.weight, self._record, self.site = static

    def __eq__(self, other: object) -> bool:
        """Itself, where a call is determined by its operands alone.

        `jnp.einsum` is compiled once for each of its static arguments, this one among them: one that reads a new key,
        or the layer being called, at each call must not be answered from there.
        """
        fixed = self.has_child and self.site is not None
        return self is other and (fixed or not self.recipe.stochastic)

    __hash__ = object.__hash__

    def at(self, site: str) -> DotGeneral:
        """The same dot_general with its call site named. The record of calls is shared."""
        return DotGeneral((*self._static[:-1], site), self.key)

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every distinct dot product traced so far, in order, with what ran."""
        return tuple(self._record.calls)

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """`lax.dot_general(lhs, rhs, ...)` with all three of its GEMMs in the recipe."""
        site = self.site if self.site is not None else _linen_path()
        why = refusal(lhs.dtype, rhs.dtype, dimension_numbers)
        plain = functools.partial(
            lax.dot_general, lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding
        )
        if _linen_initializes():  # what it computes is thrown away
            return plain()
        self._record.calls[Call(site or "", lhs.shape, rhs.shape, None if why else self.recipe.name, why or "")] = None
        if why is not None and self.other == "error":
            raise ValueError(
                f"dot_general at {site or 'an unnamed site'}: dimension_numbers={dimension_numbers} cannot run in "
                f"{self.recipe.name!r}: {why}; say other='plain' to let such dots run as lax.dot_general"
            )
        if why is not None:
            return plain()
        swapped = einsum_turned(lhs, rhs) != (self.weight == "left")
        dtype = preferred_element_type or jnp.result_type(lhs.dtype, rhs.dtype)
        y = linear(
            *((rhs, lhs) if swapped else (lhs, rhs)),
            dimension_numbers[0][::-1] if swapped else dimension_numbers[0],
            how=Rounded(self.recipe, self.backend, dtype),
            key=self._call_key(site) if self.recipe.stochastic else None,
            out_sharding=None if swapped else out_sharding,
        )
        y = weight_first(y, rhs.ndim - len(dimension_numbers[0][1])) if swapped else y
        return y if self._has_key() else needs_stream(y, self.key)

    def _has_key(self) -> bool:
        """False where the Linen stream that gives the keys was not passed to `apply`."""
        return not (self.recipe.stochastic and isinstance(self.key, str)) or _linen_layer(self.key).has_rng(self.key)

    def _call_key(self, site: str | None) -> jax.Array | None:
        if isinstance(self.key, str):
            if not self._has_key():
                return None
            layer = _linen_layer(self.key)
            self._check_loop(layer.scope.rngs[self.key].rng, site)
            key = layer.make_rng(self.key)
        elif callable(self.key):
            key = self.key()
        else:
            key = self.key
            if site is None:
                raise ValueError(
                    "dot_general: with a plain key every call needs a site, or all layers would share random bits; "
                    "pass site= (or .at(name)), or key= a stream"
                )
            self._check_loop(key, site)
        return key if site is None else site_key(key, site)

    def _check_loop(self, key: jax.Array, site: str | None) -> None:
        loop = loop_with_one_key(key)
        if loop is not None:
            raise ValueError(
                f"dot_general at {site or 'an unnamed site'}: its key is the same in every iteration of the {loop} "
                "around it, so that all layers would round with the same random bits; with Linen pass key='NAME', that "
                "rng stream to apply, and split_rngs={'NAME': True} to nn.scan; else scan over a key for each layer, "
                "or fold the loop's counter in (layer_key)"
            )

    def tree_flatten_with_keys(self) -> tuple[list, tuple]:
        """The key is the child if it is data (an array, a stream), static if it is a function or a name."""
        if self.has_child:
            return [(jax.tree_util.GetAttrKey("key"), self.key)], (self._static, None)
        return [], (self._static, self.key)

    @classmethod
    def tree_unflatten(cls, aux: tuple, children: Any) -> DotGeneral:
        """The inverse of flattening; the child may be any object, as JAX's contract for pytrees asks."""
        static, fixed = aux
        return cls(static, next(iter(children), fixed))


def dot_general(
    recipe: Recipe | str,
    *,
    key: Any = None,
    site: str | None = None,
    backend: str = "auto",
    other: str = "error",
    weight: str = "right",
) -> DotGeneral:
    """A function to be used in place of `lax.dot_general`, whose three GEMMs run in `recipe`.

    `key` is needed if the recipe rounds stochastically: the name of a Linen rng stream, a function of no arguments,
    an NNX rng stream, or this step's typed key. `site` names the call site where no Linen layer does. `weight` says
    which operand the weight is, "left" or "right": of `dot_general`, or of the `jnp.einsum` that calls it, as they were
    written there. Any contraction without batch dims runs in the recipe; what else is asked for is an error unless
    `other="plain"`. `calls` says what ran.
    """
    recipe = as_recipe(recipe, "dot_general")
    recipe.refuse_foreign("dot_general")
    if recipe.stochastic and key is None:
        raise ValueError(
            f"dot_general: recipe {recipe.name!r} rounds stochastically and needs key=: a Linen stream's name, "
            "a function, an NNX stream or this step's key"
        )
    for name, value, known in (("other", other, OTHERS), ("weight", weight, WEIGHTS)):
        if value not in known:
            raise ValueError(f"dot_general: {name} must be one of {', '.join(known)}, got {value!r}")
    key = _own_stream(key)
    is_function = isinstance(key, Callable) and jax.tree_util.all_leaves([key])  # type: ignore[arg-type]
    has_child = not (key is None or isinstance(key, str) or is_function)
    return DotGeneral((has_child, recipe, backend, other, weight, _Record(), site), key)


def _own_stream(key: Any) -> Any:
    """An NNX stream forked, so that it is the layers' own and is stacked and split with them, as NNX's Dropout does."""
    if not type(key).__module__.startswith("flax.nnx"):
        return key
    # NNX takes attributes of unknown type for static; a stream inside one must be seen as state of the model.
    sys.modules["flax.nnx"].register_data_type(DotGeneral)
    return key.fork()


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
            "function, an NNX stream or a key"
        )
    return module


def _linen_path() -> str | None:
    module = _linen_module()
    return None if module is None else "/".join(module.path)


def _linen_initializes() -> bool:
    module = _linen_module()
    return module is not None and module.is_initializing()
