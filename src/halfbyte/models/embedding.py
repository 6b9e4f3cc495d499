"""The two ends of the model: token embedding and head weight.

The embedding is read in the compute dtype, and its gradient is summed in float32: a common token is added to one row
thousands of times a step, which
bfloat16 would lose.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from halfbyte.models.context import Context
from halfbyte.models.params import Params
from halfbyte.sharding import Rules, constrain


class _Placement(NamedTuple):
    mesh: Mesh
    rules: Rules
    dtype: Any

    def hold(self, x: jax.Array, *axes: str | None) -> jax.Array:
        return constrain(x, axes, self.mesh, self.rules)


def embed_tokens(table: jax.Array, tokens: jax.Array, ctx: Context) -> jax.Array:
    """Rows of `table` [vocab, embed], as [batch, seq, embed] in the compute dtype."""
    if ctx.mesh is None:
        return table[tokens].astype(
            ctx.compute_dtype
        )  # cast after reading: the table is not copied, and its gradient adds up in float32
    rows = _sharded_lookup(
        table, ctx.constrain(tokens, "batch", "seq"), _Placement(ctx.mesh, ctx.rules, ctx.compute_dtype)
    )
    return ctx.constrain(rows, "batch", "residual_seq", "width")


def head_weight(params: Params) -> jax.Array:
    """The head's weight [embed, vocab]: its own, or the embedding transposed."""
    return params["head"] if "head" in params else params["embed"].T


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _sharded_lookup(table: jax.Array, tokens: jax.Array, at: _Placement) -> jax.Array:
    cast = at.hold(table.astype(at.dtype), "vocab", "embed")
    return at.hold(cast, "vocab", None)[tokens]  # gathered over fsdp in the compute dtype


def _lookup_fwd(table: jax.Array, tokens: jax.Array, at: _Placement) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _sharded_lookup(table, tokens, at), (tokens, jnp.zeros((table.shape[0], 0), table.dtype))


def _lookup_bwd(at: _Placement, residuals: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, None]:
    tokens, like = residuals
    empty = at.hold(jnp.zeros((like.shape[0], g.shape[-1]), like.dtype), "vocab", None)
    return at.hold(empty.at[tokens].add(g.astype(like.dtype)), "vocab", "embed"), None


_sharded_lookup.defvjp(_lookup_fwd, _lookup_bwd)
