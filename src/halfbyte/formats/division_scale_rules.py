"""Scale rules that divide: four over six, Quartet II and TetraJet-v2, each in its authors' order of operations.

In real arithmetic they are `TwoLevelScale`, but a code depends on the last bit of its scale. With A the amax under the
outer scale, b that of a block, h the headroom and k a candidate:

    FourOverSixScale  S = 6 T / A;  s_k = e4m3(min(((b / 6) S) (6 / k), 448));  z = x * (1 / (s_k (1 / S)))
    QuartetScale      d = (A / T) / (6 / h);  s_k = e4m3(((b / (6 / h)) (6 / k)) / d);  z = x / (s_k d)
    TetraJetScale     the same, with s = e4m3((b / d) / 6)

Quotients are rounded once (`exact_float32.divide_rne`); a compiler's own may not be.

MS-EDEN (Quartet II, arXiv 2601.22813) rounds the scale stochastically instead of the elements. Elements are rounded to
nearest. For each run of 128, c = sum z^2 / sum z q is by how much rounding shortened or lengthened the run on average;
s c, which is between two values of E4M3, is rounded stochastically to one of them, with mean s c: one random number
per 16 elements.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte.formats.block_view import BlockView
from halfbyte.formats.elements import Element
from halfbyte.formats.exact_float32 import (
    EXPONENT_MASK,
    INFINITY_BITS,
    bitcast_to_float32,
    bitcast_to_uint32,
    divide_rne,
    multiply_rne,
    subnormal_unit_factor,
)
from halfbyte.formats.outer_scales import OUTER_GROUP_SIZE, block_axis, effective_block_scale, reduce_per_group
from halfbyte.formats.scale_candidates import block_error, ordered_block_sum
from halfbyte.formats.scale_rules import OLD_FIELDS, BlockMagnitudes, BlockScales, TwoLevelScale
from halfbyte.renamed import renamed_members


def _divide_bits_by(bits: jax.Array, number: float) -> jax.Array:
    """Returns the bits of x / number."""
    return divide_rne(bits, jnp.full(bits.shape, int(np.float32(number).view(np.uint32)), jnp.uint32))


@renamed_members(**OLD_FIELDS)
@dataclasses.dataclass(frozen=True)
class FourOverSixScale(TwoLevelScale):
    """Scales in the order of operations of four over six."""

    encode_scale_from_table: ClassVar[bool] = False

    def unrounded_block_scale(self, amax: jax.Array, outer: jax.Array, candidate: float, element: Element) -> jax.Array:
        scaled = multiply_rne(_divide_bits_by(amax, element.max), outer, subnormal_unit_factor(outer))
        return scaled if candidate == element.max else scaled * jnp.float32(element.max / candidate)


@renamed_members(**{**OLD_FIELDS, "by_step": "uses_effective_step"})
@dataclasses.dataclass(frozen=True)
class QuartetScale(TwoLevelScale):
    """Divides by an outer decode scale d: a code decodes to q (s d)."""

    encode_scale_from_table: ClassVar[bool] = False
    uses_effective_step: ClassVar[bool] = True

    def scaled_amax_target(self, element: Element) -> float:
        """Returns the value that a block's amax is mapped to before its scale is rounded."""
        return element.max / self.headroom

    def unrounded_block_scale(self, amax: jax.Array, outer: jax.Array, candidate: float, element: Element) -> jax.Array:
        scaled_amax = _divide_bits_by(amax, self.scaled_amax_target(element))
        if candidate != element.max:
            scaled_amax = bitcast_to_uint32(bitcast_to_float32(scaled_amax) * jnp.float32(element.max / candidate))
        return bitcast_to_float32(divide_rne(scaled_amax, bitcast_to_uint32(outer)))

    def _scales_exactly(self, blocks: BlockMagnitudes, element: Element, candidate: float) -> BlockScales:
        usable = (blocks.tensor_amax != 0) & (blocks.tensor_amax < jnp.uint32(INFINITY_BITS))
        outer = bitcast_to_float32(
            _divide_bits_by(_divide_bits_by(blocks.tensor_amax, self.scale_top), self.scaled_amax_target(element))
        )
        outer = jnp.where(usable, outer, jnp.float32(1))
        per_block = jnp.broadcast_to(outer, blocks.amax.shape)
        codes, values = self._rounded(self.unrounded_block_scale(blocks.amax, per_block, candidate, element))
        return BlockScales(codes.astype(jnp.uint8), values, jnp.ones_like(values), outer)

    def scaled(self, magnitude: jax.Array, scales: BlockScales, view: BlockView) -> jax.Array:
        return bitcast_to_float32(
            divide_rne(
                magnitude,
                bitcast_to_uint32(view.broadcast_scales(effective_block_scale(scales.values, scales.tensor_decode))),
            )
        )

    def deviation(self, q: jax.Array, scales: BlockScales, blocks: BlockMagnitudes, element: Element) -> jax.Array:
        value = q * blocks.view.broadcast_scales(effective_block_scale(scales.values, scales.tensor_decode))
        return block_error(bitcast_to_float32(blocks.magnitude), value, blocks.view, self.error_metric)


@renamed_members(**{**OLD_FIELDS, "by_step": "uses_effective_step"})
@dataclasses.dataclass(frozen=True)
class TetraJetScale(QuartetScale):
    """Scales in the order of operations of TetraJet-v2."""

    def unrounded_block_scale(self, amax: jax.Array, outer: jax.Array, candidate: float, element: Element) -> jax.Array:
        return bitcast_to_float32(
            _divide_bits_by(divide_rne(amax, bitcast_to_uint32(outer)), self.scaled_amax_target(element))
        )


@renamed_members(**{**OLD_FIELDS, "group": "scale_group_size", "by_step": "uses_effective_step"})
@dataclasses.dataclass(frozen=True)
class MsEdenScale(QuartetScale):
    """MS-EDEN: block scales, corrected per run of 128 elements, then rounded stochastically."""

    stochastic = True
    scale_group_size = OUTER_GROUP_SIZE

    def correct_scales(
        self, scales: BlockScales, scaled: jax.Array, rounded: jax.Array, view: BlockView, noise: jax.Array | None
    ) -> BlockScales:
        assert noise is not None, "a stochastic scale needs random bytes"
        return self.corrected(scales, scaled, rounded, view, uniform_per_block(noise.reshape(view.shape), view))

    def corrected(
        self, scales: BlockScales, scaled: jax.Array, rounded: jax.Array, view: BlockView, uniform: jax.Array
    ) -> BlockScales:
        """Returns the scales to decode with, from z, q and one uniform in [0, 1) per block."""
        square, cross = (
            reduce_per_group(ordered_block_sum(t, view), view, jnp.add) for t in (scaled * scaled, scaled * rounded)
        )
        ratio = bitcast_to_float32(divide_rne(bitcast_to_uint32(square), bitcast_to_uint32(cross)))
        corrected = scales.values * jnp.where(cross == 0, jnp.float32(1), ratio)
        below, gap = _grid_below(self.scale, jnp.minimum(corrected, jnp.float32(self.scale.max)))
        values = below + jnp.where(uniform * gap < corrected - below, gap, jnp.float32(0))
        codes, values = self._rounded(values)  # already on the grid: encodes, and applies the floor
        return scales._replace(codes=codes.astype(jnp.uint8), values=values)


def _grid_below(scale: Element, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (the value of the scale's grid at or below x, the step to the next value)."""
    min_normal = int(np.float32(scale.min_normal).view(np.uint32))
    binade = bitcast_to_float32(jnp.maximum(bitcast_to_uint32(x) & jnp.uint32(EXPONENT_MASK), jnp.uint32(min_normal)))
    gap = binade * jnp.float32(2.0**-scale.mantissa_bits)
    inverse = bitcast_to_float32(jnp.uint32(254 << 23) - bitcast_to_uint32(gap))  # exact: gap is a power of two
    return jnp.floor(x * inverse) * gap, gap


def uniform_per_block(noise: jax.Array, view: BlockView) -> jax.Array:
    """Returns float32 in [0, 1), one per block, from the 24 bits of its first three random bytes."""
    inside = block_axis(view) + 1
    a, b, c = (jax.lax.index_in_dim(noise, i, inside, keepdims=False).astype(jnp.int32) for i in range(3))
    return ((a << 16) | (b << 8) | c).astype(jnp.float32) * jnp.float32(2.0**-24)
