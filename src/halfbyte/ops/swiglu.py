"""SwiGLU between the MLP's linears, with every rounding stated.

    a = g * sigmoid(g),   h = a * u                                    forward
    du = dh * a,   dg = (dh * u) * sigmoid(g) * (1 + g * (1 - sigmoid(g)))   backward

Float32 arithmetic; a, h, du, dh * u and dg are each rounded to the activations' dtype, as a chain of separate
operations in that dtype would. The roundings survive jit, so the quantizers that read h, dg and du see the same numbers
wherever they are fused. exp() itself is the device's.
"""

import jax
import jax.numpy as jnp

from halfbyte.formats.bits import round_bfloat16


def _round(x: jax.Array, like: jax.Array) -> jax.Array:
    return round_bfloat16(x) if like.dtype == jnp.bfloat16 else x


def swiglu(g: jax.Array, u: jax.Array) -> jax.Array:
    """h in g's dtype."""
    gate, up = g.astype(jnp.float32), u.astype(jnp.float32)
    a = _round(gate * jax.nn.sigmoid(gate), g)
    return _round(a * up, g).astype(g.dtype)


def swiglu_backward(g: jax.Array, u: jax.Array, dh: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(dg, du) in g's dtype."""
    gate, up, d = (t.astype(jnp.float32) for t in (g, u, dh))
    s = jax.nn.sigmoid(gate)
    du = _round(d * _round(gate * s, g), g)
    dg = _round(_round(d * up, g) * (s * (jnp.float32(1) + gate * (jnp.float32(1) - s))), g)
    return dg.astype(g.dtype), du.astype(g.dtype)
