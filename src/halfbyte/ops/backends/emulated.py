"""`carrier`: one bfloat16 GEMM with float32 sums over exact carriers.

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
from halfbyte.ops.gemms import FPROP, Contraction, Gemm, alpha, contraction_last, dot, finish, result_shape
from halfbyte.ops.operand import Operand, Quantized
from halfbyte.ops.problem import Problem


def multiply(gemm: Gemm, left: Operand, right: Operand, dtype: jnp.dtype) -> jax.Array:
    """Exact products, float32 sums, the operands' factors, one rounding to `dtype`."""
    factor, axes = alpha(left, right), gemm.axes(left.values().ndim)
    if isinstance(left, Quantized) and isinstance(right, Quantized) and _eight_bit(left) and _eight_bit(right):
        sums = lax.platform_dependent(
            left,
            right,
            cuda=lambda a, b: _f8(gemm, a, b, axes),
            default=lambda a, b: _wide(a.values(), b.values(), axes),
        )
        return finish(sums, factor, dtype)
    return lax.platform_dependent(
        left.values(),
        right.values(),
        cpu=lambda a, b: finish(_wide(a, b, axes), factor, dtype),
        default=lambda a, b: narrow_gemm(a, b, axes, factor, dtype),
    )


def narrow_gemm(a: jax.Array, b: jax.Array, axes: Contraction, factor: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """A bfloat16 GEMM. Without a factor its own epilogue makes the one rounding; with one, the float32 sums do."""
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    if factor is None:
        return lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=dtype)
    return finish(dot(a, b, axes), factor, dtype)


def f8_matrix(tensor: QTensor, axes: tuple[int, ...]) -> jax.Array:
    """The codes of an FP8 tensor as float8 [rows, contraction]: an 8-bit GEMM wants the contraction last."""
    assert tensor.format.element is not None
    return contraction_last(lax.bitcast_convert_type(tensor.codes, tensor.format.element.dtype), axes)


def _wide(a: jax.Array, b: jax.Array, axes: Contraction) -> jax.Array:
    return dot(a.astype(jnp.float32), b.astype(jnp.float32), axes)


def _eight_bit(operand: Quantized) -> bool:
    element, block = operand.policy.format.element, operand.policy.format.block
    return element is not None and element.bits == 8 and block is None


def _f8(gemm: Gemm, a: Quantized, b: Quantized, axes: Contraction) -> jax.Array:
    """An 8-bit GEMM. The transposes of its operands fuse with the quantization that makes the codes."""
    left, right = (f8_matrix(o.codes, summed) for o, summed in zip((a, b), axes, strict=True))
    sums = dot(left, right, ((1,), (1,)), precision=f8_precision(gemm))
    return sums.reshape(result_shape(a.codes.shape, b.codes.shape, axes))


def f8_precision(gemm: Gemm) -> lax.Precision | None:
    """Hopper's 8-bit units keep about 14 bits of a running sum. fprop takes them as they are; the gradients' sums are
    split and added up in float32, an eighth slower: the choice of Transformer Engine.
    """
    return None if gemm is FPROP else lax.Precision.HIGHEST


def unsupported(problem: Problem, gemm: Gemm) -> str | None:
    """Needs outer scales that multiply a GEMM's sums."""
    for role in gemm.roles:
        policy = getattr(problem.recipe, role)
        if policy.format.scale.outer == "128":
            return f"{role} ({policy}) has outer scales inside the sum, and with them its numbers are not bfloat16"
    return None


BACKEND = Backend("carrier", unsupported, multiply)
