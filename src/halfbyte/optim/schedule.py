"""Learning rates by step. Each schedule is a function of a traced step and gives float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from halfbyte.later import later

from .config import OptimizerConfig, check_warmup, span

if TYPE_CHECKING:
    import optax
else:
    optax = later("optax")

Schedule = Callable[[jax.Array], jax.Array]


def learning_rate(config: OptimizerConfig, steps: int) -> Schedule:
    """The rate used by the update of step 0, 1, ...: warm-up rises linearly to the peak, the last step has `final`
    times the peak."""
    warmup = check_warmup(config, steps)
    body = _body(config, steps - warmup)
    rise = optax.linear_schedule(config.learning_rate / max(1, warmup), config.learning_rate, max(1, warmup - 1))
    joined = optax.join_schedules([rise, body], [warmup]) if warmup else body

    def rate(step: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes the int32 step with floats
            return jnp.maximum(jnp.asarray(joined(step), jnp.float32), 0.0)  # a linear decay may round below 0

    return rate


def _body(config: OptimizerConfig, steps: int) -> optax.Schedule:
    peak, last = config.learning_rate, max(1, steps - 1)
    if config.schedule == "constant":
        return optax.constant_schedule(peak)
    if config.schedule == "cosine":
        return optax.cosine_decay_schedule(peak, last, alpha=config.final)
    decay = min(span(config.decay, steps), last)
    return optax.linear_schedule(peak, peak * config.final, decay, transition_begin=last - decay)
