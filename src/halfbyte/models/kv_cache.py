"""Generation with a key-value cache: `prefill` reads the prompts, `decode_step` appends one token to each row.

All shapes are static, so both functions can be jitted. Prompts of different lengths are padded on the right; row b has
`lengths[b]` tokens. Padding is written into the cache too, but masked: a query attends to the first `length + 1`
entries, and later tokens overwrite the padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from halfbyte.models.config import LlamaConfig
from halfbyte.models.layer_scan import scan_layers
from halfbyte.models.llama import apply_norm, embed_inputs, project_logits, rope_of, transformer_block
from halfbyte.models.model_context import DEFAULT_CONTEXT, LayerContext, ModelContext
from halfbyte.models.params import Params
from halfbyte.ops.attention import attention, masked_attention


class KVCache(NamedTuple):
    """Rotated keys and values of all layers, [layers, batch, size, kv_heads, head_dim].

    `lengths`, int32 [batch], is the number of valid entries per row.
    """

    k: jax.Array
    v: jax.Array
    lengths: jax.Array


def prefill(
    cfg: LlamaConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array | None = None,
    ctx: ModelContext = DEFAULT_CONTEXT,
    *,
    size: int,
) -> tuple[jax.Array, KVCache]:
    """Returns the logits of the last token of every row, float32 [batch, vocab], and the cache of `size` entries.

    `tokens` [batch, seq] are padded on the right. `lengths` is int32 [batch]; None: no row is padded.
    """
    batch, seq = tokens.shape
    if size < seq:
        raise ValueError(
            f"cache: size {size} cannot hold a prompt of {seq} tokens; "
            "ask for at least the prompt and the tokens to generate"
        )
    if lengths is None:
        lengths = jnp.full((batch,), seq, jnp.int32)
    keys_values: list[jax.Array] = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        keys_values[:] = [k, v]
        return attention(q, k, v, None, implementation=ctx.attention, mesh=ctx.mesh, rules=ctx.rules)

    tables, padding = rope_of(cfg, jnp.arange(seq, dtype=jnp.int32)[None]), ((0, 0), (0, size - seq), (0, 0), (0, 0))

    def visit(x: jax.Array, weights: Params, here: LayerContext, _: None) -> tuple[jax.Array, list[jax.Array]]:
        x = transformer_block(cfg, weights, x, tables, here, attend)
        return x, [jnp.pad(array, padding) for array in keys_values]

    x, segment_caches = scan_layers(cfg, params, embed_inputs(cfg, params, tokens, ctx), ctx, visit)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    return _logits(cfg, params, last, ctx), _cache(segment_caches, lengths)


def decode_step(
    cfg: LlamaConfig, params: Params, cache: KVCache, tokens: jax.Array, ctx: ModelContext = DEFAULT_CONTEXT
) -> tuple[jax.Array, KVCache]:
    """Returns the logits after `tokens`, float32 [batch, vocab], and the cache with their keys and values.

    `tokens` is int32 [batch], one per row. The caller must not extend a full row: this is not checked.
    """
    batch, size = cache.k.shape[1:3]
    rows = jnp.arange(batch)
    visible = (jnp.arange(size)[None] <= cache.lengths[:, None])[:, None]  # [batch, 1, size]
    tables = rope_of(cfg, cache.lengths[:, None])

    def visit(x: jax.Array, weights: Params, here: LayerContext, entry: Any) -> tuple[jax.Array, list[jax.Array]]:
        keys_values: list[jax.Array] = []

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            keys_values[:] = [
                old.at[rows, cache.lengths].set(new[:, 0]) for old, new in zip(entry, (k, v), strict=True)
            ]
            return masked_attention(q, keys_values[0], keys_values[1], visible)

        return transformer_block(cfg, weights, x, tables, here, attend), keys_values

    x = embed_inputs(cfg, params, tokens[:, None], ctx)
    x, segment_caches = scan_layers(cfg, params, x, ctx, visit, (cache.k, cache.v))
    return _logits(cfg, params, x, ctx), _cache(segment_caches, cache.lengths + 1)


def _cache(made: list[Any], lengths: jax.Array) -> KVCache:
    """Concatenates the keys and values of the segments, [layers of the segment, ...], to those of all layers."""
    k, v = jax.tree.map(lambda *parts: jnp.concatenate(parts), *made)
    return KVCache(k, v, lengths)


def _logits(cfg: LlamaConfig, params: Params, x: jax.Array, ctx: ModelContext) -> jax.Array:
    return project_logits(cfg, params, apply_norm(cfg, x, params["final_norm"]), ctx)[:, 0]
