"""grouped_qdot: y = x W of each row's expert, its three GEMMs quantized; a loop of `qdot` over experts, in one program.

    fprop  y_e = Q(x_e) Q(W_e)     dgrad  dx_e = Q(dy_e) Q(W_e)^T     wgrad  dW_e = Q(x_e)^T Q(dy_e)

Every expert is a tensor of its own. Its rows begin a tensor of as many rows as x has, and the rest of that is zero: a
zero row changes no maximum, no code and no sum, and random bytes are counted from a tensor's own first row. So no
block, no transform and no scale crosses two experts, whatever backend `qdot` has.

That is the definition, and as `reference` it runs so: all rows times all experts, or the rows of each where `groups`
are numbers and not traced. Otherwise the same codes are made and multiplied tile by tile (`grouped_linear.py`), at the
cost of the rows that there are.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from halfbyte.ops.expert_tiles import apply_in_tiles, choose_tile_rows
from halfbyte.ops.gemm_problem import check_input_dtype, check_weight_dtype
from halfbyte.ops.grouped_linear import grouped_matmul, unsupported_grouped
from halfbyte.ops.qdot import qdot
from halfbyte.ops.trace_context import (
    explicit_sharding,
    in_auto_axes,
    pvary_to_common_axes,
    refuse_second_derivative,
    warn_if_key_shared,
)
from halfbyte.recipes import GEMM_ROLES, Recipe, as_recipe, layer_key
from halfbyte.renamed import renamed_parameters

GroupSizes = jax.Array | np.ndarray | Sequence[int]


@renamed_parameters()
def grouped_qdot(
    x: jax.Array, w: jax.Array, groups: GroupSizes, *, recipe: Recipe | str, key: jax.Array | None = None,
    backend: str = "auto",
) -> jax.Array:  # fmt: skip
    """x [rows, inputs] times w [experts, inputs, outputs], each row with its expert's, in x's dtype.

    `groups` int32 [experts] says how many rows each expert has, the first expert's first; it may be traced. Expert e
    gives what `qdot(x_e, w[e], key=fold_in(key, e))` gives: its tensor scales, its key, its random bytes are its own.
    NaN or infinity in an expert's operand makes that expert's result NaN and no other's. An expert without rows has a
    gradient of zero. Rows after the last group are never read, and give zero. Groups of more rows than x has are a
    ValueError, or where they are traced a result of NaN. As with `qdot`, one key for several tensors is a
    SharedBitsWarning, and there is no second derivative.
    """
    chosen = as_recipe(recipe, "grouped_qdot")
    groups = groups if isinstance(groups, jax.Array) else np.asarray(groups)
    x, w = pvary_to_common_axes(jnp.asarray(x), jnp.asarray(w))
    _check(x, w, groups)
    if x.shape[0] == 0 or w.shape[0] == 0:
        return jnp.zeros((x.shape[0], w.shape[-1]), x.dtype)

    def run(x: jax.Array, w: jax.Array, groups: jax.Array | np.ndarray, key: jax.Array | None) -> jax.Array:
        own = warn_if_key_shared(key, (chosen,), (x, w))
        return refuse_second_derivative(_products(x, w, groups, chosen, own, backend), x, w)

    found = explicit_sharding(x, w)
    if found is None:
        return run(x, w, groups, key)
    rows = NamedSharding(found.mesh, PartitionSpec(*jax.typeof(x).sharding.spec[:1]))  # of x, and of the result
    return in_auto_axes(run, x, w, jnp.asarray(groups), key, out=rows)


def _products(
    x: jax.Array, w: jax.Array, groups: jax.Array | np.ndarray, recipe: Recipe, key: jax.Array | None, backend: str
) -> jax.Array:
    counts = jnp.asarray(groups, jnp.int32)
    if backend == "auto" and unsupported_grouped(recipe) is None:
        y = _tiled(x, w, jnp.clip(counts, 0, x.shape[0]), recipe, key)  # a kernel counts its steps by them
    elif isinstance(groups, jax.core.Tracer):
        y = _reference_loop(x, w, counts, recipe, key, backend)
    else:
        y = _reference_unrolled(x, w, np.asarray(groups), recipe, key, backend)
    fits = (jnp.min(counts) >= 0) & (jnp.max(counts) <= x.shape[0]) & (jnp.sum(counts) <= x.shape[0])
    return jnp.where(fits, y, jnp.full((), jnp.nan, x.dtype))


def _tiled(x: jax.Array, w: jax.Array, counts: jax.Array, recipe: Recipe, key: jax.Array | None) -> jax.Array:
    """Tile by tile: rows are moved to where tiles begin, and back."""
    rows = x.shape[0]
    tile = choose_tile_rows(rows, w.shape[0], [recipe])
    expert = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(rows, dtype=jnp.int32), side="right").astype(jnp.int32)
    return apply_in_tiles(
        x, expert, counts, tile, lambda rows, tiles: grouped_matmul(rows, w, tiles, recipe=recipe, key=key)
    )


def _padded_rows(rows: int, recipe: Recipe) -> int:
    """The rows of a tensor that has whole blocks and transforms along them."""
    run = math.lcm(*(getattr(recipe, role).quantization_group_size for roles in GEMM_ROLES.values() for role in roles))
    return -(-rows // run) * run


def _reference_unrolled(
    x: jax.Array, w: jax.Array, counts: np.ndarray, recipe: Recipe, key: jax.Array | None, backend: str
) -> jax.Array:
    """The definition for groups that are known: a `qdot` of each expert's rows. A compiler may sum by size, and so it
    has the sizes of that loop.
    """

    def one(expert: int, start: int, count: int) -> jax.Array:
        mine = jnp.pad(x[start : start + count], ((0, _padded_rows(count, recipe) - count), (0, 0)))
        bits = None if key is None else layer_key(key, expert)
        return qdot(mine, w[expert], recipe=recipe, key=bits, backend=backend)[:count]

    starts = np.cumsum(counts) - counts
    made = [one(e, int(starts[e]), int(n)) for e, n in enumerate(counts) if n]
    nobodys = jnp.zeros((x.shape[0] - int(counts.sum()), w.shape[-1]), x.dtype)
    return jnp.concatenate([*made, nobodys])


def _reference_loop(
    x: jax.Array, w: jax.Array, counts: jax.Array, recipe: Recipe, key: jax.Array | None, backend: str
) -> jax.Array:
    """The definition: an expert after the other, each a tensor of all rows."""
    rows, starts = x.shape[0], jnp.cumsum(counts) - counts
    room = _padded_rows(rows, recipe)  # of one expert, which may have all rows
    padded = jnp.pad(x, ((0, room), (0, 0)))

    @jax.checkpoint  # what one expert keeps is as large as what all keep
    def one(y: jax.Array, expert: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        weight, number, start, count = expert
        own = jnp.arange(room, dtype=jnp.int32)[:, None] < count
        mine = jnp.where(own, lax.dynamic_slice_in_dim(padded, start, room), jnp.zeros((), x.dtype))
        bits = None if key is None else layer_key(key, number)
        made = qdot(mine, weight, recipe=recipe, key=bits, backend=backend)
        kept = jnp.where(own, made, lax.dynamic_slice_in_dim(y, start, room))
        return lax.dynamic_update_slice_in_dim(y, kept, start, 0), None

    begun, *_ = pvary_to_common_axes(jnp.zeros((rows + room, w.shape[-1]), x.dtype), x, counts)
    y, _ = lax.scan(one, begun, (w, jnp.arange(w.shape[0], dtype=jnp.int32), starts, counts))
    return y[:rows]


def _check(x: jax.Array, w: jax.Array, groups: jax.Array | np.ndarray) -> None:
    """All three fit each other, as far as it is known when they are traced."""
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1] or groups.shape != w.shape[:1]:
        raise ValueError(
            f"grouped_qdot takes x [rows, inputs], w [experts, inputs, outputs] and groups [experts], got {x.shape}, "
            f"{w.shape} and {groups.shape}"
        )
    check_input_dtype(x, "grouped_qdot")
    check_weight_dtype(w, "grouped_qdot")
    if not jnp.issubdtype(groups.dtype, jnp.integer):
        raise TypeError(f"grouped_qdot: groups are counts of rows, whole numbers, got {groups.dtype}")
    if not isinstance(groups, jax.core.Tracer):
        listed = np.asarray(groups)
        if listed.min(initial=0) < 0 or listed.sum() > x.shape[0]:
            raise ValueError(f"grouped_qdot: groups {listed.tolist()} must be 0 or more, and x has {x.shape[0]} rows")
