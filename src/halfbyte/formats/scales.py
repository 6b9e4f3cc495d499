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

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .bits import float32_bits, float_of_bits
from .blocks import BlockFormat, ScaleRule
from .elements import E4M3, E8M0_BIAS, E8M0_NAN, Element, decode_e8m0, round_nearest
from .exact import INFINITY_BITS, MAX_BITS, divide_bits, multiply_short_bits, reduce_factor, times

# float32 bits of the non-negative E4M3 codes; the last, a NaN, is no scale and stands as 0.
E4M3_BITS = np.append(np.arange(127, dtype=np.uint8).view(E4M3.dtype).astype(np.float32), np.float32(0)).view(np.uint32)
LANES = E4M3_BITS.size + 2


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


def tensor_top(fmt: BlockFormat) -> float:
    """What the tensor's amax is mapped to: 2688 for NVFP4, the element's largest value for FP8."""
    assert fmt.element is not None
    return fmt.element.max * (E4M3.max if fmt.scale is ScaleRule.TWO_LEVEL else 1.0)


def _encode_scale_bits(amax_bits: jax.Array, top: float) -> jax.Array:
    return jnp.minimum(divide_bits(top, amax_bits), jnp.uint32(MAX_BITS))


def _once(compute: Callable[[jax.Array], jax.Array], unscaled: np.ndarray, amax_bits: jax.Array) -> jax.Array:
    """compute(amax_bits), or `unscaled` for an amax that gives no scale: zero, infinity, NaN.

    On a CPU it is computed in a loop of one turn: XLA copies plain scalar arithmetic into every consumer, and would do
    it again for each block. A loop it leaves whole.
    """
    usable = (amax_bits != 0) & (amax_bits < jnp.uint32(INFINITY_BITS))
    start = jnp.asarray(unscaled)

    def in_a_loop(bits: jax.Array, usable: jax.Array) -> jax.Array:
        turns = usable.astype(jnp.int32)
        # A start that depends on the tensor varies over a mesh as the result does, which shard_map asks for.
        return lax.fori_loop(0, turns, lambda _, made: compute(bits), jnp.where(usable, jnp.zeros_like(start), start))

    def plain(bits: jax.Array, usable: jax.Array) -> jax.Array:
        return lax.optimization_barrier(jnp.where(usable, compute(bits), start))

    return lax.platform_dependent(amax_bits, usable, cpu=in_a_loop, default=plain)


def _two_level_lanes(amax_bits: jax.Array) -> jax.Array:
    """float32 [130]: the encode scale of every E4M3 code, then 1/S, then S6."""
    encode_scale = _encode_scale_bits(amax_bits, 2688.0)
    decode_scale = divide_bits(1.0, encode_scale)
    reach = multiply_short_bits(jnp.asarray(E4M3_BITS), jnp.broadcast_to(decode_scale, E4M3_BITS.shape))
    table = jnp.minimum(divide_bits(1.0, reach), jnp.uint32(MAX_BITS))
    sixth = float32_bits(float_of_bits(encode_scale) * jnp.float32(1 / 6))
    # One array, not three: what two results share would be compiled twice.
    lane, padded = jnp.arange(LANES), jnp.pad(table, (0, 2))
    return float_of_bits(jnp.where(lane == LANES - 2, decode_scale, jnp.where(lane == LANES - 1, sixth, padded)))


@jax.jit
def _two_level(amax_bits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(1/S, S6, float32 [128] encode scales) of an NVFP4 tensor. Jitted apart so that it is traced once a program."""
    with np.errstate(divide="ignore"):
        reciprocals = np.minimum(np.float32(1) / E4M3_BITS.view(np.float32), np.finfo(np.float32).max)
    lanes = _once(_two_level_lanes, np.append(reciprocals, np.array([1, 1 / 6], np.float32)), amax_bits)
    return lanes[-2], lanes[-1], lanes[:-2]


@functools.partial(jax.jit, static_argnums=1)
def _one_level(amax_bits: jax.Array, top: float) -> tuple[jax.Array, jax.Array]:
    """(S, 1/S) for a tensor's amax that is to become `top`."""

    def compute(amax_bits: jax.Array) -> jax.Array:
        encode_scale = _encode_scale_bits(amax_bits, top)
        return float_of_bits(jnp.where(jnp.arange(2) == 0, encode_scale, divide_bits(1.0, encode_scale)))

    lanes = _once(compute, np.ones(2, np.float32), amax_bits)
    return lanes[0], lanes[1]


def tensor_scales(amax: jax.Array, fmt: BlockFormat) -> TensorScales:
    """S and 1/S of a tensor with this amax.

    Both 1 for a format without a tensor scale, and where amax is zero, infinite or NaN.
    """
    if not fmt.tensor_scale:
        return TensorScales(jnp.ones_like(amax), jnp.ones_like(amax))
    return TensorScales(*_one_level(float32_bits(amax), tensor_top(fmt)))


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
    scaled = times(block_bits, sixth, reduce_factor(sixth))
    scaled = jnp.where(scaled <= jnp.float32(E4M3.max), scaled, jnp.float32(E4M3.max))  # infinity and NaN saturate too
    values, codes = round_nearest(E4M3, scaled)
    encode_scale = table.at[codes].get(mode="promise_in_bounds")
    return BlockScales(codes.astype(jnp.uint8), values, encode_scale, tensor_decode)


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
