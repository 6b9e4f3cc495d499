"""The three GEMMs of a linear y = x W, by name, and how float32 sums become their result.

| GEMM  | equation    | left operand           | right operand          | sums over |
|-------|-------------|------------------------|------------------------|-----------|
| fprop | y  = x W    | x [tokens..., inputs]  | W [inputs, outputs]    | inputs    |
| dgrad | dx = dy W^T | dy [tokens..., outputs]| W [inputs, outputs]    | outputs   |
| wgrad | dw = x^T dy | x [tokens..., inputs]  | dy [tokens..., outputs]| tokens    |
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.ops.operand import Operand, Owed, rounded
from halfbyte.ops.shards import Cut, axes_of, scatter_sum
from halfbyte.recipe import GEMMS as ROLES_OF

Contraction = tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One of the three: its name, and what it sums `over`."""

    name: str
    over: str

    @property
    def roles(self) -> tuple[str, str]:
        """The recipe's names of its left and its right operand."""
        return ROLES_OF[self.name]

    def axes(self, left_ndim: int) -> Contraction:
        """The axes of its operands that are summed, for a left operand of so many dims."""
        last, tokens = (left_ndim - 1,), tuple(range(left_ndim - 1))
        return {"inputs": (last, (0,)), "outputs": (last, (1,)), "tokens": (tokens, tokens)}[self.over]

    def __str__(self) -> str:
        return self.name


FPROP, DGRAD, WGRAD = Gemm("fprop", "inputs"), Gemm("dgrad", "outputs"), Gemm("wgrad", "tokens")
GEMMS = (FPROP, DGRAD, WGRAD)


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


def alpha(left: Operand, right: Operand) -> jax.Array | None:
    """The factor of a GEMM's float32 sums: the product of both operands' factors, None for 1; one for each sum where
    rows of an operand have factors of their own.
    """
    a, b = left.factor, right.factor
    if a is not None and a.ndim:
        a = a[..., None]  # [rows of left] -> [rows of left, 1]
        b = b if b is None or not b.ndim else jnp.expand_dims(b, range(a.ndim - 1))  # -> [1..., rows of right]
    factors = [factor for factor in (a, b) if factor is not None]
    return functools.reduce(jnp.multiply, factors) if factors else None


def finish(sums: jax.Array, factor: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """float32 sums times the factor, rounded once to `dtype`, by a rounding that the compiler keeps."""
    if factor is not None and 0 < factor.ndim < sums.ndim:
        factor = jnp.expand_dims(factor, range(sums.ndim - factor.ndim))  # of the columns alone
    return rounded(sums if factor is None else sums * factor, dtype)


def added_up(
    sums: jax.Array, over: tuple[str, ...], cut: Cut, dtype: jnp.dtype, *, beside: Sequence[jax.Array | Owed] = ()
) -> jax.Array:
    """A GEMM's float32 sums, partial over the mesh axes `over`, added up, scattered over `cut`, and rounded once. Who
    reads them waits for what is computed `beside` too: else a scheduler puts that last, for nobody waits for it, and
    has nothing left to do while sums travel.
    """
    scattered = scatter_sum(sums, (*cut, ()))
    rest = tuple(axis for axis in over if axis not in axes_of(cut))
    total = lax.psum(scattered, rest) if rest else scattered
    return finish(lax.optimization_barrier((total, tuple(beside)))[0] if beside else total, None, dtype)
