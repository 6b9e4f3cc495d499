"""Causal attention over packed documents, grouped-query heads, by `jax.nn.dot_product_attention`.

A query attends to the keys at or before its position with the same segment id. Padding (segment 0) is a separate
document, so every row of the softmax has a key. Two implementations:

- `cudnn`: flash attention. Without segments the mask is causal and the upper triangle is skipped. The fused kernel has
  no segment mask, so segments are passed as an additive bias [batch, 1, seq, seq] (2 bytes per element, shared by all
  heads).
- `xla`: float32 scores. Long sequences are split into blocks of queries. Each block is rematerialized and reads only
  the keys up to its end, so the whole score matrix never exists.

On a mesh it runs inside `shard_map`: batch over data and fsdp, heads over tensor. Devices along context have equal work
(`context_parallel_attention.py`).
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
    """Returns causal attention of q [batch, seq, heads, head_dim], in q's shape and dtype.

    `k`, `v`: [batch, seq, kv_heads, head_dim], where kv_heads divides heads. `segments`, int32 [batch, seq], masks
    documents from each other; without it every row is one document. Raises ValueError with the reason if the named
    `implementation` does not support the inputs.
    """
    selected = select_attention_impl(
        q.shape, q.dtype, implementation=implementation, mesh=mesh, packed=segments is not None
    )
    local: Callable[..., jax.Array] = functools.partial(_attention_on_shard, implementation=selected)
    if mesh is None or mesh.size == 1:  # inside shard_map the result would be saved twice for the backward pass
        return local(q, k, v, segments)
    axes = rules.mesh_axes("seq")
    if axis_size(mesh, axes) > 1:
        shards, seq = axis_size(mesh, axes), q.shape[1]
        if seq % (2 * shards):
            raise ValueError(
                f"attention: context={shards} cuts a sequence into {2 * shards} chunks, and {seq} is no multiple of "
                f"that; use a seq that is a multiple of {2 * shards}, or a smaller context"
            )
        local = lambda q, k, v, segments: zigzag_attention(q, k, v, segments, axes, selected)  # noqa: E731
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
    """Returns the implementation that `attention` runs for queries of `shape` [batch, seq, heads, head_dim].

    It is `cudnn` or `xla`; "auto" is `cudnn` on a GPU if cuDNN supports the queries.
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
    """Returns why cuDNN's fused attention does not support these queries, or None.

    Does not query a device, so it is valid for deviceless compilation, too.
    """
    seq, head_dim = shape[1], shape[3]
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 or float16, got {jnp.dtype(dtype).name}"
    if head_dim % 8 or head_dim > 128:
        return f"head_dim must be a multiple of 8 and at most 128, got {head_dim}"
    shards = axis_size(mesh, "context")
    length = seq if shards == 1 else seq // (2 * shards)
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
    # Slicing inside the rematerialized function saves q, k and v once for all blocks, not the slices of each block.
    blocks = [
        jax.checkpoint(functools.partial(_xla_rows, start=start))(q, k, v, segments)
        for start in range(0, q.shape[1], QUERY_BLOCK)
    ]
    return jnp.concatenate(blocks, axis=1)


def _xla_rows(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, *, start: int) -> jax.Array:
    """Returns attention of the block of queries that begins at `start`, over the keys up to its end."""
    stop = min(start + QUERY_BLOCK, q.shape[1])
    rows = lax.broadcasted_iota(jnp.int32, (1, stop - start, stop), 1) + start
    visible = rows >= lax.broadcasted_iota(jnp.int32, (1, stop - start, stop), 2)
    if segments is not None:
        visible = visible & (segments[:, start:stop, None] == segments[:, None, :stop])
    return masked_attention(q[:, start:stop], k[:, :stop], v[:, :stop], visible)


def masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """Returns attention [batch, queries, heads, head_dim] over the `visible` keys of a block or of a cache.

    `visible`: bool [batch, queries, keys]. Scores are float32. Query heads are grouped by their key head; keys and
    values are not repeated.
    """
    weights = jax.nn.softmax(attention_scores(q, k, visible), axis=-1).astype(v.dtype)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(q.shape)
