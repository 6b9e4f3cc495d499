"""The passes of `native` for MXFP8: one read of a tensor writes all its operands in cuDNN's layout.

A block scale depends only on its block, so there is no amax pass, and alpha is 1. As with other formats a NaN or an
infinity anywhere makes the whole result NaN: the kernels write the E8M0 code 254 for a block with an infinity and 255
for one with a NaN. No finite block has these (the largest finite value gives 247), so the max of the scales detects
them, and the decode scale is 1 or NaN.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from halfbyte import kernels
from halfbyte.formats import MXFP8, MXFP8_E5M2, PackedQTensor, swizzle_scales
from halfbyte.kernels import ScaleLayout
from halfbyte.kernels.mosaic_launch import StackSlice, materialize_slice
from halfbyte.kernels.mxfp8_quantize import MX_BLOCK, MxOperandSpec
from halfbyte.kernels.mxfp8_quantize import unsupported_mxfp8 as kernels_unsupported
from halfbyte.ops.activation import SILU, Activation
from halfbyte.ops.backends.cudnn_block_scaled import cudnn_call_refusal
from halfbyte.ops.gemm_problem import LinearProblem
from halfbyte.ops.linear_sharding import DimAxes, LinearSharding, all_gather_dims, global_amax
from halfbyte.ops.operand import BlockScaledOperand, Operand, operand_decode_scale, tag_residual
from halfbyte.ops.quantize_passes import (
    ROW_AXIS,
    Amaxes,
    ArrayOrDeferred,
    GatedQuantizePasses,
    OperandOrResidual,
    OperandSpec,
    WeightOperand,
)
from halfbyte.recipes import WEIGHT_ROLES, OperandPolicy, Recipe

MX_ELEMENT_NAMES = {MXFP8.element: "e4m3", MXFP8_E5M2.element: "e5m2"}  # the kernels' names
E8M0_NON_FINITE = 254  # the smallest scale code of a non-finite block
KernelFn = Callable[..., tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True)
class Mxfp8QuantizePasses(GatedQuantizePasses):
    """The quantize passes of MXFP8 as kernels."""

    name = "native"
    single_operand_weight = False

    def format_mismatch(self, recipe: Recipe) -> str | None:
        """Returns why the recipe is unsupported; None for x and dy in MXFP8 with TE's scale rule."""
        for role, policy in recipe.operands().items():
            if role not in WEIGHT_ROLES and not _is_kernel_operand(policy):
                return f"{role} is {policy}; its kernels make MXFP8 blocks of {MX_BLOCK}, scales rounded up"
        return None

    def unsupported(self, problem: LinearProblem) -> str | None:
        """Returns why the FFI call or the kernels do not support the problem, or None."""
        reason = self.format_mismatch(problem.recipe) or cudnn_call_refusal(problem) or problem.no_pallas_reason()
        return reason or kernels_unsupported(problem.tokens, problem.inputs, capability=problem.device.capability)

    def weight_unsupported(self, problem: LinearProblem, policy: OperandPolicy) -> str | None:
        if not _is_kernel_operand(policy) or policy != OperandPolicy(policy.format):
            return f"its kernel makes mxfp8 1d rne, scales rounded up, this is {policy}"
        if problem.weight_dtype != "float32":
            return f"its kernel reads float32 weights, got {problem.weight_dtype}"
        odd = [n for n in problem.weight_shard_shape if n % MX_BLOCK]
        return f"its kernel needs whole blocks of {MX_BLOCK} where the weight rests, got {odd[0]}" if odd else None

    def unsupported_activation_fusion(self, activation: Activation, recipes: Sequence[Recipe]) -> str | None:
        return None if activation == SILU else f"its kernels compute {SILU.name}, not {activation.name}"

    def quantize_with_amax(self, x: jax.Array, specs: Sequence[OperandSpec], maxima: Amaxes) -> list[OperandOrResidual]:
        return self._make(kernels.mxfp8_quantize.quantize_mxfp8, [x], [specs])[0]

    def activate(self, g: ArrayOrDeferred, u: ArrayOrDeferred, specs: Sequence[OperandSpec]) -> list[OperandOrResidual]:
        return self._make(kernels.mxfp8_quantize.quantize_swiglu_mxfp8, [g, u], [specs])[0]

    def activate_backward(self, g, u, dh, dg, du, h):
        return tuple(self._make(kernels.mxfp8_quantize.quantize_swiglu_backward_mxfp8, [g, u, dh], [dg, du, h]))

    def _make(
        self, kernel: KernelFn, arrays: Sequence[jax.Array], wanted: Sequence[Sequence[OperandSpec]]
    ) -> list[list[OperandOrResidual]]:
        """Returns the operands `wanted` of each tensor that the kernel quantizes from `arrays`."""
        shape = arrays[0].shape
        flat = [a.reshape(-1, shape[-1]) for a in arrays]  # [tokens..., features] -> [tokens, features]
        kernel_specs = [
            (spec, _kernel_operand_specs(spec, tensor)) for tensor, specs in enumerate(wanted) for spec in specs
        ]
        outputs = kernel(*flat, operands=tuple(operand for _, operand in kernel_specs))
        operand_arrays = iter(zip(outputs[::2], outputs[1::2], strict=True))
        pairs = [[next(operand_arrays) for _ in specs] for specs in wanted]
        decode_scales = _decode_scales([arrays_of[0][1] for arrays_of in pairs], wanted[0][0].dim_axes)
        return [
            [_operand(*pair, decode_scale, spec, shape) for pair, spec in zip(arrays_of, specs, strict=True)]
            for arrays_of, decode_scale, specs in zip(pairs, decode_scales, wanted, strict=True)
        ]

    def quantize_weight(self, w: jax.Array | StackSlice, spec: OperandSpec, *, packed: bool = True) -> WeightOperand:
        """Returns packed codes, blocked along `spec.axis`.

        One kernel call writes the codes of fprop and of dgrad, whichever is requested; XLA merges the two equal calls.
        """
        policy = spec.policy
        operands = tuple(MxOperandSpec(columnwise, element=_element(policy)) for columnwise in (True, False))
        outputs = kernels.mxfp8_quantize.quantize_mxfp8(materialize_slice(w), operands=operands)
        codes, scales = [a.T for a in outputs[:2]] if spec.axis == -2 else outputs[2:]
        (amax,) = _decode_scales([outputs[1]], spec.dim_axes)  # 1 or NaN, instead of an amax
        return PackedQTensor(codes, scales, amax, jnp.float32(1), policy.format, policy.block, spec.axis)

    def all_gather_weight(
        self, codes: PackedQTensor, policy: OperandPolicy, *, axis: int, shards: LinearSharding
    ) -> Operand:
        """Returns the K-major operand in the kernel's order, all-gathered if the storage is sharded."""
        assert codes.scales is not None
        transpose = axis == -2
        dim_axes = shards.weight_storage_axes[::-1] if transpose else shards.weight_storage_axes
        k_major, scales = (all_gather_dims(a.T if transpose else a, dim_axes) for a in (codes.packed, codes.scales))
        shape = k_major.shape[::-1] if transpose else k_major.shape
        return BlockScaledOperand(k_major, swizzle_scales(scales), operand_decode_scale(codes), policy, shape, axis)


def _is_kernel_operand(policy: OperandPolicy) -> bool:
    """Returns True if the kernels support this policy."""
    fmt = policy.format
    is_mxfp8 = fmt.element in MX_ELEMENT_NAMES and (fmt.block, fmt.scale) == (MXFP8.block, MXFP8.scale)
    return is_mxfp8 and policy == OperandPolicy(fmt, source=policy.source) and policy.source != "requantize_forward"


def _element(policy: OperandPolicy) -> str:
    return MX_ELEMENT_NAMES[policy.format.element]


def _kernel_operand_specs(spec: OperandSpec, tensor: int) -> MxOperandSpec:
    """Returns the kernel's spec of an operand of the tensor with index `tensor`."""
    return MxOperandSpec(spec.axis != ROW_AXIS, ScaleLayout.TILED, _element(spec.policy), tensor)


def _operand(
    codes: jax.Array, scales: jax.Array, factor: jax.Array, spec: OperandSpec, shape: tuple[int, ...]
) -> OperandOrResidual:
    operand = BlockScaledOperand(codes, scales, factor, spec.policy, shape, spec.axis)
    return tag_residual(operand) if spec.as_residual else operand


def _decode_scales(scales: Sequence[jax.Array], cut: DimAxes) -> list[jax.Array]:
    """Returns 1 per tensor of these block scales, NaN if its global tensor is not finite; float32."""
    max_codes = global_amax([jnp.max(codes).astype(jnp.int32) for codes in scales], cut)
    return [jnp.where(max_code < E8M0_NON_FINITE, jnp.float32(1), jnp.float32(jnp.nan)) for max_code in max_codes]


MXFP8_PASSES = Mxfp8QuantizePasses()
