"""qdot: y = x W with its three GEMMs quantized, in anyone's model; qdots: several linears of one x.

    fprop  y  = Q(x)  Q(W)          contracts the inputs
    dgrad  dx = Q(dy) Q(W)^T        contracts the outputs
    wgrad  dw = Q(x)^T Q(dy)        contracts the tokens

Each Q is an operand policy of the recipe, with its own tensor scale and its own random bits. The rounding has no
gradient of its own: it passes straight through. What the backward pass keeps of x is wgrad's operand, packed: 4.5 bits
a number under NVFP4; and of W its codes. Linears of one x share its operands wherever they want the same.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from halfbyte.ops.linear import (
    Linear,
    LinearPlan,
    gathered_back,
    gathered_in,
    once_each,
    operands_of_x,
    places_of,
    prepare,
)
from halfbyte.ops.operand import add_rounded
from halfbyte.ops.shards import WHOLE, Placement, received, returned, with_idle_axes
from halfbyte.ops.surroundings import anywhere
from halfbyte.ops.weight import QWeight, check_kept, weight_specs
from halfbyte.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Plan:
    """The linears' plans, and the dtype of their results."""

    linears: tuple[LinearPlan, ...]
    out_dtype: jnp.dtype


@anywhere
def qdot(
    x: jax.Array, w: jax.Array | QWeight, *, recipe: Recipe, key: jax.Array | None = None, backend: str = "auto",
    placement: Placement | None = None, out_sharding: NamedSharding | None = None,
    out_dtype: jnp.dtype | None = None, weights_kept: str = "master", sharded: bool = False,
) -> jax.Array:  # fmt: skip
    """x [..., inputs] times w [inputs, outputs], in x's dtype; every GEMM, forward and backward, as the recipe says.

    float32 sums, the tensor scales applied to them, one rounding to the result's dtype. The weight gradient has w's
    dtype. `key` is a typed key, folded by the caller with step, layer and site; it is needed where the recipe rounds
    stochastically. `w` may be a `QWeight`; `weights_kept` as for `mlp`. NaN or infinity in an operand makes the whole
    result NaN. With a `placement` every device of its mesh computes its part, by the same kernels as a single one.
    """
    (y,) = qdots(
        x,
        (w,),
        recipes=(recipe,),
        keys=(key,),
        backend=backend,
        placements=None if placement is None else (placement,),
        out_dtype=out_dtype,
        weights_kept=weights_kept,
        sharded=sharded,
    )
    return y if out_sharding is None else lax.with_sharding_constraint(y, out_sharding)


def qdots(
    x: jax.Array, weights: Sequence[jax.Array | QWeight], *, recipes: Sequence[Recipe],
    keys: Sequence[jax.Array | None], backend: str = "auto", placements: Sequence[Placement] | None = None,
    out_dtype: jnp.dtype | None = None, weights_kept: str = "master", sharded: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """`qdot` of one x with each of `weights`. `sharded` without placements: the compiler lays the arrays out over
    several devices, and kernels, which read one device's, are left out.
    """
    check_kept(weights_kept)
    for w, recipe in zip(weights, recipes, strict=True):
        _check(x, w, recipe)
    run = functools.partial(
        _local, recipes=tuple(recipes), backend=backend, out_dtype=jnp.dtype(out_dtype or x.dtype), kept=weights_kept
    )
    if placements is None:
        return run(x, tuple(weights), tuple(keys), shards=(WHOLE,) * len(recipes), sharded=sharded)
    shards = tuple(p.shards(x.ndim) for p in placements)
    specs = tuple(weight_specs(w, p.w) for w, p in zip(weights, placements, strict=True))
    run, first = functools.partial(run, shards=shards), placements[0]
    if any((p.mesh, p.x) != (first.mesh, first.x) for p in placements):
        raise ValueError("placements: linears of one x have one mesh and one x, got " + "; ".join(map(str, placements)))
    results = on_mesh(run, first.mesh, specs, first.x, tuple(p.y for p in placements), x, weights, keys)
    return tuple(y.astype(out_dtype or x.dtype) for y in results)


def on_mesh(
    run: Any, mesh: Mesh, weight_specs: Any, x_specs: Any, out_specs: Any, x: Any, weights: Any, keys: Sequence[Any]
) -> Any:
    """run(x, weights, keys) on local arrays, with typed keys passed as their words. Results may be wider than run's:
    see `returned`.
    """
    words = tuple(None if key is None else jax.random.key_data(key) for key in keys)
    kinds = [None if key is None else jax.random.key_impl(key) for key in keys]

    def local(x: Any, weights: Any, words: Any) -> Any:
        typed = [None if w is None else jax.random.wrap_key_data(w, impl=k) for w, k in zip(words, kinds, strict=True)]
        within, without = (functools.partial(to, mesh=mesh) for to in (received, returned))
        return jax.tree.map(without, run(jax.tree.map(within, x, x_specs), weights, tuple(typed)), out_specs)

    specs = (x_specs, tuple(weight_specs), jax.tree.map(lambda _: PartitionSpec(), words))
    # Axes that are not named in a spec are summed over in its gradient: those of size 1 are named.
    mentioned = functools.partial(jax.tree.map, functools.partial(with_idle_axes, mesh=mesh))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=mentioned(specs), out_specs=mentioned(out_specs), check_vma=False)
    return mapped(x, tuple(weights), words)


def _local(x: jax.Array, weights: tuple, keys: tuple, *, out_dtype: jnp.dtype, **planned: Any) -> tuple[jax.Array, ...]:
    tokens, plans, anchors, codes = prepare(x, weights, keys, **planned)
    results = _qdots(Plan(plans, out_dtype), tokens, anchors, codes, keys)
    # [tokens..., outputs] -> [..., outputs]
    return tuple(y if y.ndim == x.ndim else y.reshape(*x.shape[:-1], y.shape[-1]) for y in results)


def _check(x: jax.Array, weight: jax.Array | QWeight, recipe: Recipe) -> None:
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(f"qdot takes bfloat16 or float32, got x of {x.dtype}; convert with astype first")
    if len(weight.shape) != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"qdot contracts the last axis of x with the first of w, got x {x.shape} and w {weight.shape}")
    if isinstance(weight, QWeight) and weight.recipe != recipe:
        raise ValueError(
            f"this QWeight was made under recipe {weight.recipe.name}, qdot was asked for {recipe.name}; "
            f"quantize the weight again"
        )


def _linears(plan: Plan, anchors, codes, keys) -> tuple[Linear, ...]:
    return tuple(Linear.of(*parts) for parts in zip(plan.linears, anchors, codes, keys, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _qdots(plan: Plan, x, anchors, codes, keys):
    linears = _linears(plan, anchors, codes, keys)
    operands = operands_of_x(gathered_in(x, plan.linears[0].shards), linears, ("fprop_x",))
    return tuple(linear.fprop(row, plan.out_dtype) for linear, (row,) in zip(linears, operands, strict=True))


def _qdots_fwd(plan: Plan, x, anchors, codes, keys):
    linears = _linears(plan, anchors, codes, keys)
    weights = tuple(linear.keep() for linear in linears)
    x = gathered_in(x, plan.linears[0].shards)
    operands = operands_of_x(x, linears, ("fprop_x", "wgrad_x"), kept=("wgrad_x",))
    results = tuple(linear.fprop(row, plan.out_dtype) for linear, (row, _) in zip(linears, operands, strict=True))
    columns = once_each(linears, "wgrad_x", [column for _, column in operands])
    return results, (columns, weights, keys)


def _qdots_bwd(plan: Plan, residuals, gradients):
    columns, weights, keys = residuals
    parts = zip(plan.linears, weights, keys, gradients, strict=True)
    linears = [Linear.restore(p, w, k, after=dy) for p, w, k, dy in parts]
    gradients = [gathered_back(dy, linear.plan.shards) for linear, dy in zip(linears, gradients, strict=True)]
    operands = [linear.quantize(dy, "dgrad_dy", "wgrad_dy") for linear, dy in zip(linears, gradients, strict=True)]
    dtype = jnp.dtype(plan.linears[0].problem.dtype)
    dx = [linear.dgrad(row, dtype) for linear, (row, _) in zip(linears, operands, strict=True)]
    kept = [columns[i] for i in places_of(linears, "wgrad_x")]
    dw = [
        linear.wgrad(linear.load(column, "wgrad_x"), dy_column)
        for linear, column, (_, dy_column) in zip(linears, kept, operands, strict=True)
    ]
    return functools.reduce(add_rounded, dx), tuple(dw), None, None


_qdots.defvjp(_qdots_fwd, _qdots_bwd)
