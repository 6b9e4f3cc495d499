"""Causal attention over a sequence that is sharded across devices (zigzag), and the blockwise attention below it.

A block returns the context O = softmax(S) V and the statistics L = logsumexp(S), float32 [batch, queries, heads], with
S = Q K^T / sqrt(head_dim). Blocks over disjoint keys merge into the whole:

    L = logsumexp over blocks of L_i,    O = sum over blocks of exp(L_i - L) O_i

The gradient of a block needs the O and L of the whole. With P_i = exp(S_i - L) and D = rowsum(dO * O), as in the
backward pass of flash attention:

    dV_i = P_i^T dO,    dS_i = P_i * (dO V_i^T - D),    dQ = sum of dS_i K_i,    dK_i = dS_i^T Q
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from halfbyte.ops.linear_sharding import num_shards

QUERY_BLOCK = 512  # queries whose scores exist at one time on the XLA path


MASKED = -1e30  # finite, so that a masked score never makes a NaN


RESIDUAL_NAME = "context_attention"
"""Checkpoint name of the context and statistics that the backward pass reads."""


CAUSAL = (False, False, True)  # of the three blocks of QKVArrays


AttentionPart = tuple[jax.Array, jax.Array]
"""Context [batch, queries, heads, head_dim] and statistics of a block."""


QueryHalves = tuple[jax.Array, jax.Array]


QKVArrays = tuple[jax.Array, jax.Array, jax.Array]
"""Arrays of the wide block, the pairs and the diagonal chunks. The last two are stacked along the batch."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def zigzag_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, axes: tuple[str, ...], implementation: str
) -> jax.Array:
    """Returns causal attention of local shards [batch, seq / n, ...], sharded in order over the mesh axes `axes`.

    To be called inside shard_map. `segments`: int32 [batch, seq / n] or None. seq / n must be even.

    A query has as much work as there are keys before it. With neighbouring shards the last of n devices has 2n - 1
    times the work of the first. So every shard is split into two halves, 0 to 2n - 1 over the sequence. Half i attends
    to i + 1 chunks of keys. Device r keeps half 2r and swaps half 2r + 1 with device n - 1 - r for half 2n - 1 - 2r.
    Now each has a `lower` half i < n and the `upper` half 2n - 1 - i, together 2n + 1 chunks, two of them on the
    diagonal:

        queries    chunks of keys            block
        upper      0 to n - 1                wide: the same on every device
        lower      0 to i - 1                these and
        upper      n to 2n - 2 - i           these are n - 1 pairs of a half and a chunk; which ones depends on i
        both       their own                 causal

    Shapes do not depend on the device, no masked product is computed outside the diagonal chunks, and no device
    branches. Outside of attention everything stays in sequence order: positions, random bits and codes do not depend on
    the swap. It costs half of q and half of the result, once to a partner and once back, per pass.

    Keys and values are all-gathered in the forward and again in the backward pass. Their gradients are reduce-scattered
    in float32 and rounded once. The residuals are the halves of q, the halves of the context, and the statistics.
    """
    return _forward(q, k, v, segments, axes, implementation)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, axes: tuple[str, ...], implementation: str
) -> tuple[jax.Array, Any]:
    shard = ContextParallelShard(axes)
    halves = shard.exchange_halves(q)
    keys, values, visible = (
        shard.keys(shard.gather_key_chunks(k)),
        shard.keys(shard.gather_key_chunks(v)),
        shard.visible(segments),
    )
    forward = BLOCKS[implementation].forward
    parts = [
        forward(*arrays, causal=causal)
        for *arrays, causal in zip(shard.queries(halves), keys, values, visible, CAUSAL, strict=True)
    ]
    lower, upper = (_named(merge_partial_softmax(half)) for half in shard.by_half(*parts))
    contexts = lower[0].astype(q.dtype), upper[0].astype(q.dtype)
    return shard.restore_halves(contexts), (halves, k, v, segments, contexts, (lower[1], upper[1]))


def _backward(axes: tuple[str, ...], implementation: str, kept: Any, gradient: jax.Array) -> tuple[Any, ...]:
    halves, k, v, segments, contexts, statistics = kept
    shard = ContextParallelShard(axes)
    keys, values, visible = (
        shard.keys(shard.gather_key_chunks(k)),
        shard.keys(shard.gather_key_chunks(v)),
        shard.visible(segments),
    )
    parts = zip(shard.queries(contexts), shard.queries(statistics), strict=True)
    of_queries = (parts, shard.queries(shard.exchange_halves(gradient)))
    backward = BLOCKS[implementation].backward
    gradients = [
        backward(*arrays, causal=causal)
        for *arrays, causal in zip(shard.queries(halves), keys, values, visible, *of_queries, CAUSAL, strict=True)
    ]
    dq, dk, dv = zip(*gradients, strict=True)
    return (
        shard.restore_halves(shard.sum_queries(*dq)).astype(halves[0].dtype),
        shard.sum_keys(*dk).astype(k.dtype),
        shard.sum_keys(*dv).astype(v.dtype),
        None,
    )


zigzag_attention.defvjp(_forward, _backward)


def _named(part: AttentionPart) -> AttentionPart:
    context, statistics = part
    return checkpoint_name(context, RESIDUAL_NAME), checkpoint_name(statistics, RESIDUAL_NAME)


class ContextParallelShard:
    """This device's halves of the queries and chunks of the keys. `lower` and `upper` are traced."""

    def __init__(self, axes: tuple[str, ...]):
        self.axes, self.n = axes, num_shards(axes)
        rank = lax.axis_index(axes)
        self.keeps_lower = 2 * rank < self.n
        self.lower = jnp.where(self.keeps_lower, 2 * rank, 2 * self.n - 1 - 2 * rank)
        self.upper = 2 * self.n - 1 - self.lower
        pair = jnp.arange(self.n - 1, dtype=jnp.int32)
        self.of_lower = pair < self.lower
        self.chunk_of_pair = jnp.where(self.of_lower, pair, self.n + pair - self.lower)

    def exchange_halves(self, x: jax.Array) -> QueryHalves:
        """Returns the lower and upper half that this device works on, from its shard of queries."""
        kept, sent = jnp.split(x, 2, axis=1)
        received = self._to_partner(sent)
        return jnp.where(self.keeps_lower, kept, received), jnp.where(self.keeps_lower, received, kept)

    def restore_halves(self, halves: QueryHalves) -> jax.Array:
        """Inverts `exchange_halves`."""
        lower, upper = halves
        kept, sent = jnp.where(self.keeps_lower, lower, upper), jnp.where(self.keeps_lower, upper, lower)
        return jnp.concatenate([kept, self._to_partner(sent)], axis=1)

    def _to_partner(self, x: jax.Array) -> jax.Array:
        return lax.ppermute(x, self.axes, [(rank, self.n - 1 - rank) for rank in range(self.n)])

    def gather_key_chunks(self, x: jax.Array) -> jax.Array:
        """All-gathers the shards of keys: [batch, 2n, seq / 2n, ...]."""
        whole = lax.all_gather(x, self.axes, axis=1, tiled=True)
        return whole.reshape(x.shape[0], 2 * self.n, x.shape[1] // 2, *x.shape[2:])

    def queries(self, halves: QueryHalves) -> QKVArrays:
        """Returns the queries of each block."""
        lower, upper = halves
        pairs = jnp.where(self._by_pair(upper), lower[:, None], upper[:, None])
        return upper, _flat(pairs), _flat(jnp.stack([lower, upper], axis=1))

    def keys(self, chunks: jax.Array) -> QKVArrays:
        """Returns the keys of each block."""
        wide = chunks[:, : self.n]
        own = jnp.take(chunks, jnp.stack([self.lower, self.upper]), axis=1, mode="clip")
        pairs = jnp.take(chunks, self.chunk_of_pair, axis=1, mode="clip")
        return wide.reshape(wide.shape[0], -1, *wide.shape[3:]), _flat(pairs), _flat(own)

    def visible(self, segments: jax.Array | None) -> tuple[jax.Array | None, ...]:
        """Returns for each block which keys are in the query's document; None for all of them."""
        if segments is None:
            return (None, None, None)
        chunks = self.gather_key_chunks(segments)
        lower, upper = (jnp.take(chunks, index, axis=1, mode="clip") for index in (self.lower, self.upper))
        blocks = zip(self.queries((lower, upper)), self.keys(chunks), strict=True)
        return tuple(queries[:, :, None] == keys[:, None, :] for queries, keys in blocks)

    def by_half(
        self, wide: AttentionPart, pairs: AttentionPart, own: AttentionPart
    ) -> tuple[list[AttentionPart], list[AttentionPart]]:
        """Returns the parts of the lower and of the upper half. Every pair is in both, once with statistics -inf."""
        contexts, statistics = (_stacked(x, self.n - 1) for x in pairs)
        diagonal = [_stacked(x, 2) for x in own]
        in_lower = self._by_pair(statistics[:, 0])

        def parts(only: jax.Array) -> list[AttentionPart]:
            masked = jnp.where(only, statistics, -jnp.inf)
            return [(contexts[:, pair], masked[:, pair]) for pair in range(self.n - 1)]

        lower, upper = ((diagonal[0][:, half], diagonal[1][:, half]) for half in (0, 1))
        return [lower, *parts(in_lower)], [upper, wide, *parts(~in_lower)]

    def sum_queries(self, wide: jax.Array, pairs: jax.Array, own: jax.Array) -> QueryHalves:
        """Sums the query gradients of the blocks into those of both halves, in float32."""
        wide, pairs, own = wide.astype(jnp.float32), _summands(pairs, self.n - 1), _summands(own, 2)
        of_lower = self._by_pair(wide)
        lower, upper = (jnp.sum(jnp.where(only, pairs, 0.0), axis=1) for only in (of_lower, ~of_lower))
        return own[:, 0] + lower, own[:, 1] + wide + upper

    def sum_keys(self, wide: jax.Array, pairs: jax.Array, own: jax.Array) -> jax.Array:
        """Reduce-scatters the key gradients of the blocks: float32, this device's shard, summed over all devices."""
        pairs, own = _summands(pairs, self.n - 1), _summands(own, 2)
        chunk = jnp.arange(2 * self.n, dtype=jnp.int32)
        in_first_half = chunk < self.n
        paired = jnp.where(in_first_half, chunk < self.lower, chunk < self.upper)
        pair = jnp.where(in_first_half, chunk, chunk - self.n + self.lower)
        dims = (0, *range(2, own.ndim))  # flags of chunks [2n] -> [1, 2n, 1, ...]
        paired, is_lower, is_upper = (
            jnp.expand_dims(flag, dims) for flag in (paired, chunk == self.lower, chunk == self.upper)
        )
        total = jnp.where(paired, jnp.take(pairs, pair, axis=1, mode="clip"), 0.0)
        total += jnp.where(is_lower, own[:, :1], 0.0) + jnp.where(is_upper, own[:, 1:], 0.0)
        # [batch, n * seq / 2n, ...] -> [batch, 2n, seq / 2n, ...], 0 for the second half of the chunks
        total = total.at[:, : self.n].add(wide.astype(jnp.float32).reshape(total[:, : self.n].shape))
        whole = total.reshape(total.shape[0], -1, *total.shape[3:])
        return lax.psum_scatter(whole, self.axes, scatter_dimension=1, tiled=True)

    def _by_pair(self, like: jax.Array) -> jax.Array:
        """Returns which pairs belong to the lower half: bool [1, n - 1, 1, ...], to broadcast with `like`."""
        return self.of_lower.reshape(1, -1, *(1,) * (like.ndim - 1))


def _flat(x: jax.Array) -> jax.Array:
    """[batch, stack, ...] -> [batch * stack, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _stacked(x: jax.Array, count: int) -> jax.Array:
    """[batch * count, ...] -> [batch, count, ...]."""
    return x.reshape(-1, count, *x.shape[1:])


def _summands(x: jax.Array, count: int) -> jax.Array:
    return _stacked(x.astype(jnp.float32), count)


@dataclass(frozen=True)
class BlockAttentionImpl:
    """Attention of one block: `xla` (float32 scores, QUERY_BLOCK queries at a time) or `cudnn` (takes the statistics).

    forward(q, k, v, visible, causal) returns the context and the statistics. backward(q, k, v, visible, part, dy,
    causal) returns the gradients of q, k and v in any dtype. `visible`, bool [batch, queries, keys] or None, masks in
    addition to `causal`, which is top-left.
    """

    forward: Callable[..., AttentionPart]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def merge_partial_softmax(parts: list[AttentionPart]) -> AttentionPart:
    """Merges parts of the same queries over disjoint keys, in float32.

    A part whose weight is 0 (statistics of -inf, or an underflow) does not count, even if its context is NaN.
    """
    whole = functools.reduce(jnp.logaddexp, (statistics for _, statistics in parts))
    total = jnp.zeros(parts[0][0].shape, jnp.float32)
    for context, statistics in parts:
        weight = jnp.exp(statistics - whole)[..., None]
        total += jnp.where(weight > 0, weight * context.astype(jnp.float32), 0.0)
    return total, whole


def group_query_heads(q: jax.Array, kv_heads: int) -> jax.Array:
    """[batch, queries, heads, head_dim] -> [batch, queries, kv_heads, group, head_dim]."""
    batch, queries, heads, head_dim = q.shape
    return q.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)


def attention_scores(q: jax.Array, k: jax.Array, visible: jax.Array | None) -> jax.Array:
    """Returns float32 scores [batch, kv_heads, group, queries, keys]; MASKED where a key is not visible."""
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", group_query_heads(q, k.shape[2]), k, preferred_element_type=jnp.float32)
    scores = scores * (q.shape[-1] ** -0.5)
    return scores if visible is None else jnp.where(visible[:, None, None], scores, MASKED)


def _xla_forward(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array | None, *, causal: bool) -> AttentionPart:
    parts = [_xla_rows(rows, mask, k, v) for (rows,), mask in _query_blocks((q,), visible, k.shape[1], causal=causal)]
    return jnp.concatenate([out for out, _ in parts], axis=1), jnp.concatenate([stats for _, stats in parts], axis=1)


def _xla_rows(q: jax.Array, visible: jax.Array | None, k: jax.Array, v: jax.Array) -> AttentionPart:
    scores = attention_scores(q, k, visible)
    statistics = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - statistics[..., None]).astype(v.dtype)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v, preferred_element_type=jnp.float32)
    # [batch, kv_heads, group, queries] -> [batch, queries, heads]
    return out.reshape(q.shape), jnp.moveaxis(statistics, 3, 1).reshape(q.shape[:3])


def _xla_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array | None,
    part: AttentionPart,
    dy: jax.Array,
    *,
    causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    of_queries = (q, *part, dy)
    rows = _query_blocks(of_queries, visible, k.shape[1], causal=causal)
    dq, dk, dv = zip(*(_xla_gradient(*arrays, visible=mask, k=k, v=v) for arrays, mask in rows), strict=True)
    return jnp.concatenate(dq, axis=1), functools.reduce(jnp.add, dk), functools.reduce(jnp.add, dv)


def _xla_gradient(
    q: jax.Array,
    context: jax.Array,
    statistics: jax.Array,
    gradient: jax.Array,
    *,
    visible: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    kv_heads = k.shape[2]
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    q_by_head, dy = group_query_heads(q, kv_heads), group_query_heads(gradient, kv_heads)

    def of_query(x: jax.Array) -> jax.Array:
        """[batch, queries, heads] -> [batch, kv_heads, group, queries, 1], to broadcast with scores."""
        return jnp.moveaxis(group_query_heads(x[..., None], kv_heads)[..., 0], 1, 3)[..., None]

    weights = jnp.exp(attention_scores(q, k, visible) - of_query(statistics))
    delta = jnp.sum(gradient.astype(jnp.float32) * context.astype(jnp.float32), axis=-1)
    d_scores = weights * (product("bqhgd,bkhd->bhgqk", dy, v) - of_query(delta)) * (q.shape[-1] ** -0.5)
    d_scores, weights = d_scores.astype(q.dtype), weights.astype(v.dtype)
    dq = product("bhgqk,bkhd->bqhgd", d_scores, k).reshape(q.shape)
    return dq, product("bhgqk,bqhgd->bkhd", d_scores, q_by_head), product("bhgqk,bqhgd->bkhd", weights, dy)


def _query_blocks(
    arrays: tuple[jax.Array, ...], visible: jax.Array | None, keys: int, *, causal: bool
) -> list[tuple[list[jax.Array], jax.Array | None]]:
    """Splits `arrays` and the mask into blocks of QUERY_BLOCK queries."""
    queries = arrays[0].shape[1]
    if causal:
        lower = lax.broadcasted_iota(jnp.int32, (1, queries, keys), 1)
        lower = lower >= lax.broadcasted_iota(jnp.int32, (1, queries, keys), 2)
        visible = lower if visible is None else visible & lower
    blocks = [slice(start, start + QUERY_BLOCK) for start in range(0, queries, QUERY_BLOCK)]
    return [([x[:, block] for x in arrays], None if visible is None else visible[:, block]) for block in blocks]


def _cudnn_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array | None, *, causal: bool
) -> AttentionPart:
    from jax._src.cudnn import fused_attention_stablehlo as fused  # the public function rounds statistics to bfloat16

    mask = None if visible is None else visible[:, None]
    kind = fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK
    out, statistics = fused.dot_product_attention(
        q, k, v, mask=mask, scale=q.shape[-1] ** -0.5, mask_type=kind, return_residual=True
    )
    return out, statistics.swapaxes(1, 2)  # [batch, heads, queries] -> [batch, queries, heads]


def _cudnn_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array | None,
    part: AttentionPart,
    dy: jax.Array,
    *,
    causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    from jax._src.cudnn import fused_attention_stablehlo as fused  # no public function takes the statistics

    context, statistics = part
    unused = jnp.zeros(0, q.dtype)
    masked = visible is not None
    bias = fused.combine_bias_and_mask(None, visible[:, None], q.dtype) if visible is not None else unused
    residuals = (q, k, v, bias, *(unused,) * 6, statistics.swapaxes(1, 2), context)
    gradients = fused._dot_product_attention_bwd_rule(
        q.shape[-1] ** -0.5, 42, 0.0, (masked, masked),
        fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK,
        fused.AttentionLayout.BTNH.value, None, fused.check_cudnn_version(), False, residuals, dy,
    )  # fmt: skip
    dq, dk, dv = gradients[:3]
    return dq, dk, dv


BLOCKS = {
    "xla": BlockAttentionImpl(_xla_forward, _xla_backward),
    "cudnn": BlockAttentionImpl(_cudnn_forward, _cudnn_backward),
}
