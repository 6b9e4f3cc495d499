"""`emulated`: one bfloat16 GEMM with float32 sums over block-dequantized operands.

element x block scale has at most 6 significant bits (2 from E2M1, 4 from E4M3; 4 under MXFP8), so bfloat16 holds it and
a bfloat16 tensor core multiplies it exactly: only the order of the sum differs from native hardware. On a CPU, where
bfloat16 has no fast GEMM, the same values are multiplied as float32. If both operands are FP8, a GPU with FP8 tensor
cores (SM 8.9 and later) multiplies the 8-bit codes themselves.
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
    """Returns exact products summed in float32, times alpha, rounded once to `dtype`."""
    alpha, axes = gemm_alpha(left, right), gemm.contracting_axes(left.values().ndim)
    if isinstance(left, QuantizedOperand) and isinstance(right, QuantizedOperand) and _is_fp8(left) and _is_fp8(right):
        sums = lax.platform_dependent(
            left,
            right,
            cuda=lambda a, b: _fp8_gemm(gemm, a, b, axes),
            default=lambda a, b: _f32_gemm(a.values(), b.values(), axes),
        )
        return apply_epilogue(sums, alpha, dtype)
    return lax.platform_dependent(
        left.values(),
        right.values(),
        cpu=lambda a, b: apply_epilogue(_f32_gemm(a, b, axes), alpha, dtype),
        default=lambda a, b: bf16_gemm_with_alpha(a, b, axes, alpha, dtype),
    )


def bf16_gemm_with_alpha(
    a: jax.Array, b: jax.Array, axes: ContractingAxes, factor: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
    """Returns a bfloat16 GEMM, rounded once: by its epilogue without alpha (`factor`), else after alpha on its sums."""
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    if factor is None:
        return lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=dtype)
    return apply_epilogue(dot_f32(a, b, axes), factor, dtype)


def fp8_k_major(tensor: QTensor, axes: tuple[int, ...]) -> jax.Array:
    """Returns the codes of an FP8 tensor as float8 [rows, k]: an 8-bit GEMM reads K-major operands."""
    assert tensor.format.element is not None
    return to_k_major(lax.bitcast_convert_type(tensor.codes, tensor.format.element.dtype), axes)


def _f32_gemm(a: jax.Array, b: jax.Array, axes: ContractingAxes) -> jax.Array:
    return dot_f32(a.astype(jnp.float32), b.astype(jnp.float32), axes)


def _is_fp8(operand: QuantizedOperand) -> bool:
    element, block = operand.policy.format.element, operand.policy.format.block
    return element is not None and element.bits == 8 and block is None


def _fp8_gemm(gemm: GemmKind, a: QuantizedOperand, b: QuantizedOperand, axes: ContractingAxes) -> jax.Array:
    """Returns the sums of an 8-bit GEMM. XLA fuses the transposes of its operands with their quantization."""
    left, right = (fp8_k_major(o.codes, summed) for o, summed in zip((a, b), axes, strict=True))
    sums = dot_f32(left, right, ((1,), (1,)), precision=fp8_accumulation_precision(gemm))
    return sums.reshape(result_shape(a.codes.shape, b.codes.shape, axes))


def fp8_accumulation_precision(gemm: GemmKind) -> lax.Precision | None:
    """Returns the precision of an 8-bit GEMM: default for fprop, float32 accumulation for gradients, as in TE.

    Hopper's FP8 tensor cores keep about 14 bits of a running sum. HIGHEST promotes partial sums to float32, at an
    eighth more time.
    """
    return None if gemm is FPROP else lax.Precision.HIGHEST


def emulated_unsupported(problem: LinearProblem, gemm: GemmKind) -> str | None:
    """Returns why a GEMM is unsupported, or None: per-128 outer scales cannot be applied to its sums."""
    for role in gemm.roles:
        policy = getattr(problem.recipe, role)
        if policy.format.scale.outer_granularity == "128":
            return f"{role} ({policy}) has outer scales inside the sum, and with them its numbers are not bfloat16"
    return None


BACKEND = Backend("emulated", emulated_unsupported, emulated_gemm)
