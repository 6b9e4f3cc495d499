"""RMSNorm, y = x / rms(x) * scale.

Computed in float32, returned in the dtype of x. The VJP is written out so that what the backward pass keeps is x as it
came (bf16) and one float32 a row, never a float32 copy of x. That float32 has a checkpoint name: with it saved, y is
made again by two products, the same to the last bit:

    r  = rsqrt(mean(x^2) + eps),  n = x r
    dx = r (g s - n mean(g s n)),  ds = sum over rows of g n
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from halfbyte.ops.operand import SCALES, pinned


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float = 1e-5) -> jax.Array:
    """`x` [..., D] over its root mean square along the last dim, times `scale` [D]; float32 inside, x's dtype out."""
    return _scaled(x, _inverse(x, eps), scale)


def _inverse(x: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    return lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


def _scaled(x: jax.Array, inverse: jax.Array, scale: jax.Array) -> jax.Array:
    return pinned((x.astype(jnp.float32) * inverse * _row(scale, x.ndim)).astype(x.dtype))


def _fwd(x: jax.Array, scale: jax.Array, eps: float) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    inverse = checkpoint_name(_inverse(x, eps), SCALES)
    return _scaled(x, inverse, scale), (x, scale, inverse)


def _bwd(eps: float, residuals: tuple[jax.Array, jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, scale, inverse = residuals
    wide = g.astype(jnp.float32)
    normed = x.astype(jnp.float32) * inverse
    scaled = wide * _row(scale, x.ndim)
    dx = inverse * (scaled - normed * jnp.mean(scaled * normed, axis=-1, keepdims=True))
    dscale = jnp.sum(wide * normed, axis=tuple(range(x.ndim - 1)))
    return pinned(dx.astype(x.dtype)), dscale.astype(scale.dtype)


def _row(scale: jax.Array, ndim: int) -> jax.Array:
    return scale.astype(jnp.float32).reshape((1,) * (ndim - 1) + scale.shape)


rms_norm.defvjp(_fwd, _bwd)
