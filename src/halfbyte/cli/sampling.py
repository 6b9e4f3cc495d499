"""A few words from freshly trained weights, for the end of a run."""

from typing import Any

import jax
import jax.numpy as jnp

from halfbyte import models
from halfbyte.train.config import TrainConfig


def sample_text(config: TrainConfig, params: Any, dataset: Any, *, prompt: str = "The", tokens: int = 60) -> tuple[str, str]:
    """(prompt, continuation): drawn at temperature 0.7 from the 40 likeliest tokens, in bf16, with the run's seed."""
    tokenizer = dataset.tokenizer()
    ids = jnp.asarray([tokenizer.encode(prompt)], jnp.int32)
    model = config.model
    size = ids.shape[1] + tokens

    def draw(logits: jax.Array, key: jax.Array) -> jax.Array:
        values, choices = jax.lax.top_k(logits, 40)
        return jnp.take_along_axis(choices, jax.random.categorical(key, values / 0.7)[:, None], axis=1)[:, 0]

    @jax.jit
    def write(params: Any, ids: jax.Array, key: jax.Array) -> jax.Array:
        logits, cache = models.prefill(model, params, ids, size=size)

        def add(carry: tuple[jax.Array, Any], key: jax.Array) -> tuple[tuple[jax.Array, Any], jax.Array]:
            logits, cache = carry
            token = draw(logits, key)
            return models.decode_step(model, params, cache, token), token

        return jax.lax.scan(add, (logits, cache), jax.random.split(key, tokens))[1][:, 0]

    local = jax.device_put(jax.device_get(params), jax.local_devices()[0])
    found = write(local, ids, jax.random.key(config.seed))
    return prompt, tokenizer.decode([int(token) for token in found])
