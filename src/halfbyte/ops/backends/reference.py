"""`reference`: float32 products of the quantized operands, float32 sums at full precision.

The definition of the result.
"""

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.ops.backends.gemm import Contraction, dot
from halfbyte.ops.operand import Operand
from halfbyte.ops.problem import Problem

NAME = "reference"


def unsupported(problem: Problem) -> str | None:
    """It runs everywhere."""
    return None


def gemm(left: Operand, right: Operand, axes: Contraction) -> jax.Array:
    """float32 sums of exact products, without the operands' factors."""
    return dot(
        left.values().astype(jnp.float32), right.values().astype(jnp.float32), axes, precision=lax.Precision.HIGHEST
    )
