"""Element formats: E2M1, E4M3, E5M2, others of their kind, and E8M0.

A code is `sign | exponent | mantissa`. With bias b and m mantissa bits a magnitude is

    2**(E - b) * (1 + M / 2**m)      E > 0
    2**(1 - b) * M / 2**m            E = 0 (subnormal)

so that the spacing of the grid around a is step(a) = max(2**floor(log2 a), 2**(1-b)) / 2**m. Rounding to nearest even
on that grid is one addition and one subtraction of a number that depends on a: `(a + c) - c` with c = 1.5 * 2**23 *
step(a), because float32 itself rounds to nearest even at the spacing step(a) there. XLA folds such a pair only when c
is a constant. A plain cast to a narrow type and back is *not* safe: inside jit XLA removes it on some devices
(docs/numerics.md).

Reference: OCP Microscaling Formats v1.0, and `ml_dtypes`, with which the tests agree on every code.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from halfbyte.formats.exact_float32 import (
    EXPONENT_MASK,
    MAGNITUDE_MASK,
    SIGN_MASK,
    bitcast_to_float32,
    bitcast_to_uint32,
    copy_sign,
)


@dataclasses.dataclass(frozen=True)
class Element:
    """A signed floating-point element of at most eight bits, saturating at `max`.

    Codes above that of `max` are NaN, except the one with all exponent bits and no mantissa bit, which is infinity. If
    `max` has the largest code, the element has neither NaN nor infinity.
    """

    name: str
    bits: int
    mantissa_bits: int
    bias: int
    max: float
    dtype: np.dtype

    @property
    def min_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def max_exponent(self) -> int:
        """floor(log2(max)): the OCP rule's emax."""
        return int(np.floor(np.log2(self.max)))

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def max_code(self) -> int:
        """Code of `max`: 2**mantissa_bits codes per binade, the subnormals first."""
        binades = self.max_exponent + self.bias
        return int((binades - 1 + self.max / 2.0**self.max_exponent) * 2**self.mantissa_bits)

    @property
    def has_nan(self) -> bool:
        return self.max_code < self.sign_bit - 1

    @property
    def infinity_code(self) -> int | None:
        code = self.sign_bit - (1 << self.mantissa_bits)  # all ones in the exponent
        return code if code > self.max_code else None

    @property
    def stored_bits(self) -> int:
        """Bits of a stored code: 4 if two codes fit in a byte, else 8."""
        return 4 if self.bits <= 4 else 8

    def magnitudes(self) -> np.ndarray:
        """Returns float32 values of the codes without a sign, [sign_bit]; NaN above `max`, except an infinity."""
        codes = np.arange(self.sign_bit)
        binade, fraction = codes >> self.mantissa_bits, codes % 2**self.mantissa_bits / 2**self.mantissa_bits
        values = np.ldexp(np.where(binade == 0, fraction, 1 + fraction), np.maximum(binade, 1) - self.bias)
        values[self.max_code + 1 :] = np.nan
        if self.infinity_code is not None:
            values[self.infinity_code] = np.inf
        return values.astype(np.float32)


E1M2 = Element("E1M2", 4, 2, 0, 3.5, np.dtype(np.uint8))  # a uniform grid of steps of 1/2
E2M1 = Element("E2M1", 4, 1, 1, 6.0, np.dtype(ml_dtypes.float4_e2m1fn))
E4M3 = Element("E4M3", 8, 3, 7, 448.0, np.dtype(ml_dtypes.float8_e4m3fn))
E5M2 = Element("E5M2", 8, 2, 15, 57344.0, np.dtype(ml_dtypes.float8_e5m2))
# Unsigned, for scales only: five exponent bits, three mantissa bits; the last binade is unused.
UE5M3 = Element("UE5M3", 9, 3, 15, 61440.0, np.dtype(np.uint8))


class RoundedMagnitudes(NamedTuple):
    """Magnitudes on an element's grid."""

    value: jax.Array  # float32
    code: jax.Array  # uint32, without the sign


def round_nearest(element: Element, magnitude: jax.Array) -> RoundedMagnitudes:
    """Rounds float32 magnitudes to the nearest value of the element's grid, ties to even; saturates.

    NaN stays NaN where the element has one (E4M3, E5M2), and becomes `max` where it has none (E2M1).
    """
    top = jnp.float32(element.max)
    bounded = jnp.minimum(magnitude, top) if element.has_nan else jnp.where(magnitude <= top, magnitude, top)
    min_normal = np.float32(element.min_normal).view(np.uint32)
    binade = jnp.maximum(bitcast_to_uint32(bounded) & jnp.uint32(EXPONENT_MASK), jnp.uint32(min_normal))
    magic = binade + jnp.uint32(((23 - element.mantissa_bits) << 23) + 0x40_0000)  # binade * 1.5 * 2**(23 - m)
    shifted = bounded + bitcast_to_float32(magic)
    # One unit in the last place of the sum is one step of the grid; there are 2**m steps per binade.
    steps = bitcast_to_uint32(shifted) - magic
    code = steps + ((binade - jnp.uint32(min_normal)) >> (23 - element.mantissa_bits))
    if element.has_nan:
        code = jnp.where(jnp.isnan(magnitude), jnp.uint32(element.sign_bit - 1), code)
    return RoundedMagnitudes(shifted - bitcast_to_float32(magic), code)


def round_stochastic_e2m1(magnitude: jax.Array, noise: jax.Array) -> RoundedMagnitudes:
    """Rounds float32 magnitudes stochastically to an E2M1 neighbour, up with probability by distance; saturates at 6.

    `noise` is uint8. With u = noise / 256: t = a + u * step(a), then t is truncated to the grid at its own step. The
    bias is -step / 512 on average, at most step / 256, and a < 1/512 always gives 0, as in the hardware's convert.
    """
    magnitude = jnp.where(magnitude <= jnp.float32(6), magnitude, jnp.float32(6))
    binade = bitcast_to_float32(bitcast_to_uint32(magnitude) & jnp.uint32(EXPONENT_MASK))
    step = jnp.maximum(binade, jnp.float32(1)) * jnp.float32(0.5)
    shifted = magnitude + step * (noise.astype(jnp.int32).astype(jnp.float32) * jnp.float32(1 / 256))
    shifted = jnp.minimum(shifted, jnp.float32(6))
    subnormal_code = (shifted >= jnp.float32(0.5)).astype(jnp.uint32)
    exponent_code = bitcast_to_uint32(shifted) >> 22  # the exponent and one mantissa bit; 1.0 is code 2
    code = jnp.where(shifted < jnp.float32(1), subnormal_code, exponent_code - jnp.uint32((127 << 1) - 2))
    return RoundedMagnitudes(decode(E2M1, code), code)


class GridNeighbours(NamedTuple):
    """Grid values around magnitudes, for a 4-bit element."""

    code: jax.Array  # uint32, of the value at or below the magnitude
    below: jax.Array  # float32, that value
    step: jax.Array  # float32, to the next value; 0 above the last


def grid_neighbours(element: Element, magnitude: jax.Array) -> GridNeighbours:
    """Returns the grid values around float32 magnitudes, by comparison with each of the few values."""
    grid = element.magnitudes()
    code = _count(magnitude, grid[1:])
    below = decode(element, code)
    above = decode(element, jnp.minimum(code + jnp.uint32(1), jnp.uint32(element.max_code)))
    return GridNeighbours(code, below, above - below)


def round_half_away(element: Element, magnitude: jax.Array) -> RoundedMagnitudes:
    """Rounds magnitudes to the nearest value of a 4-bit grid, ties away from zero; saturates; NaN becomes 0."""
    grid = element.magnitudes()
    code = _count(magnitude, (grid[1:] + grid[:-1]) / 2)
    return RoundedMagnitudes(decode(element, code), code)


def round_stochastic_midpoint(element: Element, magnitude: jax.Array, noise: jax.Array) -> RoundedMagnitudes:
    """Rounds magnitudes stochastically to a neighbour on a 4-bit element's grid; saturates.

    `noise` is uint8. With u = (noise + 1/2) / 256, it rounds up if (a - below) / step + u >= 1. The mean over all bytes
    is the magnitude, to 1/512 of a step.
    """
    code, below, step = grid_neighbours(element, magnitude)
    threshold = step * ((jnp.int32(511) - 2 * noise.astype(jnp.int32)).astype(jnp.float32) * jnp.float32(1 / 512))
    up = ((magnitude - below >= threshold) & (step > 0)).astype(jnp.uint32)
    return RoundedMagnitudes(decode(element, code + up), code + up)


def _count(magnitude: jax.Array, limits: np.ndarray) -> jax.Array:
    """Returns, per magnitude, the number of limits that it reaches, uint32."""
    zeros = jnp.zeros_like(magnitude, jnp.uint32)
    return sum(((magnitude >= jnp.float32(limit)).astype(jnp.uint32) for limit in limits), zeros)


def encode(element: Element, x: jax.Array) -> jax.Array:
    """Returns uint8 codes of the values nearest to x, ties to even; saturates and keeps the sign of zero.

    NaN is the largest code of its sign: a NaN where the element has one (E4M3, E5M2), else `max` (6 in E2M1).
    """
    bits = bitcast_to_uint32(x)
    return with_sign(element, round_nearest(element, bitcast_to_float32(bits & jnp.uint32(MAGNITUDE_MASK))).code, bits)


def with_sign(element: Element, code: jax.Array, bits: jax.Array) -> jax.Array:
    """Returns uint8 codes: codes of magnitudes with the sign of float32 `bits`."""
    return (code | ((bits & jnp.uint32(SIGN_MASK)) >> (32 - element.bits))).astype(jnp.uint8)


def decode(element: Element, codes: jax.Array) -> jax.Array:
    """Returns the float32 values of uint8 codes, exactly, NaN and infinities included."""
    codes = codes.astype(jnp.uint32)
    magnitude = codes & jnp.uint32(element.sign_bit - 1)
    mantissa_bits = element.mantissa_bits
    normal = bitcast_to_float32((magnitude << (23 - mantissa_bits)) + jnp.uint32((127 - element.bias) << 23))
    subnormal = magnitude.astype(jnp.int32).astype(jnp.float32) * jnp.float32(element.min_normal / 2.0**mantissa_bits)
    value = jnp.where(magnitude < jnp.uint32(1 << mantissa_bits), subnormal, normal)
    if element.has_nan:
        value = jnp.where(magnitude > jnp.uint32(element.max_code), jnp.float32(jnp.nan), value)
    if element.infinity_code is not None:
        value = jnp.where(magnitude == jnp.uint32(element.infinity_code), jnp.float32(jnp.inf), value)
    return copy_sign(value, (codes & jnp.uint32(element.sign_bit)) << (32 - element.bits))


# E8M0 has no sign and no mantissa: code c is 2**(c - 127), 255 is NaN.
E8M0_DTYPE = np.dtype(ml_dtypes.float8_e8m0fnu)
E8M0_BIAS = 127
E8M0_MAX = 254
E8M0_NAN = 255


def decode_e8m0(codes: jax.Array) -> jax.Array:
    """Returns the float32 values of E8M0 codes: 2**(code - 127); code 0 is the subnormal 2**-127, 255 is NaN."""
    codes = codes.astype(jnp.uint32)
    bits = jnp.where(codes == 0, jnp.uint32(0x40_0000), codes << 23)
    return jnp.where(codes == E8M0_NAN, jnp.float32(jnp.nan), bitcast_to_float32(bits))
