"""`native`: block-scaled FP4 and FP8 tensor cores, through cuDNN's block-scaled GEMM.

XLA calls it `__cudnn$blockScaledDot`: codes with the contraction last, block scales in tiles of 128x4, and one more
operand that multiplies the result, all in one kernel. There are two ways to it:

- **our own call**, over `BlockScaledOperand`s: cuDNN reads what our passes wrote, with nothing in between.
- **`jax.nn.scaled_matmul`**, over `QuantizedOperand`s, if the compiler shards the program over several devices (it
  can shard that one), if cuDNN is older than 9.13, and on GPUs without such units, where XLA dequantizes.
  XLA tiles the scales, writes float32 sums, and a second pass multiplies and rounds them.

The factor. With a bfloat16 result cuDNN's global scale is a bfloat16 number, and so is what it multiplies: a float32
alpha would be rounded to 8 bits, and the sums twice. So the call is given alpha's power of two, which is exact
wherever it is applied, and the rest of alpha, in [1, 2), multiplies the rounded result in float32:

    y = bf16(bf16(sums * 2^e) * m),   alpha = 2^e * m

No bit of alpha is lost; y is rounded twice. The consumer of y multiplies by m as it loads: XLA if it can fuse it, and
the gated kernels, which get g, u and dh as `DeferredAlpha`; so y is written once. With a float32 result (wgrad) alpha
goes in whole, and nothing is rounded. MXFP8 has no scale of the tensor: alpha is 1 (or NaN), and y is rounded once.
"""

import dataclasses
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.stages import Compiled, Lowered

from halfbyte.devices import native_training
from halfbyte.formats import E5M2, BlockFormat, PackedQTensor, QTensor, pack_nibbles, swizzle_scales
from halfbyte.kernels import ColumnwiseOperand, RowwiseOperand, ScaleLayout
from halfbyte.kernels.mosaic_launch import StackSlice
from halfbyte.kernels.tensor_scale_kernel import GEMM_ALPHA_INDEX
from halfbyte.ops.backends import kernel_support
from halfbyte.ops.backends.backend import Backend, find_unexpected_gemms
from halfbyte.ops.backends.cudnn_block_scaled import (
    BLOCK_SCALED_SCOPE,
    block_scaled_dot,
    cudnn_call_refusal,
    is_native_profitable,
)
from halfbyte.ops.backends.fused import FusedQuantizePasses
from halfbyte.ops.backends.mxfp8_passes import MXFP8_PASSES
from halfbyte.ops.gemm_problem import (
    GemmKind,
    LinearProblem,
    apply_epilogue,
    gemm_alpha,
    result_shape,
    target_device,
    to_k_major,
)
from halfbyte.ops.linear_sharding import LinearSharding, all_gather_dims, axes_in
from halfbyte.ops.operand import (
    BlockScaledOperand,
    DeferredAlpha,
    Operand,
    QuantizedOperand,
    Residual,
    from_residual,
    operand_decode_scale,
    tag_residual,
    to_residual,
)
from halfbyte.ops.quantize_passes import (
    XLA_PASSES,
    Amaxes,
    OperandOrResidual,
    OperandSpec,
    QuantizePasses,
    WeightOperand,
)
from halfbyte.recipes import OperandPolicy, Recipe

MULTIPLE = 32  # compilation does not check it; execution needs it
CUDNN_FORMAT_TRIPLES = (  # (element, scale, block) that XLA's call takes; it dequantizes others
    ("float4_e2m1fn", "float8_e4m3fn", 16),
    ("float8_e4m3fn", "float8_e8m0fnu", 32),
    ("float8_e5m2", "float8_e8m0fnu", 32),
)


def native_format_mismatch(recipe: Recipe) -> str | None:
    """Needs something quantized."""
    return None if recipe.quantized else f"recipe {recipe.name} quantizes nothing"


def native_unsupported(problem: LinearProblem, gemm: GemmKind) -> str | None:
    """Needs an NVIDIA GPU, formats that cuDNN's call knows, and a contraction that is a multiple of 32."""
    if problem.device.capability is None:
        name = problem.device.name
        return f"jax.nn.scaled_matmul has no implementation for {name}; it needs an NVIDIA GPU (use emulated)"
    left, right = (getattr(problem.recipe, role).format for role in gemm.roles)
    if left.hardware_unit is None or left.block is None or left.hardware_unit != right.hardware_unit:
        return f"{gemm} multiplies {left} by {right}; block-scaled units take one block-scaled format on both sides"
    unknown = [fmt for fmt in (left, right) if not _known(fmt)]
    if unknown:
        return f"{gemm} multiplies {unknown[0]}, which cuDNN's block-scaled call does not take: XLA would dequantize it"
    if left.element == right.element == E5M2:
        return f"{gemm} multiplies {left} by {right}; cuDNN's block-scaled call takes E5M2 on one side only"
    size = problem.k_size(gemm)
    return f"{gemm} sums over {size}, and block-scaled units need a multiple of {MULTIPLE}" if size % MULTIPLE else None


def _known(fmt: BlockFormat) -> bool:
    assert fmt.element is not None and fmt.scale_dtype is not None
    return (jnp.dtype(fmt.element.dtype).name, jnp.dtype(fmt.scale_dtype).name, fmt.block) in CUDNN_FORMAT_TRIPLES


def native_gemm(gemm: GemmKind, left: Operand, right: Operand, dtype: jnp.dtype) -> jax.Array:
    """Exact products, float32 sums, the operands' factors."""
    y = native_gemm_deferred_alpha(gemm, left, right, dtype)
    return apply_epilogue(y.array.astype(jnp.float32), y.alpha, dtype) if isinstance(y, DeferredAlpha) else y


def native_gemm_deferred_alpha(
    gemm: GemmKind, left: Operand, right: Operand, dtype: jnp.dtype
) -> jax.Array | DeferredAlpha:
    """The same, with the rest of a factor left to the reader."""
    if isinstance(left, BlockScaledOperand) and isinstance(right, BlockScaledOperand):
        return _scaled(left, right, dtype)
    assert isinstance(left, QuantizedOperand) and isinstance(right, QuantizedOperand), "block-scaled units read codes"
    axes = gemm.contracting_axes(left.codes.codes.ndim)
    (a, a_scales), (b, b_scales) = (_elements(o.codes, summed) for o, summed in zip((left, right), axes, strict=True))
    with jax.named_scope(BLOCK_SCALED_SCOPE):
        y = jax.nn.scaled_matmul(a, b, a_scales, b_scales, preferred_element_type=jnp.float32)
    y = y.reshape(result_shape(left.codes.shape, right.codes.shape, axes))  # [1, rows, columns] -> [free dims of both]
    return apply_epilogue(y, gemm_alpha(left, right), dtype)


def _scaled(left: BlockScaledOperand, right: BlockScaledOperand, dtype: jnp.dtype) -> jax.Array | DeferredAlpha:
    """The product of two operands with their factors, as the module says."""
    factor = gemm_alpha(left, right)
    exact = dtype == jnp.float32 or not any(o.policy.format.tensor_scale for o in (left, right))
    if factor is None or exact:
        return block_scaled_dot(left, right, factor, dtype)
    power, rest = split_power_of_two(factor)
    return DeferredAlpha(block_scaled_dot(left, right, power, dtype), rest)


def split_power_of_two(factor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(2^e, m) with factor = 2^e * m and m in [1, 2), float32, by integers; (1, factor) for zero, subnormal and
    non-finite ones.
    """
    bits = lax.bitcast_convert_type(factor, jnp.uint32)
    exponent = bits & jnp.uint32(0x7F80_0000)
    normal = (exponent != 0) & (exponent != jnp.uint32(0x7F80_0000))
    power = lax.bitcast_convert_type(exponent, jnp.float32)
    rest = lax.bitcast_convert_type((bits & jnp.uint32(0x807F_FFFF)) | jnp.uint32(0x3F80_0000), jnp.float32)
    return jnp.where(normal, power, jnp.float32(1)), jnp.where(normal, rest, factor)


def _elements(tensor: QTensor, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """([1, rows, contraction] elements, [1, rows, contraction / block] scales)."""
    codes, scales = _rows(tensor, axes)
    assert tensor.format.element is not None and tensor.scales is not None
    narrow = codes.astype(jnp.uint4) if tensor.format.element.bits == 4 else codes
    elements = lax.bitcast_convert_type(narrow, tensor.format.element.dtype)
    return elements[None], lax.bitcast_convert_type(scales, tensor.scales.dtype)[None]


def _rows(tensor: QTensor, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """(uint8 codes [rows, contraction], uint8 scales [rows, contraction / block])."""
    assert tensor.scales is not None and tensor.format.block is not None
    scales = lax.bitcast_convert_type(tensor.scales, jnp.uint8)
    if tensor.block == "2d":  # one scale a tile: repeat it on each of the tile's rows
        scales = jnp.repeat(scales, tensor.format.block, axis=1 - axes[0])
    return to_k_major(tensor.codes, axes), to_k_major(scales, axes)


class PackedWeightPasses(QuantizePasses):
    """Weights kept as packed codes: GEMMs read them in two orders, made where they are read."""

    single_operand_weight = False

    @jax.named_scope("quantize")
    def load_packed_weight(self, codes: PackedQTensor, policy: OperandPolicy, *, axis: int) -> Operand:
        if codes.block == "2d" and codes.axis == -2:
            return _of_squares(to_k_major_codes(codes.packed, axis), codes, policy, axis)
        tensor = codes.unpack()
        return to_block_scaled(
            QuantizedOperand(tensor.dequantize_blocks(), operand_decode_scale(codes), policy, tensor), axis
        )

    @jax.named_scope("quantize")
    def all_gather_weight(
        self, codes: PackedQTensor, policy: OperandPolicy, *, axis: int, shards: LinearSharding
    ) -> Operand | None:
        """Of a weight whose outputs are gathered, None where it is another: its parts are put in order first. A gather
        along outputs turns the whole anyway; regrouping nibbles after it would be a second pass.
        """
        if (
            codes.block != "2d"
            or codes.axis != -2
            or axes_in(shards.weight_storage_axes[:1])
            or not axes_in(shards.weight_storage_axes)
        ):
            return None
        cut = shards.weight_storage_axes[::-1] if axis == -2 else shards.weight_storage_axes
        whole_codes = all_gather_dims(to_k_major_codes(codes.packed, axis), cut)
        whole = dataclasses.replace(
            codes, scales=None if codes.scales is None else all_gather_dims(codes.scales, shards.weight_storage_axes)
        )
        return _of_squares(whole_codes, whole, policy, axis)


class ReferenceNativePasses(PackedWeightPasses):
    """The definition's operands, laid out by XLA as our own call reads them."""

    def unsupported(self, problem: LinearProblem) -> str | None:
        """Needs what our own call needs."""
        return cudnn_call_refusal(problem)

    def quantize_with_amax(self, x: jax.Array, specs: Sequence[OperandSpec], maxima: Amaxes) -> list[OperandOrResidual]:
        defined = XLA_PASSES.quantize(x, [dataclasses.replace(r, as_residual=False) for r in specs])
        made = [to_block_scaled(o, r.axis) for o, r in zip(defined, specs, strict=True)]
        return [_to_residual_codes(o) if r.as_residual else o for o, r in zip(made, specs, strict=True)]


def _to_residual_codes(operand: Operand) -> Residual:
    return tag_residual(operand) if isinstance(operand, BlockScaledOperand) else to_residual(operand)


def to_block_scaled(operand: Operand, axis: int) -> Operand:
    """Returns a `QuantizedOperand` contracted along `axis` as `BlockScaledOperand`; others unchanged."""
    if not isinstance(operand, QuantizedOperand):
        return operand
    shape = operand.codes.shape
    summed = (len(shape) - 1,) if axis == -1 else tuple(range(len(shape) - 1))
    codes, scales = _rows(operand.codes, summed)
    element = operand.policy.format.element
    assert element is not None
    narrow = pack_nibbles(codes) if element.bits == 4 else codes
    return BlockScaledOperand(narrow, swizzle_scales(scales), operand.decode_scale, operand.policy, shape, axis)


def to_k_major_codes(packed: jax.Array, axis: int) -> jax.Array:
    """Codes uint8 [inputs / 2, outputs] as rows with the contraction last."""
    return packed.T if axis == -2 else _paired_along_rows(packed)


def expand_2d_scales(scales: jax.Array, block: int, axis: int) -> jax.Array:
    """Scales [inputs / block, outputs / block], one a square, on each row of their squares, tiled."""
    return swizzle_scales(jnp.repeat(scales.T if axis == -2 else scales, block, axis=0))


def _of_squares(rows: jax.Array, codes: PackedQTensor, policy: OperandPolicy, axis: int) -> BlockScaledOperand:
    """The operand of ordered codes and of the scales [inputs / 16, outputs / 16] of `codes`."""
    assert codes.scales is not None and policy.format.block is not None
    scales = expand_2d_scales(codes.scales, policy.format.block, axis)
    shape = tuple(n * policy.format.block for n in codes.scales.shape)
    return BlockScaledOperand(rows, scales, operand_decode_scale(codes), policy, shape, axis)


def _paired_along_rows(packed: jax.Array) -> jax.Array:
    """4-bit codes uint8 [inputs / 2, outputs], two inputs a byte -> [inputs, outputs / 2], two outputs a byte; word by
    word, so that XLA makes one pass of it.
    """
    rows, columns = packed.shape
    # [inputs / 2, outputs] -> [inputs / 2, outputs / 2]: a word has two inputs of two outputs
    words = lax.bitcast_convert_type(packed.reshape(rows, columns // 2, 2), jnp.uint16)
    shifts = jnp.array([0, 4], jnp.uint16)[None, :, None]  # of the even and of the odd input
    ours = words[:, None, :] >> shifts
    pairs = (ours & jnp.uint16(0xF)) | ((ours >> jnp.uint16(4)) & jnp.uint16(0xF0))
    return pairs.astype(jnp.uint8).reshape(2 * rows, columns // 2)  # [inputs / 2, 2, ...] -> [inputs, ...]


@dataclasses.dataclass(frozen=True)
class NativeQuantizePasses(PackedWeightPasses, FusedQuantizePasses):
    """The kernels of `fused`, asked for codes and tiles instead of carriers: what cuDNN reads, and what is kept."""

    name = "native"
    accepts_deferred_alpha = True
    packs_weights = True

    def format_mismatch(self, recipe: Recipe) -> str | None:
        if recipe.wgrad_x.source == "requantize_forward":
            return f"wgrad_x is {recipe.wgrad_x}, requantized from a dequantized operand, and this backend writes codes"
        return kernel_support.nvfp4_format_mismatch(recipe) or kernel_support.separate_pass_reason([recipe])

    def unsupported(self, problem: LinearProblem) -> str | None:
        """Needs what our own call needs, and what the kernels need."""
        return cudnn_call_refusal(problem) or self.format_mismatch(problem.recipe) or super().unsupported(problem)

    def _rowwise(self, row: OperandSpec, scale: jax.Array, shape: tuple[int, ...]) -> RowwiseOperand:
        return dataclasses.replace(super()._rowwise(row, scale, shape), code_scale_layout=ScaleLayout.TILED)

    def _columnwise(self, column: OperandSpec, scale: jax.Array, shape: tuple[int, ...]) -> ColumnwiseOperand:
        return dataclasses.replace(
            super()._columnwise(column, scale, shape), packed=False, code_scale_layout=ScaleLayout.TILED
        )

    def _operands(
        self, made: Sequence[jax.Array], specs: Sequence[OperandSpec], scales: Sequence[jax.Array],
        shape: tuple[int, ...],
    ) -> list[OperandOrResidual]:  # fmt: skip
        """What a kernel wrote: codes and scales of each operand, row before column."""
        pairs = zip(made[::2], made[1::2], strict=True)
        found = [
            BlockScaledOperand(codes, tiles, scale[GEMM_ALPHA_INDEX], r.policy, shape, r.axis)
            for (codes, tiles), scale, r in zip(pairs, scales, specs, strict=True)
        ]
        return [tag_residual(o) if r.as_residual else o for o, r in zip(found, specs, strict=True)]

    def quantize_weight(self, w: jax.Array | StackSlice, spec: OperandSpec, *, packed: bool = True) -> WeightOperand:
        """Packed codes, whether the weight travels or not."""
        return super().quantize_weight(w, spec, packed=True)

    def operand_from_residual(self, kept: Residual, policy: OperandPolicy) -> Operand:
        return from_residual(kept, policy)


def unexpected_native_calls(lowered: Lowered, compiled: Compiled) -> list[str]:
    """Returns unexpected GEMMs for a device with block-scaled units; on others XLA dequantizes, as requested."""
    return (
        find_unexpected_gemms(BLOCK_SCALED_SCOPE, unexpected_native_gemms, lowered, compiled)
        if native_training(target_device(), "nvfp4")
        else []
    )


def unexpected_native_gemms(program: str) -> list[str]:
    """Lines of a compiled program where a GEMM of this backend is something else than cuDNN's block-scaled call."""
    other = re.compile(r'custom_call_target="__cublas|"kind":"__(?:triton\w*gemm|cudnn\$fusion)|(?<!%)\bdot\(')
    return [line.strip() for line in program.splitlines() if BLOCK_SCALED_SCOPE in line and other.search(line)]


REFERENCE_NATIVE_PASSES = ReferenceNativePasses()
NATIVE_PASSES = NativeQuantizePasses()
BACKEND = Backend(
    "native",
    native_unsupported,
    native_gemm,
    (NATIVE_PASSES, MXFP8_PASSES, REFERENCE_NATIVE_PASSES, XLA_PASSES),
    gemm_deferred_alpha=native_gemm_deferred_alpha,
    format_mismatch=native_format_mismatch,
    is_profitable=is_native_profitable,
    unexpected_gemms=unexpected_native_calls,
)
