"""A mixture of experts in the place of a layer's MLP: route, sort by expert, three grouped linears, weigh and add up.

Nothing is dropped: an expert takes all tokens that chose it. Those that are sorted together are those of one
microbatch, on every mesh. The router is float32 and never quantized; the load is left in `here.routed`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.models.config import EXPERT_SITES, LlamaConfig
from halfbyte.models.context import LayerContext
from halfbyte.models.linear import is_exact
from halfbyte.models.params import Params
from halfbyte.models.quantized import amaxes_of, shares_scale
from halfbyte.nn.routing import route
from halfbyte.ops.activation import ACTIVATIONS
from halfbyte.ops.dispatch import combine, fork, gated, spread
from halfbyte.ops.tiles import Tiles, buffer_rows, check_tiles, grouped_tiles, places, tile_rows
from halfbyte.recipe import Recipe


def experts_mlp(cfg: LlamaConfig, weights: Params, h: jax.Array, here: LayerContext) -> jax.Array:
    """h [batch, seq, embed] through the experts that each token chooses, in h's dtype."""
    tokens, wide = fork(h.reshape(-1, cfg.embed))
    found = route(wide, weights["router"], cfg.experts_per_token, normalise=cfg.norm_topk)
    if here.routed is not None:
        here.routed.append(found.load)
    recipes = [None if is_exact(h, r) else r for r in (here.recipe("mlp", name) for name in EXPERT_SITES)]
    check_tiles(recipes)
    pairs = found.experts.size
    tile = tile_rows(pairs, cfg.experts, recipes)
    rows = places(found.experts.reshape(-1), found.load.counts, tile).reshape(found.experts.shape)
    room = buffer_rows(pairs, cfg.experts, tile)
    tiles = Tiles.of(found.load.counts, room, tile)
    amaxes = _shared_amaxes([weights[name] for name in EXPERT_SITES[:2]], recipes)

    def dot(x: jax.Array, number: int) -> jax.Array:
        name = EXPERT_SITES[number]
        how: dict[str, Any] = {"recipe": recipes[number], "key": here.site_key(f"mlp/{name}"), "amax": amaxes[number]}
        return grouped_tiles(x, weights[name], tiles, **how)

    x = spread(tokens, rows, room)  # [tokens, embed] -> [room, embed], sorted by expert, each from a new tile on
    y = dot(gated(ACTIVATIONS[cfg.activation], dot(x, 0), dot(x, 1)), 2)
    return combine(y, rows, found.weights).reshape(h.shape)


def _shared_amaxes(gate_up: Sequence[jax.Array], recipes: Sequence[Recipe | None]) -> list[jax.Array | None]:
    """Of gate, up and down, float32 [experts]: an expert's gate and up have one tensor scale where recipes say so."""
    shares = [recipe is not None and shares_scale(recipe) for recipe in recipes[:2]]
    if not any(shares):
        return [None, None, None]
    found = [amaxes_of(lax.stop_gradient(w)) for w, shared in zip(gate_up, shares, strict=True) if shared]
    largest = functools.reduce(jnp.maximum, found)
    return [largest if shared else None for shared in (*shares, False)]
