"""`native`: block-scaled FP4 and FP8 tensor cores, through cuDNN's block-scaled GEMM.

XLA calls it `__cudnn$blockScaledDot`: K-major codes, block scales swizzled in tiles of 128x4, and a scalar that
multiplies the result, in one kernel. There are two implementations:

- **FFI call**, over `BlockScaledOperand`s: cuDNN reads what the quantize passes wrote, with nothing in between.
- **`jax.nn.scaled_matmul`**, over `QuantizedOperand`s, if XLA partitions the program over several devices (it can
  partition this function), if cuDNN is older than 9.13, and on GPUs without such tensor cores, where XLA dequantizes.
  XLA swizzles the scales, writes float32 sums, and a second pass multiplies and rounds them.

Alpha. With a bfloat16 result cuDNN's global scale is bfloat16, and so is what it multiplies: a float32 alpha would be
rounded to 8 bits, and the sums twice. So the call takes alpha's power of two, which is exact wherever it is applied,
and the remaining factor, in [1, 2), multiplies the rounded result in float32:

    y = bf16(bf16(sums * 2^e) * m),   alpha = 2^e * m

No bit of alpha is lost; y is rounded twice. The consumer of y multiplies by m as it loads: XLA if it can fuse it, and
the gated kernels, which get g, u and dh as `DeferredAlpha`; so y is written once. With a float32 result (wgrad) the
call applies all of alpha, and nothing is rounded. MXFP8 has no per-tensor scale: alpha is 1 (or NaN), and y is rounded
once.
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
CUDNN_FORMAT_TRIPLES = (  # (element, scale, block) that XLA's call supports; it dequantizes others
    ("float4_e2m1fn", "float8_e4m3fn", 16),
    ("float8_e4m3fn", "float8_e8m0fnu", 32),
    ("float8_e5m2", "float8_e8m0fnu", 32),
)


def native_format_mismatch(recipe: Recipe) -> str | None:
    """Returns why the recipe is unsupported, or None: it must quantize an operand."""
    return None if recipe.quantized else f"recipe {recipe.name} quantizes nothing"


def native_unsupported(problem: LinearProblem, gemm: GemmKind) -> str | None:
    """Returns why a GEMM is unsupported, or None: it needs an NVIDIA GPU, formats of cuDNN's call, and k % 32 == 0."""
    if problem.device.capability is None:
        name = problem.device.name
        return f"jax.nn.scaled_matmul has no implementation for {name}; it needs an NVIDIA GPU (use emulated)"
    left, right = (getattr(problem.recipe, role).format for role in gemm.roles)
    if left.hardware_unit is None or left.block is None or left.hardware_unit != right.hardware_unit:
        return f"{gemm} multiplies {left} by {right}; block-scaled units take one block-scaled format on both sides"
    unknown = [fmt for fmt in (left, right) if not _is_supported_format(fmt)]
    if unknown:
        return f"{gemm} multiplies {unknown[0]}, which cuDNN's block-scaled call does not take: XLA would dequantize it"
    if left.element == right.element == E5M2:
        return f"{gemm} multiplies {left} by {right}; cuDNN's block-scaled call takes E5M2 on one side only"
    size = problem.k_size(gemm)
    return f"{gemm} sums over {size}, and block-scaled units need a multiple of {MULTIPLE}" if size % MULTIPLE else None


def _is_supported_format(fmt: BlockFormat) -> bool:
    assert fmt.element is not None and fmt.scale_dtype is not None
    return (jnp.dtype(fmt.element.dtype).name, jnp.dtype(fmt.scale_dtype).name, fmt.block) in CUDNN_FORMAT_TRIPLES


def native_gemm(gemm: GemmKind, left: Operand, right: Operand, dtype: jnp.dtype) -> jax.Array:
    """Returns exact products summed in float32, times alpha, in `dtype`; rounded as the module describes."""
    y = native_gemm_deferred_alpha(gemm, left, right, dtype)
    return apply_epilogue(y.array.astype(jnp.float32), y.alpha, dtype) if isinstance(y, DeferredAlpha) else y


def native_gemm_deferred_alpha(
    gemm: GemmKind, left: Operand, right: Operand, dtype: jnp.dtype
) -> jax.Array | DeferredAlpha:
    """Returns `native_gemm`, or its bf16 result with the remaining factor of alpha deferred to the consumer."""
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
    """Returns the FFI call's product of two operands; alpha is applied or deferred as the module describes."""
    alpha = gemm_alpha(left, right)
    exact = dtype == jnp.float32 or not any(o.policy.format.tensor_scale for o in (left, right))
    if alpha is None or exact:
        return block_scaled_dot(left, right, alpha, dtype)
    power_of_two, mantissa = split_power_of_two(alpha)
    return DeferredAlpha(block_scaled_dot(left, right, power_of_two, dtype), mantissa)


def split_power_of_two(factor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (2^e, m), float32, with factor = 2^e * m and |m| in [1, 2), by operations on bits.

    It returns (1, factor) if factor is zero, subnormal or not finite.
    """
    bits = lax.bitcast_convert_type(factor, jnp.uint32)
    exponent = bits & jnp.uint32(0x7F80_0000)
    normal = (exponent != 0) & (exponent != jnp.uint32(0x7F80_0000))
    power = lax.bitcast_convert_type(exponent, jnp.float32)
    mantissa = lax.bitcast_convert_type((bits & jnp.uint32(0x807F_FFFF)) | jnp.uint32(0x3F80_0000), jnp.float32)
    return jnp.where(normal, power, jnp.float32(1)), jnp.where(normal, mantissa, factor)


def _elements(tensor: QTensor, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns (elements [1, rows, k], scales [1, rows, k / block])."""
    codes, scales = _rows(tensor, axes)
    assert tensor.format.element is not None and tensor.scales is not None
    unsigned = codes.astype(jnp.uint4) if tensor.format.element.bits == 4 else codes
    elements = lax.bitcast_convert_type(unsigned, tensor.format.element.dtype)
    return elements[None], lax.bitcast_convert_type(scales, tensor.scales.dtype)[None]


def _rows(tensor: QTensor, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns (uint8 codes [rows, k], uint8 scales [rows, k / block])."""
    assert tensor.scales is not None and tensor.format.block is not None
    scales = lax.bitcast_convert_type(tensor.scales, jnp.uint8)
    if tensor.block == "2d":  # one scale per tile: repeat it for each row of the tile
        scales = jnp.repeat(scales, tensor.format.block, axis=1 - axes[0])
    return to_k_major(tensor.codes, axes), to_k_major(scales, axes)


class PackedWeightPasses(QuantizePasses):
    """Passes whose weights are packed codes; the K-major order of each GEMM is built when it reads them."""

    single_operand_weight = False

    @jax.named_scope("quantize")
    def load_packed_weight(self, codes: PackedQTensor, policy: OperandPolicy, *, axis: int) -> Operand:
        if codes.block == "2d" and codes.axis == -2:
            return _from_2d_blocks(to_k_major_codes(codes.packed, axis), codes, policy, axis)
        tensor = codes.unpack()
        return to_block_scaled(
            QuantizedOperand(tensor.dequantize_blocks(), operand_decode_scale(codes), policy, tensor), axis
        )

    @jax.named_scope("quantize")
    def all_gather_weight(
        self, codes: PackedQTensor, policy: OperandPolicy, *, axis: int, shards: LinearSharding
    ) -> Operand | None:
        """Returns the operand of a weight with 2D blocks that is all-gathered along outputs only, else None.

        Each shard is reordered before the gather. An all-gather along outputs transposes the global array anyway;
        regrouping nibbles after it would be a second pass.
        """
        if (
            codes.block != "2d"
            or codes.axis != -2
            or axes_in(shards.weight_storage_axes[:1])
            or not axes_in(shards.weight_storage_axes)
        ):
            return None
        dim_axes = shards.weight_storage_axes[::-1] if axis == -2 else shards.weight_storage_axes
        gathered_codes = all_gather_dims(to_k_major_codes(codes.packed, axis), dim_axes)
        gathered = dataclasses.replace(
            codes, scales=None if codes.scales is None else all_gather_dims(codes.scales, shards.weight_storage_axes)
        )
        return _from_2d_blocks(gathered_codes, gathered, policy, axis)


class ReferenceNativePasses(PackedWeightPasses):
    """Operands of the reference, reordered by XLA into the layout of the FFI call."""

    def unsupported(self, problem: LinearProblem) -> str | None:
        """Returns why the FFI call does not support the problem, or None."""
        return cudnn_call_refusal(problem)

    def quantize_with_amax(self, x: jax.Array, specs: Sequence[OperandSpec], maxima: Amaxes) -> list[OperandOrResidual]:
        reference = XLA_PASSES.quantize(x, [dataclasses.replace(spec, as_residual=False) for spec in specs])
        operands = [to_block_scaled(operand, spec.axis) for operand, spec in zip(reference, specs, strict=True)]
        return [
            _to_residual_codes(operand) if spec.as_residual else operand
            for operand, spec in zip(operands, specs, strict=True)
        ]


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
    packed = pack_nibbles(codes) if element.bits == 4 else codes
    return BlockScaledOperand(packed, swizzle_scales(scales), operand.decode_scale, operand.policy, shape, axis)


def to_k_major_codes(packed: jax.Array, axis: int) -> jax.Array:
    """Returns codes uint8 [inputs / 2, outputs] in K-major order for a GEMM that contracts `axis`."""
    return packed.T if axis == -2 else _pair_along_outputs(packed)


def expand_2d_scales(scales: jax.Array, block: int, axis: int) -> jax.Array:
    """Returns scales [inputs / block, outputs / block] of 2D blocks, repeated per row of their blocks and swizzled."""
    return swizzle_scales(jnp.repeat(scales.T if axis == -2 else scales, block, axis=0))


def _from_2d_blocks(rows: jax.Array, codes: PackedQTensor, policy: OperandPolicy, axis: int) -> BlockScaledOperand:
    """Returns the operand of K-major codes `rows` and of the scales [inputs / 16, outputs / 16] of `codes`."""
    assert codes.scales is not None and policy.format.block is not None
    scales = expand_2d_scales(codes.scales, policy.format.block, axis)
    shape = tuple(n * policy.format.block for n in codes.scales.shape)
    return BlockScaledOperand(rows, scales, operand_decode_scale(codes), policy, shape, axis)


def _pair_along_outputs(packed: jax.Array) -> jax.Array:
    """Regroups 4-bit codes uint8 [inputs / 2, outputs], two inputs per byte, to [inputs, outputs / 2], two outputs.

    It works on 16-bit words, so that XLA compiles it to one pass.
    """
    rows, columns = packed.shape
    # [inputs / 2, outputs] -> [inputs / 2, outputs / 2]: a word has two inputs of two outputs
    words = lax.bitcast_convert_type(packed.reshape(rows, columns // 2, 2), jnp.uint16)
    shifts = jnp.array([0, 4], jnp.uint16)[None, :, None]  # of the even and of the odd input
    shifted = words[:, None, :] >> shifts
    pairs = (shifted & jnp.uint16(0xF)) | ((shifted >> jnp.uint16(4)) & jnp.uint16(0xF0))
    return pairs.astype(jnp.uint8).reshape(2 * rows, columns // 2)  # [inputs / 2, 2, ...] -> [inputs, ...]


@dataclasses.dataclass(frozen=True)
class NativeQuantizePasses(PackedWeightPasses, FusedQuantizePasses):
    """The kernels of `fused`, which write codes and swizzled scales: the operands of cuDNN and the residuals."""

    name = "native"
    accepts_deferred_alpha = True
    packs_weights = True

    def format_mismatch(self, recipe: Recipe) -> str | None:
        if recipe.wgrad_x.source == "requantize_forward":
            return f"wgrad_x is {recipe.wgrad_x}, requantized from a dequantized operand, and this backend writes codes"
        return kernel_support.nvfp4_format_mismatch(recipe) or kernel_support.separate_pass_reason([recipe])

    def unsupported(self, problem: LinearProblem) -> str | None:
        """Returns why the FFI call or the kernels do not support the problem, or None."""
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
        """Returns the kernel's outputs, codes and scales per operand, row before column, as operands."""
        pairs = zip(made[::2], made[1::2], strict=True)
        operands = [
            BlockScaledOperand(codes, tiles, scale[GEMM_ALPHA_INDEX], spec.policy, shape, spec.axis)
            for (codes, tiles), scale, spec in zip(pairs, scales, specs, strict=True)
        ]
        return [
            tag_residual(operand) if spec.as_residual else operand
            for operand, spec in zip(operands, specs, strict=True)
        ]

    def quantize_weight(self, w: jax.Array | StackSlice, spec: OperandSpec, *, packed: bool = True) -> WeightOperand:
        """Returns packed codes, even if the weight is not all-gathered."""
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
    """Returns lines of a compiled program in which a GEMM of this backend is not cuDNN's block-scaled call."""
    unexpected = re.compile(r'custom_call_target="__cublas|"kind":"__(?:triton\w*gemm|cudnn\$fusion)|(?<!%)\bdot\(')
    return [line.strip() for line in program.splitlines() if BLOCK_SCALED_SCOPE in line and unexpected.search(line)]


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
