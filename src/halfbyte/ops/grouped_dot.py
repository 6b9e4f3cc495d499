"""grouped_qdot: y = x W with the matrix of each row's expert and three quantized GEMMs, in one program.

    fprop  y_e = Q(x_e) Q(W_e)     dgrad  dx_e = Q(dy_e) Q(W_e)^T     wgrad  dW_e = Q(x_e)^T Q(dy_e)

It is defined as a loop of `qdot` over experts. The rows of an expert are a separate tensor, padded with zero rows: a
zero row changes no amax, no code and no sum, and random bytes are indexed from the tensor's first row. So no block, no
transform and no scale crosses two experts, with any backend of `qdot`.

Backend `auto` computes and multiplies the same codes tile by tile (`grouped_linear.py`), at a cost proportional to the
rows. If the recipe does not allow tiles, and with any other backend, the loop itself runs: over all rows per expert if
`groups` is traced, else over each expert's own rows.
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
    """Multiplies each row of x [rows, inputs] by its expert's matrix of w [experts, inputs, outputs], in x's dtype.

    `groups`, int32 [experts], is the number of rows of each expert, in the order of experts; it may be traced. Expert e
    computes `qdot(x_e, w[e], key=fold_in(key, e))`, with its own tensor scales, key and random bytes. NaN or infinity
    in an operand of one expert makes the result of that expert NaN, and of no other. The gradient of an expert without
    rows is zero. Rows after the last group are never read and give zero. Groups with more rows than x raise ValueError,
    or give NaN if traced. As with `qdot`, one key for several tensors is a SharedBitsWarning, and there is no second
    derivative.
    """
    resolved = as_recipe(recipe, "grouped_qdot")
    groups = groups if isinstance(groups, jax.Array) else np.asarray(groups)
    x, w = pvary_to_common_axes(jnp.asarray(x), jnp.asarray(w))
    _check(x, w, groups)
    if x.shape[0] == 0 or w.shape[0] == 0:
        return jnp.zeros((x.shape[0], w.shape[-1]), x.dtype)

    def run(x: jax.Array, w: jax.Array, groups: jax.Array | np.ndarray, key: jax.Array | None) -> jax.Array:
        checked_key = warn_if_key_shared(key, (resolved,), (x, w))
        return refuse_second_derivative(_products(x, w, groups, resolved, checked_key, backend), x, w)

    sharding = explicit_sharding(x, w)
    if sharding is None:
        return run(x, w, groups, key)
    # The rows of the result are sharded as those of x.
    out = NamedSharding(sharding.mesh, PartitionSpec(*jax.typeof(x).sharding.spec[:1]))
    return in_auto_axes(run, x, w, jnp.asarray(groups), key, out=out)


def _products(
    x: jax.Array, w: jax.Array, groups: jax.Array | np.ndarray, recipe: Recipe, key: jax.Array | None, backend: str
) -> jax.Array:
    counts = jnp.asarray(groups, jnp.int32)
    if backend == "auto" and unsupported_grouped(recipe) is None:
        y = _tiled(x, w, jnp.clip(counts, 0, x.shape[0]), recipe, key)  # kernels derive their trip count from them
    elif isinstance(groups, jax.core.Tracer):
        y = _reference_loop(x, w, counts, recipe, key, backend)
    else:
        y = _reference_unrolled(x, w, np.asarray(groups), recipe, key, backend)
    fits = (jnp.min(counts) >= 0) & (jnp.max(counts) <= x.shape[0]) & (jnp.sum(counts) <= x.shape[0])
    return jnp.where(fits, y, jnp.full((), jnp.nan, x.dtype))


def _tiled(x: jax.Array, w: jax.Array, counts: jax.Array, recipe: Recipe, key: jax.Array | None) -> jax.Array:
    """Multiplies tile by tile: moves the rows to the starts of tiles and the results back."""
    rows = x.shape[0]
    tile = choose_tile_rows(rows, w.shape[0], [recipe])
    expert = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(rows, dtype=jnp.int32), side="right").astype(jnp.int32)
    return apply_in_tiles(
        x, expert, counts, tile, lambda rows, tiles: grouped_matmul(rows, w, tiles, recipe=recipe, key=key)
    )


def _padded_rows(rows: int, recipe: Recipe) -> int:
    """Returns `rows` rounded up to whole blocks and Hadamard transforms along them."""
    run = math.lcm(*(getattr(recipe, role).quantization_group_size for roles in GEMM_ROLES.values() for role in roles))
    return -(-rows // run) * run


def _reference_unrolled(
    x: jax.Array, w: jax.Array, counts: np.ndarray, recipe: Recipe, key: jax.Array | None, backend: str
) -> jax.Array:
    """Computes the definition for groups that are not traced: one `qdot` per expert over its own rows.

    A compiler may choose the order of summation by size, so the sizes are those of a loop written by hand.
    """

    def multiply_expert(expert: int, start: int, count: int) -> jax.Array:
        rows = jnp.pad(x[start : start + count], ((0, _padded_rows(count, recipe) - count), (0, 0)))
        bits = None if key is None else layer_key(key, expert)
        return qdot(rows, w[expert], recipe=recipe, key=bits, backend=backend)[:count]

    starts = np.cumsum(counts) - counts
    products = [multiply_expert(e, int(starts[e]), int(n)) for e, n in enumerate(counts) if n]
    unassigned = jnp.zeros((x.shape[0] - int(counts.sum()), w.shape[-1]), x.dtype)
    return jnp.concatenate([*products, unassigned])


def _reference_loop(
    x: jax.Array, w: jax.Array, counts: jax.Array, recipe: Recipe, key: jax.Array | None, backend: str
) -> jax.Array:
    """Computes the definition for traced groups: a scan over experts, each as a tensor of all rows."""
    rows, starts = x.shape[0], jnp.cumsum(counts) - counts
    capacity = _padded_rows(rows, recipe)  # of one expert, which may have all rows
    padded = jnp.pad(x, ((0, capacity), (0, 0)))

    @jax.checkpoint  # the residuals of one expert are as large as those of all experts together
    def one(y: jax.Array, expert: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        weight, index, start, count = expert
        in_group = jnp.arange(capacity, dtype=jnp.int32)[:, None] < count
        rows_x = jnp.where(in_group, lax.dynamic_slice_in_dim(padded, start, capacity), jnp.zeros((), x.dtype))
        bits = None if key is None else layer_key(key, index)
        product = qdot(rows_x, weight, recipe=recipe, key=bits, backend=backend)
        update = jnp.where(in_group, product, lax.dynamic_slice_in_dim(y, start, capacity))
        return lax.dynamic_update_slice_in_dim(y, update, start, 0), None

    zeros, *_ = pvary_to_common_axes(jnp.zeros((rows + capacity, w.shape[-1]), x.dtype), x, counts)
    y, _ = lax.scan(one, zeros, (w, jnp.arange(w.shape[0], dtype=jnp.int32), starts, counts))
    return y[:rows]


def _check(x: jax.Array, w: jax.Array, groups: jax.Array | np.ndarray) -> None:
    """Validates shapes and dtypes of the three, and the values of `groups` unless traced."""
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
        counts = np.asarray(groups)
        if counts.min(initial=0) < 0 or counts.sum() > x.shape[0]:
            raise ValueError(f"grouped_qdot: groups {counts.tolist()} must be 0 or more, and x has {x.shape[0]} rows")
