"""Rotary position embedding, with the frequency scaling of Llama 3.1.

Pair i of a head (elements i and i + head_dim/2) is rotated by the angle position * theta^(-2i/head_dim). Llama 3.1
stretches long wavelengths: frequencies of wavelengths above original/low are divided by `factor`, those below
original/high are unchanged, and between them the two are blended linearly in original/wavelength.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte.io import check_float, check_int


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of the rotary frequencies beyond the context of pretraining."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq: int = 8192

    def __post_init__(self) -> None:
        check_float("rope_scaling.factor", self.factor, holds=self.factor >= 1, wanted="at least 1")
        for name in ("low_freq_factor", "high_freq_factor"):
            value = getattr(self, name)
            check_float(f"rope_scaling.{name}", value, holds=value > 0, wanted="above 0")
        check_int("rope_scaling.original_max_seq", self.original_max_seq, least=1)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope_scaling.high_freq_factor must exceed low_freq_factor, "
                f"got {self.high_freq_factor} and {self.low_freq_factor}"
            )


def rope_frequencies(head_dim: int, *, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Returns radians per position for each pair, float32 [head_dim / 2]."""
    plain = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return plain.astype(np.float32)
    rotations = scaling.original_max_seq * plain / (2 * np.pi)  # original length in wavelengths
    span = scaling.high_freq_factor - scaling.low_freq_factor
    plain_share = np.clip((rotations - scaling.low_freq_factor) / span, 0.0, 1.0)
    return (plain_share * plain + (1 - plain_share) * plain / scaling.factor).astype(np.float32)


def rope_cos_sin(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin of the angles, float32 [batch, seq, 1, head_dim / 2], for `positions` [batch, seq]."""
    angles = positions.astype(jnp.float32)[..., None, None] * jnp.asarray(frequencies).reshape(1, 1, 1, -1)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates `x` [batch, seq, heads, head_dim] by its positions; in float32, returned in x's dtype."""
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
