"""Causal attention whose sequence is cut over devices, with the same work on each of them.

A query has as much work as there are keys before it, so that of n devices with neighbouring parts the last has 2n - 1
times the work of the first. Cut every device's queries into two halves, 0 to 2n - 1 over the sequence: half i has i + 1
chunks of keys to look at. Device r keeps half 2r and swaps half 2r + 1 with device n - 1 - r for its half 2n - 1 - 2r.
Now each has a `lower` half i < n and the `upper` half 2n - 1 - i, together 2n + 1 chunks, two of them cut by the
diagonal:

    queries    chunks of keys            what
    upper      0 to n - 1                one block, the same everywhere
    lower      0 to i - 1                these and
    upper      n to 2n - 2 - i           these are n - 1 pairs of a half and a chunk, which ones depends on i
    both       their own                 causal

Shapes do not depend on the device, nothing masked is multiplied but within the diagonal's chunks, and no device
branches. Outside of attention everything stays in the order of the sequence: positions, random bits and codes know
nothing of the swap, which costs half of q and half of the result, once to a partner and once back, a pass.

Keys and values are gathered, in the forward and again in the backward pass; their gradients are summed in float32 on
the way home and rounded once. The backward pass keeps q's halves, the result's halves and statistics.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from halfbyte.ops.shards import size_of

from .attention_blocks import BLOCKS, Part, merge

KEPT = "context_attention"
"""The checkpoint name of what the backward pass keeps of the result."""

Halves = tuple[jax.Array, jax.Array]
Three = tuple[jax.Array, jax.Array, jax.Array]
"""What belongs to the wide block, to the pairs and to the diagonal's chunks; the last two are stacked along the batch.
"""


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def balanced_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, axes: tuple[str, ...], implementation: str
) -> jax.Array:
    """Causal attention of local parts [batch, seq / n, ...], cut in order over the mesh axes `axes`; inside shard_map.

    `segments` int32 [batch, seq / n] or None. The part must be even.
    """
    return _forward(q, k, v, segments, axes, implementation)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, axes: tuple[str, ...], implementation: str
) -> tuple[jax.Array, Any]:
    share = Share(axes)
    halves = share.swap(q)
    keys, values, visible = share.keys(share.chunks(k)), share.keys(share.chunks(v)), share.visible(segments)
    forward = BLOCKS[implementation].forward
    parts = [
        forward(*arrays, causal=causal)
        for *arrays, causal in zip(share.queries(halves), keys, values, visible, CAUSAL, strict=True)
    ]
    lower, upper = (_named(merge(found)) for found in share.by_half(*parts))
    contexts = lower[0].astype(q.dtype), upper[0].astype(q.dtype)
    return share.swap_back(contexts), (halves, k, v, segments, contexts, (lower[1], upper[1]))


def _backward(axes: tuple[str, ...], implementation: str, kept: Any, gradient: jax.Array) -> tuple[Any, ...]:
    halves, k, v, segments, contexts, statistics = kept
    share = Share(axes)
    keys, values, visible = share.keys(share.chunks(k)), share.keys(share.chunks(v)), share.visible(segments)
    parts = zip(share.queries(contexts), share.queries(statistics), strict=True)
    of_queries = (parts, share.queries(share.swap(gradient)))
    backward = BLOCKS[implementation].backward
    found = [
        backward(*arrays, causal=causal)
        for *arrays, causal in zip(share.queries(halves), keys, values, visible, *of_queries, CAUSAL, strict=True)
    ]
    dq, dk, dv = zip(*found, strict=True)
    return (
        share.swap_back(share.sum_queries(*dq)).astype(halves[0].dtype),
        share.sum_keys(*dk).astype(k.dtype),
        share.sum_keys(*dv).astype(v.dtype),
        None,
    )


balanced_attention.defvjp(_forward, _backward)
CAUSAL = (False, False, True)


def _named(part: Part) -> Part:
    context, statistics = part
    return checkpoint_name(context, KEPT), checkpoint_name(statistics, KEPT)


class Share:
    """This device's part of the work; `lower` is traced."""

    def __init__(self, axes: tuple[str, ...]):
        self.axes, self.n = axes, size_of(axes)
        rank = lax.axis_index(axes)
        self.keeps_lower = 2 * rank < self.n
        self.lower = jnp.where(self.keeps_lower, 2 * rank, 2 * self.n - 1 - 2 * rank)
        self.upper = 2 * self.n - 1 - self.lower
        pair = jnp.arange(self.n - 1, dtype=jnp.int32)
        self.of_lower = pair < self.lower
        self.chunk_of_pair = jnp.where(self.of_lower, pair, self.n + pair - self.lower)

    def swap(self, x: jax.Array) -> Halves:
        """This device's part of queries, or of what belongs to them -> its lower and its upper half."""
        kept, sent = jnp.split(x, 2, axis=1)
        received = self._to_partner(sent)
        return jnp.where(self.keeps_lower, kept, received), jnp.where(self.keeps_lower, received, kept)

    def swap_back(self, halves: Halves) -> jax.Array:
        """What `swap` was given, from its result."""
        lower, upper = halves
        kept, sent = jnp.where(self.keeps_lower, lower, upper), jnp.where(self.keeps_lower, upper, lower)
        return jnp.concatenate([kept, self._to_partner(sent)], axis=1)

    def _to_partner(self, x: jax.Array) -> jax.Array:
        return lax.ppermute(x, self.axes, [(rank, self.n - 1 - rank) for rank in range(self.n)])

    def chunks(self, x: jax.Array) -> jax.Array:
        """This device's part of keys -> those of all, [batch, 2n, seq / 2n, ...]."""
        whole = lax.all_gather(x, self.axes, axis=1, tiled=True)
        return whole.reshape(x.shape[0], 2 * self.n, x.shape[1] // 2, *x.shape[2:])

    def queries(self, halves: Halves) -> Three:
        """What each block has on its left."""
        lower, upper = halves
        pairs = jnp.where(self._by_pair(upper), lower[:, None], upper[:, None])
        return upper, _flat(pairs), _flat(jnp.stack([lower, upper], axis=1))

    def keys(self, chunks: jax.Array) -> Three:
        """What each block has on its right."""
        wide = chunks[:, : self.n]
        own = jnp.take(chunks, jnp.stack([self.lower, self.upper]), axis=1, mode="clip")
        pairs = jnp.take(chunks, self.chunk_of_pair, axis=1, mode="clip")
        return wide.reshape(wide.shape[0], -1, *wide.shape[3:]), _flat(pairs), _flat(own)

    def visible(self, segments: jax.Array | None) -> tuple[jax.Array | None, ...]:
        """Which keys of each block are in the query's document; None: all."""
        if segments is None:
            return (None, None, None)
        known = self.chunks(segments)
        lower, upper = (jnp.take(known, at, axis=1, mode="clip") for at in (self.lower, self.upper))
        both = zip(self.queries((lower, upper)), self.keys(known), strict=True)
        return tuple(queries[:, :, None] == keys[:, None, :] for queries, keys in both)

    def by_half(self, wide: Part, pairs: Part, own: Part) -> tuple[list[Part], list[Part]]:
        """The parts of the lower and of the upper half. Every pair is in both lists, in one of them with no weight."""
        contexts, statistics = (_stacked(x, self.n - 1) for x in pairs)
        mine = [_stacked(x, 2) for x in own]
        kept = self._by_pair(statistics[:, 0])

        def parts(only: jax.Array) -> list[Part]:
            weighed = jnp.where(only, statistics, -jnp.inf)
            return [(contexts[:, at], weighed[:, at]) for at in range(self.n - 1)]

        lower, upper = ((mine[0][:, half], mine[1][:, half]) for half in (0, 1))
        return [lower, *parts(kept)], [upper, wide, *parts(~kept)]

    def sum_queries(self, wide: jax.Array, pairs: jax.Array, own: jax.Array) -> Halves:
        """Gradients of each block's queries -> those of both halves, in float32."""
        wide, pairs, own = wide.astype(jnp.float32), _summands(pairs, self.n - 1), _summands(own, 2)
        of_lower = self._by_pair(wide)
        lower, upper = (jnp.sum(jnp.where(only, pairs, 0.0), axis=1) for only in (of_lower, ~of_lower))
        return own[:, 0] + lower, own[:, 1] + wide + upper

    def sum_keys(self, wide: jax.Array, pairs: jax.Array, own: jax.Array) -> jax.Array:
        """Gradients of each block's keys -> the sums over all devices of this device's part, in float32."""
        pairs, own = _summands(pairs, self.n - 1), _summands(own, 2)
        chunk = jnp.arange(2 * self.n, dtype=jnp.int32)
        left = chunk < self.n
        paired = jnp.where(left, chunk < self.lower, chunk < self.upper)
        pair = jnp.where(left, chunk, chunk - self.n + self.lower)
        dims = (0, *range(2, own.ndim))  # flags of chunks [2n] -> [1, 2n, 1, ...]
        paired, first, second = (jnp.expand_dims(at, dims) for at in (paired, chunk == self.lower, chunk == self.upper))
        total = jnp.where(paired, jnp.take(pairs, pair, axis=1, mode="clip"), 0.0)
        total += jnp.where(first, own[:, :1], 0.0) + jnp.where(second, own[:, 1:], 0.0)
        # [batch, n * seq / 2n, ...] -> [batch, 2n, seq / 2n, ...], nothing for the right half of the chunks
        total = total.at[:, : self.n].add(wide.astype(jnp.float32).reshape(total[:, : self.n].shape))
        whole = total.reshape(total.shape[0], -1, *total.shape[3:])
        return lax.psum_scatter(whole, self.axes, scatter_dimension=1, tiled=True)

    def _by_pair(self, like: jax.Array) -> jax.Array:
        """Which pairs are the lower half's, bool [1, n - 1, 1, ...] for arrays [batch, n - 1, ...] of `like`."""
        return self.of_lower.reshape(1, -1, *(1,) * (like.ndim - 1))


def _flat(x: jax.Array) -> jax.Array:
    """[batch, stack, ...] -> [batch * stack, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _stacked(x: jax.Array, count: int) -> jax.Array:
    """[batch * count, ...] -> [batch, count, ...]."""
    return x.reshape(-1, count, *x.shape[1:])


def _summands(x: jax.Array, count: int) -> jax.Array:
    return _stacked(x.astype(jnp.float32), count)
