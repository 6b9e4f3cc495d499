"""Causal attention over packed documents, grouped-query heads, by `jax.nn.dot_product_attention`.

A query sees the keys at or before its position that carry the same segment id; padding (segment 0) is a document of its
own, so that every row of the softmax has a key. Two implementations:

- `cudnn`: flash attention. Without segments the mask is causal and the upper triangle is skipped. The fused kernel has
  no segment mask, so segments are passed as an additive bias [batch, 1, seq, seq] (2 bytes per element, shared by all
  heads).
- `xla`: float32 scores. Long sequences are split into blocks of queries, each rematerialized and cut at its diagonal,
so
  the score matrix never exists whole.

On a mesh it runs inside `shard_map`: batch over data and fsdp, heads over tensor. Devices along context share the work
evenly (`context_parallel_attention.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from halfbyte.distributed import DEFAULT_RULES, LogicalAxisRules, axis_size, shard_map_over
from halfbyte.ops.context_parallel_attention import QUERY_BLOCK, attention_scores, zigzag_attention

IMPLEMENTATIONS = ("auto", "cudnn", "xla")


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    *,
    implementation: str = "auto",
    mesh: Mesh | None = None,
    rules: LogicalAxisRules = DEFAULT_RULES,
) -> jax.Array:
    """Causal attention, [batch, seq, heads, head_dim] in q's dtype. `k`, `v` [batch, seq, kv_heads, head_dim],
    kv_heads divides heads.

    `segments` int32 [batch, seq] masks documents from each other; None means that every row is one document. Naming an
    implementation that cannot serve is a ValueError that says why.
    """
    chosen = select_attention_impl(
        q.shape, q.dtype, implementation=implementation, mesh=mesh, packed=segments is not None
    )
    local: Callable[..., jax.Array] = functools.partial(_attention_on_shard, implementation=chosen)
    if mesh is None or mesh.size == 1:  # inside shard_map the backward pass would keep the result a second time
        return local(q, k, v, segments)
    axes = rules.mesh_axes("seq")
    if axis_size(mesh, axes) > 1:
        parts, seq = axis_size(mesh, axes), q.shape[1]
        if seq % (2 * parts):
            raise ValueError(
                f"attention: context={parts} cuts a sequence into {2 * parts} chunks, and {seq} is no multiple of "
                f"that; use a seq that is a multiple of {2 * parts}, or a smaller context"
            )
        local = lambda q, k, v, segments: zigzag_attention(q, k, v, segments, axes, chosen)  # noqa: E731
    queries, keys = (rules.spec(("batch", "seq", heads), mesh) for heads in ("heads", "kv_heads"))
    in_specs = (queries, keys, keys, None if segments is None else rules.spec(("batch", "seq"), mesh))
    y: jax.Array = shard_map_over(local, mesh, in_specs, queries)(q, k, v, segments)
    return y


def select_attention_impl(
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    *,
    implementation: str = "auto",
    mesh: Mesh | None = None,
    packed: bool = True,
) -> str:
    """The implementation that `attention` will run for queries of `shape` [batch, seq, heads, head_dim]: `cudnn` or
    `xla`.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention: no implementation {implementation!r}; choose one of {', '.join(IMPLEMENTATIONS)}")
    reason = cudnn_unsupported(shape, dtype, mesh=mesh, packed=packed)
    if implementation == "cudnn" and reason:
        raise ValueError(f"attention: cudnn cannot serve: {reason}; use 'xla' or 'auto'")
    if implementation == "auto":
        return "cudnn" if _platform(mesh) in ("gpu", "cuda") and not reason else "xla"
    return implementation


def cudnn_unsupported(
    shape: tuple[int, ...], dtype: jnp.dtype, *, mesh: Mesh | None = None, packed: bool = True
) -> str | None:
    """Why cuDNN's fused attention cannot take these queries, or None. Asks nothing of the device, so it holds for
    deviceless compilation too.
    """
    seq, head_dim = shape[1], shape[3]
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 or float16, got {jnp.dtype(dtype).name}"
    if head_dim % 8 or head_dim > 128:
        return f"head_dim must be a multiple of 8 and at most 128, got {head_dim}"
    parts = axis_size(mesh, "context")
    length = seq if parts == 1 else seq // (2 * parts)
    if packed and length % 2:
        return f"with a mask it needs an even sequence length in each block, got {length}"
    return None


def _platform(mesh: Mesh | None) -> str:
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def _attention_on_shard(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, *, implementation: str
) -> jax.Array:
    if implementation == "cudnn":
        mask = None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")
    return _xla(q, k, v, segments)


def _xla(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    if q.shape[1] <= QUERY_BLOCK:
        return _xla_rows(q, k, v, segments, start=0)
    # Slices are taken inside what is rematerialized, so that the backward pass keeps q, k and v once for all blocks.
    blocks = [
        jax.checkpoint(functools.partial(_xla_rows, start=start))(q, k, v, segments)
        for start in range(0, q.shape[1], QUERY_BLOCK)
    ]
    return jnp.concatenate(blocks, axis=1)


def _xla_rows(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, *, start: int) -> jax.Array:
    """The block of queries that begins at `start`, against the keys up to its end."""
    stop = min(start + QUERY_BLOCK, q.shape[1])
    rows = lax.broadcasted_iota(jnp.int32, (1, stop - start, stop), 1) + start
    visible = rows >= lax.broadcasted_iota(jnp.int32, (1, stop - start, stop), 2)
    if segments is not None:
        visible = visible & (segments[:, start:stop, None] == segments[:, None, :stop])
    return masked_attention(q[:, start:stop], k[:, :stop], v[:, :stop], visible)


def masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """Attention [batch, queries, heads, head_dim] over the keys of a block, or of a cache, that are `visible`, bool
    [batch, queries, keys]. Scores in float32; query heads grouped by their key head, nothing repeated.
    """
    weights = jax.nn.softmax(attention_scores(q, k, visible), axis=-1).astype(v.dtype)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(q.shape)
