"""The side path of a linear: a mean over tokens taken out of x before it is quantized, and added back to y.

X [T tokens, inputs] = 1 m^T + R, so y = R W + 1 (m^T W): the GEMMs see R, which has no part that all tokens share, and
the mean passes beside them in float32, as a vector.

    y  = Q(R) Q(W) + 1 (m^T W)
    dW = Q(R)^T Q(dy) + m (1^T dy)
    dR = Q(dy) Q(W)^T,   dm = W (1^T dy)^T,   dX = dR + 1 (dm - 1^T dR)^T / T

The last follows from R = X - 1 m^T and m = X^T 1 / T; without rounding the bracket is zero. So the mean of dX over
tokens is that of dy W^T, which nothing has quantized.

Any m gives the same y, so it is one that no order of summation changes: numbers are summed as integers, in units of
2^(e - k) for a feature whose largest magnitude is below 2^e, with k = 30 - ceil(log2 T), and the mean is rounded to
bfloat16. R, and with it every code, is the same on every mesh.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.formats.bits import round_bfloat16
from halfbyte.ops.operand import add_rounded, rounded
from halfbyte.ops.weight import QWeight, Remembered, Weight

LEAST = -90  # exponent below which a feature's units do not get smaller


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def split(outer: tuple[str, ...], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(R in x's dtype, m float32 [inputs]) of x [tokens..., inputs]; `outer` are axes of a `shard_map` around, along
    which the other tokens lie. NaN where x is not finite.
    """
    tokens = tuple(range(x.ndim - 1))
    wide, count = x.astype(jnp.float32), _count(outer, x)
    largest = _over(lax.pmax, jnp.max(jnp.abs(wide), axis=tokens), outer)
    exponent = (lax.bitcast_convert_type(largest, jnp.int32) >> 23) - 126  # largest < 2^exponent
    places = 30 - math.ceil(math.log2(count)) - jnp.clip(exponent, LEAST, 128)
    scaled = wide * jnp.broadcast_to(_power(places), wide.shape)
    units = lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int32)
    total = _over(lax.psum, jnp.sum(units, axis=tokens, dtype=jnp.int32), outer)
    mean = round_bfloat16(total.astype(jnp.float32) * _power(-places) * jnp.float32(1 / count))
    mean = jnp.where(jnp.isfinite(largest), mean, jnp.float32(jnp.nan))
    return add_rounded(x, -jnp.broadcast_to(mean, x.shape).astype(x.dtype)), mean


def _split_bwd(outer, _, gradients):
    dr, dm = gradients
    tokens = tuple(range(dr.ndim - 1))
    rest = _over(lax.psum, dm - jnp.sum(dr.astype(jnp.float32), axis=tokens), outer) / _count(outer, dr)
    return (add_rounded(dr, jnp.broadcast_to(rest, dr.shape)),)


split.defvjp(lambda outer, x: (split(outer, x), None), _split_bwd)


def beside(y: jax.Array, mean: jax.Array, weight: Weight, dtype: jnp.dtype) -> jax.Array:
    """y + 1 (m^T W), y float32 [tokens..., outputs], rounded once to `dtype`."""
    within = weight.weight if isinstance(weight, Remembered) else weight
    master = within.anchor if isinstance(within, QWeight) else within
    row = lax.dot(mean, master.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return rounded(y + jnp.broadcast_to(row, y.shape), dtype)


def _count(outer: tuple[str, ...], x: jax.Array) -> int:
    """Tokens of the whole x."""
    return math.prod(x.shape[:-1]) * math.prod(lax.axis_size(axis) for axis in outer)


def _over(reduce: Callable[..., jax.Array], value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return reduce(value, axes) if axes else value


def _power(exponent: jax.Array) -> jax.Array:
    """2^exponent, float32, for exponents of normal numbers."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
