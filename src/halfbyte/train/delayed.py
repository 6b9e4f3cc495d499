"""Delayed scaling: what a run remembers of the largest magnitudes of x, W and dy of every linear, from step to step.

Under a recipe with a `history` of n steps, step t scales a tensor by what the steps before it have seen:

    A_t = max(a_(t-1), ..., a_(t-n)),  S_t = fp8_max / A_t

A step's a is the largest magnitude of the whole tensor, over all devices and microbatches. Where the maximum is 0 or
not finite, A stays as it was; at first it is 0, for which S is 1. A skipped step leaves all as it was. The rule is
that of Transformer Engine's update kernel (common/recipe/delayed_scaling.cu, with margin 0 and the algorithm `max`).

A pass learns a only while it runs, that of dy in the backward pass: it comes back as the cotangent of A
(`ops.Remembered`).
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from halfbyte.models import linear_sites

from .config import TrainConfig
from .precision import phases

Delayed = dict[str, jax.Array]
NAME = "delayed"  # as a state and its checkpoints have it


def history_of(config: TrainConfig) -> int:
    """Steps that the run's recipes look back, in any of its phases; 0 if none does."""
    resolved = [phase.resolved(config) for phase in phases(config)]
    recipes = (made for each in resolved for segment in each.segments for made in segment.recipes.values())
    lengths = sorted({made.history for made in recipes} - {0})
    if len(lengths) > 1:
        raise ValueError(f"a run keeps one length of history, got recipes with {lengths}; give them all the same")
    return lengths[0] if lengths else 0


def nothing_seen(config: TrainConfig) -> Delayed | None:
    """What a run begins with: `amaxes` A float32 [layers, linears, 3], by x, W and dy, and `history` [n, ...], the
    newest last; None without a recipe that looks back.
    """
    steps, shape = history_of(config), (config.model.layers, len(linear_sites(config.model)), 3)
    if not steps:
        return None
    return {"amaxes": jnp.zeros(shape, jnp.float32), "history": jnp.zeros((steps, *shape), jnp.float32)}


def advanced(delayed: Delayed | None, seen: jax.Array | None) -> Delayed | None:
    """After a step that has `seen` these. A linear that was not quantized has seen 0."""
    if delayed is None or seen is None:
        return delayed
    history = jnp.concatenate([delayed["history"][1:], seen[None]])
    largest = jnp.max(history, axis=0)
    amaxes = jnp.where(jnp.isfinite(largest) & (largest > 0), largest, delayed["amaxes"])
    return {"amaxes": amaxes, "history": history}


def as_stored(leaves: Mapping[str, Mapping[str, Any]], where: NamedSharding) -> Any:
    """What a checkpoint with these leaves remembers, in its own shapes; None if nothing."""
    found = {name.removeprefix(f"{NAME}/"): leaf for name, leaf in leaves.items() if name.startswith(f"{NAME}/")}
    shaped = {n: jax.ShapeDtypeStruct(tuple(leaf["shape"]), leaf["dtype"], sharding=where) for n, leaf in found.items()}
    return shaped or None


def as_wanted(config: TrainConfig, found: Delayed | None, where: NamedSharding) -> Delayed | None:
    """What a run goes on with that had `found` before its config was changed: the same where it remembers as much,
    else nothing, or what a run begins with.
    """
    begin = functools.partial(nothing_seen, config)
    wanted = jax.eval_shape(begin)
    if wanted is None:
        return None
    shapes = {name: leaf.shape for name, leaf in (found or {}).items()}
    same = shapes == {name: leaf.shape for name, leaf in wanted.items()}
    return found if same else jax.jit(begin, out_shardings=where)()
