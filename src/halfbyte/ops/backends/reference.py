"""`reference`: float32 products of the quantized operands, float32 sums at full precision.

The definition of the result. On a CPU it is one to the last bit: XLA cuts a long sum by its length there, so it is
summed here in runs of 128, from the first number on. Zeros after the last number then change nothing.
"""

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.ops.backends.backend import Backend
from halfbyte.ops.gemms import Contraction, Gemm, alpha, contraction_last, dot, finish, result_shape
from halfbyte.ops.operand import Operand
from halfbyte.ops.problem import target

RUN = 128


def multiply(gemm: Gemm, left: Operand, right: Operand, dtype: jnp.dtype) -> jax.Array:
    """Exact products, float32 sums, the operands' factors, one rounding to `dtype`."""
    a, b = (o.values().astype(jnp.float32) for o in (left, right))
    axes = gemm.axes(a.ndim)
    sums = _in_runs(a, b, axes) if target().platform == "cpu" else dot(a, b, axes, precision=lax.Precision.HIGHEST)
    return finish(sums, alpha(left, right), dtype)


def _in_runs(a: jax.Array, b: jax.Array, axes: Contraction) -> jax.Array:
    def runs(x: jax.Array, summed: tuple[int, ...]) -> jax.Array:
        rows = contraction_last(x, summed)
        filled = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % RUN)))
        return filled.reshape(rows.shape[0], -1, RUN).swapaxes(0, 1)  # [runs, rows, RUN]

    def add(sums: jax.Array, run: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return sums + dot(*run, ((1,), (1,)), precision=lax.Precision.HIGHEST), None

    parts = runs(a, axes[0]), runs(b, axes[1])
    sums, _ = lax.scan(add, jnp.zeros((parts[0].shape[1], parts[1].shape[1]), jnp.float32), parts)
    return sums.reshape(result_shape(a.shape, b.shape, axes))


BACKEND = Backend("reference", lambda problem, gemm: None, multiply)
