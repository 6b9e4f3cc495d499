"""Scale rules that divide: those of four over six, Quartet II and TetraJet-v2, each in its authors' own order.

In real numbers they are `TwoLevel`; a code depends on the last bit. With A the maximum that the outer scale is made of,
b a block's, h the headroom and k a candidate:

    DividedFirst   S = 6 T / A;  s_k = e4m3(min(((b / 6) S) (6 / k), 448));  z = x * (1 / (s_k (1 / S)))
    ByDivision     d = (A / T) / (6 / h);  s_k = e4m3(((b / (6 / h)) (6 / k)) / d);  z = x / (s_k d)
    OuterFirst     the same, with s = e4m3((b / d) / 6)

Quotients are exact (`exact.divide`): a compiler's own are not.

MS-EDEN (Quartet II, arXiv 2601.22813) puts the chance of a rounding into the scale. Elements are rounded to nearest,
and for each 128 neighbours c = sum z^2 / sum z q says how much too long or too short they became on average; s c, which
lies between two values of E4M3, becomes one of them by chance, with the mean s c: one random number for 16 elements.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .bits import EXPONENT, float32_bits, float_of_bits
from .choices import deviation, in_order
from .elements import Element
from .exact import INFINITY_BITS, divide, reduce_factor, times
from .outer import NEIGHBOURS, block_axis, per_group, step
from .scales import Blocks, BlockScales, TwoLevel
from .views import BlockView


def _over(bits: jax.Array, number: float) -> jax.Array:
    """Bits of x / number."""
    return divide(bits, jnp.full(bits.shape, int(np.float32(number).view(np.uint32)), jnp.uint32))


@dataclasses.dataclass(frozen=True)
class DividedFirst(TwoLevel):
    """The order of four over six."""

    by_table: ClassVar[bool] = False

    def unrounded(self, largest: jax.Array, outer: jax.Array, candidate: float, element: Element) -> jax.Array:
        scaled = times(_over(largest, element.max), outer, reduce_factor(outer))
        return scaled if candidate == element.max else scaled * jnp.float32(element.max / candidate)


@dataclasses.dataclass(frozen=True)
class ByDivision(TwoLevel):
    """An outer decode scale d, and divisions by it: a code stands for q (s d)."""

    by_table: ClassVar[bool] = False
    by_step: ClassVar[bool] = True

    def reach(self, element: Element) -> float:
        """What a block's amax becomes, before its scale is rounded."""
        return element.max / self.headroom

    def unrounded(self, largest: jax.Array, outer: jax.Array, candidate: float, element: Element) -> jax.Array:
        part = _over(largest, self.reach(element))
        if candidate != element.max:
            part = float32_bits(float_of_bits(part) * jnp.float32(element.max / candidate))
        return float_of_bits(divide(part, float32_bits(outer)))

    def _computed(self, blocks: Blocks, element: Element, candidate: float) -> BlockScales:
        usable = (blocks.amax != 0) & (blocks.amax < jnp.uint32(INFINITY_BITS))
        outer = float_of_bits(_over(_over(blocks.amax, self.scale_top), self.reach(element)))
        outer = jnp.where(usable, outer, jnp.float32(1))
        each = jnp.broadcast_to(outer, blocks.largest.shape)
        codes, values = self._rounded(self.unrounded(blocks.largest, each, candidate, element))
        return BlockScales(codes.astype(jnp.uint8), values, jnp.ones_like(values), outer)

    def scaled(self, magnitude: jax.Array, scales: BlockScales, view: BlockView) -> jax.Array:
        return float_of_bits(divide(magnitude, float32_bits(view.spread(step(scales.values, scales.tensor_decode)))))

    def deviation(self, rounded: jax.Array, scales: BlockScales, blocks: Blocks, element: Element) -> jax.Array:
        value = rounded * blocks.view.spread(step(scales.values, scales.tensor_decode))
        return deviation(float_of_bits(blocks.magnitude), value, blocks.view, self.measure)


@dataclasses.dataclass(frozen=True)
class OuterFirst(ByDivision):
    """The order of TetraJet-v2."""

    def unrounded(self, largest: jax.Array, outer: jax.Array, candidate: float, element: Element) -> jax.Array:
        return float_of_bits(_over(divide(largest, float32_bits(outer)), self.reach(element)))


@dataclasses.dataclass(frozen=True)
class Eden(ByDivision):
    """MS-EDEN: scales of blocks corrected for each 128 neighbours, then rounded stochastically."""

    stochastic = True
    group = NEIGHBOURS

    def settle(
        self, scales: BlockScales, scaled: jax.Array, rounded: jax.Array, view: BlockView, noise: jax.Array | None
    ) -> BlockScales:
        assert noise is not None, "a stochastic scale needs random bytes"
        return self.corrected(scales, scaled, rounded, view, uniforms(noise.reshape(view.shape), view))

    def corrected(
        self, scales: BlockScales, scaled: jax.Array, rounded: jax.Array, view: BlockView, uniform: jax.Array
    ) -> BlockScales:
        """The scales to decode with, from z, q and a uniform number in [0, 1) for each block."""
        square, cross = (per_group(in_order(t, view), view, jnp.add) for t in (scaled * scaled, scaled * rounded))
        ratio = float_of_bits(divide(float32_bits(square), float32_bits(cross)))
        wanted = scales.values * jnp.where(cross == 0, jnp.float32(1), ratio)
        below, gap = _grid_below(self.scale, jnp.minimum(wanted, jnp.float32(self.scale.max)))
        values = below + jnp.where(uniform * gap < wanted - below, gap, jnp.float32(0))
        codes, values = self._rounded(values)  # on the grid already
        return scales._replace(codes=codes.astype(jnp.uint8), values=values)


def _grid_below(scale: Element, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the largest value of a scale's type that is not larger than x, the step to the next)."""
    least = int(np.float32(scale.min_normal).view(np.uint32))
    binade = float_of_bits(jnp.maximum(float32_bits(x) & jnp.uint32(EXPONENT), jnp.uint32(least)))
    gap = binade * jnp.float32(2.0**-scale.mantissa_bits)
    inverse = float_of_bits(jnp.uint32(254 << 23) - float32_bits(gap))  # of a power of two
    return jnp.floor(x * inverse) * gap, gap


def uniforms(noise: jax.Array, view: BlockView) -> jax.Array:
    """float32 in [0, 1), one a block: 24 bits, those of its first three bytes."""
    inside = block_axis(view) + 1
    a, b, c = (jax.lax.index_in_dim(noise, i, inside, keepdims=False).astype(jnp.int32) for i in range(3))
    return ((a << 16) | (b << 8) | c).astype(jnp.float32) * jnp.float32(2.0**-24)
