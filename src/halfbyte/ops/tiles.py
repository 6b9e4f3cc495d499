"""Where experts' rows lie: sorted by expert, every expert from a new tile on.

A tile has `tile` rows of one expert, the last of them filled up with zero rows. So no block, no transform and no scale
crosses two experts, and a zero row changes no maximum, no code and no sum. A buffer has room for any routing; tiles
without rows come last, and nothing reads them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.devices import Device
from halfbyte.formats.bits import float_of_bits
from halfbyte.ops.problem import target
from halfbyte.ops.surroundings import several_devices
from halfbyte.recipe import ROLES, Recipe

LARGEST = 128
"""Rows of a tile, at most."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["counts", "experts", "first"],
    meta_fields=["tile", "backend", "sharded"],
)
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Where experts lie: `counts` int32 [experts] rows of each; of each tile its expert (the number of experts where it
    has none) and its first row, counted within the expert. Of another `backend` than "auto" the products are XLA's, or
    those of carriers; where rows are `sharded` by the compiler, no kernel of ours reads them.
    """

    counts: jax.Array
    experts: jax.Array
    first: jax.Array
    tile: int
    backend: str = "auto"
    sharded: bool = False

    @classmethod
    def of(cls, counts: jax.Array, rows: int, tile: int) -> "Tiles":
        """Of a buffer of `rows`, whole tiles."""
        ends = jnp.cumsum(whole_tiles(counts, tile))
        start = jnp.arange(rows // tile, dtype=jnp.int32) * tile
        experts = jnp.searchsorted(ends, start, side="right", method="compare_all").astype(jnp.int32)
        before = jnp.concatenate([jnp.zeros(1, ends.dtype), ends])[experts]
        return cls(counts, experts, (start - before).astype(jnp.int32), tile, sharded=several_devices())

    @property
    def used(self) -> jax.Array:
        """How many tiles have an expert."""
        return jnp.sum((self.experts < self.counts.shape[0]).astype(jnp.int32))

    def per_tile(self, per_expert: jax.Array) -> jax.Array:
        """[experts, ...] -> [tiles, ...]; the last expert's where a tile has none, which nothing reads."""
        return per_expert[jnp.minimum(self.experts, per_expert.shape[0] - 1)]

    def largest(self, bits: jax.Array) -> jax.Array:
        """float32 [experts]: of uint32 [tiles] bits of magnitudes, which keep infinity and NaN."""
        return float_of_bits(jnp.zeros(self.counts.shape[0] + 1, jnp.uint32).at[self.experts].max(bits)[:-1])

    def slice(self, array: jax.Array, number: jax.Array) -> jax.Array:
        """The rows of one tile."""
        return lax.dynamic_slice_in_dim(array, number * self.tile, self.tile)


def whole_tiles(counts: jax.Array, tile: int) -> jax.Array:
    """Rows of each expert in whole tiles."""
    return (counts + (tile - 1)) // tile * tile


def tile_rows(rows: int, experts: int, recipes: Sequence[Recipe | None], *, device: Device | None = None) -> int:
    """Rows of a tile: whole runs of every operand, and more of them while experts stay several tiles long; on a GPU, as
    many as its kernels take. Without `device` that of programs traced now.
    """
    policies = [getattr(recipe, role) for recipe in recipes if recipe is not None for role in ROLES]
    tile = math.lcm(4, *(policy.run for policy in policies))  # random bytes are drawn four rows at a time
    if (device or target()).capability is not None:
        return math.lcm(tile, LARGEST)
    while 2 * tile <= LARGEST and 8 * tile * experts <= rows:
        tile *= 2
    return tile


def buffer_rows(pairs: int, experts: int, tile: int) -> int:
    """Rows that hold any routing of so many (token, expert) pairs."""
    return -(-(pairs + min(experts, pairs) * (tile - 1)) // tile) * tile


def places(experts_of: jax.Array, counts: jax.Array, tile: int) -> jax.Array:
    """int32 [pairs]: the row of each pair; an expert's pairs in their order."""
    sizes = whole_tiles(counts, tile)
    before, start = jnp.cumsum(counts) - counts, jnp.cumsum(sizes) - sizes
    order = jnp.argsort(experts_of, stable=True)
    chosen = experts_of[order]
    row = jnp.arange(experts_of.shape[0], dtype=jnp.int32) - before[chosen] + start[chosen]
    return jnp.zeros_like(experts_of).at[order].set(row.astype(experts_of.dtype), unique_indices=True)


def through_tiles(
    x: jax.Array, experts_of: jax.Array, counts: jax.Array, tile: int, run: Callable[[jax.Array, Tiles], jax.Array]
) -> jax.Array:
    """run(rows, tiles) of x [pairs, width], whose rows are moved to where the tiles of their experts begin, and back; 0
    for pairs that have none (their expert is the number of experts).
    """
    experts = counts.shape[0]
    row = places(experts_of, jnp.append(counts, 0), tile)
    row = jnp.where(experts_of < experts, row, 2**31 - 1)
    room = buffer_rows(x.shape[0], experts, tile)
    moved = jnp.zeros((room, x.shape[1]), x.dtype).at[row].set(x, mode="drop")
    return run(moved, Tiles.of(counts, room, tile)).at[row].get(mode="fill", fill_value=0)
