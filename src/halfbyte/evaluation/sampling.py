"""Which token comes next, given its logits.

Temperature divides the logits; `top_k` keeps the k likeliest tokens; `top_p` (nucleus sampling, arXiv 1904.09751) keeps
the smallest set of likeliest tokens whose probabilities add up to at least p, after the temperature and `top_k`. What
is kept is drawn from in proportion. Temperature 0 takes the likeliest token, the lowest id among equals.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from halfbyte.inputs import check_real, check_whole


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The defaults are greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_real("temperature", self.temperature, holds=self.temperature >= 0, wanted="0 (greedy) or more")
        check_real("top_p", self.top_p, holds=0 < self.top_p <= 1, wanted="above 0 and at most 1 (all tokens)")
        check_whole("top_k", self.top_k, zero="all tokens")
        check_whole("seed", self.seed)


def draw(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """A token for each row of float32 logits [batch, vocab]: int32 [batch]."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, kept_logits(logits, sampling), axis=-1).astype(jnp.int32)


def kept_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits over the temperature, -inf for every token that `top_k` and `top_p` leave out."""
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][..., -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p < 1:
        falling = -jnp.sort(-logits, axis=-1)
        chances = jax.nn.softmax(falling, axis=-1)
        before = jnp.cumsum(chances, axis=-1) - chances  # of all likelier tokens: 0 for the first, which always stays
        least = jnp.min(jnp.where(before < sampling.top_p, falling, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits
