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
    """Codes and scales of a tensor of `shape` for a block-scaled unit.

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
        """The dims that are not contracted."""
        return self.shape[:-1] if self.axis == -1 else self.shape[-1:]

    @property
    def k_size(self) -> int:
        """How many elements a row has."""
        return math.prod(self.shape) // math.prod(self.rows)

    def values(self) -> jax.Array:
        """Returns the values that are multiplied, in the tensor's order."""
        fmt, rows = self.policy.format, math.prod(self.rows)
        assert fmt.element is not None and fmt.block is not None
        codes = unpack_nibbles(self.codes) if fmt.element.bits == 4 else self.codes
        scales = unswizzle_scales(self.scales, rows, self.k_size // fmt.block)
        # [rows, contraction] -> the tensor's own order
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
# What the VJP saves: packed codes, 8-bit codes, operands of block-scaled units, or the bfloat16 tensor.
Residual = PackedQTensor | Fp8Operand | BlockScaledOperand | jax.Array
_Tree = TypeVar("_Tree")
SAVED_NAME = "quantized"  # the checkpoint name of packed residuals: a remat policy may save them by it
SCALES_NAME = (
    "scales"  # of the scales of a tensor or the statistics of a row: a few bytes that spare a pass over the tensor
)


def operand_decode_scale(tensor: QTensor | PackedQTensor) -> jax.Array:
    """The factor that a GEMM's result owes this tensor: its decode scale, NaN if its amax is not finite. One for each
    row where rows have scales of their own, [dims that are not summed]; 1 where the scale is inside the sum.
    """
    factor = jnp.where(jnp.isfinite(tensor.amax), tensor.decode_scale, jnp.float32(jnp.nan))
    outer = tensor.format.scale.outer_granularity
    if outer == "tensor":
        return factor
    if outer == "row":
        return factor[..., 0] if tensor.axis == -1 else factor.reshape(-1, factor.shape[-1])[0]
    return jnp.where(jnp.all(jnp.isfinite(factor)), jnp.float32(1), jnp.float32(jnp.nan))


def key_words_arg(key: Key | None) -> jax.Array | StackSlice | None:
    """uint32 [2]: the key as kernels take it, where it lies if it was mixed with others; None stays None."""
    if isinstance(key, HashedKey):
        return StackSlice(key.words, key.index)
    return None if key is None else hashed_key_words(key)


def round_to_bfloat16(x: jax.Array) -> jax.Array:
    """x as bfloat16, by a rounding that survives: XLA drops a cast to bfloat16 and back within one program."""
    return x if x.dtype == jnp.bfloat16 else round_bfloat16(x.astype(jnp.float32)).astype(jnp.bfloat16)


def round_to_dtype(x: jax.Array) -> jax.Array:
    """x, rounded to its dtype for good. A compiler may carry a bfloat16 number on with excess precision, on one mesh
    and not on another; what an operand is made of must be the number itself, or codes would depend on the mesh.
    """
    kind = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant) if x.dtype == jnp.bfloat16 else x


def round_f32_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """float32 x in `dtype`, to bfloat16 by a rounding that the compiler keeps."""
    return (round_bfloat16(x) if dtype == jnp.bfloat16 else x).astype(dtype)


def add_and_round(a: jax.Array, b: jax.Array) -> jax.Array:
    """a + b, rounded to their dtype for good: a compiler that may keep excess precision would skip the rounding on one
    mesh and not on another, and a stochastic rounding further on would make much of the difference.
    """
    return round_f32_to(a.astype(jnp.float32) + b.astype(jnp.float32), a.dtype)


def quantize_operand(
    x: jax.Array, policy: OperandPolicy, *, axis: int, key: Key | None, cut: DimAxes = (),
    signs: Key | None = None, amax: jax.Array | None = None,
) -> BlockDequantized | QuantizedOperand:  # fmt: skip
    """x under `policy`, blocked and transformed along `axis` (-1 or -2), the axis that the GEMM contracts.

    The definition for every backend. Of a tensor that is `cut` over a mesh, x is the local part. `signs` is the key of
    the signs that both operands of the GEMM share, where they are drawn. A given `amax` makes the tensor's scale, and
    larger numbers saturate; what the operand's codes have as theirs is x's own all the same.
    """
    if not policy.format.quantized and not policy.hadamard:
        return BlockDequantized(round_to_bfloat16(x), None, policy)  # the caller's own array, which is kept once
    return _quantize_grid(x, policy, axis, key, cut, signs, amax)


def check_rounding_keys(policy: OperandPolicy, key: Key | None, signs: Key | None) -> None:
    """ValueError where what an operand draws has no key."""
    if (policy.uses_random_bits and key is None) or (policy.uses_random_signs and signs is None):
        raise ValueError(
            "this recipe rounds stochastically and needs a key; pass key=..., or use a recipe "
            "without stochastic rounding (nvfp4_no_sr)"
        )


@jax.named_scope("quantize")  # a name for profiles: a cast to bfloat16 alone has none
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
    usual = "rne" if noise is None else "stochastic"
    how = {} if policy.rounding == usual else {"rounding": policy.rounding}
    scaled_by = amax if given is None else given
    grid = quantize_to_grid(x, policy.format, block=policy.block, axis=axis, noise=noise, amax=scaled_by, **how)
    codes = encode_qtensor(grid, policy.format, block=policy.block, axis=axis)
    if given is not None:
        codes = dataclasses.replace(codes, amax=amax_of(x) if amax is None else amax)
    return QuantizedOperand(grid.dequantize_blocks(), operand_decode_scale(codes), policy, codes)


def _transform(policy: OperandPolicy, signs: Key | None) -> dict[str, Any]:
    """How its Hadamard transform differs from the published one: in size, or by signs of this step."""
    size = {} if policy.hadamard_size == HADAMARD_SIZE else {"points": policy.hadamard_size}
    drawn = (
        {"signs": random_signs(signs, policy.hadamard_size)} if policy.uses_random_signs and signs is not None else {}
    )
    return size | drawn


def _random_bytes(key: Key, shape: tuple[int, ...], cut: DimAxes) -> jax.Array:
    """Random bytes for x: those of its place in the whole tensor."""
    if not axes_in(cut):
        return random_bytes(key, shape)
    return random_bytes(
        key, shape, offset=shard_offsets(shape, cut), global_shape=global_shape(shape, cut), aligned=True
    )


def _global_amax(x: jax.Array, fmt: BlockFormat, axis: int, cut: DimAxes) -> jax.Array:
    """The amax of the whole tensor, by integers, which keep infinity and NaN; or of whole rows, or of 128 neighbours,
    which lie on one device.
    """
    found = amax_of(x) if fmt.scale.outer_granularity == "tensor" else amax_per_outer_group(x, fmt, axis=axis)
    rows = {"tensor": cut, "row": cut[-1:] if axis == -1 else cut[:-1], "128": ()}[fmt.scale.outer_granularity]
    (bits,) = global_amax([lax.bitcast_convert_type(found, jnp.int32)], rows)
    return lax.bitcast_convert_type(bits, jnp.float32)


def dequantize_operand(made: Operand | PackedQTensor) -> jax.Array:
    """The numbers that an operand or packed codes stand for, float32; NaN where a GEMM over it would give NaN."""
    if isinstance(made, QuantizedOperand | PackedQTensor):
        return dequantize_codes(made.codes if isinstance(made, QuantizedOperand) else made.unpack())
    numbers = made.values().astype(jnp.float32)
    return numbers if made.decode_scale is None else numbers * made.decode_scale


def dequantize_codes(codes: QTensor) -> jax.Array:
    """What a tensor's codes stand for, as the source of another operand, float32; NaN if its amax is not finite."""
    return jnp.where(codes.finite, codes.dequantize(), jnp.float32(jnp.nan))


def quantization_error(x: jax.Array, operand: Operand) -> jax.Array:
    """x minus the numbers that its operand stands for, these rounded to bfloat16: in x's dtype, the same wherever it is
    computed.
    """
    factor = jnp.float32(1) if operand.decode_scale is None else operand.decode_scale
    factor = factor[..., None] if factor.ndim else factor  # of each token
    return add_and_round(x, -round_bfloat16(operand.values().astype(jnp.float32) * factor).astype(x.dtype))


def to_residual(operand: Operand) -> Residual:
    """The operand as it is kept for the backward pass: 4.5 bits a number under NVFP4; packed codes under the name by
    which a remat policy may save them.

    A tensor that is kept as it came stays the caller's own array, so that linears with one input share the residual.
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
