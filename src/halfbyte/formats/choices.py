"""Four over six: several scales for a block, and the one that leaves the least error (arXiv 2512.02010).

E2M1 has no 5: a block whose largest number becomes 6 rounds the next ones coarsely. Where it becomes 4 the grid ends at
4, and is finer for what lies between 2/3 and 1 of it. For each value k that the largest number may become

    s_k = e4m3(min(amax_block * mult_k, 448));   z = x * encode_k;   q = round(z)

and the first k with the least error of its block is taken. The measure is one of

    squared, absolute    sum |v - x|^p with v = ((q s_k) A) / (6 T), p = 2 or 1: in the input's own domain, elements in
                         order, the rows of a tile as a tree, every operation rounded to float32
    expected             s_k^2 sum (z - lo)(hi - z), (z - 6)^2 above 6: the mean squared error of a stochastic rounding
                         between the neighbours lo and hi. It is known before the draw, so the choice does not depend on
                         it, and the mean over draws stays x.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .bits import float_of_bits
from .elements import Element, Rounded, neighbours, round_away, round_nearest
from .exact import lift
from .views import BlockView

MEASURES = ("squared", "absolute", "expected")
LARGEST = np.finfo(np.float32).max
SMALL_BITS = int(np.float32(2.0**-60).view(np.uint32))


def to_nearest(element: Element, magnitude: jax.Array, rounding: str) -> Rounded:
    """The nearest value, ties as `rounding` says: away from zero, or to even."""
    return (round_away if rounding == "away" else round_nearest)(element, magnitude)


def normal(magnitude: jax.Array, amax: jax.Array) -> jax.Array:
    """float32 magnitudes from their bits; times 2**64 under a maximum below 2**-60, where a device may flush them."""
    return jnp.where(amax < jnp.uint32(SMALL_BITS), lift(magnitude), float_of_bits(magnitude))


def deviation(magnitude: jax.Array, value: jax.Array, view: BlockView, measure: str) -> jax.Array:
    """Each block's error between magnitudes and their values."""
    off = jnp.abs(value - magnitude)
    return in_order(off * off if measure == "squared" else off, view)


def expected_deviation(element: Element, scaled: jax.Array, scale: jax.Array, view: BlockView) -> jax.Array:
    """Each block's expected squared error under stochastic rounding, in units of the outer scale."""
    _, below, step = neighbours(element, scaled)
    beyond = scaled - jnp.float32(element.max)
    each = jnp.where(beyond > 0, beyond * beyond, (scaled - below) * (below + step - scaled))
    return scale * scale * in_order(each, view)


def in_order(values: jax.Array, view: BlockView) -> jax.Array:
    """Sums over blocks: elements one after the other, the rows of a tile as a tree of halves."""
    *rows, last = view.shared
    values = jnp.minimum(values, jnp.float32(LARGEST))  # keeps a compiler from fusing a product with the sum
    parts = [lax.index_in_dim(values, i, last, keepdims=False) for i in range(view.shape[last])]
    total = functools.reduce(jnp.add, parts)
    for axis in rows:
        while total.shape[axis] > 1:
            half = total.shape[axis] // 2
            total = lax.slice_in_dim(total, 0, half, axis=axis) + lax.slice_in_dim(total, half, 2 * half, axis=axis)
        total = lax.squeeze(total, (axis,))
    return total


def take_least(found: Sequence[Sequence[jax.Array]], errors: Sequence[jax.Array]) -> list[jax.Array]:
    """Of arrays one a block under each candidate, those of the first candidate with the least error."""
    taken, least = list(found[0]), errors[0]
    for arrays, error in zip(found[1:], errors[1:], strict=True):
        taken = [jnp.where(error < least, new, old) for new, old in zip(arrays, taken, strict=True)]
        least = jnp.minimum(error, least)
    return taken
