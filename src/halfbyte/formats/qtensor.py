"""QTensor: a quantized tensor as a pytree, and two 4-bit codes in a byte."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .bits import copy_sign, float32_bits, float_of_bits, magnitude_bits
from .blocks import BlockFormat
from .elements import decode
from .exact import USUAL_BITS, multiply_short_bits
from .outer import step

TINY_BITS = int(np.float32(2.0**-100).view(np.uint32))  # products with such a scale may be subnormal


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "amax", "decode_scale"],
    meta_fields=["format", "block", "axis"],
)
@dataclasses.dataclass(frozen=True)
class QTensor:
    """`codes` uint8, one an element (0..15 for E2M1, the sign of zero kept); `scales` in the format's scale type, one a
    block, None if there is none; `amax` and `decode_scale` (1 / S) float32.

    The array stands for element(code) * scale * decode_scale. Where S is not of the whole tensor, `amax` and
    `decode_scale` are one a block as well.
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
        """S of the tensor, 1 where the format has no tensor scale."""
        return self.format.tensor_scales(self.amax).encode

    @property
    def finite(self) -> jax.Array:
        """Whether the tensor held only finite numbers."""
        return jnp.all(magnitude_bits(self.amax) < jnp.uint32(0x7F80_0000))

    @property
    def packed(self) -> jax.Array:
        """uint8, two 4-bit codes a byte along the blocked axis, the even index in the low nibble; others one a byte."""
        return pack(self.codes, axis=self.axis) if _two_a_byte(self.format) else self.codes

    def carrier(self) -> jax.Array:
        """element(code) * block scale as float32: the tensor without the scales that a GEMM applies to its sums."""
        assert self.format.element is not None
        values = decode(self.format.element, self.codes)
        if self.scales is None:
            return values
        return values * self._spread(carried(self._scale_values(), self.decode_scale, self.format.scale.outer))

    def dequantize(self) -> jax.Array:
        """float32 values; NaN everywhere if the tensor held a NaN. Subnormal results are exact on every device."""
        assert self.format.element is not None
        width = self.format.element.mantissa_bits + 1 + self.format.scale.significant_bits
        short, scale = decode(self.format.element, self.codes), self.decode_scale
        if self.format.tensor_scale and not self.format.scale.by_step:
            short = short if self.scales is None else short * self._spread(self._scale_values())
        else:
            scale = step(self._scale_values(), scale) if self.format.tensor_scale else self._scale_values()
        if self.format.tensor_scale:
            scale = jnp.where(jnp.isnan(self.amax), jnp.float32(jnp.nan), scale)
        scale = self._spread(scale) if scale.ndim else scale

        def with_subnormals(short, scale):
            spread = jnp.broadcast_to(magnitude_bits(scale), short.shape)
            bits = multiply_short_bits(magnitude_bits(short), spread, width=max(width, USUAL_BITS))
            exact = copy_sign(float_of_bits(bits), float32_bits(short))
            return jnp.where(jnp.isnan(short * scale), jnp.float32(jnp.nan), exact)

        tiny = jnp.min(magnitude_bits(scale)) < jnp.uint32(TINY_BITS)
        return lax.cond(tiny, with_subnormals, lambda short, scale: short * scale, short, scale)

    def _scale_values(self) -> jax.Array:
        assert self.scales is not None
        return scale_values(self.scales, self.format)

    def _spread(self, scales: jax.Array) -> jax.Array:
        """What blocks have, at each of their elements."""
        view = self.format.view(self.shape, block=self.block, axis=self.axis)
        # [view.shape] -> [shape]
        return view.spread(scales).reshape(self.shape)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["packed", "scales", "amax", "decode_scale"],
    meta_fields=["format", "block", "axis"],
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """A QTensor as it is kept between forward and backward, or sent to other devices: packed codes, scales as uint8."""

    packed: jax.Array
    scales: jax.Array | None
    amax: jax.Array
    decode_scale: jax.Array
    format: BlockFormat
    block: str = "1d"
    axis: int = -1

    @classmethod
    def of(cls, tensor: QTensor) -> "Packed":
        scales = None if tensor.scales is None else lax.bitcast_convert_type(tensor.scales, jnp.uint8)
        return cls(tensor.packed, scales, tensor.amax, tensor.decode_scale, tensor.format, tensor.block, tensor.axis)

    def unpack(self) -> QTensor:
        codes = unpack(self.packed, axis=self.axis) if _two_a_byte(self.format) else self.packed
        dtype = self.format.scale_dtype
        scales = None if self.scales is None or dtype is None else lax.bitcast_convert_type(self.scales, dtype)
        return QTensor(codes, scales, self.amax, self.decode_scale, self.format, self.block, self.axis)


def carried(scales: jax.Array, decode_scale: jax.Array, outer: str) -> jax.Array:
    """What of a block's scales its elements are multiplied by before a GEMM: an outer scale inside the sum as well."""
    return step(scales, decode_scale) if outer == "128" else scales


def scale_values(scales: jax.Array, fmt: BlockFormat) -> jax.Array:
    """float32 values of stored block scales (in the format's scale type, or their uint8 codes)."""
    return fmt.scale.decode(lax.bitcast_convert_type(scales, jnp.uint8))


def _two_a_byte(fmt: BlockFormat) -> bool:
    return fmt.element is not None and fmt.element.stored_bits == 4


def pack(codes: jax.Array, *, axis: int = -1) -> jax.Array:
    """Two 4-bit codes a byte along `axis`, the even index in the low nibble."""
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


def unpack(packed: jax.Array, *, axis: int = -1) -> jax.Array:
    """The codes of `pack`'s result."""
    axis = axis % packed.ndim
    pairs = jnp.stack([packed & jnp.uint8(0xF), packed >> 4], axis=axis + 1)
    # [..., bytes, 2, ...] -> [..., 2 * bytes, ...]
    return pairs.reshape(*packed.shape[:axis], 2 * packed.shape[axis], *packed.shape[axis + 1 :])
