"""One training step, replayed layer by layer, with everything that its linears are given in hand.

The forward pass keeps the input of every layer; then, from the last layer to the first, one layer is run again, as the
run computes it, with slots that bring out what its linears are given. What the MLP, one op, keeps to itself is
computed again by three linears. Only one layer's tensors exist at a time, so a model that trains on a device can be
replayed there.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte import models, ops
from halfbyte.models import LlamaConfig, moe
from halfbyte.models.config import EXPERT_SITES, SHARED_SITES
from halfbyte.models.layer_scan import scan_layers, slice_segment
from halfbyte.models.linear_layers import MLP_SITES
from halfbyte.models.llama import apply_norm, embed_inputs, loss_from_hidden, make_block_fn
from halfbyte.models.model_context import (
    LayerContext,
    ModelContext,
    key_path,
    keys_of_layers,
    layer_segments,
    stream_words_of_layer,
    stream_words_of_layers,
)
from halfbyte.models.quantized_params import (
    FUSED_GROUPS,
    fused_group,
    has_shared_scale,
    matrix_amaxes,
    quantize_with_shared_scale,
)
from halfbyte.ops.activation import ACTIVATIONS
from halfbyte.ops.expert_tiles import ExpertTiles
from halfbyte.ops.moe_dispatch import ExpertLoad
from halfbyte.recipes import LayerSegment, Recipe, layer_key, site_key

Batch = dict[str, jax.Array]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "w", "dy", "weight", "key", "bits", "amax", "dw", "tiles"],
    meta_fields=["site", "recipe", "max_rows"],
)
@dataclass(frozen=True)
class LinearCapture:
    """What one linear was given: x [..., inputs], w [inputs, outputs], the gradient dy of its output.

    As the run has it: its `weight` (w, or a QWeight where it shares a scale), its `key`, and `dw`, the gradient of w in
    the run's own program of the layer. As the definition has it: the key of its `bits`, and the `amax` that stands for
    w's own, None if that is its own.

    Of experts: x and dy are rows in `tiles`, w and dw [experts, inputs, outputs], amax [experts]; `most` rows, whole
    tiles, hold any expert's.
    """

    site: str
    recipe: Recipe
    x: jax.Array
    w: jax.Array
    dy: jax.Array
    weight: Any
    key: jax.Array | None
    bits: jax.Array | None
    amax: jax.Array | None
    dw: jax.Array
    tiles: ExpertTiles | None = None
    max_rows: int = 0

    def for_expert(self, expert: Any) -> "LinearCapture":
        """One expert's rows alone, from the first row on, and zeros after them; numbers of its own."""
        assert self.tiles is not None

        def at(per_expert: jax.Array | None) -> Any:
            return None if per_expert is None else per_expert[expert]

        key, bits = (None if k is None else jax.random.fold_in(k, expert) for k in (self.key, self.bits))
        rows = {name: self.expert_rows(getattr(self, name), expert, self.tiles.counts[expert]) for name in ("x", "dy")}
        return LinearCapture(
            self.site, self.recipe, rows["x"], at(self.w), rows["dy"], at(self.w), key, bits, at(self.amax), at(self.dw)
        )  # fmt: skip

    def for_fullest_expert(self) -> "LinearCapture":
        """Of experts, the one with the most rows as a linear of its own: as many of them as the largest power of two
        has, at least 32. Anything else is itself."""
        if self.tiles is None:
            return self
        counts = jax.device_get(self.tiles.counts)
        alone, many = self.for_expert(int(counts.argmax())), max(32, 1 << int(counts.max()).bit_length() - 1)
        return dataclasses.replace(alone, x=alone.x[:many], dy=alone.dy[:many])

    def expert_rows(self, array: jax.Array, expert: Any, count: Any) -> jax.Array:
        """[most, features]: the first `count` rows of an expert in an array that lies in tiles, each expert from a new
        tile on, and zeros."""
        assert self.tiles is not None
        sizes = -(-self.tiles.counts // self.tiles.tile) * self.tiles.tile
        number = jnp.arange(self.max_rows, dtype=jnp.int32)
        own = array.at[(jnp.cumsum(sizes) - sizes)[expert] + number].get(mode="fill", fill_value=0)
        return jnp.where((number < count)[:, None], own, jnp.zeros((), array.dtype))


def reference_key(key: jax.Array, number: jax.Array, site: str) -> jax.Array:
    """The key of a linear's random bits, by the definition, from that of its step."""
    return functools.reduce(site_key, key_path(site), layer_key(key, number))


@jax.custom_vjp
def _tap(x: jax.Array, slot: jax.Array) -> jax.Array:
    """x; the "gradient" of `slot` is x itself, which brings it out of any loop or checkpoint."""
    return x


_tap.defvjp(lambda x, slot: (x, x), lambda x, dy: (dy, x))


class GradientTaps(NamedTuple):
    """What linears are given, as gradients: `zeros` like x and like y by site; theirs are x itself and dy."""

    zeros: dict[str, tuple[jax.Array, jax.Array]]

    def on_input(self, site: str, x: jax.Array) -> jax.Array:
        return _tap(x, self.zeros[site][0])

    def on_output(self, site: str, y: jax.Array) -> jax.Array:
        return y + self.zeros[site][1]


def replay_forward(cfg: LlamaConfig, ctx: ModelContext, params: Any, batch: Batch) -> tuple[list[jax.Array], jax.Array]:
    """(the inputs of all layers, stacked by segment; the gradient of the mean loss for the last layer's output)."""
    layer = make_block_fn(cfg, batch, ctx)
    x = embed_inputs(cfg, params, batch["tokens"], ctx)
    x, inputs = scan_layers(cfg, params, x, ctx, lambda x, weights, here, _: (layer(x, weights, here), x))
    count = jnp.maximum(jnp.sum((batch["targets"] >= 0).astype(jnp.float32)), 1.0)

    def head(x: jax.Array) -> jax.Array:
        return loss_from_hidden(cfg, params, apply_norm(cfg, x, params["final_norm"]), batch["targets"], ctx)[0] / count

    return inputs, jax.grad(head)(x)


class ReplayedLayer(NamedTuple):
    """One layer of the model: its number, its weights without the layer dim, and the recipe of each linear."""

    number: jax.Array
    weights: Any
    recipes: Any


def replay_layer(
    cfg: LlamaConfig, ctx: ModelContext, replayed: ReplayedLayer, x: jax.Array, dy: jax.Array, batch: Batch
) -> tuple[jax.Array, list[LinearCapture]]:
    """Returns the gradient of the layer's input and the captures of its linears."""
    number, weights, recipes = replayed
    run = make_block_fn(cfg, batch, ctx)
    keys = {site: key[0] for site, key in keys_of_layers(ctx.key, recipes, number[None]).items()}
    drawn = stream_words_of_layer(stream_words_of_layers(ctx.key, recipes, number[None]), jnp.int32(0))
    here = LayerContext(ctx, models.param_specs(cfg), recipes, drawn)

    def layer(x: jax.Array, weights: Any, slots: Any) -> tuple[jax.Array, list[jax.Array]]:
        routed: list[ExpertLoad] = []
        y = run(x, weights, dataclasses.replace(here, watch=GradientTaps(slots), expert_loads=routed))
        return y, [load.counts for load in routed]

    sites = [path.removeprefix("layers/") for path in recipes]
    tokens, of_experts = x.size // x.shape[-1], [f"layers/mlp/{name}" for name in EXPERT_SITES if cfg.experts]
    tile, room = moe.moe_tile_layout(cfg, tokens, [recipes[path] for path in of_experts]) if of_experts else (1, 0)
    sizes = {site: _at(weights, site).shape for site in sites}
    shapes = {site: (room,) if len(size) == 3 else x.shape[:-1] for site, size in sizes.items()}
    slots = {site: tuple(jnp.zeros((*shapes[site], n), x.dtype) for n in sizes[site][-2:]) for site in sites}
    _, back, counts = jax.vjp(layer, x, weights, slots, has_aux=True)
    dx, dw, seen = back(dy)
    ready = {**weights, **{group: quantize_with_shared_scale(weights[group], here, group) for group in FUSED_GROUPS}}
    for mlp in (MLP_SITES, SHARED_SITES):
        seen |= _replay_mlp(cfg, here, keys, ready["mlp"], seen, mlp) if mlp[0] in weights["mlp"] else {}
    tiles = ExpertTiles.from_counts(counts[0], room, tile) if cfg.experts else None

    def linear(site: str) -> LinearCapture:
        recipe, w = here.recipe(*site.split("/")), _at(weights, site)
        bits = None if ctx.key is None else reference_key(ctx.key, number, site)
        amax = group_amax(weights, recipes, site)
        return LinearCapture(site, recipe, seen[site][0], w, seen[site][1], _at(ready, site), keys.get(site), bits,
                      amax, _at(dw, site), tiles if w.ndim == 3 else None, -(-tokens // tile) * tile)  # fmt: skip

    return dx, [linear(site) for site in sites]


def _replay_mlp(
    cfg: LlamaConfig, here: LayerContext, keys: Mapping[str, jax.Array], weights: Any, seen: Any, sites: Sequence[str]
) -> dict[str, tuple[jax.Array, ...]]:
    """(x, dy) of the `sites` of a gated MLP, which have `keys`, from what is seen at its ends."""
    gate, up, down = sites

    def go(x: jax.Array, name: str) -> jax.Array:
        recipe, key = here.recipe("mlp", name), keys.get(f"mlp/{name}")
        how: dict[str, Any] = {"backend": here.backend(recipe), "partitioned_by_xla": here.on_mesh}
        return ops.qdot(x, weights[name], recipe=recipe, key=key, **how)

    activation, x, dy = ACTIVATIONS[cfg.activation], seen[f"mlp/{gate}"][0], seen[f"mlp/{down}"][1]
    g, u = go(x, gate), go(x, up)
    h = activation.forward(g, u)
    (dh,) = jax.vjp(lambda h: go(h, down), h)[1](dy)
    dg, du = activation.backward(g, u, dh)
    return {f"mlp/{gate}": (x, dg), f"mlp/{up}": (x, du), f"mlp/{down}": (h, dy)}


def group_amax(weights: Any, recipes: Any, site: str) -> jax.Array | None:
    """The amax of all weights that share a tensor scale with this one; None if it has its own."""
    group, _, name = site.partition("/")
    sharing = [other for other in fused_group(group, name) if has_shared_scale(recipes[f"layers/{group}/{other}"])]
    if name not in sharing:
        return None
    return functools.reduce(jnp.maximum, (matrix_amaxes(weights[group][other]) for other in sharing))


def _at(weights: Any, site: str) -> Any:
    group, _, name = site.partition("/")
    return weights[group][name]


class StepReplay:
    """Compiled once for a config and a policy, then shown any weights, batch and key."""

    def __init__(self, cfg: LlamaConfig, context: ModelContext):
        self.cfg, self.context = cfg, context
        self._segments = layer_segments(cfg, context)
        self._forward = jax.jit(lambda params, batch, key: replay_forward(cfg, self._with(key), params, batch))
        self._layers = [self._layer(segment) for segment in self._segments]

    def _with(self, key: jax.Array) -> ModelContext:
        return dataclasses.replace(self.context, key=key)

    def _layer(self, segment: LayerSegment) -> Any:
        def run(params: Any, at: jax.Array, inputs: jax.Array, dy: jax.Array, batch: Batch, key: jax.Array) -> Any:
            stacked = slice_segment(params["layers"], self.cfg, segment)
            weights = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, at, keepdims=False), stacked)
            x = lax.dynamic_index_in_dim(inputs, at, keepdims=False)
            replayed = ReplayedLayer(at + jnp.int32(segment.start), weights, segment.recipes)
            return replay_layer(self.cfg, self._with(key), replayed, x, dy, batch)

        return jax.jit(run)

    def layers(self, params: Any, batch: Batch, key: jax.Array) -> Iterator[tuple[int, list[LinearCapture]]]:
        """(layer number, its linears), from the last layer to the first."""
        inputs, dy = self._forward(params, batch, key)
        for segment, kept, run in reversed(list(zip(self._segments, inputs, self._layers, strict=True))):
            for number in reversed(range(segment.start, segment.stop)):
                dy, linears = run(params, jnp.int32(number - segment.start), kept, dy, batch, key)
                yield number, linears
