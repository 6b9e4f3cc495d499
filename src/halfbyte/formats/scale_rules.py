"""Scale rules: exact computation of a tensor's outer scale and its block scales. A rule is a value.

`TwoLevelScale` (NVFP4) has an E4M3 block scale under a float32 scale S, which maps the tensor's amax to the product of
the largest block scale and the largest element, 448 * 6 = 2688:

    S = min(top / amax, FLT_MAX); 1 if that is zero, or amax is zero or not finite
    decode scale = 1 / S;   mult = S * float32(headroom / target)
    block scale s = e4m3(min(block_amax * mult, 448));   block encode scale = min(1 / (s * (1 / S)), FLT_MAX)
"""

import abc
import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte.formats.block_view import BlockView
from halfbyte.formats.elements import (
    E4M3,
    E8M0_BIAS,
    E8M0_DTYPE,
    E8M0_MAX,
    E8M0_NAN,
    Element,
    decode,
    decode_e8m0,
    round_nearest,
)
from halfbyte.formats.exact_float32 import (
    INFINITY_BITS,
    MAX_BITS,
    SUBNORMAL_LIFT_EXPONENT,
    bitcast_to_float32,
    bitcast_to_uint32,
    divide_constant_rne,
    divide_rne,
    multiply_rne,
    multiply_short_significand_rne,
    subnormal_unit_factor,
)
from halfbyte.formats.outer_scales import (
    OUTER_GRANULARITIES,
    OUTER_GROUP_SIZE,
    compute_without_duplication,
    encode_scale_bits,
    outer_amax_bits,
    scales_from_amax_bits,
    tensor_scales_from_amax,
)
from halfbyte.formats.scale_candidates import (
    ERROR_METRICS,
    block_error,
    expected_block_error,
    lift_from_subnormals,
    round_nearest_with_ties,
    select_min_error,
)
from halfbyte.renamed import renamed_members


class TensorScales(NamedTuple):
    encode: jax.Array  # float32, S
    decode: jax.Array  # float32, 1 / S


class BlockMagnitudes(NamedTuple):
    """Inputs of a rule: the bits of magnitudes and amaxes, uint32."""

    magnitude: jax.Array  # per element, [view.shape]
    amax: jax.Array  # per block, [view.scale_shape]
    tensor_amax: jax.Array  # of the tensor, from `ScaleRule.amax_bits` or the caller
    view: BlockView
    rounding: str = "rne"  # how elements will be rounded


class BlockScales(NamedTuple):
    codes: jax.Array  # uint8, one per block, compact as all fields
    values: jax.Array  # float32, the decoded scale
    encode: jax.Array  # float32, multiplies the elements of the block
    tensor_decode: jax.Array  # float32, 1 / S; a scalar, or one per block if S is not per tensor


class ScaleRule(abc.ABC):
    """Computes scales. A rule is a frozen dataclass: it hashes, and equal rules give equal scales."""

    uses_effective_step: ClassVar[bool] = False  # True: a code decodes to q (s / S), not (q s) / S
    stochastic: ClassVar[bool] = False  # True: the scales themselves are rounded stochastically

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype | None:
        """Dtype of a stored block scale; None if there is none."""

    @property
    @abc.abstractmethod
    def significant_bits(self) -> int:
        """Bits that the block scale adds to those of an element in their product; a power of two adds none."""

    @abc.abstractmethod
    def tensor_amax_target(self, element: Element) -> float | None:
        """Returns the value that the tensor's amax is mapped to; None if there is no S."""

    @abc.abstractmethod
    def compute_scales(self, blocks: BlockMagnitudes, element: Element) -> BlockScales:
        """Returns the scales of a tensor's blocks."""

    @abc.abstractmethod
    def decode(self, codes: jax.Array) -> jax.Array:
        """Returns float32 values of the uint8 codes of block scales."""

    @property
    def outer_granularity(self) -> str:
        """Granularity of S: "tensor", "row" (the dim a GEMM does not contract) or "128" elements of the contraction."""
        return "tensor"

    @property
    def scale_group_size(self) -> int:
        """Elements along the contraction whose scales depend on each other, if more than a block."""
        return 1

    def check(self, element: Element) -> None:  # noqa: B027
        """Raises ValueError if the rule does not support the element."""

    def amax_bits(self, block_amax: jax.Array, view: BlockView) -> jax.Array:
        """Returns the bits of the amaxes under S, from those of the blocks; a scalar if S is per tensor."""
        return jnp.max(block_amax)

    def scaled(self, magnitude: jax.Array, scales: BlockScales, view: BlockView) -> jax.Array:
        """Returns magnitudes times the encode scale, float32, to be rounded to the element's grid."""
        subnormal_encode = view.broadcast_scales(subnormal_unit_factor(scales.encode))
        return multiply_rne(magnitude, view.broadcast_scales(scales.encode), subnormal_encode)

    def correct_scales(
        self, scales: BlockScales, scaled: jax.Array, rounded: jax.Array, view: BlockView, noise: jax.Array | None
    ) -> BlockScales:
        """Returns the scales to decode with, once elements are rounded; `noise` are the operand's random bytes."""
        return scales

    def tensor_scales(self, amax: jax.Array, element: Element) -> TensorScales:
        """Returns S and 1/S for this amax; both 1 without a tensor scale, and where amax is zero or not finite."""
        target = self.tensor_amax_target(element)
        if target is None:
            return TensorScales(jnp.ones_like(amax), jnp.ones_like(amax))
        return TensorScales(*tensor_scales_from_amax(bitcast_to_uint32(amax), target))


@dataclasses.dataclass(frozen=True)
class PerTensorScale(ScaleRule):
    """No block scale (FP8): S = largest element / amax."""

    dtype = None
    significant_bits = 0

    def tensor_amax_target(self, element: Element) -> float:
        return element.max

    def compute_scales(self, blocks: BlockMagnitudes, element: Element) -> BlockScales:
        tensor, shape = self.tensor_scales(bitcast_to_float32(blocks.tensor_amax), element), blocks.amax.shape
        blank, ones = jnp.zeros(shape, jnp.uint8), jnp.ones(shape, jnp.float32)
        return BlockScales(blank, ones, jnp.broadcast_to(tensor.encode, shape), tensor.decode)

    def decode(self, codes: jax.Array) -> jax.Array:
        return jnp.ones(codes.shape, jnp.float32)


# Fields that users write in recipe files, under their names of version 0.1.
OLD_FIELDS = {
    "among": "candidate_targets",
    "measure": "error_metric",
    "outer": "outer_granularity",
    "by_table": "encode_scale_from_table",
}


@renamed_members(**OLD_FIELDS)
@dataclasses.dataclass(frozen=True)
class TwoLevelScale(ScaleRule):
    """A block scale of the type `scale`, at most `scale_top`, under a float32 outer scale.

    A block's amax is mapped to the largest element, or to the one of `candidate_targets` with the least `error_metric`.
    With `headroom` 17/16 no element clips: E4M3 rounds down by 1/17 at most. `floor` replaces a scale that rounds to
    zero.
    """

    scale: Element = E4M3
    scale_top: float = E4M3.max
    candidate_targets: tuple[float, ...] = ()
    error_metric: str = "squared"
    headroom: float = 1.0
    outer_granularity: str = "tensor"
    floor: float = 0.0

    encode_scale_from_table: ClassVar[bool] = True  # True: it depends only on S and the scale code

    @property
    def dtype(self) -> np.dtype:
        return self.scale.dtype

    @property
    def significant_bits(self) -> int:
        return self.scale.mantissa_bits + 1

    @property
    def scale_group_size(self) -> int:
        return OUTER_GROUP_SIZE if self.outer_granularity == "128" else 1

    def tensor_amax_target(self, element: Element) -> float:
        return element.max * self.scale_top

    def check(self, element: Element) -> None:
        for field, value, choices in (
            ("outer_granularity", self.outer_granularity, OUTER_GRANULARITIES),
            ("error_metric", self.error_metric, ERROR_METRICS),
        ):
            if value not in choices:
                raise ValueError(f"scale rule: {field} must be one of {', '.join(choices)}, got {value!r}")
        targets = self.candidates(element)
        if element.max not in targets or min(targets) <= 0 or max(targets) > element.max:
            raise ValueError(
                f"scale rule: candidate_targets={targets} does not serve {element.name}, whose largest value is "
                f"{element.max:g}: the candidates of a block's maximum are that one and smaller ones"
            )
        if self.has_candidates and element.stored_bits != 4:
            raise ValueError(f"scale rule: several candidates are for 4-bit elements, got {element.name}")

    @property
    def has_candidates(self) -> bool:
        """True if the rule selects among several targets."""
        return len(self.candidate_targets) > 1

    def candidates(self, element: Element) -> tuple[float, ...]:
        """Returns the element values that a block's amax may be mapped to."""
        return self.candidate_targets or (element.max,)

    def amax_bits(self, block_amax: jax.Array, view: BlockView) -> jax.Array:
        return outer_amax_bits(block_amax, view, self.outer_granularity)

    @property
    def _may_be_subnormal(self) -> bool:
        """True if a block's encode scale, top / (s amax), can be subnormal: for an amax of FLT_MAX, where top < 4 s."""
        if not self.has_candidates:
            return False
        smallest, largest = min(self.candidate_targets), max(self.candidate_targets)
        return largest * self.scale_top < 4 * min(self.scale.max, self.scale_top * self.headroom * largest / smallest)

    def scaled(self, magnitude: jax.Array, scales: BlockScales, view: BlockView) -> jax.Array:
        plain = super().scaled(magnitude, scales, view)
        if not self._may_be_subnormal:
            return plain
        # Elements are then 2**126 and more: lowered, and the scale lifted, by bits, as XLA would merge constants.
        bits, lift = bitcast_to_uint32(scales.encode), jnp.uint32(SUBNORMAL_LIFT_EXPONENT << 23)
        lowered = bitcast_to_float32(jnp.maximum(magnitude, lift) - lift)
        units = bitcast_to_uint32(bits.astype(jnp.int32).astype(jnp.float32))  # of 2**-149
        lifted = bitcast_to_float32(units - jnp.uint32((149 - SUBNORMAL_LIFT_EXPONENT) << 23))
        is_subnormal = view.broadcast_scales(bits < jnp.uint32(0x80_0000))
        return jnp.where(is_subnormal, lowered * view.broadcast_scales(lifted), plain)

    def compute_scales(self, blocks: BlockMagnitudes, element: Element) -> BlockScales:
        if self.encode_scale_from_table and self.outer_granularity == "tensor":
            decode_scale, mults, table = _two_level(blocks.tensor_amax, self, element)
            options = [self._scales_from_table(blocks.amax, m, table, decode_scale) for m in mults]
        else:
            options = [self._scales_exactly(blocks, element, k) for k in self.candidates(element)]
        if len(options) == 1:
            return options[0]
        errors = [self._error(blocks, element, scales) for scales in options]
        codes, values, encode = select_min_error([scales[:3] for scales in options], errors)
        return BlockScales(codes, values, encode, options[0].tensor_decode)

    def _error(self, blocks: BlockMagnitudes, element: Element, scales: BlockScales) -> jax.Array:
        """Returns the error of each block under these scales, by `error_metric`."""
        view, scaled = blocks.view, self.scaled(blocks.magnitude, scales, blocks.view)
        if self.error_metric == "expected":
            return expected_block_error(element, scaled, scales.values, view)
        rounded = round_nearest_with_ties(element, scaled, blocks.rounding).value
        return self.deviation(rounded, scales, blocks, element)

    def deviation(self, q: jax.Array, scales: BlockScales, blocks: BlockMagnitudes, element: Element) -> jax.Array:
        """Returns errors in the input's domain: grid values times s and the amax, divided by the amax's target."""
        scaled = q * blocks.view.broadcast_scales(scales.values)
        amax = blocks.tensor_amax if blocks.tensor_amax.ndim == 0 else blocks.view.broadcast_scales(blocks.tensor_amax)
        top = jnp.full(scaled.shape, np.float32(self.tensor_amax_target(element)))
        dividend = bitcast_to_uint32(scaled * lift_from_subnormals(amax, amax))
        value = bitcast_to_float32(divide_rne(dividend, bitcast_to_uint32(top)))
        return block_error(lift_from_subnormals(blocks.magnitude, amax), value, blocks.view, self.error_metric)

    def unrounded_block_scale(self, amax: jax.Array, outer: jax.Array, candidate: float, element: Element) -> jax.Array:
        """Returns block scales before rounding, from bits of the blocks' amaxes and the outer encode scale."""
        mult = outer * jnp.float32(self.headroom / candidate)
        return multiply_rne(amax, mult, subnormal_unit_factor(mult))

    def _scales_exactly(self, blocks: BlockMagnitudes, element: Element, candidate: float) -> BlockScales:
        """Returns scales of blocks whose outer scales differ, each computed exactly."""
        encode, decode_scale = scales_from_amax_bits(blocks.tensor_amax, self.tensor_amax_target(element))
        codes, values = self._rounded(self.unrounded_block_scale(blocks.amax, encode, candidate, element))
        outer = jnp.broadcast_to(bitcast_to_uint32(decode_scale), values.shape)
        step = multiply_short_significand_rne(bitcast_to_uint32(values), outer)
        encode_scale = jnp.minimum(divide_constant_rne(1.0, step), jnp.uint32(MAX_BITS))
        return BlockScales(codes.astype(jnp.uint8), values, bitcast_to_float32(encode_scale), decode_scale)

    def decode(self, codes: jax.Array) -> jax.Array:
        return decode(self.scale, codes)

    def _rounded(self, scaled: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rounds block scales; returns (codes, values)."""
        limit = jnp.float32(self.scale.max)
        scaled = jnp.where(scaled <= limit, scaled, limit)  # infinity and NaN saturate too
        values, codes = round_nearest(self.scale, scaled)
        if self.floor:
            floor = round_nearest(self.scale, jnp.float32(self.floor))
            empty = codes == 0
            values, codes = jnp.where(empty, floor.value, values), jnp.where(empty, floor.code, codes)
        return codes, values

    def _scales_from_table(self, amax: jax.Array, mult: jax.Array, table: jax.Array, outer: jax.Array) -> BlockScales:
        codes, values = self._rounded(multiply_rne(amax, mult, subnormal_unit_factor(mult)))
        encode_scale = table.at[codes].get(mode="promise_in_bounds")
        return BlockScales(codes.astype(jnp.uint8), values, encode_scale, outer)


@dataclasses.dataclass(frozen=True)
class E8M0Scale(ScaleRule):
    """One power of two per block and no S (the MX formats): exact. NaN for a block with a NaN."""

    dtype = E8M0_DTYPE
    significant_bits = 0
    nan_above: ClassVar[int]  # the scale of a block whose amax has larger bits is NaN

    @abc.abstractmethod
    def exponent(self, amax: jax.Array, element: Element) -> jax.Array:
        """Returns the int32 exponent biased by 127, before clipping to E8M0, from the bits of a block's amax."""

    def tensor_amax_target(self, element: Element) -> None:
        return None

    def compute_scales(self, blocks: BlockMagnitudes, element: Element) -> BlockScales:
        code = jnp.clip(self.exponent(blocks.amax, element), 0, E8M0_MAX)
        is_nan = blocks.amax > jnp.uint32(self.nan_above)
        codes = jnp.where(is_nan, jnp.int32(E8M0_NAN), code).astype(jnp.uint8)
        inverse = bitcast_to_float32((jnp.int32(2 * E8M0_BIAS) - code).astype(jnp.uint32) << 23)
        return BlockScales(codes, decode_e8m0(codes), inverse, jnp.float32(1))

    def decode(self, codes: jax.Array) -> jax.Array:
        return decode_e8m0(codes)


@dataclasses.dataclass(frozen=True)
class E8M0FloorScale(E8M0Scale):
    """floor(log2 amax) - emax, the OCP rule: the largest element may saturate. NaN for a block with an infinity."""

    nan_above = MAX_BITS

    def exponent(self, amax: jax.Array, element: Element) -> jax.Array:
        return (amax >> 23).astype(jnp.int32) - element.max_exponent


@dataclasses.dataclass(frozen=True)
class E8M0CeilScale(E8M0Scale):
    """The least power of two under which no element of the block saturates: Transformer Engine's rule.

    It is amax * float32(1 / largest element), rounded up; comparing the fractions of the two is equivalent. A block
    with an infinity has the largest scale, and its finite elements become zero.
    """

    nan_above = INFINITY_BITS

    def exponent(self, amax: jax.Array, element: Element) -> jax.Array:
        top_fraction = int(np.float32(element.max / 2.0**element.max_exponent).view(np.uint32)) & 0x7F_FFFF
        floor = (amax >> 23).astype(jnp.int32) - element.max_exponent
        # At the smallest scale the product is subnormal, and one more amax is rounded down to it.
        limit = jnp.uint32(top_fraction) + (floor == 0).astype(jnp.uint32)
        up = floor + (amax & jnp.uint32(0x7F_FFFF) > limit).astype(jnp.int32)
        return jnp.where(amax == jnp.uint32(INFINITY_BITS), jnp.int32(E8M0_MAX), up)


TENSOR_ONLY, TWO_LEVEL, POWER_FLOOR, POWER_UP = PerTensorScale(), TwoLevelScale(), E8M0FloorScale(), E8M0CeilScale()


@functools.partial(jax.jit, static_argnums=(1, 2))
def _two_level(
    amax_bits: jax.Array, rule: TwoLevelScale, element: Element
) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
    """Returns (1/S, a mult per candidate, float32 encode scale of each code); jitted to be traced once per program.

    A block's encode scale depends only on S and its code: 128 exact divisions replace an inexact one per block.
    """
    scales = np.nan_to_num(rule.scale.magnitudes(), nan=0.0)  # NaN is no scale
    inverses = np.array([rule.headroom / value for value in rule.candidates(element)], np.float32)

    def compute(amax_bits: jax.Array) -> jax.Array:
        """Returns float32: the encode scale of every code, then 1/S, then the mults."""
        encode_scale = encode_scale_bits(amax_bits, rule.tensor_amax_target(element))
        decode_scale = divide_constant_rne(1.0, encode_scale)
        outer = jnp.broadcast_to(decode_scale, scales.shape)
        step = multiply_short_significand_rne(jnp.asarray(scales.view(np.uint32)), outer)
        flat = jnp.pad(jnp.minimum(divide_constant_rne(1.0, step), jnp.uint32(MAX_BITS)), (0, 1 + inverses.size))
        mults = [bitcast_to_uint32(bitcast_to_float32(encode_scale) * jnp.float32(inverse)) for inverse in inverses]
        # One array: XLA would compile what several results share once for each.
        for index, extra in enumerate([decode_scale, *mults], scales.size):
            flat = jnp.where(jnp.arange(flat.size) == index, extra, flat)
        return bitcast_to_float32(flat)

    with np.errstate(divide="ignore"):
        reciprocals = np.minimum(np.float32(1) / scales, np.finfo(np.float32).max)
    unscaled = np.concatenate([reciprocals, np.ones(1, np.float32), inverses])
    flat = compute_without_duplication(compute, unscaled, amax_bits)
    return flat[scales.size], tuple(flat[scales.size + 1 + i] for i in range(inverses.size)), flat[: scales.size]
