"""Operands of a GEMM, and the reference quantization of a tensor into one.

An operand is a matrix of values that the hardware multiplies exactly, and one float32 `decode_scale` per tensor or per
row, which multiplies the GEMM's float32 sums:

    y = (left . right) * (decode_scale_left * decode_scale_right)

| type                 | holds                                                    | written by            |
|----------------------|----------------------------------------------------------|-----------------------|
| `BlockDequantized`   | element x block scale, exact in bfloat16                 | kernels; bf16 tensors |
| `QuantizedOperand`   | the same values, and their codes and scales              | the reference         |
| `Fp8Operand`         | 8-bit codes, in the tensor's order, transposed, or both  | FP8 kernels           |
| `BlockScaledOperand` | packed codes with the contracted dim last, tiled scales  | native kernels        |
"""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from halfbyte.formats import (
    BlockFormat,
    HashedKey,
    Key,
    PackedQTensor,
    QTensor,
    amax_of,
    amax_per_outer_group,
    encode_qtensor,
    hadamard_transform,
    hashed_key_words,
    quantize_to_grid,
    random_bytes,
    unpack_nibbles,
    unswizzle_scales,
)
from halfbyte.formats.elements import decode
from halfbyte.formats.exact_float32 import round_bfloat16
from halfbyte.formats.hadamard import HADAMARD_SIZE, random_signs
from halfbyte.formats.qtensor import decode_block_scales
from halfbyte.kernels.mosaic_launch import StackSlice
from halfbyte.ops.linear_sharding import DimAxes, axes_in, global_amax, global_shape, shard_offsets
from halfbyte.recipes import OperandPolicy
from halfbyte.renamed import old_names


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array", "decode_scale", "scale_vector"], meta_fields=["policy"]
)
@dataclasses.dataclass(frozen=True)
class BlockDequantized:
    """`array` float32 or bfloat16; `decode_scale` float32, None for 1.

    `scale_vector` holds the tensor's scales as GPU kernels read them; None if no kernel wrote this operand.
    """

    array: jax.Array
    decode_scale: jax.Array | None
    policy: OperandPolicy
    scale_vector: jax.Array | None = None

    def values(self) -> jax.Array:
        """Returns the values that are multiplied."""
        return self.array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array", "decode_scale", "codes"], meta_fields=["policy"]
)
@dataclasses.dataclass(frozen=True)
class QuantizedOperand:
    """Block-dequantized values and their codes; XLA does not compute an unused one."""

    array: jax.Array
    decode_scale: jax.Array
    policy: OperandPolicy
    codes: QTensor

    scale_vector: ClassVar[None] = None

    def values(self) -> jax.Array:
        """Returns the values that are multiplied."""
        return self.array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["as_stored", "transposed", "decode_scale"], meta_fields=["policy"]
)
@dataclasses.dataclass(frozen=True)
class Fp8Operand:
    """float8 codes under one scale: `as_stored` in the tensor's order, `transposed` as a matrix [features, tokens].

    One of them may be None. An 8-bit GEMM needs the contracted dim last.
    """

    as_stored: jax.Array | None
    transposed: jax.Array | None
    decode_scale: jax.Array
    policy: OperandPolicy

    def values(self) -> jax.Array:
        """Returns the values of the codes, in the tensor's order."""
        if self.as_stored is not None:
            return self.as_stored
        assert self.transposed is not None, "8-bit codes come in at least one order"
        return self.transposed.T  # [features, tokens] -> [tokens, features]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "decode_scale"],
    meta_fields=["policy", "shape", "axis"],
)
@dataclasses.dataclass(frozen=True)
class BlockScaledOperand:
    """Codes and scales of a tensor of `shape` for block-scaled tensor cores.

    It is contracted along its features (`axis` -1) or along all its other dims (-2). `codes`: uint8 [rows, k], two
    4-bit codes per byte, the even index in the low nibble. `scales`: uint8, flat, as `formats.swizzle_scales` orders
    them. The VJP saves it unchanged.
    """

    codes: jax.Array
    scales: jax.Array
    decode_scale: jax.Array | None
    policy: OperandPolicy
    shape: tuple[int, ...]
    axis: int

    @property
    def rows(self) -> tuple[int, ...]:
        """Returns the dims that are not contracted."""
        return self.shape[:-1] if self.axis == -1 else self.shape[-1:]

    @property
    def k_size(self) -> int:
        """Returns k: the number of elements per row."""
        return math.prod(self.shape) // math.prod(self.rows)

    def values(self) -> jax.Array:
        """Returns the values that are multiplied, in the tensor's order."""
        fmt, rows = self.policy.format, math.prod(self.rows)
        assert fmt.element is not None and fmt.block is not None
        codes = unpack_nibbles(self.codes) if fmt.element.bits == 4 else self.codes
        scales = unswizzle_scales(self.scales, rows, self.k_size // fmt.block)
        # [rows, k] -> the tensor's own order
        matrix = decode(fmt.element, codes) * jnp.repeat(decode_block_scales(scales, fmt), fmt.block, axis=-1)
        return (matrix if self.axis == -1 else matrix.T).reshape(self.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightScalesResidual:
    """What a kernel needs besides the master weight to requantize it: the scale vector of eight float32."""

    vector: jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array", "alpha"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class DeferredAlpha:
    """bf16 GEMM output whose alpha, float32, has not been applied. The consumer computes round_bf16(array * alpha)."""

    array: jax.Array
    alpha: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


@functools.partial(jax.tree_util.register_dataclass, data_fields=["first", "remainder"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TwoTermOperand:
    """x as two operands: its quantization, and that of the quantization error. Their products are added."""

    first: "Operand"
    remainder: "Operand"


Operand = BlockDequantized | QuantizedOperand | Fp8Operand | BlockScaledOperand
# What the VJP saves: packed codes, 8-bit codes, operands of block-scaled tensor cores, or the bfloat16 tensor.
Residual = PackedQTensor | Fp8Operand | BlockScaledOperand | jax.Array
_Tree = TypeVar("_Tree")
SAVED_NAME = "quantized"  # the checkpoint name of packed residuals, for remat policies that save them
# The checkpoint name of a tensor's scales or a row's statistics: a few bytes that save another read of the tensor.
SCALES_NAME = "scales"


def operand_decode_scale(tensor: QTensor | PackedQTensor) -> jax.Array:
    """Returns this tensor's share of a GEMM's alpha: its decode scale, float32, NaN if its amax is not finite.

    Per-row scales have the shape of the dims that are not contracted. Per-128 scales vary along the contraction and are
    part of the values: it returns 1.
    """
    scale = jnp.where(jnp.isfinite(tensor.amax), tensor.decode_scale, jnp.float32(jnp.nan))
    outer = tensor.format.scale.outer_granularity
    if outer == "tensor":
        return scale
    if outer == "row":
        return scale[..., 0] if tensor.axis == -1 else scale.reshape(-1, scale.shape[-1])[0]
    return jnp.where(jnp.all(jnp.isfinite(scale)), jnp.float32(1), jnp.float32(jnp.nan))


def key_words_arg(key: Key | None) -> jax.Array | StackSlice | None:
    """Returns the key as kernels read it, uint32 [2]: a slice of the stacked words of a `HashedKey`; None for None."""
    if isinstance(key, HashedKey):
        return StackSlice(key.words, key.index)
    return None if key is None else hashed_key_words(key)


def round_to_bfloat16(x: jax.Array) -> jax.Array:
    """Returns x as bfloat16 by a rounding that XLA keeps; it drops a cast to bfloat16 and back within one program."""
    return x if x.dtype == jnp.bfloat16 else round_bfloat16(x.astype(jnp.float32)).astype(jnp.bfloat16)


def round_to_dtype(x: jax.Array) -> jax.Array:
    """Rounds x to its dtype with `reduce_precision`, which XLA keeps.

    XLA may compute a bfloat16 value with excess precision on one mesh and not on another. Operands are quantized from
    the rounded value, so that codes do not depend on the mesh.
    """
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant) if x.dtype == jnp.bfloat16 else x


def round_f32_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns float32 x in `dtype`; the rounding to bfloat16 is one that XLA keeps."""
    return (round_bfloat16(x) if dtype == jnp.bfloat16 else x).astype(dtype)


def add_and_round(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a + b, rounded once to their dtype by a rounding that XLA keeps.

    With excess precision allowed XLA would skip the rounding on one mesh and not on another, and a later stochastic
    rounding would amplify the difference.
    """
    return round_f32_to(a.astype(jnp.float32) + b.astype(jnp.float32), a.dtype)


def quantize_operand(
    x: jax.Array, policy: OperandPolicy, *, axis: int, key: Key | None, cut: DimAxes = (),
    signs: Key | None = None, amax: jax.Array | None = None,
) -> BlockDequantized | QuantizedOperand:  # fmt: skip
    """Quantizes x under `policy`, blocked and transformed along `axis` (-1 or -2), the axis that the GEMM contracts.

    It is the reference for every backend. `cut`: the mesh axes over which the dims of the tensor are sharded; x is the
    local shard. `signs`: the key of the random Hadamard signs that both operands of the GEMM share. An `amax` sets the
    tensor's scale, and larger values saturate; the `amax` of the returned codes is x's own.
    """
    if not policy.format.quantized and not policy.hadamard:
        return BlockDequantized(round_to_bfloat16(x), None, policy)  # the caller's array, so that it is saved only once
    return _quantize_grid(x, policy, axis, key, cut, signs, amax)


def check_rounding_keys(policy: OperandPolicy, key: Key | None, signs: Key | None) -> None:
    """Raises ValueError if the policy draws random bits or signs and their key is None."""
    if (policy.uses_random_bits and key is None) or (policy.uses_random_signs and signs is None):
        raise ValueError(
            "this recipe rounds stochastically and needs a key; pass key=..., or use a recipe "
            "without stochastic rounding (nvfp4_no_sr)"
        )


@jax.named_scope("quantize")  # for profiles; the mere cast to bfloat16 above is not named
def _quantize_grid(
    x: jax.Array, policy: OperandPolicy, axis: int, key: Key | None, cut: DimAxes, signs: Key | None,
    given: jax.Array | None,
) -> BlockDequantized | QuantizedOperand:  # fmt: skip
    check_rounding_keys(policy, key, signs)
    x = round_to_dtype(round_to_bfloat16(x) if policy.source == "bfloat16" else x)
    if policy.hadamard:
        x = hadamard_transform(x, axis=axis, **_transform(policy, signs))
    if not policy.format.quantized:
        return BlockDequantized(round_to_bfloat16(x), None, policy)
    noise = _random_bytes(key, x.shape, cut) if policy.uses_random_bits and key is not None else None
    amax = _global_amax(x, policy.format, axis, cut) if axes_in(cut) else None
    default_rounding = "rne" if noise is None else "stochastic"
    rounding = {} if policy.rounding == default_rounding else {"rounding": policy.rounding}
    grid_amax = amax if given is None else given
    grid = quantize_to_grid(x, policy.format, block=policy.block, axis=axis, noise=noise, amax=grid_amax, **rounding)
    codes = encode_qtensor(grid, policy.format, block=policy.block, axis=axis)
    if given is not None:
        codes = dataclasses.replace(codes, amax=amax_of(x) if amax is None else amax)
    return QuantizedOperand(grid.dequantize_blocks(), operand_decode_scale(codes), policy, codes)


def _transform(policy: OperandPolicy, signs: Key | None) -> dict[str, Any]:
    """Returns the arguments of `hadamard_transform` that differ from its defaults: size, and signs of this step."""
    size = {} if policy.hadamard_size == HADAMARD_SIZE else {"points": policy.hadamard_size}
    random = (
        {"signs": random_signs(signs, policy.hadamard_size)} if policy.uses_random_signs and signs is not None else {}
    )
    return size | random


def _random_bytes(key: Key, shape: tuple[int, ...], cut: DimAxes) -> jax.Array:
    """Returns random bytes for x, by its offset in the global tensor."""
    if not axes_in(cut):
        return random_bytes(key, shape)
    return random_bytes(
        key, shape, offset=shard_offsets(shape, cut), global_shape=global_shape(shape, cut), aligned=True
    )


def _global_amax(x: jax.Array, fmt: BlockFormat, axis: int, cut: DimAxes) -> jax.Array:
    """Returns the amax of the global tensor, per global row, or per 128 elements, all of which are on one device.

    Float32 bits are reduced as integers, which keeps infinity and NaN.
    """
    amax = amax_of(x) if fmt.scale.outer_granularity == "tensor" else amax_per_outer_group(x, fmt, axis=axis)
    dim_axes = {"tensor": cut, "row": cut[-1:] if axis == -1 else cut[:-1], "128": ()}[fmt.scale.outer_granularity]
    (bits,) = global_amax([lax.bitcast_convert_type(amax, jnp.int32)], dim_axes)
    return lax.bitcast_convert_type(bits, jnp.float32)


def dequantize_operand(made: Operand | PackedQTensor) -> jax.Array:
    """Returns the values of an operand or of packed codes, float32; NaN where a GEMM over it would give NaN."""
    if isinstance(made, QuantizedOperand | PackedQTensor):
        return dequantize_codes(made.codes if isinstance(made, QuantizedOperand) else made.unpack())
    values = made.values().astype(jnp.float32)
    return values if made.decode_scale is None else values * made.decode_scale


def dequantize_codes(codes: QTensor) -> jax.Array:
    """Returns the values of codes, as the source of another operand: float32, NaN if the amax is not finite."""
    return jnp.where(codes.finite, codes.dequantize(), jnp.float32(jnp.nan))


def quantization_error(x: jax.Array, operand: Operand) -> jax.Array:
    """Returns x minus the values of its operand, which are rounded to bfloat16 first; in x's dtype.

    All roundings are ones that XLA keeps, so the result does not depend on the mesh.
    """
    scale = jnp.float32(1) if operand.decode_scale is None else operand.decode_scale
    scale = scale[..., None] if scale.ndim else scale  # [tokens...] -> [tokens..., 1]
    return add_and_round(x, -round_bfloat16(operand.values().astype(jnp.float32) * scale).astype(x.dtype))


def to_residual(operand: Operand) -> Residual:
    """Returns the operand as the VJP saves it, named for remat policies (`SAVED_NAME`): packed codes, if quantized.

    Under NVFP4 these have 4.5 bits per element. An unquantized operand is the caller's own array, so that linears with
    one input share the residual.
    """
    if isinstance(operand, BlockDequantized):
        assert not operand.policy.format.quantized, "a pass that makes carriers packs what is to be kept itself"
        return operand.array
    return tag_residual(PackedQTensor.from_qtensor(operand.codes) if isinstance(operand, QuantizedOperand) else operand)


@jax.named_scope("quantize")
def tag_residual(kept: _Tree, name: str = SAVED_NAME) -> _Tree:
    """Names `kept` for remat policies that save it."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, name), kept)


def from_residual(kept: Residual, policy: OperandPolicy) -> Operand:
    """Inverts `to_residual`, bit for bit."""
    if isinstance(kept, Fp8Operand | BlockScaledOperand):
        return kept
    if not isinstance(kept, PackedQTensor):
        return BlockDequantized(kept, None, policy)
    codes = kept.unpack()
    return QuantizedOperand(codes.dequantize_blocks(), operand_decode_scale(kept), policy, codes)


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
