"""Scale rules: how a tensor's scale and those of its blocks are found, exactly.

A rule is a value. It owns the type of a block's scale, what the tensor's largest magnitude is mapped to (`top`), and
`find`, which may look at the blocks' maxima and at every element. There are three kinds here.

`TwoLevel` (NVFP4): an E4M3 scale a block under a float32 scale S of the tensor, which maps the tensor's amax to the
product of the largest block scale and the largest element, 448 * 6 = 2688:

    S = min(top / amax, FLT_MAX); 1 if that is zero, or amax is zero or not finite
    decode scale = 1 / S;   mult = S * float32(1 / largest element)
    block scale s = e4m3(min(block_amax * mult, 448))
    block encode scale = min(1 / (s * (1 / S)), FLT_MAX)

The last line depends on the scale's code alone once S is known, so it is a table of 128 float32 numbers a tensor, made
with exact integer divisions (`exact`) and looked up: no element and no block is ever divided, which is both faster and
right where XLA's division is not.

`outer` says of what S is the scale: of the whole tensor, of a `row` (what a GEMM does not sum over: S is then a vector,
applied to the sums), or of 128 neighbours along the contraction. `headroom` h makes room above: mult = S * float32(h /
largest element), which with 17/16 leaves no element to clip, because E4M3 rounds down by 1/17 at most. `floor` is what
a scale becomes that rounds to zero. `among` are element values that a block's amax may be mapped to; `choices` says
which a block takes.

`TensorOnly` (FP8): no block scale, S = largest element / amax. `PowerOfTwo` (the MX formats): one power of two a block
and no scale of the tensor, which is exact by construction.
"""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .bits import float32_bits, float_of_bits
from .choices import MEASURES, deviation, expected_deviation, normal, take_least, to_nearest
from .elements import E4M3, E8M0_BIAS, E8M0_DTYPE, E8M0_MAX, E8M0_NAN, Element, decode, decode_e8m0, round_nearest
from .exact import (
    INFINITY_BITS,
    LIFT,
    MAX_BITS,
    divide,
    divide_bits,
    multiply_short_bits,
    reduce_factor,
    times,
)
from .outer import NEIGHBOURS, OUTERS, outer_maxima
from .tensor_scale import encode_scale_bits, once, outer_scales, tensor_scales
from .views import BlockView


class TensorScales(NamedTuple):
    """float32, of one tensor."""

    encode: jax.Array  # S
    decode: jax.Array  # 1 / S


class Blocks(NamedTuple):
    """A tensor as a rule sees it: the bits of magnitudes, uint32."""

    magnitude: jax.Array  # of every element, [view.shape]
    largest: jax.Array  # of each block, [view.scale_shape]
    amax: jax.Array  # of the tensor, as `ScaleRule.amax_bits` gave it or the caller wants it
    view: BlockView
    rounding: str = "rne"  # how elements will be rounded


class BlockScales(NamedTuple):
    """One entry a block, compact."""

    codes: jax.Array  # uint8
    values: jax.Array  # float32, the decoded scale
    encode: jax.Array  # float32, what an element is multiplied by
    tensor_decode: jax.Array  # float32, 1 / S; a number, or one a block where S is not of the whole tensor


class ScaleRule(abc.ABC):
    """How scales are found. A rule is a frozen dataclass: it hashes, and equal rules give equal scales."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype | None:
        """Of a stored block scale; None if a block has none."""

    @property
    @abc.abstractmethod
    def significant_bits(self) -> int:
        """Of a block scale: what it adds to the element's in their product; a power of two adds none."""

    @abc.abstractmethod
    def top(self, element: Element) -> float | None:
        """What the tensor's amax is mapped to; None if the tensor has no scale."""

    @abc.abstractmethod
    def find(self, blocks: Blocks, element: Element) -> BlockScales:
        """The scales of a tensor's blocks."""

    @abc.abstractmethod
    def decode(self, codes: jax.Array) -> jax.Array:
        """float32 values of the uint8 codes of block scales."""

    by_step: ClassVar[bool] = False  # whether a code stands for q (s / S), not (q s) / S

    @property
    def outer(self) -> str:
        """What S is the scale of: tensor, row, 128."""
        return "tensor"

    @property
    def group(self) -> int:
        """Neighbours along the contraction whose scales depend on each other, if more than a block."""
        return 1

    @property
    def stochastic(self) -> bool:
        """Whether the scales themselves are rounded by chance."""
        return False

    def check(self, element: Element) -> None:  # noqa: B027
        """ValueError if it has no scale for blocks of this element."""

    def amax_bits(self, largest: jax.Array, view: BlockView) -> jax.Array:
        """Bits of the amax that the tensor scale is made of, from those of the blocks; one number for a tensor."""
        return jnp.max(largest)

    def scaled(self, magnitude: jax.Array, scales: BlockScales, view: BlockView) -> jax.Array:
        """float32 magnitudes as they are rounded onto the element's grid, from their bits."""
        return times(magnitude, view.spread(scales.encode), view.spread(reduce_factor(scales.encode)))

    def settle(
        self, scales: BlockScales, scaled: jax.Array, rounded: jax.Array, view: BlockView, noise: jax.Array | None
    ) -> BlockScales:
        """The scales to decode with, once elements are rounded; `noise` are the operand's random bytes."""
        return scales

    def tensor_scales(self, amax: jax.Array, element: Element) -> TensorScales:
        """S and 1/S of a tensor with this amax; both 1 without a tensor scale, and where amax is zero or not finite."""
        top = self.top(element)
        if top is None:
            return TensorScales(jnp.ones_like(amax), jnp.ones_like(amax))
        return TensorScales(*tensor_scales(float32_bits(amax), top))


@dataclasses.dataclass(frozen=True)
class TensorOnly(ScaleRule):
    """No block scale: the tensor's own maps its amax to the largest element."""

    dtype = None
    significant_bits = 0

    def top(self, element: Element) -> float:
        return element.max

    def find(self, blocks: Blocks, element: Element) -> BlockScales:
        tensor, shape = self.tensor_scales(float_of_bits(blocks.amax), element), blocks.largest.shape
        blank, ones = jnp.zeros(shape, jnp.uint8), jnp.ones(shape, jnp.float32)
        return BlockScales(blank, ones, jnp.broadcast_to(tensor.encode, shape), tensor.decode)

    def decode(self, codes: jax.Array) -> jax.Array:
        return jnp.ones(codes.shape, jnp.float32)


@dataclasses.dataclass(frozen=True)
class TwoLevel(ScaleRule):
    """A block scale of the type `scale`, at most `scale_top`, under a float32 outer scale.

    A block's amax is mapped to the largest element. A rule with several `candidates` for that says in `choose` which of
    them a block takes: by its `measure`, if they are those of `among`.
    """

    scale: Element = E4M3
    scale_top: float = E4M3.max
    among: tuple[float, ...] = ()
    measure: str = "squared"
    headroom: float = 1.0
    outer: str = "tensor"
    floor: float = 0.0

    by_table: ClassVar[bool] = True  # whether S and a factor for each candidate say it all

    @property
    def dtype(self) -> np.dtype:
        return self.scale.dtype

    @property
    def significant_bits(self) -> int:
        return self.scale.mantissa_bits + 1

    @property
    def group(self) -> int:
        return NEIGHBOURS if self.outer == "128" else 1

    def top(self, element: Element) -> float:
        return element.max * self.scale_top

    def check(self, element: Element) -> None:
        for field, value, choices in (("outer", self.outer, OUTERS), ("measure", self.measure, MEASURES)):
            if value not in choices:
                raise ValueError(f"scale rule: {field} must be one of {', '.join(choices)}, got {value!r}")
        if self.among and (element.max not in self.among or min(self.among) <= 0 or max(self.among) > element.max):
            raise ValueError(
                f"scale rule: among={self.among} does not serve {element.name}, whose largest value is "
                f"{element.max:g}: the candidates of a block's maximum are that one and smaller ones"
            )
        if self.chooses and element.stored_bits != 4:
            raise ValueError(f"scale rule: several candidates are for 4-bit elements, got {element.name}")

    @property
    def chooses(self) -> bool:
        """Whether a block has several candidates."""
        return len(self.among) > 1

    def candidates(self, element: Element) -> tuple[float, ...]:
        """Element values that a block's amax may be mapped to."""
        return self.among or (element.max,)

    def amax_bits(self, largest: jax.Array, view: BlockView) -> jax.Array:
        return outer_maxima(largest, view, self.outer)

    @property
    def _may_be_subnormal(self) -> bool:
        """Whether a block's encode scale, top / (s amax), can be: for an amax of FLT_MAX, where top < 4 s."""
        if not self.chooses:
            return False
        largest = min(self.scale.max, self.scale_top * self.headroom * max(self.among) / min(self.among))
        return max(self.among) * self.scale_top < 4 * largest

    def scaled(self, magnitude: jax.Array, scales: BlockScales, view: BlockView) -> jax.Array:
        plain = super().scaled(magnitude, scales, view)
        if not self._may_be_subnormal:
            return plain
        # Of numbers of 2**126 and more: they lowered, the scale lifted, by bits, for XLA would move constants together.
        bits, down = float32_bits(scales.encode), jnp.uint32(LIFT << 23)
        lowered = float_of_bits(jnp.maximum(magnitude, down) - down)
        units = float32_bits(bits.astype(jnp.int32).astype(jnp.float32))  # of 2**-149
        lifted = float_of_bits(units - jnp.uint32((149 - LIFT) << 23))
        return jnp.where(view.spread(bits < jnp.uint32(0x80_0000)), lowered * view.spread(lifted), plain)

    def find(self, blocks: Blocks, element: Element) -> BlockScales:
        if self.by_table and self.outer == "tensor":
            decode_scale, mults, table = _two_level(blocks.amax, self, element)
            found = [self._found(blocks.largest, m, table, decode_scale) for m in mults]
        else:
            found = [self._computed(blocks, element, k) for k in self.candidates(element)]
        return self.choose(blocks, element, found)

    def choose(self, blocks: Blocks, element: Element, found: Sequence[BlockScales]) -> BlockScales:
        """The scales of all blocks, from those under each candidate."""
        if len(found) == 1:
            return found[0]
        errors = [self._error(blocks, element, scales) for scales in found]
        codes, values, encode = take_least([scales[:3] for scales in found], errors)
        return BlockScales(codes, values, encode, found[0].tensor_decode)

    def _error(self, blocks: Blocks, element: Element, scales: BlockScales) -> jax.Array:
        """Of each block under these scales, by the measure."""
        view, scaled = blocks.view, self.scaled(blocks.magnitude, scales, blocks.view)
        if self.measure == "expected":
            return expected_deviation(element, scaled, scales.values, view)
        rounded = to_nearest(element, scaled, blocks.rounding).value
        return self.deviation(rounded, scales, blocks, element)

    def deviation(self, rounded: jax.Array, scales: BlockScales, blocks: Blocks, element: Element) -> jax.Array:
        """Errors of magnitudes on the grid in the input's domain: times s, times A, divided by what A is mapped to."""
        carrier = rounded * blocks.view.spread(scales.values)
        amax = blocks.amax if blocks.amax.ndim == 0 else blocks.view.spread(blocks.amax)
        top = jnp.full(carrier.shape, np.float32(self.top(element)))
        value = float_of_bits(divide(float32_bits(carrier * normal(amax, amax)), float32_bits(top)))
        return deviation(normal(blocks.magnitude, amax), value, blocks.view, self.measure)

    def unrounded(self, largest: jax.Array, outer: jax.Array, candidate: float, element: Element) -> jax.Array:
        """Block scales before they are rounded, from bits of the blocks' maxima and the outer encode scale."""
        mult = outer * jnp.float32(self.headroom / candidate)
        return times(largest, mult, reduce_factor(mult))

    def _computed(self, blocks: Blocks, element: Element, candidate: float) -> BlockScales:
        """Scales of blocks, each with an outer scale of its own, exactly."""
        encode, decode_scale = outer_scales(blocks.amax, self.top(element))
        codes, values = self._rounded(self.unrounded(blocks.largest, encode, candidate, element))
        reach = multiply_short_bits(float32_bits(values), jnp.broadcast_to(float32_bits(decode_scale), values.shape))
        inverse = jnp.minimum(divide_bits(1.0, reach), jnp.uint32(MAX_BITS))
        return BlockScales(codes.astype(jnp.uint8), values, float_of_bits(inverse), decode_scale)

    def decode(self, codes: jax.Array) -> jax.Array:
        return decode(self.scale, codes)

    def _rounded(self, scaled: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(codes, values) of block scales."""
        limit = jnp.float32(self.scale.max)
        scaled = jnp.where(scaled <= limit, scaled, limit)  # infinity and NaN saturate too
        values, codes = round_nearest(self.scale, scaled)
        if self.floor:
            floor = round_nearest(self.scale, jnp.float32(self.floor))
            empty = codes == 0
            values, codes = jnp.where(empty, floor.value, values), jnp.where(empty, floor.code, codes)
        return codes, values

    def _found(self, largest: jax.Array, mult: jax.Array, table: jax.Array, decode_scale: jax.Array) -> BlockScales:
        codes, values = self._rounded(times(largest, mult, reduce_factor(mult)))
        encode_scale = table.at[codes].get(mode="promise_in_bounds")
        return BlockScales(codes.astype(jnp.uint8), values, encode_scale, decode_scale)


@dataclasses.dataclass(frozen=True)
class PowerOfTwo(ScaleRule):
    """An E8M0 scale a block, NaN for a block with a NaN; no scale of the tensor."""

    dtype = E8M0_DTYPE
    significant_bits = 0

    nan_above: ClassVar[int]  # the scale of a block whose amax has larger bits is NaN

    @abc.abstractmethod
    def exponent(self, largest: jax.Array, element: Element) -> jax.Array:
        """int32, biased by 127, not yet clipped to what E8M0 holds, for the bits of a block's amax."""

    def top(self, element: Element) -> None:
        return None

    def find(self, blocks: Blocks, element: Element) -> BlockScales:
        code = jnp.clip(self.exponent(blocks.largest, element), 0, E8M0_MAX)
        broken = blocks.largest > jnp.uint32(self.nan_above)
        codes = jnp.where(broken, jnp.int32(E8M0_NAN), code).astype(jnp.uint8)
        inverse = float_of_bits((jnp.int32(2 * E8M0_BIAS) - code).astype(jnp.uint32) << 23)
        return BlockScales(codes, decode_e8m0(codes), inverse, jnp.float32(1))

    def decode(self, codes: jax.Array) -> jax.Array:
        return decode_e8m0(codes)


@dataclasses.dataclass(frozen=True)
class PowerFloor(PowerOfTwo):
    """floor(log2 amax) - emax, the rule of the OCP text: the largest element of a block may saturate.

    A block with an infinity has the scale NaN.
    """

    nan_above = MAX_BITS

    def exponent(self, largest: jax.Array, element: Element) -> jax.Array:
        return (largest >> 23).astype(jnp.int32) - element.max_exponent


@dataclasses.dataclass(frozen=True)
class PowerUp(PowerOfTwo):
    """The least power of two under which no element of the block saturates: Transformer Engine's rule.

    It takes amax * float32(1 / largest element), rounded, up to the next power of two. Comparing the fractions of amax
    and of the largest element says the same for every amax. A block with an infinity has the largest scale, and zeros
    beside it.
    """

    nan_above = INFINITY_BITS

    def exponent(self, largest: jax.Array, element: Element) -> jax.Array:
        top_fraction = int(np.float32(element.max / 2.0**element.max_exponent).view(np.uint32)) & 0x7F_FFFF
        floor = (largest >> 23).astype(jnp.int32) - element.max_exponent
        # At the least scale the product is subnormal, and one number more is rounded down to it.
        limit = jnp.uint32(top_fraction) + (floor == 0).astype(jnp.uint32)
        up = floor + (largest & jnp.uint32(0x7F_FFFF) > limit).astype(jnp.int32)
        return jnp.where(largest == jnp.uint32(INFINITY_BITS), jnp.int32(E8M0_MAX), up)


TENSOR_ONLY, TWO_LEVEL, POWER_FLOOR, POWER_UP = TensorOnly(), TwoLevel(), PowerFloor(), PowerUp()


@functools.partial(jax.jit, static_argnums=(1, 2))
def _two_level(
    amax_bits: jax.Array, rule: TwoLevel, element: Element
) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
    """(1/S, a mult for each candidate, float32 encode scales by code) of a tensor with two levels of scales.

    Jitted apart so that it is traced once a program.
    """
    # A NaN is no scale and stands as 0.
    scales = np.nan_to_num(rule.scale.magnitudes(), nan=0.0)
    inverse = np.array([rule.headroom / value for value in rule.candidates(element)], np.float32)

    def compute(amax_bits: jax.Array) -> jax.Array:
        """float32: the encode scale of every code, then 1/S, then the mults."""
        encode_scale = encode_scale_bits(amax_bits, rule.top(element))
        decode_scale = divide_bits(1.0, encode_scale)
        reach = multiply_short_bits(jnp.asarray(scales.view(np.uint32)), jnp.broadcast_to(decode_scale, scales.shape))
        lanes = jnp.pad(jnp.minimum(divide_bits(1.0, reach), jnp.uint32(MAX_BITS)), (0, 1 + inverse.size))
        mults = [float32_bits(float_of_bits(encode_scale) * jnp.float32(number)) for number in inverse]
        # One array, not several: what two results share would be compiled twice.
        for place, extra in enumerate([decode_scale, *mults], scales.size):
            lanes = jnp.where(jnp.arange(lanes.size) == place, extra, lanes)
        return float_of_bits(lanes)

    with np.errstate(divide="ignore"):
        reciprocals = np.minimum(np.float32(1) / scales, np.finfo(np.float32).max)
    lanes = once(compute, np.concatenate([reciprocals, np.ones(1, np.float32), inverse]), amax_bits)
    return lanes[scales.size], tuple(lanes[scales.size + 1 + i] for i in range(inverse.size)), lanes[: scales.size]
