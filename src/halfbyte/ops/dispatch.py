"""Rows to their experts and back: every gradient is a gather and a sum in a stated order, no scatter-add."""

import functools

import jax
import jax.numpy as jnp

from halfbyte.ops.operand import rounded


@jax.custom_vjp
def fork(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x, x in float32): for experts and for their router. Both gradients meet in float32, and are rounded once."""
    return x, x.astype(jnp.float32)


fork.defvjp(lambda x: (fork(x), None), lambda _, g: (rounded(g[0].astype(jnp.float32) + g[1], g[0].dtype),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def spread(x: jax.Array, rows: jax.Array, room: int) -> jax.Array:
    """x [tokens, width] -> [room, width]: token t at rows[t, i] for each of its experts i; zero elsewhere. Its gradient
    adds up a token's experts in their order.
    """
    tokens, k = rows.shape
    pair = _pairs(rows, room)
    return x.at[jnp.where(pair < tokens * k, pair // k, tokens)].get(mode="fill", fill_value=0)


def _pairs(rows: jax.Array, room: int) -> jax.Array:
    """int32 [room]: the number of the (token, expert) pair in each row; as many as there are where it has none."""
    numbers = jnp.arange(rows.size, dtype=jnp.int32)
    return jnp.full(room, rows.size, jnp.int32).at[rows.reshape(-1)].set(numbers, unique_indices=True)


spread.defvjp(
    lambda x, rows, room: (spread(x, rows, room), rows),
    lambda room, rows, g: (rounded(jnp.sum(g[rows].astype(jnp.float32), axis=1), g.dtype), None),
)


@jax.custom_vjp
def combine(y: jax.Array, rows: jax.Array | None, weights: jax.Array) -> jax.Array:
    """y [room, width] -> [tokens, width]: the sum over a token's experts, in their order, of weight times row. Without
    `rows` y has a token's one after the other."""
    return rounded(jnp.sum(_of_tokens(y, rows, weights) * weights[..., None], axis=1), y.dtype)


def _of_tokens(y: jax.Array, rows: jax.Array | None, weights: jax.Array) -> jax.Array:
    """float32 [tokens, k, width]."""
    return (y.reshape(*weights.shape, -1) if rows is None else y[rows]).astype(jnp.float32)


def _combine_bwd(residuals, g):
    y, rows, weights = residuals
    wide = g.astype(jnp.float32)
    if rows is None:
        dy = (wide[:, None] * weights[..., None]).reshape(y.shape)
    else:
        pair = _pairs(rows, y.shape[0])
        known, own = (pair < rows.size)[:, None], jnp.minimum(pair, rows.size - 1)
        dy = wide[own // rows.shape[1]] * weights.reshape(-1)[own][:, None]  # [room, width]
        dy = jnp.where(known, dy, 0)
    return rounded(dy, y.dtype), None, jnp.sum(wide[:, None] * _of_tokens(y, rows, weights), axis=-1)


combine.defvjp(lambda y, rows, weights: (combine(y, rows, weights), (y, rows, weights)), _combine_bwd)
