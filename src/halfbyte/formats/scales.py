"""Scales of a tensor and of its blocks, exactly.

NVFP4 has two levels. The tensor's encode scale maps its amax to the top of what an E4M3 scale times an E2M1 element can
hold, 448 * 6 = 2688:

    S = min(2688 / amax, FLT_MAX); 1 if that is zero, or amax is zero or not finite
    decode scale = 1 / S;   S6 = S * float32(1/6)
    block scale s = e4m3(min(block_amax * S6, 448))
    block encode scale = min(1 / (s * (1 / S)), FLT_MAX)

The last line depends on the scale's code alone once S is known, so it is a table of 128 float32 numbers a tensor, made
with exact integer divisions (`exact`) and looked up: no element and no block is ever divided, which is both faster and
right where XLA's division is not.

FP8 has one level, S = max / amax. The MX formats have one power of two a block, which is exact by construction.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .bits import float32_bits, float_of_bits
from .blocks import BlockFormat, ScaleRule
from .elements import E4M3, E8M0_BIAS, E8M0_NAN, Element, decode, decode_e8m0, encode, round_magnitude
from .exact import INFINITY_BITS, LIFT, MAX_BITS, divide_bits, lift, multiply_bits

SMALL_BITS = int(np.float32(2.0**-60).view(np.uint32))  # magnitudes below this are worked on times 2**64
ONE_BITS = 0x3F80_0000
E4M3_CODES = 128  # non-negative ones


class TensorScales(NamedTuple):
    """float32 scalars of one tensor."""

    encode: jax.Array  # S
    decode: jax.Array  # 1 / S


class BlockScales(NamedTuple):
    """One entry a block, compact."""

    codes: jax.Array  # uint8
    values: jax.Array  # float32, the decoded scale
    encode: jax.Array  # float32, what an element is multiplied by
    tensor_decode: jax.Array  # float32 scalar, 1 / S


def _bits(value: float) -> jax.Array:
    return jnp.uint32(np.float32(value).view(np.uint32))


def _encode_scale_bits(amax_bits: jax.Array, top: float) -> jax.Array:
    ratio = jnp.minimum(divide_bits(_bits(top), amax_bits), jnp.uint32(MAX_BITS))
    unusable = (amax_bits == 0) | (amax_bits >= jnp.uint32(INFINITY_BITS)) | (ratio == 0)
    return jnp.where(unusable, jnp.uint32(ONE_BITS), ratio)


def tensor_top(fmt: BlockFormat) -> float:
    """What the tensor's amax is mapped to: 2688 for NVFP4, the element's largest value for FP8."""
    assert fmt.element is not None
    return fmt.element.max * (E4M3.max if fmt.scale is ScaleRule.TWO_LEVEL else 1.0)


@jax.jit
def _two_level(amax_bits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(1/S, S6, encode scale of every E4M3 code) of an NVFP4 tensor.

    Jitted apart so that it is traced once, not once a tensor.
    """
    encode_scale = _encode_scale_bits(amax_bits, 2688.0)
    decode_scale = divide_bits(jnp.uint32(ONE_BITS), encode_scale)
    sixth = multiply_bits(encode_scale, _bits(1 / 6))
    every_scale = decode(E4M3, jnp.arange(E4M3_CODES, dtype=jnp.uint8) % jnp.uint8(127))
    reach = multiply_bits(float32_bits(every_scale), jnp.broadcast_to(decode_scale, (E4M3_CODES,)))
    table = jnp.minimum(divide_bits(jnp.uint32(ONE_BITS), reach), jnp.uint32(MAX_BITS))
    return float_of_bits(decode_scale), float_of_bits(sixth), float_of_bits(table)


def tensor_scales(amax: jax.Array, fmt: BlockFormat) -> TensorScales:
    """S and 1/S of a tensor with this amax.

    Both 1 for a format without a tensor scale, and where amax is zero, infinite or NaN.
    """
    if not fmt.tensor_scale:
        return TensorScales(jnp.ones_like(amax), jnp.ones_like(amax))
    encode_scale = _encode_scale_bits(float32_bits(amax), tensor_top(fmt))
    return TensorScales(float_of_bits(encode_scale), float_of_bits(divide_bits(jnp.uint32(ONE_BITS), encode_scale)))


def block_scales(block_bits: jax.Array, amax_bits: jax.Array, fmt: BlockFormat) -> BlockScales:
    """Scales of blocks whose largest magnitudes have these bits, in a tensor whose amax has those."""
    assert fmt.element is not None
    if fmt.scale is ScaleRule.NONE:
        tensor = tensor_scales(float_of_bits(amax_bits), fmt)
        blank, ones = jnp.zeros(block_bits.shape, jnp.uint8), jnp.ones(block_bits.shape, jnp.float32)
        return BlockScales(blank, ones, jnp.broadcast_to(tensor.encode, block_bits.shape), tensor.decode)
    if fmt.scale is ScaleRule.TWO_LEVEL:
        return _two_level_blocks(block_bits, amax_bits)
    return _power_blocks(block_bits, fmt.element, round_up=fmt.scale is ScaleRule.POWER_UP)


def _two_level_blocks(block_bits: jax.Array, amax_bits: jax.Array) -> BlockScales:
    tensor_decode, sixth, table = _two_level(amax_bits)
    plain = float_of_bits(block_bits) * sixth
    small = lift(block_bits) * (sixth * jnp.float32(2.0**-LIFT))
    scaled = jnp.where(block_bits < jnp.uint32(SMALL_BITS), small, plain)
    scaled = jnp.where(scaled <= jnp.float32(E4M3.max), scaled, jnp.float32(E4M3.max))  # infinity and NaN saturate too
    values = round_magnitude(E4M3, scaled)
    codes = encode(E4M3, values)
    return BlockScales(codes, values, table.at[codes].get(mode="promise_in_bounds"), tensor_decode)


def _power_blocks(block_bits: jax.Array, element: Element, *, round_up: bool) -> BlockScales:
    exponent = (block_bits >> 23).astype(jnp.int32) - element.max_exponent  # biased by 127
    if round_up:
        top_fraction = int(np.float32(element.max / 2.0**element.max_exponent).view(np.uint32)) & 0x7F_FFFF
        exponent = exponent + (block_bits & jnp.uint32(0x7F_FFFF) > jnp.uint32(top_fraction)).astype(jnp.int32)
    code = jnp.clip(exponent, 0, 254)
    broken = block_bits >= jnp.uint32(INFINITY_BITS)
    codes = jnp.where(broken, jnp.int32(E8M0_NAN), code).astype(jnp.uint8)
    inverse = float_of_bits((jnp.int32(2 * E8M0_BIAS) - code).astype(jnp.uint32) << 23)
    return BlockScales(codes, decode_e8m0(codes), inverse, jnp.float32(1))
