"""`carrier`: one bfloat16 GEMM with float32 sums over exact carriers.

element x block scale has at most 6 significant bits (2 from E2M1, 4 from E4M3; 4 under MXFP8), so bfloat16 holds it and
a bfloat16 tensor core multiplies it exactly: only the order of the sum differs from native hardware. On a CPU, where
bfloat16 has no fast GEMM, the same numbers are multiplied as float32. Where both operands are FP8, a GPU with FP8 units
(SM 8.9 and later) multiplies the 8-bit codes themselves.
"""

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.ops.backends.gemm import Contraction, alpha, dot, f8_matrix, finish, result_shape
from halfbyte.ops.operand import Operand
from halfbyte.ops.problem import Problem

NAME = "carrier"


def unsupported(problem: Problem) -> str | None:
    """It runs everywhere."""
    return None


def _wide(a: jax.Array, b: jax.Array, axes: Contraction) -> jax.Array:
    return dot(a.astype(jnp.float32), b.astype(jnp.float32), axes)


def narrow_gemm(a: jax.Array, b: jax.Array, axes: Contraction, factor: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """A bfloat16 GEMM. Without a factor its own epilogue makes the one rounding; with one, the float32 sums do."""
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    if factor is None:
        return lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=dtype)
    return finish(dot(a, b, axes), factor, dtype)


def _eight_bit(operand: Operand) -> bool:
    element, block = operand.policy.format.element, operand.policy.format.block
    return element is not None and element.bits == 8 and block is None


def _f8(a: Operand, b: Operand, axes: Contraction) -> jax.Array:
    """An 8-bit GEMM. The transposes of its operands fuse with the quantization that makes the codes."""
    codes = [o.codes() for o in (a, b)]
    left, right = (f8_matrix(q, summed) for q, summed in zip(codes, axes, strict=True))
    return dot(left, right, ((1,), (1,))).reshape(result_shape(codes[0].shape, codes[1].shape, axes))


def gemm(left: Operand, right: Operand, axes: Contraction, dtype: jnp.dtype) -> jax.Array:
    """Exact products, float32 sums, the operands' factors, one rounding to `dtype`."""
    factor = alpha(left, right)
    if _eight_bit(left) and _eight_bit(right):
        sums = lax.platform_dependent(
            left, right, cuda=lambda a, b: _f8(a, b, axes), default=lambda a, b: _wide(a.values(), b.values(), axes)
        )
        return finish(sums, factor, dtype)
    return lax.platform_dependent(
        left.values(),
        right.values(),
        cpu=lambda a, b: finish(_wide(a, b, axes), factor, dtype),
        default=lambda a, b: narrow_gemm(a, b, axes, factor, dtype),
    )
