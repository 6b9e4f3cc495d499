"""What a GEMM consumes, and how a tensor becomes it.

Every operand stands for a matrix of numbers that the hardware multiplies exactly, and one float32 `factor` for the
whole tensor, or for each of its rows, which multiplies the GEMM's float32 sums:

    y = (left . right) * (factor_left * factor_right)

| type        | holds                                                    | made by                       |
|-------------|----------------------------------------------------------|-------------------------------|
| `Carrier`   | element x block scale, exact in bfloat16                 | kernels; bf16 tensors         |
| `Quantized` | the same numbers, and the codes and scales they stand for | the definition                |
| `EightBit`  | 8-bit codes, as the tensor lies, transposed, or both     | FP8 kernels                   |
| `BlockScaled` | packed codes with the contraction last, scales in tiles | native kernels                |
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from halfbyte.formats import (
    BlockFormat,
    Key,
    MixedKey,
    Packed,
    QTensor,
    amax_of,
    mixed_words,
    outer_amax,
    random_bytes,
    store,
    to_grid,
    transform_runs,
    unpack,
    untile_scales,
)
from halfbyte.formats.bits import round_bfloat16
from halfbyte.formats.elements import decode
from halfbyte.formats.hadamard import SIZE, fresh_signs
from halfbyte.formats.qtensor import scale_values
from halfbyte.kernels.stacks import Layer
from halfbyte.ops.shards import Cut, axes_of, largest, offsets, whole_shape
from halfbyte.recipe import OperandPolicy


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array", "factor", "vector"], meta_fields=["policy"])
@dataclasses.dataclass(frozen=True)
class Carrier:
    """`array` float32 or bfloat16; `factor` float32 scalar, None for 1.

    `vector` is the tensor's scales as GPU kernels pass them on, where a kernel made this operand.
    """

    array: jax.Array
    factor: jax.Array | None
    policy: OperandPolicy
    vector: jax.Array | None = None

    def values(self) -> jax.Array:
        """The numbers that are multiplied."""
        return self.array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array", "factor", "codes"], meta_fields=["policy"])
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A carrier and its codes; what nobody reads of the two is not computed."""

    array: jax.Array
    factor: jax.Array
    policy: OperandPolicy
    codes: QTensor

    vector: ClassVar[None] = None

    def values(self) -> jax.Array:
        """The numbers that are multiplied."""
        return self.array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["rows", "transposed", "factor"], meta_fields=["policy"]
)
@dataclasses.dataclass(frozen=True)
class EightBit:
    """float8 codes under one scale: `rows` as the tensor lies, `transposed` as a matrix [features, tokens]; one may be
    None. An 8-bit GEMM wants the contraction last.
    """

    rows: jax.Array | None
    transposed: jax.Array | None
    factor: jax.Array
    policy: OperandPolicy

    def values(self) -> jax.Array:
        """The codes' own numbers, as the tensor lies."""
        if self.rows is not None:
            return self.rows
        assert self.transposed is not None, "8-bit codes come in at least one order"
        return self.transposed.T  # [features, tokens] -> [tokens, features]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "factor"],
    meta_fields=["policy", "shape", "axis"],
)
@dataclasses.dataclass(frozen=True)
class BlockScaled:
    """What a block-scaled unit reads of a tensor of `shape`, contracted along its features (`axis` -1) or along all
    its other dims (-2).

    `codes` uint8 [rows, contraction], two 4-bit ones a byte, the even index in the low nibble; `scales` uint8, those of
    a row's blocks, flat, as `formats.tile_scales` tiles them. It is kept for the backward pass as it is.
    """

    codes: jax.Array
    scales: jax.Array
    factor: jax.Array | None
    policy: OperandPolicy
    shape: tuple[int, ...]
    axis: int

    @property
    def rows(self) -> tuple[int, ...]:
        """The dims that are not contracted."""
        return self.shape[:-1] if self.axis == -1 else self.shape[-1:]

    @property
    def contraction(self) -> int:
        """How many numbers a row has."""
        return math.prod(self.shape) // math.prod(self.rows)

    def values(self) -> jax.Array:
        """The numbers that are multiplied, as the tensor lies."""
        fmt, rows = self.policy.format, math.prod(self.rows)
        assert fmt.element is not None and fmt.block is not None
        codes = unpack(self.codes) if fmt.element.bits == 4 else self.codes
        scales = untile_scales(self.scales, rows, self.contraction // fmt.block)
        # [rows, contraction] -> the tensor's own order
        matrix = decode(fmt.element, codes) * jnp.repeat(scale_values(scales, fmt), fmt.block, axis=-1)
        return (matrix if self.axis == -1 else matrix.T).reshape(self.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightScales:
    """What a kernel needs beside the master weight to make its carrier again: the tensor's scales, eight numbers."""

    vector: jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array", "factor"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Owed:
    """A GEMM's bfloat16 result, whose reader is to multiply it by `factor`, float32, and to round the product."""

    array: jax.Array
    factor: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


@functools.partial(jax.tree_util.register_dataclass, data_fields=["first", "rest"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class InTwo:
    """x as two operands, the second of what the first's rounding has left over; their products are added."""

    first: "Operand"
    rest: "Operand"


Operand = Carrier | Quantized | EightBit | BlockScaled
# Until the backward pass: packed codes, 8-bit codes, what a block-scaled unit reads, the bfloat16 tensor itself.
Kept = Packed | EightBit | BlockScaled | jax.Array
_Tree = TypeVar("_Tree")
SAVED = "quantized"  # the checkpoint name of packed residuals: a remat policy may save them by it
SCALES = "scales"  # of the scales of a tensor or the statistics of a row: a few bytes that spare a pass over the tensor


def gemm_factor(tensor: QTensor | Packed) -> jax.Array:
    """The factor that a GEMM's result owes this tensor: its decode scale, NaN if its amax is not finite. One for each
    row where rows have scales of their own, [dims that are not summed]; 1 where the scale is inside the sum.
    """
    factor = jnp.where(jnp.isfinite(tensor.amax), tensor.decode_scale, jnp.float32(jnp.nan))
    outer = tensor.format.scale.outer
    if outer == "tensor":
        return factor
    if outer == "row":
        return factor[..., 0] if tensor.axis == -1 else factor.reshape(-1, factor.shape[-1])[0]
    return jnp.where(jnp.all(jnp.isfinite(factor)), jnp.float32(1), jnp.float32(jnp.nan))


def key_pair(key: Key | None) -> jax.Array | Layer | None:
    """uint32 [2]: the key as kernels take it, where it lies if it was mixed with others; None stays None."""
    if isinstance(key, MixedKey):
        return Layer(key.words, key.index)
    return None if key is None else mixed_words(key)


def to_bfloat16(x: jax.Array) -> jax.Array:
    """x as bfloat16, by a rounding that survives: XLA drops a cast to bfloat16 and back within one program."""
    return x if x.dtype == jnp.bfloat16 else round_bfloat16(x.astype(jnp.float32)).astype(jnp.bfloat16)


def pinned(x: jax.Array) -> jax.Array:
    """x, rounded to its dtype for good. A compiler may carry a bfloat16 number on with excess precision, on one mesh
    and not on another; what an operand is made of must be the number itself, or codes would depend on the mesh.
    """
    kind = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant) if x.dtype == jnp.bfloat16 else x


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """float32 x in `dtype`, to bfloat16 by a rounding that the compiler keeps."""
    return (round_bfloat16(x) if dtype == jnp.bfloat16 else x).astype(dtype)


def add_rounded(a: jax.Array, b: jax.Array) -> jax.Array:
    """a + b, rounded to their dtype for good: a compiler that may keep excess precision would skip the rounding on one
    mesh and not on another, and a stochastic rounding further on would make much of the difference.
    """
    return rounded(a.astype(jnp.float32) + b.astype(jnp.float32), a.dtype)


def quantize_operand(
    x: jax.Array, policy: OperandPolicy, *, axis: int, key: Key | None, cut: Cut = (),
    signs: Key | None = None, amax: jax.Array | None = None,
) -> Carrier | Quantized:  # fmt: skip
    """x under `policy`, blocked and transformed along `axis` (-1 or -2), the axis that the GEMM contracts.

    The definition for every backend. Of a tensor that is `cut` over a mesh, x is the local part. `signs` is the key of
    the signs that both operands of the GEMM share, where they are drawn. A given `amax` makes the tensor's scale, and
    larger numbers saturate; what the operand's codes have as theirs is x's own all the same.
    """
    if not policy.format.quantized and not policy.hadamard:
        return Carrier(to_bfloat16(x), None, policy)  # the caller's own array, which is kept once
    return _quantized_or_transformed(x, policy, axis, key, cut, signs, amax)


def check_keys(policy: OperandPolicy, key: Key | None, signs: Key | None) -> None:
    """ValueError where what an operand draws has no key."""
    if (policy.draws_bytes and key is None) or (policy.draws_signs and signs is None):
        raise ValueError(
            "this recipe rounds stochastically and needs a key; pass key=..., or use a recipe "
            "without stochastic rounding (nvfp4_no_sr)"
        )


@jax.named_scope("quantize")  # a name for profiles: a cast to bfloat16 alone has none
def _quantized_or_transformed(
    x: jax.Array, policy: OperandPolicy, axis: int, key: Key | None, cut: Cut, signs: Key | None,
    given: jax.Array | None,
) -> Carrier | Quantized:  # fmt: skip
    check_keys(policy, key, signs)
    x = pinned(to_bfloat16(x) if policy.source == "bfloat16" else x)
    if policy.hadamard:
        x = transform_runs(x, axis=axis, **_transform(policy, signs))
    if not policy.format.quantized:
        return Carrier(to_bfloat16(x), None, policy)
    noise = _noise(key, x.shape, cut) if policy.draws_bytes and key is not None else None
    amax = _amax(x, policy.format, axis, cut) if axes_of(cut) else None
    usual = "rne" if noise is None else "stochastic"
    how = {} if policy.rounding == usual else {"rounding": policy.rounding}
    scaled_by = amax if given is None else given
    grid = to_grid(x, policy.format, block=policy.block, axis=axis, noise=noise, amax=scaled_by, **how)
    codes = store(grid, policy.format, block=policy.block, axis=axis)
    if given is not None:
        codes = dataclasses.replace(codes, amax=amax_of(x) if amax is None else amax)
    return Quantized(grid.carrier(), gemm_factor(codes), policy, codes)


def _transform(policy: OperandPolicy, signs: Key | None) -> dict[str, Any]:
    """How its Hadamard transform differs from the published one: in size, or by signs of this step."""
    size = {} if policy.hadamard_size == SIZE else {"points": policy.hadamard_size}
    drawn = {"signs": fresh_signs(signs, policy.hadamard_size)} if policy.draws_signs and signs is not None else {}
    return size | drawn


def _noise(key: Key, shape: tuple[int, ...], cut: Cut) -> jax.Array:
    """Random bytes for x: those of its place in the whole tensor."""
    if not axes_of(cut):
        return random_bytes(key, shape)
    return random_bytes(key, shape, offset=offsets(shape, cut), global_shape=whole_shape(shape, cut), aligned=True)


def _amax(x: jax.Array, fmt: BlockFormat, axis: int, cut: Cut) -> jax.Array:
    """The amax of the whole tensor, by integers, which keep infinity and NaN; or of whole rows, or of 128 neighbours,
    which lie on one device.
    """
    found = amax_of(x) if fmt.scale.outer == "tensor" else outer_amax(x, fmt, axis=axis)
    rows = {"tensor": cut, "row": cut[-1:] if axis == -1 else cut[:-1], "128": ()}[fmt.scale.outer]
    (bits,) = largest([lax.bitcast_convert_type(found, jnp.int32)], rows)
    return lax.bitcast_convert_type(bits, jnp.float32)


def dequantized(made: Operand | Packed) -> jax.Array:
    """The numbers that an operand or packed codes stand for, float32; NaN where a GEMM over it would give NaN."""
    if isinstance(made, Quantized | Packed):
        return numbers_of(made.codes if isinstance(made, Quantized) else made.unpack())
    numbers = made.values().astype(jnp.float32)
    return numbers if made.factor is None else numbers * made.factor


def numbers_of(codes: QTensor) -> jax.Array:
    """What a tensor's codes stand for, as the source of another operand, float32; NaN if its amax is not finite."""
    return jnp.where(codes.finite, codes.dequantize(), jnp.float32(jnp.nan))


def left_over(x: jax.Array, operand: Operand) -> jax.Array:
    """x minus the numbers that its operand stands for, these rounded to bfloat16: in x's dtype, the same wherever it is
    computed.
    """
    factor = jnp.float32(1) if operand.factor is None else operand.factor
    factor = factor[..., None] if factor.ndim else factor  # of each token
    return add_rounded(x, -round_bfloat16(operand.values().astype(jnp.float32) * factor).astype(x.dtype))


def keep(operand: Operand) -> Kept:
    """The operand as it is kept for the backward pass: 4.5 bits a number under NVFP4; packed codes under the name by
    which a remat policy may save them.

    A tensor that is kept as it came stays the caller's own array, so that linears with one input share the residual.
    """
    if isinstance(operand, Carrier):
        assert not operand.policy.format.quantized, "a pass that makes carriers packs what is to be kept itself"
        return operand.array
    return name_saved(Packed.of(operand.codes) if isinstance(operand, Quantized) else operand)


@jax.named_scope("quantize")
def name_saved(kept: _Tree, name: str = SAVED) -> _Tree:
    """`kept`, under the name by which a remat policy may save it."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, name), kept)


def load(kept: Kept, policy: OperandPolicy) -> Operand:
    """The operand of `keep`, bit for bit."""
    if isinstance(kept, EightBit | BlockScaled):
        return kept
    if not isinstance(kept, Packed):
        return Carrier(kept, None, policy)
    codes = kept.unpack()
    return Quantized(codes.carrier(), gemm_factor(kept), policy, codes)
