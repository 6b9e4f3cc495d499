"""Token embedding and head weight.

The embedding is read in the compute dtype, and its gradient is summed in float32: a common token is added to one row
thousands of times a step, which bfloat16 would lose.

On a mesh the table is sharded by vocabulary over `tensor` and by width over `fsdp`, and is not all-gathered. A device
looks up its shard of the width for the tokens of all devices of its fsdp group. An all-to-all then sends the rows to
the devices of their tokens: an all-gather of the table, which nothing could hide, would be eight times their bytes
(128k words, 16k tokens per device). Tokens outside a device's shard of the vocabulary get zeros. The reduce-scatter
over `tensor`, in which one term is not zero, leaves positions sharded as between blocks. The backward pass runs the
same collectives in reverse, in the dtype of the rows.
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
    """Returns the rows of `table` [vocab, embed] for `tokens`: [batch, seq, embed] in the compute dtype."""
    if ctx.mesh is None:
        return table[tokens].astype(
            ctx.compute_dtype
        )  # gather before the cast: no bf16 copy of the table, and its gradient is summed in float32
    return _sharded_lookup(table, tokens, _LookupSharding(ctx.mesh, ctx.rules, ctx.compute_dtype))


def head_weight(params: Params) -> jax.Array:
    """Returns the head's weight [embed, vocab]: the parameter `head`, or the transposed embedding if tied."""
    return params["head"] if "head" in params else params["embed"].T


class _LookupSharding(NamedTuple):
    """Sharding of the lookup (mesh and logical axis rules) and the dtype of the rows."""

    mesh: Mesh
    rules: LogicalAxisRules
    dtype: Any

    def axes(self, logical: str) -> tuple[str, ...]:
        """Returns the mesh axes of more than one device over which a logical axis is sharded."""
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
    """Looks up this device's shard of the vocabulary and sums over the shards: [batch, seq, embed] of this device."""
    index, mine = _local_index(_gather_group_tokens(tokens, at), table.shape[0], at)
    rows = jnp.where(mine[..., None], table[index], jnp.zeros((), table.dtype))
    # [batch of the group, seq, shard of embed] -> [batch, seq, embed]
    rows = _all_to_all(rows, at, split=0, join=2)
    sequence_axes = _sequence_axes(at)
    rows = lax.psum_scatter(rows, sequence_axes, scatter_dimension=1, tiled=True) if sequence_axes else rows
    remaining_axes = tuple(axis for axis in at.axes("vocab") if axis not in sequence_axes)
    return lax.psum(rows, remaining_axes) if remaining_axes else rows


def _local_gradient(g: jax.Array, tokens: jax.Array, like: jax.Array, *, at: _LookupSharding) -> jax.Array:
    """Returns the gradient of this device's shard of the table, in the dtype of the table.

    Scatter-adds the tokens of its fsdp group, then all-reduces over the other batch and sequence axes.
    """
    split = _sequence_axes(at)
    g = lax.all_gather(g, split, axis=1, tiled=True) if split else g
    g = _all_to_all(g, at, split=2, join=0)  # [batch, seq, embed] -> [batch of the group, seq, shard of embed]
    index, mine = _local_index(_gather_group_tokens(tokens, at), like.shape[0], at)
    outside = jnp.where(mine, index, like.shape[0])  # an index that mode="drop" drops
    grad = jnp.zeros((like.shape[0], g.shape[-1]), like.dtype).at[outside].add(g.astype(like.dtype), mode="drop")
    summed = tuple(axis for axis in (*at.axes("batch"), *at.axes("seq")) if axis not in at.axes("embed"))
    return lax.psum(grad, summed) if summed else grad


def _gather_group_tokens(tokens: jax.Array, at: _LookupSharding) -> jax.Array:
    """All-gathers the tokens of all devices over which a row of the table is sharded."""
    axes = at.axes("embed")
    return lax.all_gather(tokens, axes, axis=0, tiled=True) if axes else tokens


def _all_to_all(rows: jax.Array, at: _LookupSharding, *, split: int, join: int) -> jax.Array:
    """Exchanges chunks of `rows` in the group: splits dim `split`, concatenates along dim `join`."""
    axes = at.axes("embed")
    return lax.all_to_all(rows, axes, split_axis=split, concat_axis=join, tiled=True) if axes else rows


def _local_index(tokens: jax.Array, rows: int, at: _LookupSharding) -> tuple[jax.Array, jax.Array]:
    """Returns the row in this device's shard of the table (0 if absent) and a mask of the tokens in the shard."""
    axes = at.axes("vocab")
    index = tokens - (lax.axis_index(axes).astype(jnp.int32) * rows if axes else 0)
    mine = (index >= 0) & (index < rows)
    return jnp.where(mine, index, 0), mine


def _sequence_axes(at: _LookupSharding) -> tuple[str, ...]:
    """Returns the mesh axes over which positions are sharded between blocks but not inside them."""
    return tuple(axis for axis in at.axes("residual_seq") if axis not in at.axes("seq"))
