"""The three GEMMs of a linear as contractions: which axes are summed."""

import math

import jax
import jax.numpy as jnp
from jax import lax

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


def result_shape(left: tuple[int, ...], right: tuple[int, ...], axes: Contraction) -> tuple[int, ...]:
    """What is left of both shapes after the contraction."""
    return tuple(
        n for shape, summed in zip((left, right), axes, strict=True) for i, n in enumerate(shape) if i not in summed
    )
