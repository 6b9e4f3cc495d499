"""The passes of `native` for MXFP8: one read of a tensor writes every operand of it as cuDNN reads them.

A block's scale needs nothing but its block, so there is no pass for maxima and no factor to apply to a GEMM's sums. One
thing is left of a tensor's amax: a NaN or an infinity anywhere makes the whole result NaN. The kernels give a block
with an infinity the E8M0 code 254 and one with a NaN 255, which no finite block has (the largest number has 247), so
that the largest scale tells; the factor is 1 or NaN.
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

MX_ELEMENT_NAMES = {MXFP8.element: "e4m3", MXFP8_E5M2.element: "e5m2"}  # as the kernels name them
E8M0_NON_FINITE = 254  # the least scale of a block that is not finite
KernelFn = Callable[..., tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True)
class Mxfp8QuantizePasses(GatedQuantizePasses):
    """The MXFP8 kernels."""

    name = "native"
    single_operand_weight = False

    def format_mismatch(self, recipe: Recipe) -> str | None:
        """Needs x and dy in MXFP8 under Transformer Engine's rule for scales."""
        for role, policy in recipe.operands().items():
            if role not in WEIGHT_ROLES and not _is_kernel_operand(policy):
                return f"{role} is {policy}; its kernels make MXFP8 blocks of {MX_BLOCK}, scales rounded up"
        return None

    def unsupported(self, problem: LinearProblem) -> str | None:
        """Needs what our own call needs, bfloat16 tensors, and whole blocks of tokens."""
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
        """What is wanted of each tensor that the kernel makes of `arrays`."""
        shape = arrays[0].shape
        flat = [a.reshape(-1, shape[-1]) for a in arrays]  # [tokens..., features] -> [tokens, features]
        asked = [(r, _kernel_operand_specs(r, tensor)) for tensor, specs in enumerate(wanted) for r in specs]
        made = kernel(*flat, operands=tuple(operand for _, operand in asked))
        written = iter(zip(made[::2], made[1::2], strict=True))
        pairs = [[next(written) for _ in specs] for specs in wanted]
        factors = _factors([of_tensor[0][1] for of_tensor in pairs], wanted[0][0].dim_axes)
        return [
            [_operand(*pair, factor, r, shape) for pair, r in zip(of_tensor, specs, strict=True)]
            for of_tensor, factor, specs in zip(pairs, factors, wanted, strict=True)
        ]

    def quantize_weight(self, w: jax.Array | StackSlice, spec: OperandSpec, *, packed: bool = True) -> WeightOperand:
        """Packed codes, blocked along an axis. One read makes those of fprop and of dgrad: asked for either, both are
        made, and XLA finds that the two calls are one.
        """
        policy = spec.policy
        both = tuple(MxOperandSpec(along, element=_element(policy)) for along in (True, False))
        made = kernels.mxfp8_quantize.quantize_mxfp8(materialize_slice(w), operands=both)
        codes, scales = [a.T for a in made[:2]] if spec.axis == -2 else made[2:]
        (factor,) = _factors([made[1]], spec.dim_axes)  # what is left of its amax
        return PackedQTensor(codes, scales, factor, jnp.float32(1), policy.format, policy.block, spec.axis)

    def all_gather_weight(
        self, codes: PackedQTensor, policy: OperandPolicy, *, axis: int, shards: LinearSharding
    ) -> Operand:
        """With the contraction last, as the kernel wrote it, whether it travels or not."""
        assert codes.scales is not None
        turn = axis == -2
        cut = shards.weight_storage_axes[::-1] if turn else shards.weight_storage_axes
        ordered, scales = (all_gather_dims(a.T if turn else a, cut) for a in (codes.packed, codes.scales))
        shape = ordered.shape[::-1] if turn else ordered.shape
        return BlockScaledOperand(ordered, swizzle_scales(scales), operand_decode_scale(codes), policy, shape, axis)


def _is_kernel_operand(policy: OperandPolicy) -> bool:
    """Whether the kernels make such operands."""
    fmt = policy.format
    ours = fmt.element in MX_ELEMENT_NAMES and (fmt.block, fmt.scale) == (MXFP8.block, MXFP8.scale)
    return ours and policy == OperandPolicy(fmt, source=policy.source) and policy.source != "requantize_forward"


def _element(policy: OperandPolicy) -> str:
    return MX_ELEMENT_NAMES[policy.format.element]


def _kernel_operand_specs(spec: OperandSpec, tensor: int) -> MxOperandSpec:
    """What the kernel is asked for."""
    return MxOperandSpec(spec.axis != ROW_AXIS, ScaleLayout.TILED, _element(spec.policy), tensor)


def _operand(
    codes: jax.Array, scales: jax.Array, factor: jax.Array, spec: OperandSpec, shape: tuple[int, ...]
) -> OperandOrResidual:
    made = BlockScaledOperand(codes, scales, factor, spec.policy, shape, spec.axis)
    return tag_residual(made) if spec.as_residual else made


def _factors(scales: Sequence[jax.Array], cut: DimAxes) -> list[jax.Array]:
    """1 for each tensor, of which these are scales; NaN where the whole one is not finite."""
    tops = global_amax([jnp.max(each).astype(jnp.int32) for each in scales], cut)
    return [jnp.where(top < E8M0_NON_FINITE, jnp.float32(1), jnp.float32(jnp.nan)) for top in tops]


MXFP8_PASSES = Mxfp8QuantizePasses()
