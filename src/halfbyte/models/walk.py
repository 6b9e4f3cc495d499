"""The one walk over a model's layers: training, scoring, generation, replays and calibration all take it.

Layers are stacked and scanned, one `lax.scan` a policy segment, so that tracing and compiling cost the same for 4
layers as for 126. What a caller does in a layer is its `visit`; codes made ahead, what is kept for the backward pass,
and stacks that kernels write in place are the walk's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfbyte.kernels.stacks import hand_back
from halfbyte.models.config import LlamaConfig, param_specs
from halfbyte.models.context import Context, LayerContext, Masters, Stacks, segments
from halfbyte.models.keys import Drawn, drawn_in_layer, drawn_in_layers
from halfbyte.models.linear import quantize_ahead, remembered, stacks_of
from halfbyte.models.params import Params, linear_sites
from halfbyte.models.remat import rematerialized
from halfbyte.models.unrolled import unstack
from halfbyte.recipe import Segment

Visit = Callable[[jax.Array, Params, LayerContext, Any], tuple[jax.Array, Any]]
"""(x, the layer's weights, its context, its entry) -> (x after the layer, what is wanted of it)."""


def through_layers(
    cfg: LlamaConfig, params: Params, x: jax.Array, ctx: Context, visit: Visit, entries: Any = None
) -> tuple[jax.Array, list[Any]]:
    """(x after all layers; what `visit` made of them, stacked by segment). `entries` are stacked [layers, ...]; a visit
    gets its layer's.
    """
    specs, made = param_specs(cfg), []
    masters = None if ctx.on_mesh else lax.stop_gradient(params["layers"])  # all layers: part of a stack is a copy
    for segment in segments(cfg, ctx):
        here = LayerContext(ctx, specs, segment.recipes, {})
        weights = of_segment(params["layers"], cfg, segment)

        numbers = np.arange(segment.start, segment.stop, dtype=np.int32)  # without a loop each is a constant
        drawn = drawn_in_layers(ctx.key, segment.recipes, jnp.asarray(numbers))

        def body(carry: tuple[jax.Array, Any], layer: Any, segment: Segment = segment, drawn: Drawn = drawn) -> Any:
            (x, kept), (weights, number, entry) = carry, layer
            place = number - segment.start
            stacks = None if kept is None else Stacks(kept[0], dict(kept[1]), place)
            at = None if masters is None else Masters(masters, weights, number)
            keys = drawn_in_layer(drawn, place)
            here = LayerContext(ctx, specs, segment.recipes, keys, stacks=stacks, masters=at)
            x, out = visit(x, weights, here, entry)
            return (x, None if stacks is None else (stacks.both, stacks.norms)), out

        layer = rematerialized(body, ctx.remat, looped=ctx.looped)
        if ctx.amaxes is not None:
            weights = remembered(weights, of_segment(ctx.amaxes, cfg, segment), segment, linear_sites(cfg))
        weights = quantize_ahead(weights, x, here)
        kept = stacks_of(segment, x, cfg.mlp, ctx)
        x, out = _through(layer, x, kept, (weights, numbers, of_segment(entries, cfg, segment)), ctx=ctx)
        made.append(out)
    return x, made


def _through(layer: Any, x: jax.Array, kept: Any, layers: Any, *, ctx: Context) -> tuple[jax.Array, Any]:
    """A segment's layers: a loop, or one layer after another if `unroll` covers them all."""
    weights, numbers, *others = layers
    count, unroll = numbers.shape[0], ctx.unroll
    if unroll < count or count == 1:
        (x, kept), stacked = lax.scan(layer, (x, kept), layers, unroll=unroll)
        return (x if kept is None else hand_back(x, kept)), stacked
    traced_once, made = jax.jit(layer), []
    for (weight, *other), number in zip(unstack((weights, *others), count, cut=ctx.on_mesh), numbers, strict=True):
        (x, _), out = traced_once((x, None), (weight, number, *other))
        made.append(out)
    return x, jax.tree.map(lambda *parts: jnp.stack(parts), *made)


def of_segment(stacked: Any, cfg: LlamaConfig, segment: Segment) -> Any:
    """The part of stacked [layers, ...] arrays that is a segment's; all of it as it is if there is one segment."""
    if segment.stop - segment.start == cfg.layers:
        return stacked
    return jax.tree.map(lambda each: each[segment.start : segment.stop], stacked)
