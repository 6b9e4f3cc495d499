"""The three GEMMs of a linear as contractions: which axes are summed, and how float32 sums become the result."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.formats import QTensor
from halfbyte.formats.bits import round_bfloat16
from halfbyte.ops.operand import Operand

Contraction = tuple[tuple[int, ...], tuple[int, ...]]


def fprop_axes(x: jax.Array) -> Contraction:
    """x [..., inputs] . W [inputs, outputs]."""
    return (x.ndim - 1,), (0,)


def dgrad_axes(dy: jax.Array) -> Contraction:
    """dy [..., outputs] . W [inputs, outputs], over the outputs."""
    return (dy.ndim - 1,), (1,)


def wgrad_axes(x: jax.Array) -> Contraction:
    """x [tokens..., inputs] . dy [tokens..., outputs], over all tokens."""
    tokens = tuple(range(x.ndim - 1))
    return tokens, tokens


def dot(a: jax.Array, b: jax.Array, axes: Contraction, *, precision: lax.Precision | None = None) -> jax.Array:
    """float32 sums of products over `axes`."""
    return lax.dot_general(a, b, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def contraction_last(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """x as a matrix [rows, contraction]."""
    free = [i for i in range(x.ndim) if i not in axes]
    return x.transpose(*free, *axes).reshape(math.prod(x.shape[i] for i in free), -1)


def f8_matrix(tensor: QTensor, axes: tuple[int, ...]) -> jax.Array:
    """The codes of an FP8 tensor as float8 [rows, contraction]: an 8-bit GEMM wants the contraction last."""
    assert tensor.format.element is not None
    return contraction_last(lax.bitcast_convert_type(tensor.codes, tensor.format.element.dtype), axes)


def result_shape(left: tuple[int, ...], right: tuple[int, ...], axes: Contraction) -> tuple[int, ...]:
    """What is left of both shapes after the contraction."""
    return tuple(
        n for shape, summed in zip((left, right), axes, strict=True) for i, n in enumerate(shape) if i not in summed
    )


def alpha(left: Operand, right: Operand) -> jax.Array | None:
    """The factor of a GEMM's float32 sums: the product of both operands' decode scales, None for 1."""
    factors = [o.decode_scale for o in (left, right) if o.decode_scale is not None]
    return functools.reduce(jnp.multiply, factors) if factors else None


def finish(sums: jax.Array, factor: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """float32 sums times the factor, rounded once to `dtype`, by a rounding that the compiler keeps."""
    y = sums if factor is None else sums * factor
    return round_bfloat16(y).astype(dtype) if dtype == jnp.bfloat16 else y.astype(dtype)
