"""Dynamic loss scaling by powers of two.

Multiplying a tensor by 2^k multiplies its amax by 2^k, hence divides NVFP4's tensor scale by 2^k, and leaves block
scales and 4-bit codes where they were: the scale guards bf16 and fp8 gradients against underflow without touching the
4-bit ones. An overflow skips the step and halves the scale; `growth_interval` good steps double it.
"""

import jax
import jax.numpy as jnp

from .config import LARGEST_SCALE, SMALLEST_SCALE, LossScaleConfig

Scaler = dict[str, jax.Array]


def next_scaler(config: LossScaleConfig, scaler: Scaler, finite: jax.Array) -> Scaler:
    """The scaler after a step whose gradients were all finite, or not."""
    skipped = scaler["skipped"] + jnp.where(finite, 0, 1).astype(jnp.int32)
    if config.mode == "off":
        return {**scaler, "skipped": skipped}
    good = scaler["good_steps"] + 1
    grow = finite & (good >= config.growth_interval)
    factor = jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5).astype(jnp.float32)
    scale = jnp.clip(scaler["scale"] * factor, SMALLEST_SCALE, LARGEST_SCALE)
    return {"scale": scale, "good_steps": jnp.where(finite & ~grow, good, 0).astype(jnp.int32), "skipped": skipped}
