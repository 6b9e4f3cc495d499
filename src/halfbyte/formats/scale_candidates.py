"""Four over six: several candidate scales per block, of which the one with the least error is used (arXiv 2512.02010).

E2M1 has no 5: a block whose amax is scaled to 6 rounds the next smaller elements coarsely. Scaled to 4, the grid ends
at 4 and is finer between 2/3 and 1 of the amax. For each candidate k that the amax may be scaled to

    s_k = e4m3(min(amax_block * mult_k, 448));   z = x * encode_k;   q = round(z)

and the block uses the first k with the least error. The error metric is one of

    squared, absolute    sum |v - x|^p with v = ((q s_k) A) / (6 T), p = 2 or 1: in the input's own domain, elements in
                         order, the rows of a tile as a tree, every operation rounded to float32; x and A times
                         2**64 where A < 2**-60, and times 2**-64 where A >= 2**60
    expected             s_k^2 sum (z - lo)(hi - z), (z - 6)^2 above 6: the mean squared error of stochastic rounding
                         between the neighbours lo and hi. It is known before the random bits, so the choice does not
                         depend on them, and the mean of the result stays x.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfbyte.formats.block_view import BlockView
from halfbyte.formats.elements import Element, RoundedMagnitudes, grid_neighbours, round_half_away, round_nearest
from halfbyte.formats.exact_float32 import SUBNORMAL_LIFT_EXPONENT, bitcast_to_float32, scale_out_of_subnormals

ERROR_METRICS = ("squared", "absolute", "expected")
MAX_FLOAT32 = np.finfo(np.float32).max
SMALL, LARGE = 2.0**-60, 2.0**60


def round_nearest_with_ties(element: Element, magnitude: jax.Array, rounding: str) -> RoundedMagnitudes:
    """Rounds to nearest, ties by `rounding`: away from zero, or to even."""
    return (round_half_away if rounding == "away" else round_nearest)(element, magnitude)


def error_lift(amax: jax.Array) -> jax.Array:
    """Returns the power of two by which elements are multiplied before their errors are computed, from float32 amaxes.

    It keeps squares within range; 1 unless the amax is below 2**-60 or at least 2**60.
    """
    up = jnp.where(amax < np.float32(SMALL), np.float32(2.0**SUBNORMAL_LIFT_EXPONENT), np.float32(1))
    return jnp.where(amax >= np.float32(LARGE), np.float32(2.0**-SUBNORMAL_LIFT_EXPONENT), up)


def lift_from_subnormals(magnitude: jax.Array, amax: jax.Array) -> jax.Array:
    """Returns float32 magnitudes times `error_lift(amax)`, from the bits of both; devices may flush subnormals."""
    small, large = (jnp.uint32(np.float32(limit).view(np.uint32)) for limit in (SMALL, LARGE))
    plain = bitcast_to_float32(magnitude)
    lowered = jnp.where(amax >= large, plain * jnp.float32(2.0**-SUBNORMAL_LIFT_EXPONENT), plain)
    return jnp.where(amax < small, scale_out_of_subnormals(magnitude), lowered)


def prevent_fma(products: jax.Array) -> jax.Array:
    """Returns finite products unchanged. The minimum keeps compilers from fusing a product and the next sum (FMA)."""
    return jnp.minimum(products, jnp.float32(MAX_FLOAT32))


def block_error(magnitude: jax.Array, value: jax.Array, view: BlockView, metric: str) -> jax.Array:
    """Returns each block's error between magnitudes and their values."""
    deviation = jnp.abs(prevent_fma(value) - magnitude)
    return ordered_block_sum(deviation * deviation if metric == "squared" else deviation, view)


def expected_block_error(element: Element, scaled: jax.Array, scale: jax.Array, view: BlockView) -> jax.Array:
    """Returns each block's expected squared error under stochastic rounding, in units of the outer scale."""
    _, below, step = grid_neighbours(element, scaled)
    beyond = scaled - jnp.float32(element.max)
    errors = jnp.where(beyond > 0, beyond * beyond, (scaled - below) * (below + step - scaled))
    return scale * scale * ordered_block_sum(errors, view)


def ordered_block_sum(values: jax.Array, view: BlockView) -> jax.Array:
    """Sums over blocks: elements in sequence, the rows of a tile as a tree of halves."""
    *rows, last = view.reduce_axes
    values = prevent_fma(values)
    parts = [lax.index_in_dim(values, i, last, keepdims=False) for i in range(view.shape[last])]
    total = functools.reduce(jnp.add, parts)
    for axis in rows:
        while total.shape[axis] > 1:
            half = total.shape[axis] // 2
            total = lax.slice_in_dim(total, 0, half, axis=axis) + lax.slice_in_dim(total, half, 2 * half, axis=axis)
        total = lax.squeeze(total, (axis,))
    return total


def select_min_error(candidates: Sequence[Sequence[jax.Array]], errors: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns, per block, the arrays of the first candidate with the least error."""
    best, best_error = list(candidates[0]), errors[0]
    for arrays, error in zip(candidates[1:], errors[1:], strict=True):
        best = [jnp.where(error < best_error, new, old) for new, old in zip(arrays, best, strict=True)]
        best_error = jnp.minimum(error, best_error)
    return best
