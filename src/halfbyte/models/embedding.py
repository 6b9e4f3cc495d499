"""The two ends of the model: token embedding and head weight.

The embedding is read in the compute dtype, and its gradient is summed in float32: a common token is added to one row
thousands of times a step, which bfloat16 would lose.

On a mesh the table is split by vocabulary over `tensor`, and by width over `fsdp`, and stays where it is. A device
looks up its part of the width for the tokens of all devices of its fsdp group, and the rows go to whose tokens they
are: the table itself, whose gather nothing could hide, would be eight times their bytes (128k words, 16k tokens a
device). Tokens outside of its part of the vocabulary get zeros; the sum over `tensor`, which has one term that is not
zero, leaves positions split as between blocks. The gradient takes the same way back, in the dtype of the rows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from halfbyte.distributed import LogicalAxisRules, axis_size, shard_map_over, with_logical_constraint
from halfbyte.models.model_context import ModelContext
from halfbyte.models.params import Params


def embed_tokens(table: jax.Array, tokens: jax.Array, ctx: ModelContext) -> jax.Array:
    """Rows of `table` [vocab, embed], as [batch, seq, embed] in the compute dtype."""
    if ctx.mesh is None:
        return table[tokens].astype(ctx.compute_dtype)  # the table is not copied; its gradient adds up in float32
    return _sharded_lookup(table, tokens, _LookupSharding(ctx.mesh, ctx.rules, ctx.compute_dtype))


def head_weight(params: Params) -> jax.Array:
    """The head's weight [embed, vocab]: its own, or the embedding transposed."""
    return params["head"] if "head" in params else params["embed"].T


class _LookupSharding(NamedTuple):
    """Where table, tokens and rows live, and the dtype of the rows."""

    mesh: Mesh
    rules: LogicalAxisRules
    dtype: Any

    def axes(self, logical: str) -> tuple[str, ...]:
        """The mesh axes of more than one device that a logical axis is split over."""
        return tuple(axis for axis in self.rules.mesh_axes(logical) if axis_size(self.mesh, axis) > 1)

    def spec(self, *axes: str | None) -> PartitionSpec:
        return self.rules.spec(axes, self.mesh)

    def map(self, local: Any, in_specs: tuple, out_specs: PartitionSpec) -> Any:
        return shard_map_over(functools.partial(local, at=self), self.mesh, in_specs, out_specs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _sharded_lookup(table: jax.Array, tokens: jax.Array, at: _LookupSharding) -> jax.Array:
    cast = with_logical_constraint(table.astype(at.dtype), ("vocab", "embed"), at.mesh, at.rules)
    specs = (at.spec("vocab", "embed"), at.spec("batch", "seq"))
    return at.map(_local_rows, specs, at.spec("batch", "residual_seq", None))(cast, tokens)


def _lookup_fwd(
    table: jax.Array, tokens: jax.Array, at: _LookupSharding
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _sharded_lookup(table, tokens, at), (tokens, jnp.zeros((table.shape[0], 0), table.dtype))


def _lookup_bwd(at: _LookupSharding, residuals: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, None]:
    tokens, like = residuals
    specs = (at.spec("batch", "residual_seq", None), at.spec("batch", "seq"), at.spec("vocab", None))
    return at.map(_local_gradient, specs, at.spec("vocab", "embed"))(g, tokens, like), None


_sharded_lookup.defvjp(_lookup_fwd, _lookup_bwd)


def _local_rows(table: jax.Array, tokens: jax.Array, *, at: _LookupSharding) -> jax.Array:
    """[batch, seq, embed] of this device: rows of its part of the vocabulary, summed over the parts."""
    index, mine = _local_index(_gather_group_tokens(tokens, at), table.shape[0], at)
    rows = jnp.where(mine[..., None], table[index], jnp.zeros((), table.dtype))
    # [batch of the group, seq, part of embed] -> [batch, seq, embed]
    rows = _all_to_all(rows, at, split=0, join=2)
    split = _sequence_axes(at)
    rows = lax.psum_scatter(rows, split, scatter_dimension=1, tiled=True) if split else rows
    rest = tuple(axis for axis in at.axes("vocab") if axis not in split)
    return lax.psum(rows, rest) if rest else rows


def _local_gradient(g: jax.Array, tokens: jax.Array, like: jax.Array, *, at: _LookupSharding) -> jax.Array:
    """The gradient of this device's part of the table, in the table's dtype: its group's tokens' first, then all
    groups'.
    """
    split = _sequence_axes(at)
    g = lax.all_gather(g, split, axis=1, tiled=True) if split else g
    g = _all_to_all(g, at, split=2, join=0)  # [batch, seq, embed] -> [batch of the group, seq, part of embed]
    index, mine = _local_index(_gather_group_tokens(tokens, at), like.shape[0], at)
    outside = jnp.where(mine, index, like.shape[0])  # dropped
    grad = jnp.zeros((like.shape[0], g.shape[-1]), like.dtype).at[outside].add(g.astype(like.dtype), mode="drop")
    summed = tuple(axis for axis in (*at.axes("batch"), *at.axes("seq")) if axis not in at.axes("embed"))
    return lax.psum(grad, summed) if summed else grad


def _gather_group_tokens(tokens: jax.Array, at: _LookupSharding) -> jax.Array:
    """The tokens of all devices that share one row of the table."""
    axes = at.axes("embed")
    return lax.all_gather(tokens, axes, axis=0, tiled=True) if axes else tokens


def _all_to_all(rows: jax.Array, at: _LookupSharding, *, split: int, join: int) -> jax.Array:
    """`rows` cut along dim `split`, a part for each device of the group, and the parts of all joined along `join`."""
    axes = at.axes("embed")
    return lax.all_to_all(rows, axes, split_axis=split, concat_axis=join, tiled=True) if axes else rows


def _local_index(tokens: jax.Array, rows: int, at: _LookupSharding) -> tuple[jax.Array, jax.Array]:
    """(row of this device's part of the table, whether the token is in it)."""
    axes = at.axes("vocab")
    index = tokens - (lax.axis_index(axes).astype(jnp.int32) * rows if axes else 0)
    mine = (index >= 0) & (index < rows)
    return jnp.where(mine, index, 0), mine


def _sequence_axes(at: _LookupSharding) -> tuple[str, ...]:
    """The axes over which positions are split between blocks but not inside them."""
    return tuple(axis for axis in at.axes("residual_seq") if axis not in at.axes("seq"))
