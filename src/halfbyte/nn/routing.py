"""Which experts a token passes, and how much each counts: the router of a mixture of experts, in float32 throughout.

    p = softmax(x R)                 over all experts, or each expert's sigmoid where there is a bias b
    chosen = the k largest of p + b  their p, without b, as weights, divided by their sum under `normalise`

A softmax of the chosen logits alone (Mixtral) is the same as normalising. Two losses keep a router sane: `balance`,
experts * sum(share of the (token, expert) pairs * mean p), is 1 where all experts have the same load (Switch
Transformers, arXiv 2101.03961), of sigmoids with each token's p divided by their sum (DeepSeek-V3, arXiv 2412.19437);
`z`, the mean of logsumexp(x R)^2, keeps logits small (ST-MoE, arXiv 2202.08906).

The bias balances without a loss (arXiv 2408.15664, DeepSeek-V3): after a step b rises by a fixed rate for each expert
that had less than the mean load, and falls for each that had more (`rebalanced`). No gradient reaches it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Load(NamedTuple):
    """`counts` int32 [experts] of (token, expert) pairs, and both losses."""

    counts: jax.Array
    balance: jax.Array
    z: jax.Array


class Routing(NamedTuple):
    """`weights` float32 and `experts` int32 [tokens, k], and what they add up to."""

    weights: jax.Array
    experts: jax.Array
    load: Load


def logits_of(x: jax.Array, router: jax.Array) -> jax.Array:
    """x R, float32 [..., experts], of x float32 [..., width] and a router float32 [width, experts]."""
    return jnp.dot(x, router, precision=lax.Precision.HIGHEST)


def route(logits: jax.Array, k: int, *, normalise: bool, bias: jax.Array | None = None) -> Routing:
    """Of logits float32 [tokens, experts]; by sigmoids with a `bias` float32 [experts]."""
    scores = jax.nn.softmax(logits) if bias is None else jax.nn.sigmoid(logits)
    _, experts = lax.top_k(lax.stop_gradient(scores if bias is None else scores + bias[None]), k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    weights = _of_their_sum(weights) if normalise else weights
    probabilities = scores if bias is None else _of_their_sum(scores)
    count = logits.shape[-1]
    counts = jnp.zeros(count, jnp.int32).at[experts.reshape(-1)].add(1)
    shares = counts.astype(jnp.float32) / jnp.float32(experts.size)
    balance = count * jnp.sum(shares * jnp.mean(probabilities, axis=0))
    return Routing(weights, experts, Load(counts, balance, jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)))


def _of_their_sum(scores: jax.Array) -> jax.Array:
    """Each divided by the sum of its row; zeros where all are, as sigmoids may be."""
    return scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), jnp.float32(1e-20))


def rebalanced(bias: jax.Array, load: jax.Array, rate: float) -> jax.Array:
    """The `bias` of routers, float32 [..., experts], after a step in which experts had this `load`."""
    return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
