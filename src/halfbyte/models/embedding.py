"""The two ends of the model: token embedding and head weight.

The embedding is read in the compute dtype, and its gradient is summed in float32: a common token is added to one row
thousands of times a step, which bfloat16 would lose.

On a mesh the table is split by vocabulary over `tensor`, and by width over `fsdp`. A device gathers its vocabulary's
part
over fsdp, looks up the tokens that fall into it, and leaves zeros for the others; the sum over `tensor`, which has one
term that is not zero, leaves positions split as between blocks. The gradient takes the same way back.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from halfbyte.models.context import Context
from halfbyte.models.params import Params
from halfbyte.ops.shards import scatter_gradient
from halfbyte.sharding import Rules, axis_size, constrain


def embed_tokens(table: jax.Array, tokens: jax.Array, ctx: Context) -> jax.Array:
    """Rows of `table` [vocab, embed], as [batch, seq, embed] in the compute dtype."""
    if ctx.mesh is None:
        return table[tokens].astype(ctx.compute_dtype)  # the table is not copied; its gradient adds up in float32
    return _sharded_lookup(table, tokens, _Placement(ctx.mesh, ctx.rules, ctx.compute_dtype, ctx.reduce_dtype))


def head_weight(params: Params) -> jax.Array:
    """The head's weight [embed, vocab]: its own, or the embedding transposed."""
    return params["head"] if "head" in params else params["embed"].T


class _Placement(NamedTuple):
    """Where table, tokens and rows live, the dtype of the rows, and what the table's gradient travels in."""

    mesh: Mesh
    rules: Rules
    dtype: Any
    reduce_dtype: str

    def axes(self, logical: str) -> tuple[str, ...]:
        """The mesh axes of more than one device that a logical axis is split over."""
        return tuple(axis for axis in self.rules.mesh_axes(logical) if axis_size(self.mesh, axis) > 1)

    def spec(self, *axes: str | None) -> PartitionSpec:
        return self.rules.spec(axes, self.mesh)

    def map(self, local: Any, in_specs: tuple, out_specs: PartitionSpec) -> Any:
        return jax.shard_map(
            functools.partial(local, at=self), mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _sharded_lookup(table: jax.Array, tokens: jax.Array, at: _Placement) -> jax.Array:
    cast = constrain(table.astype(at.dtype), ("vocab", "embed"), at.mesh, at.rules)  # before the gather
    specs = (at.spec("vocab", None), at.spec("batch", "seq"))
    return at.map(_local_rows, specs, at.spec("batch", "residual_seq", None))(cast, tokens)


def _lookup_fwd(table: jax.Array, tokens: jax.Array, at: _Placement) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _sharded_lookup(table, tokens, at), (tokens, jnp.zeros((table.shape[0], 0), table.dtype))


def _lookup_bwd(at: _Placement, residuals: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, None]:
    tokens, like = residuals
    specs = (at.spec("batch", "residual_seq", None), at.spec("batch", "seq"), at.spec("vocab", None))
    return at.map(_local_gradient, specs, at.spec("vocab", "embed"))(g, tokens, like), None


_sharded_lookup.defvjp(_lookup_fwd, _lookup_bwd)


def _local_rows(table: jax.Array, tokens: jax.Array, *, at: _Placement) -> jax.Array:
    """[batch, seq, embed] of this device: rows of its part of the vocabulary, summed over the parts."""
    index, mine = _local_index(tokens, table.shape[0], at)
    rows = jnp.where(mine[..., None], table[index], jnp.zeros((), table.dtype))
    split = _split_seq(at)
    rows = lax.psum_scatter(rows, split, scatter_dimension=1, tiled=True) if split else rows
    rest = tuple(axis for axis in at.axes("vocab") if axis not in split)
    return lax.psum(rows, rest) if rest else rows


def _local_gradient(g: jax.Array, tokens: jax.Array, like: jax.Array, *, at: _Placement) -> jax.Array:
    """The gradient of this device's part of the table, in the table's dtype: its own tokens' first, then all
    devices'.
    """
    split = _split_seq(at)
    g = lax.all_gather(g, split, axis=1, tiled=True) if split else g
    index, mine = _local_index(tokens, like.shape[0], at)
    outside = jnp.where(mine, index, like.shape[0])  # dropped
    grad = jnp.zeros((like.shape[0], g.shape[-1]), like.dtype).at[outside].add(g.astype(like.dtype), mode="drop")
    scattered = at.axes("embed")
    summed = tuple(axis for axis in (*at.axes("batch"), *at.axes("seq")) if axis not in scattered)
    grad = scatter_gradient(grad, ((), scattered), at.reduce_dtype)  # first: what is left to add up is a part
    return lax.psum(grad, summed) if summed else grad


def _local_index(tokens: jax.Array, rows: int, at: _Placement) -> tuple[jax.Array, jax.Array]:
    """(row of this device's part of the table, whether the token is in it)."""
    axes = at.axes("vocab")
    index = tokens - (lax.axis_index(axes).astype(jnp.int32) * rows if axes else 0)
    mine = (index >= 0) & (index < rows)
    return jnp.where(mine, index, 0), mine


def _split_seq(at: _Placement) -> tuple[str, ...]:
    """The axes over which positions are split between blocks but not inside them."""
    return tuple(axis for axis in at.axes("residual_seq") if axis not in at.axes("seq"))
