"""Attention of some queries to some keys, and what is needed to put such parts together.

A block gives the context O = softmax(S) V and the statistics L = logsumexp(S) of each query, where S is
Q K^T / sqrt(head_dim). Parts over disjoint keys add up to the whole:

    L = logsumexp over parts of L_i,    O = sum over parts of exp(L_i - L) O_i

The gradient of a part needs the O and L of the *whole*: with P_i = exp(S_i - L), D = rowsum(dO * O) it is

    dV_i = P_i^T dO,    dS_i = P_i * (dO V_i^T - D),    dQ = sum of dS_i K_i,    dK_i = dS_i^T Q

which is flash attention's backward pass as it is. Two implementations: `xla` (float32 scores, a few hundred queries at
a time) and `cudnn`, whose kernels take the statistics from outside. Statistics are float32 [batch, queries, heads].
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

QUERY_BLOCK = 512  # queries whose scores exist at one time on the XLA path
MASKED = -1e30  # finite, so that a masked score never makes a NaN

Part = tuple[jax.Array, jax.Array]
"""Context and statistics."""


@dataclass(frozen=True)
class Blocks:
    """An implementation: forward(q, k, v, visible, causal) -> context and statistics, backward(q, k, v, visible,
    part, dy, causal) -> gradients of q, k and v, in any dtype. `visible`, bool [batch, queries,
    keys] or None, masks beside `causal`, which is top-left."""

    forward: Callable[..., Part]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def merge(parts: list[Part]) -> Part:
    """Parts of the same queries over disjoint keys -> the whole, in float32. A part whose statistics are -inf, or so
    small that nothing is left of it, does not count, whatever it holds."""
    whole = functools.reduce(jnp.logaddexp, (statistics for _, statistics in parts))
    total = jnp.zeros(parts[0][0].shape, jnp.float32)
    for context, statistics in parts:
        weight = jnp.exp(statistics - whole)[..., None]
        total += jnp.where(weight > 0, weight * context.astype(jnp.float32), 0.0)
    return total, whole


def grouped(q: jax.Array, kv_heads: int) -> jax.Array:
    """[batch, queries, heads, head_dim] -> [batch, queries, kv_heads, group, head_dim]: nothing is repeated."""
    batch, queries, heads, head_dim = q.shape
    return q.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)


def scores(q: jax.Array, k: jax.Array, visible: jax.Array | None) -> jax.Array:
    """Float32 [batch, kv_heads, group, queries, keys]; MASKED where a key is not visible."""
    found = jnp.einsum("bqhgd,bkhd->bhgqk", grouped(q, k.shape[2]), k, preferred_element_type=jnp.float32)
    found = found * (q.shape[-1] ** -0.5)
    return found if visible is None else jnp.where(visible[:, None, None], found, MASKED)


def _xla_forward(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array | None, *, causal: bool) -> Part:
    parts = [_xla_rows(rows, seen, k, v) for (rows,), seen in _rows((q,), visible, k.shape[1], causal=causal)]
    return jnp.concatenate([out for out, _ in parts], axis=1), jnp.concatenate([found for _, found in parts], axis=1)


def _xla_rows(q: jax.Array, visible: jax.Array | None, k: jax.Array, v: jax.Array) -> Part:
    found = scores(q, k, visible)
    statistics = jax.nn.logsumexp(found, axis=-1)
    weights = jnp.exp(found - statistics[..., None]).astype(v.dtype)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v, preferred_element_type=jnp.float32)
    # [batch, kv_heads, group, queries] -> [batch, queries, heads]
    return out.reshape(q.shape), jnp.moveaxis(statistics, 3, 1).reshape(q.shape[:3])


def _xla_backward(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array | None, part: Part, dy: jax.Array, *, causal: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    of_queries = (q, *part, dy)
    rows = _rows(of_queries, visible, k.shape[1], causal=causal)
    dq, dk, dv = zip(*(_xla_gradient(*arrays, visible=seen, k=k, v=v) for arrays, seen in rows), strict=True)
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
    q_by_head, dy = grouped(q, kv_heads), grouped(gradient, kv_heads)

    def of_query(x: jax.Array) -> jax.Array:
        """[batch, queries, heads] -> [batch, kv_heads, group, queries, 1], beside scores."""
        return jnp.moveaxis(grouped(x[..., None], kv_heads)[..., 0], 1, 3)[..., None]

    weights = jnp.exp(scores(q, k, visible) - of_query(statistics))
    delta = jnp.sum(gradient.astype(jnp.float32) * context.astype(jnp.float32), axis=-1)
    d_scores = weights * (product("bqhgd,bkhd->bhgqk", dy, v) - of_query(delta)) * (q.shape[-1] ** -0.5)
    d_scores, weights = d_scores.astype(q.dtype), weights.astype(v.dtype)
    dq = product("bhgqk,bkhd->bqhgd", d_scores, k).reshape(q.shape)
    return dq, product("bhgqk,bqhgd->bkhd", d_scores, q_by_head), product("bhgqk,bqhgd->bkhd", weights, dy)


def _rows(
    arrays: tuple[jax.Array, ...], visible: jax.Array | None, keys: int, *, causal: bool
) -> list[tuple[list[jax.Array], jax.Array | None]]:
    """`arrays` and what is visible, for QUERY_BLOCK queries at a time."""
    queries = arrays[0].shape[1]
    if causal:
        lower = lax.broadcasted_iota(jnp.int32, (1, queries, keys), 1)
        lower = lower >= lax.broadcasted_iota(jnp.int32, (1, queries, keys), 2)
        visible = lower if visible is None else visible & lower
    cuts = [slice(start, start + QUERY_BLOCK) for start in range(0, queries, QUERY_BLOCK)]
    return [([x[:, cut] for x in arrays], None if visible is None else visible[:, cut]) for cut in cuts]


def _cudnn_forward(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array | None, *, causal: bool) -> Part:
    from jax._src.cudnn import fused_attention_stablehlo as fused  # the public function rounds statistics to bfloat16

    mask = None if visible is None else visible[:, None]
    kind = fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK
    out, statistics = fused.dot_product_attention(
        q, k, v, mask=mask, scale=q.shape[-1] ** -0.5, mask_type=kind, return_residual=True
    )
    return out, statistics.swapaxes(1, 2)  # [batch, heads, queries] -> [batch, queries, heads]


def _cudnn_backward(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array | None, part: Part, dy: jax.Array, *, causal: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    from jax._src.cudnn import fused_attention_stablehlo as fused  # no public function takes the statistics

    context, statistics = part
    unused = jnp.zeros(0, q.dtype)
    masked = visible is not None
    bias = fused.combine_bias_and_mask(None, visible[:, None], q.dtype) if visible is not None else unused
    kept = (q, k, v, bias, *(unused,) * 6, statistics.swapaxes(1, 2), context)
    found = fused._dot_product_attention_bwd_rule(
        q.shape[-1] ** -0.5, 42, 0.0, (masked, masked),
        fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK,
        fused.AttentionLayout.BTNH.value, None, fused.check_cudnn_version(), False, kept, dy,
    )  # fmt: skip
    dq, dk, dv = found[:3]
    return dq, dk, dv


BLOCKS = {"xla": Blocks(_xla_forward, _xla_backward), "cudnn": Blocks(_cudnn_forward, _cudnn_backward)}
