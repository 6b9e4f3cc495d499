"""`reference`: float32 products of the quantized operands, float32 sums at full precision.

The definition of the result.
"""

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.ops.backends.backend import Backend
from halfbyte.ops.gemm_problem import GemmKind, apply_epilogue, dot_f32, gemm_alpha
from halfbyte.ops.operand import Operand


def reference_gemm(gemm: GemmKind, left: Operand, right: Operand, dtype: jnp.dtype) -> jax.Array:
    """Returns exact products summed in float32, times alpha, rounded once to `dtype`."""
    a, b = (o.values().astype(jnp.float32) for o in (left, right))
    sums = dot_f32(a, b, gemm.contracting_axes(a.ndim), precision=lax.Precision.HIGHEST)
    return apply_epilogue(sums, gemm_alpha(left, right), dtype)


BACKEND = Backend("reference", lambda problem, gemm: None, reference_gemm)
