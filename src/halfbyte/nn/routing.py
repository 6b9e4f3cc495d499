"""Which experts a token passes, and how much each counts: the router of a mixture of experts, in float32 throughout.

    p = softmax(x R)                 over all experts
    chosen = the k largest of p      their p as weights, divided by their sum under `normalise`

A softmax of the chosen logits alone (Mixtral) is the same as normalising. Two losses keep a router sane: `balance`,
experts * sum(share of the (token, expert) pairs * mean p), is 1 where all experts have the same load (Switch
Transformers, arXiv 2101.03961); `z`, the mean of logsumexp(x R)^2, keeps logits small (ST-MoE, arXiv 2202.08906).
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


def route(x: jax.Array, router: jax.Array, k: int, *, normalise: bool) -> Routing:
    """Of x float32 [tokens, width] and a router float32 [width, experts]."""
    logits = jnp.dot(x, router, precision=lax.Precision.HIGHEST)
    probabilities = jax.nn.softmax(logits)
    _, experts = lax.top_k(lax.stop_gradient(probabilities), k)
    weights = jnp.take_along_axis(probabilities, experts, axis=-1)
    if normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    count = router.shape[-1]
    counts = jnp.zeros(count, jnp.int32).at[experts.reshape(-1)].add(1)
    shares = counts.astype(jnp.float32) / jnp.float32(experts.size)
    balance = count * jnp.sum(shares * jnp.mean(probabilities, axis=0))
    return Routing(weights, experts, Load(counts, balance, jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)))
