"""`reference`: float32 products of the quantized operands, float32 sums at full precision.

The definition of the result.
"""

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.ops.backends.gemm import Contraction, alpha, dot, finish
from halfbyte.ops.operand import Operand
from halfbyte.ops.problem import Problem

NAME = "reference"


def unsupported(problem: Problem) -> str | None:
    """It runs everywhere."""
    return None


def gemm(left: Operand, right: Operand, axes: Contraction, dtype: jnp.dtype) -> jax.Array:
    """Exact products, float32 sums, the operands' factors, one rounding to `dtype`."""
    a, b = (o.values().astype(jnp.float32) for o in (left, right))
    return finish(dot(a, b, axes, precision=lax.Precision.HIGHEST), alpha(left, right), dtype)
