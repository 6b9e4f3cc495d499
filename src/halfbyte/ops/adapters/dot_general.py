"""A replacement for `lax.dot_general` in Flax Linen and NNX layers, and a general dot product computed as a linear.

A layer calls `dot_general` with two arrays and names neither itself nor the step. So the key of stochastic rounding is
read at each call and folded with the call site:

| `key`                            | read at each call                    | call site                            |
|----------------------------------|--------------------------------------|--------------------------------------|
| the name of a Linen rng stream   | `make_rng` of the layer being called | the layer's path                     |
| a function, or an NNX rng stream | called, and must return a fresh key  | `site` if given, else the key only   |
| a typed key (this step's)        | as it is                             | `site`, else the Linen layer's path  |

A counter of calls would be wrong: JAX traces a scanned or rematerialized body any number of times.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from halfbyte.ops.linear_plan import ExecutionConfig
from halfbyte.ops.mlp import mlp_with_stacked_residuals
from halfbyte.ops.qdot import qdot, qdots
from halfbyte.ops.trace_context import (
    explicit_sharding,
    fold_in_manual_axis_index,
    has_einsum_swapped_operands,
    in_auto_axes,
    loop_reusing_key,
    pvary_to_common_axes,
    refuse_gradient_without_rng,
    refuse_second_derivative,
    warn_if_key_shared,
)
from halfbyte.recipes import Recipe, as_recipe, site_key
from halfbyte.renamed import renamed_parameters

UNQUANTIZED_DOT_ACTIONS = ("error", "plain")


WEIGHT_SIDES = ("right", "left")


DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


@dataclass(frozen=True)
class DotRecord:
    """One dot product of a layer: the recipe that it ran in, or why it ran as `lax.dot_general`."""

    site: str
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    recipe: str | None
    why_plain: str = ""

    def __str__(self) -> str:
        shapes = f"{self.site or '(unnamed)'}: {list(self.lhs)} x {list(self.rhs)}"
        return f"{shapes} in {self.recipe}" if self.recipe else f"{shapes} plain: {self.why_plain}"


class _DotLog:
    """Every distinct call traced so far. One object per `dot_general`, shared by its copies, compared by identity."""

    def __init__(self) -> None:
        self.calls: dict[DotRecord, None] = {}


@jax.tree_util.register_pytree_with_keys_class
class DotGeneral:
    """See `dot_general`. A pytree whose only child is the key if that is data.

    So an NNX stream inside it is state of the model. The child stays a child, whatever object JAX puts in its place.
    """

    def __init__(self, static: tuple, key: Any) -> None:
        self._static, self.key = static, key
        self.has_child, self.recipe, self.backend, self.other, self.weight, self._record, self.site = static

    def __eq__(self, other: object) -> bool:
        """Equals itself if its result depends on the operands only.

        `jnp.einsum` is compiled once per value of its static arguments, of which this is one. An object that reads a
        new key or the current layer at each call must not hit that cache.
        """
        fixed = self.has_child and self.site is not None
        return self is other and (fixed or not self.recipe.stochastic)

    __hash__ = object.__hash__

    def at(self, site: str) -> DotGeneral:
        """Returns this dot_general with its call site named. The record of calls is shared."""
        return DotGeneral((*self._static[:-1], site), self.key)

    @property
    def calls(self) -> tuple[DotRecord, ...]:
        """Every distinct dot product traced so far, in order."""
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
        """Returns `lax.dot_general(lhs, rhs, ...)` with all three of its GEMMs in the recipe."""
        site = self.site if self.site is not None else _linen_path()
        why = refusal(lhs.dtype, rhs.dtype, dimension_numbers)
        plain = functools.partial(
            lax.dot_general, lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding
        )
        if _linen_initializes():  # the result is discarded
            return plain()
        self._record.calls[
            DotRecord(site or "", lhs.shape, rhs.shape, None if why else self.recipe.name, why or "")
        ] = None
        if why is not None and self.other == "error":
            raise ValueError(
                f"dot_general at {site or 'an unnamed site'}: dimension_numbers={dimension_numbers} cannot run in "
                f"{self.recipe.name!r}: {why}; say other='plain' to let such dots run as lax.dot_general"
            )
        if why is not None:
            return plain()
        swapped = has_einsum_swapped_operands(lhs, rhs) != (self.weight == "left")
        dtype = preferred_element_type or jnp.result_type(lhs.dtype, rhs.dtype)
        y = dot_as_linear(
            *((rhs, lhs) if swapped else (lhs, rhs)),
            dimension_numbers[0][::-1] if swapped else dimension_numbers[0],
            how=DotConfig(self.recipe, self.backend, dtype),
            key=self._call_key(site) if self.recipe.stochastic else None,
            out_sharding=None if swapped else out_sharding,
        )
        y = transpose_weight_dims_first(y, rhs.ndim - len(dimension_numbers[0][1])) if swapped else y
        return y if self._has_key() else refuse_gradient_without_rng(y, self.key)

    def _has_key(self) -> bool:
        """Returns False if the keys come from a Linen stream that was not passed to `apply`."""
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
        loop = loop_reusing_key(key)
        if loop is not None:
            raise ValueError(
                f"dot_general at {site or 'an unnamed site'}: its key is the same in every iteration of the {loop} "
                "around it, so that all layers would round with the same random bits; with Linen pass key='NAME', that "
                "rng stream to apply, and split_rngs={'NAME': True} to nn.scan; else scan over a key for each layer, "
                "or fold the loop's counter in (layer_key)"
            )

    def tree_flatten_with_keys(self) -> tuple[list, tuple]:
        """Flattens to the key if it is data (an array, a stream); a function or a name is static."""
        if self.has_child:
            return [(jax.tree_util.GetAttrKey("key"), self.key)], (self._static, None)
        return [], (self._static, self.key)

    @classmethod
    def tree_unflatten(cls, aux: tuple, children: Any) -> DotGeneral:
        """Inverts the flattening. The child may be any object, as JAX requires of pytrees."""
        static, fixed = aux
        return cls(static, next(iter(children), fixed))


@renamed_parameters()
def dot_general(
    recipe: Recipe | str,
    *,
    key: Any = None,
    site: str | None = None,
    backend: str = "auto",
    other: str = "error",
    weight: str = "right",
) -> DotGeneral:
    """Returns a function to be used in place of `lax.dot_general`, whose three GEMMs run in `recipe`.

    `key` is needed if the recipe rounds stochastically: the name of a Linen rng stream, a function of no arguments,
    an NNX rng stream, or this step's typed key. `site` names the call site where no Linen layer does. `weight` is
    the operand that is the weight, "left" or "right": of `dot_general`, or of the `jnp.einsum` that calls it (and may
    swap its operands), as written there. Any contraction without batch dims runs in the recipe; any other is an error
    unless `other="plain"`. `calls` lists what ran.

    A key that an enclosing loop does not change (`lax.scan`, `nn.scan` without `split_rngs`) is refused: all layers of
    a scan share one site and would round with the same bits. Under `shard_map` the device's index is folded in. Only
    the backward pass of the published recipes rounds stochastically. So without its Linen stream a layer still runs
    forward, as in `init` and evaluation, and its gradient raises an error that names the stream.
    """
    recipe = as_recipe(recipe, "dot_general")
    recipe.check_supported_outside_trainer("dot_general")
    if recipe.stochastic and key is None:
        raise ValueError(
            f"dot_general: recipe {recipe.name!r} rounds stochastically and needs key=: a Linen stream's name, "
            "a function, an NNX stream or this step's key"
        )
    for name, value, known in (("other", other, UNQUANTIZED_DOT_ACTIONS), ("weight", weight, WEIGHT_SIDES)):
        if value not in known:
            raise ValueError(f"dot_general: {name} must be one of {', '.join(known)}, got {value!r}")
    key = _fork_rng_stream(key)
    is_function = isinstance(key, Callable) and jax.tree_util.all_leaves([key])  # type: ignore[arg-type]
    has_child = not (key is None or isinstance(key, str) or is_function)
    return DotGeneral((has_child, recipe, backend, other, weight, _DotLog(), site), key)


def _fork_rng_stream(key: Any) -> Any:
    """Forks an NNX stream, so that it belongs to the layers and is stacked and split with them, as in NNX's Dropout."""
    if not type(key).__module__.startswith("flax.nnx"):
        return key
    # NNX treats attributes of unknown type as static; a stream inside one must be state of the model.
    sys.modules["flax.nnx"].register_data_type(DotGeneral)
    return key.fork()


def _linen_module() -> Any:
    """Returns the Linen layer whose method is running, None outside Linen. Linen has no public API for it."""
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


@dataclass(frozen=True)
class DotConfig:
    """Recipe and backend of a dot, whose float32 result is rounded once to `dtype`."""

    recipe: Recipe
    backend: str
    dtype: DTypeLike


def refusal(x_dtype: DTypeLike, w_dtype: DTypeLike, dimension_numbers: DimensionNumbers) -> str | None:
    """Returns why this dot cannot run as a linear, or None."""
    (contracted, _), (batch, _) = dimension_numbers
    if batch:
        return "it has batch dims, so no operand is a single weight"
    if not contracted:
        return "it contracts nothing"
    if not (jnp.issubdtype(x_dtype, jnp.floating) and jnp.issubdtype(w_dtype, jnp.floating)):
        return f"its operands are {jnp.dtype(x_dtype).name} and {jnp.dtype(w_dtype).name}, not floating point"
    return None


def dot_as_linear(
    x: jax.Array,
    w: jax.Array,
    dims: tuple[Sequence[int], Sequence[int]],
    *,
    how: DotConfig,
    key: jax.Array | None,
    out_sharding: NamedSharding | None = None,
) -> jax.Array:
    """Contracts x with the weight w over `dims` = (dims of x, dims of w): [free dims of x, free dims of w].

    With the free dims of x first, those of w last and the contracted dims flattened to K, this is x [..., K] times
    w [K, N]: a reshape, and a transpose if the dims are in another order.

    The gradients have the dtypes of x and w. Equal calls are traced and lowered once per program. On a mesh with
    explicit axes the result has the sharding that `lax.dot_general` would give it.
    """
    plan = _DotPlan((tuple(dims[0]), tuple(dims[1])), how.recipe, how.backend, jnp.dtype(how.dtype), qdot)
    x, w = pvary_to_common_axes(x, w)
    key = None if key is None else fold_in_manual_axis_index(key, x, w)
    if explicit_sharding(x, w) is None:
        y = _linear(plan, x, w, key)
        return y if out_sharding is None else lax.with_sharding_constraint(y, out_sharding)
    like = jax.eval_shape(lambda x, w: lax.dot_general(x, w, (plan.dims, ((), ())), out_sharding=out_sharding), x, w)
    return in_auto_axes(functools.partial(_linear, plan), x, w, key, out=like.sharding)


def dots_as_linears(
    sides: Sequence[tuple[jax.Array, jax.Array, tuple[Sequence[int], Sequence[int]]]], *, how: DotConfig,
    keys: Sequence[jax.Array | None],
) -> list[jax.Array]:  # fmt: skip
    """Returns `dot_as_linear` of each (x, w, dims), bit for bit, for equal x, whose operands are quantized once.

    No axis may be explicit or manual. JAX adds the gradients of x from the last to the first, as for separate dots in
    this order.
    """
    plans = [
        _DotPlan((tuple(dims[0]), tuple(dims[1])), how.recipe, how.backend, jnp.dtype(how.dtype), qdots)
        for _, _, dims in sides
    ]
    xs, weights, _ = zip(*sides[::-1], strict=True)
    return list(_linears(tuple(plans[::-1]), xs, weights, tuple(keys[::-1])))[::-1]


@functools.partial(jax.jit, static_argnames=("recipe", "backend"))
def swiglu_from_dots(
    x: jax.Array, weights: tuple[jax.Array, jax.Array, jax.Array], *, keys: tuple[jax.Array | None, ...],
    recipe: Recipe, backend: str,
) -> jax.Array:  # fmt: skip
    """Returns (silu(x Wg) * (x Wu)) Wd of `weights` gate, up and down as one op, as in `mlp`, with a key each."""
    for key, w in zip(keys, weights, strict=True):
        warn_if_key_shared(key, (recipe,), (x, w))
    y, _ = mlp_with_stacked_residuals(x, weights, None, recipe=recipe, key=keys, execution=ExecutionConfig(backend))
    return refuse_second_derivative(y, x, *weights)


@dataclass(frozen=True)
class _DotPlan:
    """Static configuration of a dot: one compiled function per value of it and per shape."""

    dims: tuple[tuple[int, ...], tuple[int, ...]]
    recipe: Recipe
    backend: str
    dtype: jnp.dtype
    dot: Callable[..., Any]  # qdot or qdots; a test may replace it

    def matrices(self, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns x [free dims, K] and w [K, N]."""
        (x_dims, w_dims), x_free, w_free = self.dims, _free_dims(x.ndim, self.dims[0]), _free_dims(w.ndim, self.dims[1])
        k = math.prod(x.shape[d] for d in x_dims)
        x2 = lax.transpose(x, (*x_free, *x_dims)).reshape(*(x.shape[d] for d in x_free), k)
        w2 = lax.transpose(w, (*w_dims, *w_free)).reshape(k, math.prod(w.shape[d] for d in w_free))
        return x2 if x.dtype in (jnp.bfloat16, jnp.float32) else x2.astype(jnp.float32), w2

    def result(self, y: jax.Array, w: jax.Array) -> jax.Array:
        """Returns y [free dims of x, N] with N split into the free dims of w."""
        return y.reshape(*y.shape[:-1], *(w.shape[d] for d in _free_dims(w.ndim, self.dims[1])))


@functools.partial(jax.jit, static_argnums=0)
def _linear(plan: _DotPlan, x: jax.Array, w: jax.Array, key: jax.Array | None) -> jax.Array:
    x2, w2 = plan.matrices(x, w)
    return plan.result(plan.dot(x2, w2, recipe=plan.recipe, key=key, backend=plan.backend, out_dtype=plan.dtype), w)


@functools.partial(jax.jit, static_argnums=0)
def _linears(
    plans: tuple[_DotPlan, ...], xs: tuple[jax.Array, ...], weights: tuple[jax.Array, ...], keys: tuple[Any, ...]
) -> list[jax.Array]:
    pairs = [plan.matrices(x, w) for plan, x, w in zip(plans, xs, weights, strict=True)]
    recipes, (first, *copies) = [plan.recipe for plan in plans], [x for x, _ in pairs]
    for key, recipe, (x, w) in zip(keys, recipes, pairs, strict=True):
        warn_if_key_shared(key, (recipe,), (x, w))
    execution, dtype = ExecutionConfig(plans[0].backend), plans[0].dtype
    ys = plans[0].dot(
        first, [w for _, w in pairs], recipes=recipes, keys=keys, execution=execution, out_dtype=dtype, copies=copies
    )
    dots = zip(plans, ys, xs, weights, strict=True)
    return [plan.result(refuse_second_derivative(y, x, w), w) for plan, y, x, w in dots]


def transpose_weight_dims_first(y: jax.Array, free: int) -> jax.Array:
    """[free dims of x, free dims of w] -> [free dims of w, free dims of x]; x has `free` of them."""
    return lax.transpose(y, (*range(free, y.ndim), *range(free)))


def _free_dims(ndim: int, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(d for d in range(ndim) if d not in set(dims))
