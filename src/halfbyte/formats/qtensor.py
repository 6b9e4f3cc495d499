"""Quantization of a tensor, and `QTensor`: a quantized tensor as a pytree.

    value = element(code) * block scale * tensor decode scale

`quantize_to_grid` is the arithmetic: amaxes, scales, then every element onto its grid. `quantize` returns the result as
codes, which `PackedQTensor` stores two per byte. All of it is bit casts, products and additions, so that it gives the
same bits inside jit on a CPU, a Hopper GPU or any other XLA device (docs/numerics.md lists what does not).

Non-finite input: an infinity saturates, and a NaN becomes the largest code of its sign (E2M1 has no NaN). The tensor's
amax keeps inf and NaN, so that neither is hidden: `QTensor.finite` is one scalar, and a GEMM over a tensor with a
non-finite amax returns NaN.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfbyte.formats.block_formats import BlockFormat
from halfbyte.formats.block_view import BlockView
from halfbyte.formats.elements import (
    E2M1,
    Element,
    RoundedMagnitudes,
    decode,
    round_stochastic_e2m1,
    round_stochastic_midpoint,
    with_sign,
)
from halfbyte.formats.exact_float32 import (
    DEFAULT_SHORT_SIGNIFICAND_BITS,
    MAGNITUDE_MASK,
    bitcast_to_float32,
    bitcast_to_uint32,
    copy_sign,
    magnitude_bits,
    multiply_short_significand_rne,
)
from halfbyte.formats.outer_scales import effective_block_scale
from halfbyte.formats.random_bits import random_bytes, warn_if_key_reused
from halfbyte.formats.scale_candidates import round_nearest_with_ties
from halfbyte.formats.scale_rules import BlockMagnitudes, BlockScales
from halfbyte.renamed import renamed_members

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
ROUNDINGS = ("rne", "stochastic", "away", "midpoint")
STOCHASTIC_ROUNDINGS = ("stochastic", "midpoint")  # these take random bytes
ALIGN_BLOCK = 16
TINY_BITS = int(np.float32(2.0**-100).view(np.uint32))  # products with such a scale may be subnormal


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "amax", "decode_scale"],
    meta_fields=["format", "block", "axis"],
)
@renamed_members(carrier="dequantize_blocks")
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A quantized tensor; a value is element(code) * scale * decode_scale.

    `codes` are uint8, one per element (0..15 for E2M1, with the sign of zero); `scales` have the format's scale dtype,
    one per block, None if the format has none; `amax` and `decode_scale` (1 / S) are float32, scalars if S is per
    tensor, else one per block.
    """

    codes: jax.Array
    scales: jax.Array | None
    amax: jax.Array
    decode_scale: jax.Array
    format: BlockFormat
    block: str = "1d"
    axis: int = -1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def encode_scale(self) -> jax.Array:
        """S of the tensor; 1 if the format has no tensor scale."""
        return self.format.tensor_scales(self.amax).encode

    @property
    def finite(self) -> jax.Array:
        """True if the tensor had only finite elements."""
        return jnp.all(magnitude_bits(self.amax) < jnp.uint32(0x7F80_0000))

    @property
    def packed(self) -> jax.Array:
        """uint8 codes; 4-bit codes are packed two per byte along the blocked axis, the even index in the low nibble."""
        return pack_nibbles(self.codes, axis=self.axis) if _packs_two_per_byte(self.format) else self.codes

    def dequantize_blocks(self) -> jax.Array:
        """Returns element(code) * block scale as float32, without the scales that a GEMM applies to its accumulator."""
        assert self.format.element is not None
        values = decode(self.format.element, self.codes)
        if self.scales is None:
            return values
        return values * self._broadcast_to_elements(
            block_decode_scale(self._scale_values(), self.decode_scale, self.format.scale.outer_granularity)
        )

    def dequantize(self) -> jax.Array:
        """Returns float32 values; all NaN if the tensor had a NaN. Subnormal results are exact on every device."""
        assert self.format.element is not None
        width = self.format.element.mantissa_bits + 1 + self.format.scale.significant_bits
        short, scale = decode(self.format.element, self.codes), self.decode_scale
        if self.format.tensor_scale and not self.format.scale.uses_effective_step:
            short = short if self.scales is None else short * self._broadcast_to_elements(self._scale_values())
        else:
            scale = (
                effective_block_scale(self._scale_values(), scale) if self.format.tensor_scale else self._scale_values()
            )
        if self.format.tensor_scale:
            scale = jnp.where(jnp.isnan(self.amax), jnp.float32(jnp.nan), scale)
        scale = self._broadcast_to_elements(scale) if scale.ndim else scale

        def with_subnormals(short, scale):
            spread = jnp.broadcast_to(magnitude_bits(scale), short.shape)
            bits = multiply_short_significand_rne(
                magnitude_bits(short), spread, width=max(width, DEFAULT_SHORT_SIGNIFICAND_BITS)
            )
            exact = copy_sign(bitcast_to_float32(bits), bitcast_to_uint32(short))
            return jnp.where(jnp.isnan(short * scale), jnp.float32(jnp.nan), exact)

        tiny = jnp.min(magnitude_bits(scale)) < jnp.uint32(TINY_BITS)
        return lax.cond(tiny, with_subnormals, lambda short, scale: short * scale, short, scale)

    def _scale_values(self) -> jax.Array:
        assert self.scales is not None
        return decode_block_scales(self.scales, self.format)

    def _broadcast_to_elements(self, scales: jax.Array) -> jax.Array:
        """Broadcasts one value per block to its elements."""
        view = self.format.view(self.shape, block=self.block, axis=self.axis)
        # [view.shape] -> [shape]
        return view.broadcast_scales(scales).reshape(self.shape)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["packed", "scales", "amax", "decode_scale"],
    meta_fields=["format", "block", "axis"],
)
@dataclasses.dataclass(frozen=True)
class PackedQTensor:
    """A QTensor in the form that is saved as a residual of the VJP or all-gathered: packed codes, scales as uint8."""

    packed: jax.Array
    scales: jax.Array | None
    amax: jax.Array
    decode_scale: jax.Array
    format: BlockFormat
    block: str = "1d"
    axis: int = -1

    @classmethod
    def from_qtensor(cls, tensor: QTensor) -> "PackedQTensor":
        scales = None if tensor.scales is None else lax.bitcast_convert_type(tensor.scales, jnp.uint8)
        return cls(tensor.packed, scales, tensor.amax, tensor.decode_scale, tensor.format, tensor.block, tensor.axis)

    def unpack(self) -> QTensor:
        codes = unpack_nibbles(self.packed, axis=self.axis) if _packs_two_per_byte(self.format) else self.packed
        dtype = self.format.scale_dtype
        scales = None if self.scales is None or dtype is None else lax.bitcast_convert_type(self.scales, dtype)
        return QTensor(codes, scales, self.amax, self.decode_scale, self.format, self.block, self.axis)


class GridTensor(NamedTuple):
    """A quantized tensor before it is encoded; XLA computes only the fields that are read."""

    values: jax.Array  # float32 on the element's grid
    codes: jax.Array  # uint8
    scales: BlockScales
    amax: jax.Array  # float32, a scalar for the tensor, or one per block
    view: BlockView
    outer: str = "tensor"

    def dequantize_blocks(self) -> jax.Array:
        """Returns values * block scale as float32: at most 6 significant bits under NVFP4, so exact in bfloat16. Outer
        scales per 128 elements are included.
        """
        spread = self.view.broadcast_scales(
            block_decode_scale(self.scales.values, self.scales.tensor_decode, self.outer)
        )
        # [shape] -> [view.shape] -> [shape]
        return (self.values.reshape(self.view.shape) * spread).reshape(self.values.shape)


def quantize(
    x: jax.Array, fmt: BlockFormat, *, block: str = "1d", rounding: str = "rne", key: jax.Array | None = None,
    axis: int = -1, amax: jax.Array | None = None,
) -> QTensor:  # fmt: skip
    """Quantizes `x` to `fmt`, in blocks along the last axis ("1d") or in square tiles of the last two ("2d").

    Args:
        x: float32, bfloat16 or float16, with any leading dims.
        rounding: "rne" rounds to nearest even. "stochastic" (E2M1 formats) rounds by random bytes drawn from `key`.
            Both saturate.
        key: One key for different tensors (under vmap or shard_map) raises a SharedBitsWarning.
        axis: -2 blocks along the next to last axis: the columnwise operand of a token-major tensor, untransposed.
        amax: Overrides the tensor's own amax (delayed scaling).
    """
    check_quantize_arguments(x, fmt, rounding=rounding, key=key)
    noise = None
    if key is not None and (rounding in STOCHASTIC_ROUNDINGS or fmt.scale.stochastic):
        noise = random_bytes(warn_if_key_reused(key, x), x.shape)
    grid = quantize_to_grid(x, fmt, block=block, axis=axis, noise=noise, amax=amax, rounding=rounding)
    return encode_qtensor(grid, fmt, block=block, axis=axis)


def encode_qtensor(grid: GridTensor, fmt: BlockFormat, *, block: str, axis: int = -1) -> QTensor:
    """Returns the QTensor of a tensor that is rounded to its grid."""
    assert fmt.element is not None
    dtype = fmt.scale_dtype
    scales = None if dtype is None else lax.bitcast_convert_type(grid.scales.codes, dtype)
    return QTensor(grid.codes, scales, grid.amax, grid.scales.tensor_decode, fmt, block, axis)


def check_quantize_arguments(x: jax.Array, fmt: BlockFormat, *, rounding: str, key: jax.Array | None) -> None:
    """Raises for arguments that `quantize` does not support; `BlockFormat.view` checks shapes."""
    if not fmt.quantized:
        raise ValueError(
            f"{fmt.name} is not a quantized format; cast with astype, or choose one of NVFP4, MXFP4, MXFP8, FP8"
        )
    if x.dtype not in FLOATS:
        raise TypeError(f"quantize takes float32, bfloat16 or float16, got {x.dtype}; convert with astype first")
    if x.ndim == 0:
        raise ValueError("quantize needs at least one axis to block, got a scalar; reshape it to a vector")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {ROUNDINGS}, got {rounding!r}")
    if (rounding in STOCHASTIC_ROUNDINGS or fmt.scale.stochastic) and key is None:
        raise ValueError(
            f'rounding="{rounding}" of {fmt.name} needs a key; pass key=jax.random.key(...), folded with step, layer '
            "and site"
        )
    if reason := unsupported_rounding(fmt, rounding):
        raise ValueError(
            f'{rounding} rounding is that of E2M1 formats (NVFP4, MXFP4), for {reason}; use rounding="rne"'
        )


def unsupported_rounding(fmt: BlockFormat, rounding: str) -> str | None:
    """Returns why `rounding` does not support the element of `fmt`, or None."""
    if rounding == "stochastic" and fmt.element != E2M1:
        return f"E2M1 elements only, got format {fmt.name}"
    if rounding in ("away", "midpoint") and (fmt.element is None or fmt.element.stored_bits != 4):
        return f"4-bit elements only, got format {fmt.name}"
    return None


def quantize_to_grid(
    x: jax.Array, fmt: BlockFormat, *, block: str = "1d", axis: int = -1, noise: jax.Array | None = None,
    amax: jax.Array | None = None, rounding: str | None = None,
) -> GridTensor:  # fmt: skip
    """Rounds x to the grid of `fmt`.

    `rounding` None is nearest even, or stochastic if there is `noise`, uint8 of x's shape. `amax` overrides the
    tensor's own (delayed scaling).
    """
    rounding = rounding or ("rne" if noise is None else "stochastic")
    assert fmt.element is not None
    view = fmt.view(x.shape, block=block, axis=axis)
    bits = bitcast_to_uint32(x).reshape(view.shape)  # blocked axes are split in two
    magnitude = bits & jnp.uint32(MAGNITUDE_MASK)
    block_amax = _amax_over(magnitude, view.reduce_axes)
    amax_bits = fmt.scale.amax_bits(block_amax, view) if amax is None else bitcast_to_uint32(amax)
    scales = fmt.scale.compute_scales(BlockMagnitudes(magnitude, block_amax, amax_bits, view, rounding), fmt.element)
    scaled = fmt.scale.scaled(magnitude, scales, view)
    rounded = _rounded(fmt.element, scaled, rounding, None if noise is None else noise.reshape(view.shape))
    scales = fmt.scale.correct_scales(scales, scaled, rounded.value, view, noise)
    codes = with_sign(fmt.element, rounded.code, bits)
    values = copy_sign(rounded.value, bits)
    # [view.shape] -> [shape]
    values, codes = values.reshape(x.shape), codes.reshape(x.shape)
    return GridTensor(values, codes, scales, bitcast_to_float32(amax_bits), view, fmt.scale.outer_granularity)


def amax_of(x: jax.Array) -> jax.Array:
    """Returns the amax of x as float32; keeps infinity and NaN, and reads subnormals on every device."""
    return bitcast_to_float32(_amax_over(magnitude_bits(x), tuple(range(x.ndim))))


def amax_per_outer_group(x: jax.Array, fmt: BlockFormat, *, axis: int = -1) -> jax.Array:
    """Returns the amaxes under the outer scales of x, for a format with more than one: float32, one per block."""
    view = fmt.view(x.shape, block="1d", axis=axis)
    block_amax = _amax_over(magnitude_bits(x).reshape(view.shape), view.reduce_axes)
    return bitcast_to_float32(fmt.scale.amax_bits(block_amax, view))


def all_finite(x: jax.Array) -> jax.Array:
    """Returns a bool scalar, True if every element of x is finite; one integer maximum over the tensor."""
    return _amax_over(magnitude_bits(x), tuple(range(x.ndim))) < jnp.uint32(0x7F80_0000)


def block_decode_scale(scales: jax.Array, decode_scale: jax.Array, outer: str) -> jax.Array:
    """Returns the scales that a GEMM operand includes: block scales, times outer scales that are per 128 elements."""
    return effective_block_scale(scales, decode_scale) if outer == "128" else scales


def decode_block_scales(scales: jax.Array, fmt: BlockFormat) -> jax.Array:
    """Returns float32 values of block scales, which have the format's scale dtype or are uint8 codes."""
    return fmt.scale.decode(lax.bitcast_convert_type(scales, jnp.uint8))


def pack_nibbles(codes: jax.Array, *, axis: int = -1) -> jax.Array:
    """Packs two 4-bit codes per byte along `axis`, the even index in the low nibble."""
    axis = axis % codes.ndim
    size = codes.shape[axis]
    if size % 2:
        raise ValueError(
            f"packing two codes a byte needs an even axis, got {size} (axis {axis} of shape {codes.shape})"
        )
    # [..., size, ...] -> [..., size / 2, 2, ...]
    pairs = codes.reshape(*codes.shape[:axis], size // 2, 2, *codes.shape[axis + 1 :])
    low, high = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    return low | (high << 4)


def unpack_nibbles(packed: jax.Array, *, axis: int = -1) -> jax.Array:
    """Unpacks the codes of `pack_nibbles`."""
    axis = axis % packed.ndim
    pairs = jnp.stack([packed & jnp.uint8(0xF), packed >> 4], axis=axis + 1)
    # [..., bytes, 2, ...] -> [..., 2 * bytes, ...]
    return pairs.reshape(*packed.shape[:axis], 2 * packed.shape[axis], *packed.shape[axis + 1 :])


def _rounded(element: Element, scaled: jax.Array, rounding: str, noise: jax.Array | None) -> RoundedMagnitudes:
    """Rounds magnitudes to the element's grid."""
    if rounding not in STOCHASTIC_ROUNDINGS:
        return round_nearest_with_ties(element, scaled, rounding)
    assert noise is not None, f"rounding {rounding} needs random bytes"
    return (
        round_stochastic_midpoint(element, scaled, noise)
        if rounding == "midpoint"
        else round_stochastic_e2m1(scaled, noise)
    )


def _amax_over(magnitude: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns the maximum over `axes`, runs of 16 of the last axis first.

    One large reduction is several times slower in XLA on a CPU. The barrier keeps XLA from merging the two steps.
    """
    last = magnitude.ndim - 1
    if last in axes and len(axes) > 1 and magnitude.shape[last] % ALIGN_BLOCK == 0:
        # [..., n] -> [..., n / 16, 16]
        runs = magnitude.reshape(*magnitude.shape[:last], magnitude.shape[last] // ALIGN_BLOCK, ALIGN_BLOCK)
        magnitude = lax.optimization_barrier(jnp.max(runs, axis=-1))
    return lax.optimization_barrier(jnp.max(magnitude, axis=axes))


def _packs_two_per_byte(fmt: BlockFormat) -> bool:
    return fmt.element is not None and fmt.element.stored_bits == 4
