"""`emulated`: one bfloat16 GEMM with float32 sums over exact carriers.

element x block scale has at most 6 significant bits (2 from E2M1, 4 from E4M3; 4 under MXFP8), so bfloat16 holds it and
a bfloat16 tensor core multiplies it exactly: only the order of the sum differs from native hardware. On a CPU, where
bfloat16 has no fast GEMM, the same numbers are multiplied as float32. Where both operands are FP8, a GPU with FP8 units
(SM 8.9 and later) multiplies the 8-bit codes themselves.
"""

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.formats import QTensor
from halfbyte.ops.backends.backend import Backend
from halfbyte.ops.gemm_problem import (
    FPROP,
    ContractingAxes,
    GemmKind,
    LinearProblem,
    apply_epilogue,
    dot_f32,
    gemm_alpha,
    result_shape,
    to_k_major,
)
from halfbyte.ops.operand import Operand, QuantizedOperand


def emulated_gemm(gemm: GemmKind, left: Operand, right: Operand, dtype: jnp.dtype) -> jax.Array:
    """Exact products, float32 sums, the operands' factors, one rounding to `dtype`."""
    factor, axes = gemm_alpha(left, right), gemm.contracting_axes(left.values().ndim)
    if (
        isinstance(left, QuantizedOperand)
        and isinstance(right, QuantizedOperand)
        and _eight_bit(left)
        and _eight_bit(right)
    ):
        sums = lax.platform_dependent(
            left,
            right,
            cuda=lambda a, b: _f8(gemm, a, b, axes),
            default=lambda a, b: _f32_gemm(a.values(), b.values(), axes),
        )
        return apply_epilogue(sums, factor, dtype)
    return lax.platform_dependent(
        left.values(),
        right.values(),
        cpu=lambda a, b: apply_epilogue(_f32_gemm(a, b, axes), factor, dtype),
        default=lambda a, b: bf16_gemm_with_alpha(a, b, axes, factor, dtype),
    )


def bf16_gemm_with_alpha(
    a: jax.Array, b: jax.Array, axes: ContractingAxes, factor: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
    """A bfloat16 GEMM. Without a factor its own epilogue makes the one rounding; with one, the float32 sums do."""
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    if factor is None:
        return lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=dtype)
    return apply_epilogue(dot_f32(a, b, axes), factor, dtype)


def fp8_k_major(tensor: QTensor, axes: tuple[int, ...]) -> jax.Array:
    """The codes of an FP8 tensor as float8 [rows, contraction]: an 8-bit GEMM wants the contraction last."""
    assert tensor.format.element is not None
    return to_k_major(lax.bitcast_convert_type(tensor.codes, tensor.format.element.dtype), axes)


def _f32_gemm(a: jax.Array, b: jax.Array, axes: ContractingAxes) -> jax.Array:
    return dot_f32(a.astype(jnp.float32), b.astype(jnp.float32), axes)


def _eight_bit(operand: QuantizedOperand) -> bool:
    element, block = operand.policy.format.element, operand.policy.format.block
    return element is not None and element.bits == 8 and block is None


def _f8(gemm: GemmKind, a: QuantizedOperand, b: QuantizedOperand, axes: ContractingAxes) -> jax.Array:
    """An 8-bit GEMM. The transposes of its operands fuse with the quantization that makes the codes."""
    left, right = (fp8_k_major(o.codes, summed) for o, summed in zip((a, b), axes, strict=True))
    sums = dot_f32(left, right, ((1,), (1,)), precision=fp8_accumulation_precision(gemm))
    return sums.reshape(result_shape(a.codes.shape, b.codes.shape, axes))


def fp8_accumulation_precision(gemm: GemmKind) -> lax.Precision | None:
    """Hopper's 8-bit units keep about 14 bits of a running sum. fprop takes them as they are; the gradients' sums are
    split and added up in float32, an eighth slower: the choice of Transformer Engine.
    """
    return None if gemm is FPROP else lax.Precision.HIGHEST


def emulated_unsupported(problem: LinearProblem, gemm: GemmKind) -> str | None:
    """Needs outer scales that multiply a GEMM's sums."""
    for role in gemm.roles:
        policy = getattr(problem.recipe, role)
        if policy.format.scale.outer_granularity == "128":
            return f"{role} ({policy}) has outer scales inside the sum, and with them its numbers are not bfloat16"
    return None


BACKEND = Backend("emulated", emulated_unsupported, emulated_gemm)
