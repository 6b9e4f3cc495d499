"""Number formats of one element: E2M1, E4M3, E5M2, any other of their kind, and E8M0.

A code is `sign | exponent | mantissa`. With bias b and m mantissa bits a magnitude is

    2**(E - b) * (1 + M / 2**m)      E > 0
    2**(1 - b) * M / 2**m            E = 0 (subnormal)

so that the spacing of the grid around a is step(a) = max(2**floor(log2 a), 2**(1-b)) / 2**m. Rounding to nearest even
on that grid is one addition and one subtraction of a number that depends on a: `(a + c) - c` with c = 1.5 * 2**23 *
step(a), because float32 itself rounds to nearest even at the spacing step(a) there. XLA folds such a pair only when c
is a constant. A plain cast to a narrow type and back is *not* safe: inside jit XLA removes it on some devices
(docs/numerics.md).

The reference for all of it: OCP Microscaling Formats v1.0, and `ml_dtypes`, with which the tests agree on every code.
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

    Codes above that of `max` are NaN; but the one with all exponent bits and no mantissa bit, if it is above, is
    infinity. Where `max` has the largest code there is neither.
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
        """The code of `max`: 2**mantissa_bits codes to a binade, the subnormals first."""
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
        """Bits of a stored code: two codes per byte if they fit, else one."""
        return 4 if self.bits <= 4 else 8

    def magnitudes(self) -> np.ndarray:
        """float32 values of the codes without a sign, [sign_bit]; NaN above `max`, infinity where there is one."""
        codes = np.arange(self.sign_bit)
        binade, fraction = codes >> self.mantissa_bits, codes % 2**self.mantissa_bits / 2**self.mantissa_bits
        values = np.ldexp(np.where(binade == 0, fraction, 1 + fraction), np.maximum(binade, 1) - self.bias)
        values[self.max_code + 1 :] = np.nan
        if self.infinity_code is not None:
            values[self.infinity_code] = np.inf
        return values.astype(np.float32)


E1M2 = Element("E1M2", 4, 2, 0, 3.5, np.dtype(np.uint8))  # eight equal steps of a half
E2M1 = Element("E2M1", 4, 1, 1, 6.0, np.dtype(ml_dtypes.float4_e2m1fn))
E4M3 = Element("E4M3", 8, 3, 7, 448.0, np.dtype(ml_dtypes.float8_e4m3fn))
E5M2 = Element("E5M2", 8, 2, 15, 57344.0, np.dtype(ml_dtypes.float8_e5m2))
# For scales only, which have no sign: five bits of exponent, three of mantissa; the last binade is unused.
UE5M3 = Element("UE5M3", 9, 3, 15, 61440.0, np.dtype(np.uint8))


class RoundedMagnitudes(NamedTuple):
    """Magnitudes on an element's grid."""

    value: jax.Array  # float32
    code: jax.Array  # uint32, without the sign


def round_nearest(element: Element, magnitude: jax.Array) -> RoundedMagnitudes:
    """Nearest value of the element's grid, ties to even, for float32 magnitudes; saturates.

    NaN stays NaN where the element has one (E4M3, E5M2), and becomes `max` where it has none (E2M1).
    """
    top = jnp.float32(element.max)
    bounded = jnp.minimum(magnitude, top) if element.has_nan else jnp.where(magnitude <= top, magnitude, top)
    lowest = np.float32(element.min_normal).view(np.uint32)
    binade = jnp.maximum(bitcast_to_uint32(bounded) & jnp.uint32(EXPONENT_MASK), jnp.uint32(lowest))
    magic = binade + jnp.uint32(((23 - element.mantissa_bits) << 23) + 0x40_0000)  # times 1.5 * 2**(23 - m)
    shifted = bounded + bitcast_to_float32(magic)
    # What the sum has more than the magic number, in its last place, are steps of the grid: 2**m to a binade.
    steps = bitcast_to_uint32(shifted) - magic
    code = steps + ((binade - jnp.uint32(lowest)) >> (23 - element.mantissa_bits))
    if element.has_nan:
        code = jnp.where(jnp.isnan(magnitude), jnp.uint32(element.sign_bit - 1), code)
    return RoundedMagnitudes(shifted - bitcast_to_float32(magic), code)


def round_stochastic_e2m1(magnitude: jax.Array, noise: jax.Array) -> RoundedMagnitudes:
    """An E2M1 neighbour of each float32 magnitude, the upper one with the probability of its nearness; saturates at 6.

    `noise` is uint8. With u = noise / 256: t = a + u * step(a), then t is cut down to the grid at its own step. The
    bias is -step / 512 on average, at most step / 256, and a < 1/512 always gives 0, as in the hardware's convert.
    """
    magnitude = jnp.where(magnitude <= jnp.float32(6), magnitude, jnp.float32(6))
    binade = bitcast_to_float32(bitcast_to_uint32(magnitude) & jnp.uint32(EXPONENT_MASK))
    step = jnp.maximum(binade, jnp.float32(1)) * jnp.float32(0.5)
    shifted = magnitude + step * (noise.astype(jnp.int32).astype(jnp.float32) * jnp.float32(1 / 256))
    shifted = jnp.minimum(shifted, jnp.float32(6))
    half = (shifted >= jnp.float32(0.5)).astype(jnp.uint32)
    cut = bitcast_to_uint32(shifted) >> 22  # the exponent and one bit of the mantissa; 1.0 is code 2
    code = jnp.where(shifted < jnp.float32(1), half, cut - jnp.uint32((127 << 1) - 2))
    return RoundedMagnitudes(decode(E2M1, code), code)


class GridNeighbours(NamedTuple):
    """Where magnitudes lie on the grid of a 4-bit element."""

    code: jax.Array  # uint32, of the largest value that is not larger
    below: jax.Array  # float32, that value
    step: jax.Array  # float32, up to the next; 0 above the last


def grid_neighbours(element: Element, magnitude: jax.Array) -> GridNeighbours:
    """The grid around float32 magnitudes, by comparison with each of its few values."""
    grid = element.magnitudes()
    code = _count(magnitude, grid[1:])
    below = decode(element, code)
    above = decode(element, jnp.minimum(code + jnp.uint32(1), jnp.uint32(element.max_code)))
    return GridNeighbours(code, below, above - below)


def round_half_away(element: Element, magnitude: jax.Array) -> RoundedMagnitudes:
    """Nearest value of a 4-bit element's grid, ties away from zero; saturates, and NaN becomes 0."""
    grid = element.magnitudes()
    code = _count(magnitude, (grid[1:] + grid[:-1]) / 2)
    return RoundedMagnitudes(decode(element, code), code)


def round_stochastic_midpoint(element: Element, magnitude: jax.Array, noise: jax.Array) -> RoundedMagnitudes:
    """A neighbour on a 4-bit element's grid: with `noise` uint8 and u = (noise + 1/2) / 256 the upper one if the way
    from the lower, in steps, and u are 1 together. The mean over the bytes is the magnitude, to 1/512 of a step;
    saturates.
    """
    code, below, step = grid_neighbours(element, magnitude)
    least = step * ((jnp.int32(511) - 2 * noise.astype(jnp.int32)).astype(jnp.float32) * jnp.float32(1 / 512))
    up = ((magnitude - below >= least) & (step > 0)).astype(jnp.uint32)
    return RoundedMagnitudes(decode(element, code + up), code + up)


def _count(magnitude: jax.Array, limits: np.ndarray) -> jax.Array:
    """How many of the limits each magnitude has reached."""
    none = jnp.zeros_like(magnitude, jnp.uint32)
    return sum(((magnitude >= jnp.float32(limit)).astype(jnp.uint32) for limit in limits), none)


def encode(element: Element, x: jax.Array) -> jax.Array:
    """uint8 codes of the values nearest to x, ties to even, saturating, the sign of zero kept.

    NaN is the largest code of its sign: a NaN where the element has one (E4M3, E5M2), else `max` (6 in E2M1).
    """
    bits = bitcast_to_uint32(x)
    return with_sign(element, round_nearest(element, bitcast_to_float32(bits & jnp.uint32(MAGNITUDE_MASK))).code, bits)


def with_sign(element: Element, code: jax.Array, bits: jax.Array) -> jax.Array:
    """uint8 codes from those of magnitudes and the float32 bits that hold the sign."""
    return (code | ((bits & jnp.uint32(SIGN_MASK)) >> (32 - element.bits))).astype(jnp.uint8)


def decode(element: Element, codes: jax.Array) -> jax.Array:
    """float32 values of uint8 codes; exact. Codes of NaN and of infinities become those."""
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


# E8M0 has neither sign nor mantissa: code c is 2**(c - 127), 255 is NaN.
E8M0_DTYPE = np.dtype(ml_dtypes.float8_e8m0fnu)
E8M0_BIAS = 127
E8M0_MAX = 254
E8M0_NAN = 255


def decode_e8m0(codes: jax.Array) -> jax.Array:
    """float32 value of E8M0 codes: 2**(code - 127), with code 0 the subnormal 2**-127 and 255 NaN."""
    codes = codes.astype(jnp.uint32)
    bits = jnp.where(codes == 0, jnp.uint32(0x40_0000), codes << 23)
    return jnp.where(codes == E8M0_NAN, jnp.float32(jnp.nan), bitcast_to_float32(bits))
