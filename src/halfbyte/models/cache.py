"""Generation with a key-value cache: `prefill` reads the prompts, `decode_step` adds one token to each row. All
shapes are static, both jit.

Prompts of different lengths are padded on the right; row b holds `lengths[b]` tokens. Padding is written into the cache
too, but never seen: a query sees the first `length + 1` entries, and later tokens overwrite the padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.models.config import LlamaConfig
from halfbyte.models.context import PLAIN, Context, LayerContext, key_of_layer, segments
from halfbyte.models.embedding import embed_tokens
from halfbyte.models.llama import block, layer_numbers, layer_slice, project_logits, rope_of
from halfbyte.models.params import Params, param_specs
from halfbyte.nn.attention import attention, cached_attention
from halfbyte.nn.norm import rms_norm


class Cache(NamedTuple):
    """Rotated keys and values of every layer, [layers, batch, size, kv_heads, head_dim], and how many entries of each
    row are real, int32 [batch].
    """

    k: jax.Array
    v: jax.Array
    lengths: jax.Array


def prefill(
    cfg: LlamaConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array | None = None,
    ctx: Context = PLAIN,
    *,
    size: int,
) -> tuple[jax.Array, Cache]:
    """(logits of each row's last token, float32 [batch, vocab]; the cache). `tokens` [batch, seq] padded on the
    right, `lengths` int32 [batch] (None: all full).
    """
    batch, seq = tokens.shape
    if size < seq:
        raise ValueError(
            f"cache: size {size} cannot hold a prompt of {seq} tokens; "
            "ask for at least the prompt and the tokens to generate"
        )
    if lengths is None:
        lengths = jnp.full((batch,), seq, jnp.int32)
    kept: list[jax.Array] = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        kept[:] = [k, v]
        return attention(q, k, v, None, implementation=ctx.attention, mesh=ctx.mesh, rules=ctx.rules)

    tables = rope_of(cfg, jnp.arange(seq, dtype=jnp.int32)[None])
    x = embed_tokens(params["embed"], tokens, ctx)

    def step(
        x: jax.Array, weights: Params, here: LayerContext, entry: None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        x = block(cfg, weights, x, tables, here, attend)
        room = ((0, 0), (0, size - seq), (0, 0), (0, 0))
        return x, (jnp.pad(kept[0], room), jnp.pad(kept[1], room))

    x, (k, v) = _over_layers(cfg, params, x, None, ctx, step)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    return _logits(cfg, params, last, ctx), Cache(k, v, lengths)


def decode_step(
    cfg: LlamaConfig, params: Params, cache: Cache, tokens: jax.Array, ctx: Context = PLAIN
) -> tuple[jax.Array, Cache]:
    """(logits after `tokens`, float32 [batch, vocab]; the cache with them). `tokens` int32 [batch], one for each row.
    Rows that are full must not be extended.
    """
    batch, size = cache.k.shape[1:3]
    rows = jnp.arange(batch)
    visible = (jnp.arange(size)[None] <= cache.lengths[:, None])[:, None]  # [batch, 1, size]
    tables = rope_of(cfg, cache.lengths[:, None])
    x = embed_tokens(params["embed"], tokens[:, None], ctx)
    kept: list[jax.Array] = []

    def step(
        x: jax.Array, weights: Params, here: LayerContext, entry: Any
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            kept[:] = [old.at[rows, cache.lengths].set(new[:, 0]) for old, new in zip(entry, (k, v), strict=True)]
            return cached_attention(q, kept[0], kept[1], visible)

        return block(cfg, weights, x, tables, here, attend), (kept[0], kept[1])

    x, (k, v) = _over_layers(cfg, params, x, (cache.k, cache.v), ctx, step)
    return _logits(cfg, params, x, ctx), Cache(k, v, cache.lengths + 1)


def _over_layers(cfg: LlamaConfig, params: Params, x: jax.Array, entries: Any, ctx: Context, step: Any) -> Any:
    """x through every layer, one scan a segment, with each layer's entry of the cache in and out."""
    specs, outputs = param_specs(cfg), []
    for segment in segments(cfg, ctx):

        def body(x: jax.Array, layer: Any, recipes: Any = segment.recipes) -> Any:
            weights, number, entry = layer
            return step(x, weights, LayerContext(ctx, specs, recipes, key_of_layer(ctx, number)), entry)

        here = jax.tree.map(lambda stacked: stacked[segment.start : segment.stop], entries)  # noqa: B023 (used at once)
        x, made = lax.scan(body, x, (layer_slice(params, cfg, segment), layer_numbers(segment), here))
        outputs.append(made)
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


def _logits(cfg: LlamaConfig, params: Params, x: jax.Array, ctx: Context) -> jax.Array:
    return project_logits(cfg, params, rms_norm(x, params["final_norm"], cfg.norm_eps), ctx)[:, 0]
