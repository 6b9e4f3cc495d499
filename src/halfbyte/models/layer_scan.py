"""Runs the layers of a model: the loop that training, scoring, generation, replays and calibration share.

Layers are stacked and scanned, one `lax.scan` per policy segment, so that tracing and compiling cost the same for 4
layers as for 126. A caller passes what it computes in a layer (`visit`); the loop handles prequantized codes, residuals
and stacks that kernels write in place. If `unroll` covers a segment, its layers run without a loop (`unstack_layers`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfbyte.kernels.mosaic_launch import return_as_cotangent
from halfbyte.models.config import LlamaConfig, param_specs
from halfbyte.models.linear_layers import allocate_residual_stacks, prequantize_layers, with_delayed_amaxes
from halfbyte.models.model_context import (
    LayerContext,
    ModelContext,
    ResidualStacks,
    StackedMasterWeights,
    StreamWords,
    layer_segments,
    stream_words_of_layer,
    stream_words_of_layers,
)
from halfbyte.models.params import Params, linear_sites
from halfbyte.models.remat import checkpoint_layer
from halfbyte.recipes import LayerSegment

LayerFn = Callable[[jax.Array, Params, LayerContext, Any], tuple[jax.Array, Any]]
"""(x, the layer's weights, its context, its entry) -> (x after the layer, an output that is stacked)."""


def scan_layers(
    cfg: LlamaConfig, params: Params, x: jax.Array, ctx: ModelContext, visit: LayerFn, entries: Any = None
) -> tuple[jax.Array, list[Any]]:
    """Returns x after all layers, and the outputs of `visit`, stacked per segment.

    `entries` are stacked [layers, ...]; `visit` gets the entry of its layer.
    """
    specs, outputs = param_specs(cfg), []
    # Stacks of all layers: a slice of a segment would be a copy.
    masters = None if ctx.on_mesh else lax.stop_gradient(params["layers"])
    for segment in layer_segments(cfg, ctx):
        segment_ctx = LayerContext(ctx, specs, segment.recipes, {})
        weights = slice_segment(params["layers"], cfg, segment)

        layer_indices = np.arange(segment.start, segment.stop, dtype=np.int32)  # constants if the layers are unrolled
        drawn = stream_words_of_layers(ctx.key, segment.recipes, jnp.asarray(layer_indices))

        def body(
            carry: tuple[jax.Array, Any], layer: Any, segment: LayerSegment = segment, drawn: StreamWords = drawn
        ) -> Any:
            (x, residuals), (weights, layer_index, entry) = carry, layer
            index = layer_index - segment.start
            stacks = None if residuals is None else ResidualStacks(residuals[0], dict(residuals[1]), index)
            stacked = None if masters is None else StackedMasterWeights(masters, weights, layer_index)
            keys = stream_words_of_layer(drawn, index)
            layer_ctx = LayerContext(ctx, specs, segment.recipes, keys, stacks=stacks, masters=stacked)
            x, out = visit(x, weights, layer_ctx, entry)
            return (x, None if stacks is None else (stacks.gate_up, stacks.norms)), out

        layer = checkpoint_layer(body, ctx.remat, looped=ctx.is_scanned)
        if ctx.delayed_amaxes is not None:
            weights = with_delayed_amaxes(
                weights, slice_segment(ctx.delayed_amaxes, cfg, segment), segment, linear_sites(cfg)
            )
        weights = prequantize_layers(weights, x, segment_ctx)
        residuals = allocate_residual_stacks(segment, x, cfg.mlp, ctx)
        x, out = _run_segment(
            layer, x, residuals, (weights, layer_indices, slice_segment(entries, cfg, segment)), ctx=ctx
        )
        outputs.append(out)
    return x, outputs


def unstack_layers(stacked: Any, count: int, *, cut: bool = False) -> list[Any]:
    """Returns the `count` layers of a tree of stacked arrays [count, ...]; `cut`: they are sharded over devices.

    `lax.scan(..., unroll=all)` returns the gradient of a stack as a concatenation of its layers' gradients. XLA fuses
    the concatenation with each consumer, and the gradients of all layers stay in memory until then. The VJP here writes
    each layer's gradient into the stack as soon as it is computed. With `cut` the stack starts as zeros: XLA would
    allocate an empty array of the whole stack on every device, but zeros only of the device's shard.
    """
    leaves, structure = jax.tree.flatten(stacked)
    floats = jnp.float32, jnp.bfloat16  # dtypes that can have a gradient
    layers = [_unstack(leaf, count, cut) if leaf.dtype in floats else list(leaf) for leaf in leaves]
    return [jax.tree.unflatten(structure, layer) for layer in zip(*layers, strict=True)]


def slice_segment(stacked: Any, cfg: LlamaConfig, segment: LayerSegment) -> Any:
    """Slices stacked [layers, ...] arrays to a segment; returns them unchanged if it has all layers."""
    if segment.stop - segment.start == cfg.layers:
        return stacked
    return jax.tree.map(lambda array: array[segment.start : segment.stop], stacked)


def _run_segment(layer: Any, x: jax.Array, residuals: Any, layers: Any, *, ctx: ModelContext) -> tuple[jax.Array, Any]:
    """Runs the layers of a segment in a scan, or one after another if `unroll` covers them all."""
    weights, numbers, *others = layers
    count, unroll = numbers.shape[0], ctx.unroll
    if unroll < count or count == 1:
        (x, residuals), stacked = lax.scan(layer, (x, residuals), layers, unroll=unroll)
        return (x if residuals is None else return_as_cotangent(x, residuals)), stacked
    traced_once, outputs = jax.jit(layer), []
    layers = unstack_layers((weights, *others), count, cut=ctx.on_mesh)
    for (weight, *other), number in zip(layers, numbers, strict=True):
        (x, _), out = traced_once((x, None), (weight, number, *other))
        outputs.append(out)
    return x, jax.tree.map(lambda *layer_outputs: jnp.stack(layer_outputs), *outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _unstack(stacked: jax.Array, count: int, cut: bool) -> list[jax.Array]:
    return [stacked[i] for i in range(count)]


def _unstack_bwd(count: int, cut: bool, _: None, grads: list[jax.Array]) -> tuple[jax.Array]:
    allocate = jnp.zeros if cut else lax.empty
    stacked = allocate((count, *grads[0].shape), grads[0].dtype)
    for i in reversed(range(count)):  # the order in which a backward pass computes them
        stacked = lax.dynamic_update_index_in_dim(stacked, grads[i], i, 0)
    return (stacked,)


_unstack.defvjp(lambda stacked, count, cut: (_unstack(stacked, count, cut), None), _unstack_bwd)
