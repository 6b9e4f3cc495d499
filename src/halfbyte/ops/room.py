"""Room for the rows that come to a device, not for all that might come.

Nobody knows how many rows choose a device's experts before it runs, and an array needs its size before. So there are
two programs: one with room for some rows, several times as many as come on average, and one with room for all. The
first runs where it suffices. Where rows lie does not matter to their numbers, so neither does which one runs.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

Weights = tuple[jax.Array, ...]
Run = Callable[[jax.Array, Weights, object], jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_room(run: Run, some: int, rows: jax.Array, weights: Weights, rest: object, count: jax.Array) -> jax.Array:
    """run(rows, weights, rest), a row for each, of rows [all, width] of which the first `count` are used: of the first
    `some` alone where these are all, and zero behind them. No gradient reaches `rest`. What the backward pass reads is
    kept of some rows; for all of them it is made again.
    """
    fits = lambda rows, weights, rest: _filled(run(rows[:some], weights, rest), rows.shape[0])  # noqa: E731
    return lax.cond(count <= some, fits, run, rows, weights, rest)


def _forward(run, some, rows, weights, rest, count):
    trees = []

    def fits(rows, weights, rest):
        y, pull = jax.vjp(lambda rows, weights: run(rows, weights, rest), rows[:some], weights)
        kept, tree = jax.tree.flatten(pull)
        trees.append(tree)
        return _filled(y, rows.shape[0]), kept

    def all_of_them(rows, weights, rest):
        return run(rows, weights, rest), [jnp.zeros(each.shape, each.dtype) for each in shapes]

    shapes = jax.eval_shape(fits, rows, weights, rest)[1]
    y, kept = lax.cond(count <= some, fits, all_of_them, rows, weights, rest)
    return y, (jax.tree.unflatten(trees[-1], kept), rows, weights, rest, count)


def _backward(run, some, kept, dy):
    pull, rows, weights, rest, count = kept

    def fits(dy):
        dx, dweights = pull(dy[:some])
        return _filled(dx, rows.shape[0]), dweights

    def all_of_them(dy):
        return jax.vjp(lambda rows, weights: run(rows, weights, rest), rows, weights)[1](dy)

    return *lax.cond(count <= some, fits, all_of_them, dy), None, None


in_room.defvjp(_forward, _backward)


def _filled(x: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x, ((0, rows - x.shape[0]), (0, 0)))
