"""One training step, replayed layer by layer, with everything that its linears are given in hand.

The forward pass keeps the input of every layer; then, from the last layer to the first, one layer is run again with a
tap at each linear, and its backward pass gives the gradient of every linear's output. Only one layer's tensors exist
at a time, so a model that trains on a device can be replayed there.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte import models, ops
from halfbyte.models import LlamaConfig
from halfbyte.models.context import Context, LayerContext, key_of_layer, segments
from halfbyte.models.embedding import embed_tokens, head_weight
from halfbyte.models.llama import block, layer_numbers, layer_slice, positions_of, rope_of
from halfbyte.ops.attention import attention
from halfbyte.ops.loss import cross_entropy
from halfbyte.ops.norm import rms_norm
from halfbyte.recipe import Recipe, Segment, site_key

Batch = dict[str, jax.Array]


@dataclass(frozen=True)
class Linear:
    """What one linear was given: x [..., inputs], w [inputs, outputs], the gradient dy of its output, its key."""

    site: str
    recipe: Recipe
    x: jax.Array
    w: jax.Array
    dy: jax.Array
    key: jax.Array | None


Look = Callable[[list[Linear], "Layer"], Any]
"""What is wanted of a layer: a pure function of its linears, traced once a segment."""


@dataclass(frozen=True)
class Layer:
    """A layer as it was run: its weights, input, the gradient of its output, and how to run it again under any
    recipes (`again(recipes) -> (output, gradient of the weights)`)."""

    weights: Any
    number: jax.Array
    again: Callable[[Any], tuple[jax.Array, Any]]


def linear_key(here: LayerContext, site: str) -> jax.Array | None:
    """The key that the model gives the linear `group/name`: those of the MLP lie under its own."""
    group, _, name = site.partition("/")
    if group != "mlp":
        return here.site_key(site)
    key = here.site_key("mlp")
    return None if key is None else site_key(key, name)


def forward(cfg: LlamaConfig, ctx: Context, params: Any, batch: Batch) -> tuple[list[jax.Array], jax.Array]:
    """(the inputs of all layers, stacked by segment; the gradient of the mean loss for the last layer's output)."""
    attend, tables, specs = _fixed(cfg, ctx, batch)
    x = embed_tokens(params["embed"], batch["tokens"], ctx)
    inputs = []
    for segment in segments(cfg, ctx):

        def body(x: jax.Array, layer: Any, recipes: Any = segment.recipes) -> tuple[jax.Array, jax.Array]:
            weights, number = layer
            here = LayerContext(ctx, specs, recipes, key_of_layer(ctx, number))
            return block(cfg, weights, x, tables, here, attend), x

        x, kept = lax.scan(body, x, (layer_slice(params, cfg, segment), layer_numbers(segment)))
        inputs.append(kept)
    scored = jnp.maximum(jnp.sum((batch["targets"] >= 0).astype(jnp.float32)), 1.0)

    def head(x: jax.Array) -> jax.Array:
        hidden = rms_norm(x, params["final_norm"], cfg.norm_eps)
        total, _ = cross_entropy(hidden, head_weight(params), batch["targets"], mesh=ctx.mesh, rules=ctx.rules)
        return total / scored

    return inputs, jax.grad(head)(x)


def through_layer(
    cfg: LlamaConfig, ctx: Context, recipes: Any, weights: Any, number: jax.Array, x: jax.Array, dy: jax.Array,
    batch: Batch, look: Look,
) -> tuple[jax.Array, Any]:  # fmt: skip
    """(the gradient of the layer's input, what `look` made of its linears)."""
    attend, tables, specs = _fixed(cfg, ctx, batch)
    here = LayerContext(ctx, specs, recipes, key_of_layer(ctx, number))
    sites = [path.removeprefix("layers/") for path in recipes]

    def tapped(x: jax.Array, slots: dict[str, tuple[jax.Array, jax.Array]]) -> jax.Array:
        def tap(value: jax.Array, weight: jax.Array, site: str) -> jax.Array:
            into, out_of = slots[site]
            value = _seen(value, into)
            return product(value, weight, here.recipe(*site.split("/")), linear_key(here, site), ctx) + out_of

        return block(cfg, weights, x, tables, LayerContext(ctx, specs, recipes, here.key, tap), attend)

    shapes = {site: _weight(weights, site).shape for site in sites}
    slots = {site: tuple(jnp.zeros((*x.shape[:-1], n), x.dtype) for n in shape) for site, shape in shapes.items()}
    _, back = jax.vjp(tapped, x, slots)
    dx, seen = back(dy)
    found = [
        Linear(site, here.recipe(*site.split("/")), seen[site][0], _weight(weights, site), seen[site][1],
               linear_key(here, site))
        for site in sites
    ]  # fmt: skip

    def again(other: Any) -> tuple[jax.Array, Any]:
        there = LayerContext(ctx, specs, other, here.key)
        out, pull = jax.vjp(lambda w: block(cfg, w, x, tables, there, attend), weights)
        return out, pull(dy)[0]

    return dx, look(found, Layer(weights, number, again))


@jax.custom_vjp
def _seen(x: jax.Array, slot: jax.Array) -> jax.Array:
    """x; the "gradient" of `slot` is x itself, which brings it out of any loop or checkpoint."""
    return x


_seen.defvjp(lambda x, slot: (x, x), lambda x, dy: (dy, x))


def product(x: jax.Array, w: jax.Array, recipe: Recipe, key: jax.Array | None, ctx: Context) -> jax.Array:
    """x w as the model computes it under `recipe`."""
    backend = ctx.backend if recipe.quantized else "auto"
    return ops.qdot(x, w, recipe=recipe, key=key, backend=backend)


def _weight(weights: Any, site: str) -> jax.Array:
    group, _, name = site.partition("/")
    found: jax.Array = weights[group][name]
    return found


def _fixed(cfg: LlamaConfig, ctx: Context, batch: Batch) -> tuple[Any, Any, Any]:
    attend = functools.partial(
        attention, segments=batch.get("segments"), implementation=ctx.attention, mesh=ctx.mesh, rules=ctx.rules
    )
    return attend, rope_of(cfg, positions_of(batch)), models.param_specs(cfg)


class Replay:
    """Compiled once for a config and a policy, then shown any weights, batch and key. `look` sees each layer's linears
    inside jit; what it returns comes back as it is, on the device, layer by layer."""

    def __init__(self, cfg: LlamaConfig, context: Context, look: Look):
        self.cfg, self.context = cfg, context
        self._segments = segments(cfg, context)
        self._forward = jax.jit(lambda params, batch, key: forward(cfg, self._with(key), params, batch))
        self._layers = [self._layer(segment, look) for segment in self._segments]

    def _with(self, key: jax.Array) -> Context:
        return dataclasses.replace(self.context, key=key)

    def _layer(self, segment: Segment, look: Look) -> Any:
        def run(params: Any, at: jax.Array, inputs: jax.Array, dy: jax.Array, batch: Batch, key: jax.Array) -> Any:
            stacked = layer_slice(params, self.cfg, segment)
            weights = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, at, keepdims=False), stacked)
            x = lax.dynamic_index_in_dim(inputs, at, keepdims=False)
            number = at + jnp.int32(segment.start)
            return through_layer(self.cfg, self._with(key), segment.recipes, weights, number, x, dy, batch, look)

        return jax.jit(run)

    def layers(self, params: Any, batch: Batch, key: jax.Array) -> Iterator[tuple[int, Any]]:
        """(layer number, what `look` found), from the last layer to the first."""
        inputs, dy = self._forward(params, batch, key)
        for segment, kept, run in reversed(list(zip(self._segments, inputs, self._layers, strict=True))):
            for number in reversed(range(segment.start, segment.stop)):
                dy, found = run(params, jnp.int32(number - segment.start), kept, dy, batch, key)
                yield number, found
