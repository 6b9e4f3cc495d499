"""The gated activation between the MLP's linears, h = a(g) * u, with explicit roundings.

    h = a(g) * u                               forward
    du = dh * a(g),   dg = (dh * u) * a'(g)    backward

Float32 arithmetic; a, h, du, dh * u and dg are each rounded to the activations' dtype, as a chain of separate
operations in that dtype would. XLA keeps the roundings, so the quantizers that read h, dg and du see the same values
wherever they are fused. exp() and tanh() are the device's own.

An activation is an entry in `ACTIVATIONS`.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from halfbyte.formats.exact_float32 import round_bfloat16

ScalarFn = Callable[[jax.Array], jax.Array]


def _round(x: jax.Array, like: jax.Array) -> jax.Array:
    return round_bfloat16(x) if like.dtype == jnp.bfloat16 else x


@dataclasses.dataclass(frozen=True)
class Activation:
    """a(g) and its derivative a'(g), both from float32 to float32."""

    name: str
    fn: ScalarFn
    derivative: ScalarFn

    def forward(self, g: jax.Array, u: jax.Array) -> jax.Array:
        """Returns h in g's dtype."""
        gate, up = g.astype(jnp.float32), u.astype(jnp.float32)
        return _round(_round(self.fn(gate), g) * up, g).astype(g.dtype)

    def backward(self, g: jax.Array, u: jax.Array, dh: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (dg, du) in g's dtype."""
        gate, up, d = (t.astype(jnp.float32) for t in (g, u, dh))
        du = _round(d * _round(self.fn(gate), g), g)
        dg = _round(_round(d * up, g) * self.derivative(gate), g)
        return dg.astype(g.dtype), du.astype(g.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_activation(activation: Activation, g: jax.Array, u: jax.Array) -> jax.Array:
    """Returns h; forward and backward have the roundings of `activation`."""
    return activation.forward(g, u)


gated_activation.defvjp(
    lambda activation, g, u: (activation.forward(g, u), (g, u)),
    lambda activation, kept, dh: activation.backward(*kept, dh),
)


def _silu_slope(g: jax.Array) -> jax.Array:
    s = jax.nn.sigmoid(g)
    return s * (jnp.float32(1) + g * (jnp.float32(1) - s))


GELU_SCALE, GELU_CUBE = 0.7978845608028654, 0.044715  # sqrt(2 / pi); Hendrycks and Gimpel, arXiv 1606.08415


def _gelu_tanh(g: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.float32(GELU_SCALE) * (g + jnp.float32(GELU_CUBE) * g * g * g))


def _gelu_slope(g: jax.Array) -> jax.Array:
    t, one = _gelu_tanh(g), jnp.float32(1)
    inner = jnp.float32(GELU_SCALE) * (one + jnp.float32(3 * GELU_CUBE) * g * g)
    return jnp.float32(0.5) * (one + t + g * (one - t * t) * inner)


SILU = Activation("silu", lambda g: g * jax.nn.sigmoid(g), _silu_slope)
GELU = Activation("gelu", lambda g: jnp.float32(0.5) * g * (jnp.float32(1) + _gelu_tanh(g)), _gelu_slope)
RELU2 = Activation("relu2", lambda g: jnp.maximum(g, 0) * jnp.maximum(g, 0), lambda g: 2 * jnp.maximum(g, 0))

ACTIVATIONS = {a.name: a for a in (SILU, GELU, RELU2)}
