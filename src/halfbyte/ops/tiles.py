"""Grouped linears by tiles: each row with its expert's weight, at the cost of the rows that there are.

    fprop  y_e = Q(x_e) Q(W_e)     dgrad  dx_e = Q(dy_e) Q(W_e)^T     wgrad  dW_e = Q(x_e)^T Q(dy_e)

Rows lie sorted by expert, and every expert begins on a new tile of `tile` rows, filled up with zero rows. So a tile has
one expert: no block, no transform and no scale crosses two, and a zero row changes no maximum, no code and no sum. A
loop over the tiles that are used multiplies each with its expert's matrix: no array of rows x experts, no product with
another expert's zeros. `grouped.grouped_qdot` is defined by a loop over experts, and has the same codes, scales and
random bits; only the order of wgrad's float32 sums differs (tile by tile).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.formats import amax_of, random_bytes, to_grid, transform_runs
from halfbyte.formats.bits import float32_bits, float_of_bits
from halfbyte.ops.gemms import Contraction, dot, finish
from halfbyte.ops.linear import quantize_part, weight_operand
from halfbyte.ops.operand import pinned, to_bfloat16
from halfbyte.ops.problem import target
from halfbyte.recipe import ROLES, OperandPolicy, Recipe, role_key

SERVED = ("auto", "carrier", "reference")
LARGEST = 128
"""Rows of a tile, at most."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["counts", "experts", "first"], meta_fields=["tile"])
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Where experts lie: `counts` int32 [experts] rows of each; of each tile its expert (the number of experts where it
    has none) and its first row, counted within the expert.
    """

    counts: jax.Array
    experts: jax.Array
    first: jax.Array
    tile: int

    @classmethod
    def of(cls, counts: jax.Array, rows: int, tile: int) -> "Tiles":
        """Of a buffer of `rows`, whole tiles."""
        ends = jnp.cumsum(whole_tiles(counts, tile))
        start = jnp.arange(rows // tile, dtype=jnp.int32) * tile
        experts = jnp.searchsorted(ends, start, side="right").astype(jnp.int32)
        before = jnp.concatenate([jnp.zeros(1, ends.dtype), ends])[experts]
        return cls(counts, experts, (start - before).astype(jnp.int32), tile)

    @property
    def used(self) -> jax.Array:
        """How many tiles have an expert."""
        return jnp.sum((self.experts < self.counts.shape[0]).astype(jnp.int32))

    def slice(self, array: jax.Array, number: jax.Array) -> jax.Array:
        """The rows of one tile."""
        return lax.dynamic_slice_in_dim(array, number * self.tile, self.tile)


def whole_tiles(counts: jax.Array, tile: int) -> jax.Array:
    """Rows of each expert in whole tiles."""
    return (counts + (tile - 1)) // tile * tile


def tile_rows(rows: int, experts: int, recipes: Sequence[Recipe | None]) -> int:
    """Rows of a tile: whole runs of every operand, and more of them while experts stay several tiles long."""
    policies = [getattr(recipe, role) for recipe in recipes if recipe is not None for role in ROLES]
    tile = math.lcm(4, *(policy.run for policy in policies))  # random bytes are drawn four rows at a time
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


def unserved(recipe: Recipe) -> str | None:
    """Why tiles cannot be quantized one by one under this recipe; None if they can."""
    for role in ROLES:
        policy: OperandPolicy = getattr(recipe, role)
        if policy.format.scale.outer != "tensor" or policy.source == "forward" or policy.draws_signs:
            return f"{role} ({policy}) is more than codes under one scale an expert"
    return None


def check_tiles(recipes: Sequence[Recipe | None], backend: str = "auto") -> None:
    """ValueError where tiles do not serve experts under one of these recipes, or a backend is asked for that is no
    product of XLA's."""
    for recipe in (each for each in recipes if each is not None and each.quantized):
        reason = unserved(recipe)
        if reason is not None or backend not in SERVED:
            reason = reason or f"backend {backend} has no grouped GEMM, only {', '.join(SERVED)} serve experts"
            raise ValueError(
                f"recipe {recipe.name} for experts: {reason}; choose another recipe, or a policy that leaves them out"
            )


@dataclasses.dataclass(frozen=True)
class _Operand:
    """`array` [rows, features] or [experts, inputs, outputs]; `factor` float32 [experts], None for 1."""

    array: jax.Array
    factor: jax.Array | None


def grouped_tiles(
    x: jax.Array, w: jax.Array, tiles: Tiles, *, recipe: Recipe | None, key: jax.Array | None,
    amax: jax.Array | None = None, first: jax.Array | int = 0,
) -> jax.Array:  # fmt: skip
    """x [rows, inputs] in `tiles` times w [experts, inputs, outputs], in x's dtype; None as recipe: plain products.

    Rows without an expert give 0. `amax` float32 [experts] stands for the weights' own where several share a scale.
    `first` is the number of w's first expert: keys are those of experts, wherever they lie.
    """
    keys = None
    if key is not None:
        numbers = jnp.arange(w.shape[0], dtype=jnp.int32) + first
        keys = jax.random.key_data(jax.vmap(functools.partial(jax.random.fold_in, key))(numbers))
    impl = None if key is None else str(jax.random.key_impl(key))
    return _grouped((recipe, impl), x, w, tiles, keys, amax)


Static = tuple[Recipe | None, str | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(
    static: Static, x: jax.Array, w: jax.Array, tiles: Tiles, keys: jax.Array | None, amax: jax.Array | None
) -> jax.Array:
    left, right = _rows(static, x, tiles, keys, "fprop_x"), _weights(static, w, keys, "fprop_w", amax)
    return _by_expert(left, right, tiles, ((1,), (0,)), x.dtype)


def _grouped_fwd(static, x, w, tiles, keys, amax):
    kept = _rows(static, x, tiles, keys, "wgrad_x")
    return _grouped(static, x, w, tiles, keys, amax), (kept, w, tiles, keys, amax)


def _grouped_bwd(static, residuals, dy):
    kept, w, tiles, keys, amax = residuals
    row, column = (_rows(static, dy, tiles, keys, role) for role in ("dgrad_dy", "wgrad_dy"))
    dx = _by_expert(row, _weights(static, w, keys, "dgrad_w", amax), tiles, ((1,), (1,)), dy.dtype)
    return dx, _summed(kept, column, tiles, w), None, None, None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)
jax.tree_util.register_dataclass(_Operand, data_fields=["array", "factor"], meta_fields=[])


def _key(static: Static, words: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(words, impl=static[1])


def _rows(static: Static, x: jax.Array, tiles: Tiles, keys: jax.Array | None, role: str) -> _Operand:
    """x [rows, features] as operand `role`: each expert under its own tensor scale and with its own random bytes."""
    recipe, axis = static[0], -2 if role.startswith("wgrad") else -1
    if recipe is None:
        return _Operand(x, None)
    policy: OperandPolicy = getattr(recipe, role)
    if not policy.format.quantized and not policy.hadamard:
        return _Operand(to_bfloat16(x), None)
    x = pinned(to_bfloat16(x) if policy.source == "bfloat16" else x)
    if policy.hadamard:
        x = transform_runs(x, axis=axis, points=policy.hadamard_size)
    if not policy.format.quantized:
        return _Operand(to_bfloat16(x), None)
    parts = x.reshape(-1, tiles.tile, x.shape[-1])  # [rows, features] -> [tiles, tile, features]
    amax, noise = _amaxes(parts, tiles), None
    if policy.draws_bytes:
        if keys is None:
            raise ValueError(f"{role} of {recipe.name} rounds stochastically and needs a key; pass key=...")
        bits = jax.vmap(lambda words: jax.random.key_data(role_key(_key(static, words), role)))(keys)
        noise = _noise(bits, parts.shape, tiles)
    usual = "stochastic" if policy.draws_bytes else "rne"
    how = {} if policy.rounding == usual else {"rounding": policy.rounding}

    def grid(part: jax.Array, amax: jax.Array, noise: jax.Array | None) -> jax.Array:
        made = to_grid(part, policy.format, block=policy.block, axis=axis, noise=noise, amax=amax, **how)
        return made.carrier()

    made = jax.vmap(grid, in_axes=(0, 0, None if noise is None else 0))(parts, tiled(amax, tiles), noise)
    decode = jax.vmap(lambda each: policy.format.tensor_scales(each).decode)(amax)
    return _Operand(made.reshape(x.shape), jnp.where(jnp.isfinite(amax), decode, jnp.float32(jnp.nan)))


def _amaxes(parts: jax.Array, tiles: Tiles) -> jax.Array:
    """float32 [experts], by integers, which keep infinity and NaN."""
    largest = jax.vmap(lambda part: float32_bits(amax_of(part)))(parts)
    found = jnp.zeros(tiles.counts.shape[0] + 1, jnp.uint32).at[tiles.experts].max(largest)
    return float_of_bits(found[:-1])


def tiled(per_expert: jax.Array, tiles: Tiles) -> jax.Array:
    """[experts, ...] -> [tiles, ...]; the last expert's where a tile has none, which nothing reads."""
    return per_expert[jnp.minimum(tiles.experts, per_expert.shape[0] - 1)]


def _noise(words: jax.Array, shape: tuple[int, ...], tiles: Tiles) -> jax.Array:
    """Random bytes of each row's place in its expert."""
    whole = (shape[0] * shape[1], shape[2])

    def one(words: jax.Array, first: jax.Array) -> jax.Array:
        return random_bytes(words, shape[1:], offset=(first, 0), global_shape=whole, aligned=True)

    return jax.vmap(one)(tiled(words, tiles), tiles.first)


def _weights(static: Static, w: jax.Array, keys: jax.Array | None, role: str, amax: jax.Array | None) -> _Operand:
    """w [experts, inputs, outputs] as operand `role`, each expert quantized as a weight of its own."""
    recipe = static[0]
    if recipe is None:
        return _Operand(w, None)
    if not getattr(recipe, role).format.quantized:
        return _Operand(to_bfloat16(w), None)

    def one(w: jax.Array, words: jax.Array | None, amax: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        key = None if words is None else _key(static, words)
        made = weight_operand(quantize_part(w, recipe, key, amax=amax), role)
        return made.values(), jnp.ones((), jnp.float32) if made.factor is None else made.factor

    mapped = tuple(None if each is None else 0 for each in (keys, amax))
    return _Operand(*jax.vmap(one, in_axes=(0, *mapped))(w, keys, amax))


def _alpha(left: _Operand, right: _Operand) -> jax.Array | None:
    factors = [operand.factor for operand in (left, right) if operand.factor is not None]
    return functools.reduce(jnp.multiply, factors) if factors else None


def _product(a: jax.Array, b: jax.Array, axes: Contraction) -> jax.Array:
    """float32 sums. Carriers are exact in bfloat16 and in float32; a CPU has no bfloat16 GEMM."""
    if target().platform == "cpu" or a.dtype == jnp.float32:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return dot(a, b, axes, precision=lax.Precision.HIGHEST)


def _by_expert(left: _Operand, right: _Operand, tiles: Tiles, axes: Contraction, dtype: jnp.dtype) -> jax.Array:
    """Each tile times its expert's matrix, one rounding to `dtype`."""
    alpha, outputs = _alpha(left, right), right.array.shape[1:][1 - axes[1][0]]

    def one(number: jax.Array, y: jax.Array) -> jax.Array:
        expert = tiles.experts[number]
        sums = _product(tiles.slice(left.array, number), right.array[expert], axes)
        made = finish(sums, None if alpha is None else alpha[expert], dtype)
        return lax.dynamic_update_slice_in_dim(y, made, number * tiles.tile, 0)

    return lax.fori_loop(0, tiles.used, one, jnp.zeros((left.array.shape[0], outputs), dtype))


def _summed(left: _Operand, right: _Operand, tiles: Tiles, w: jax.Array) -> jax.Array:
    """x^T dy of each expert, in w's dtype; zero where it has no rows."""
    alpha = _alpha(left, right)

    def one(number: jax.Array, sums: jax.Array) -> jax.Array:
        expert = tiles.experts[number]
        more = _product(tiles.slice(left.array, number), tiles.slice(right.array, number), ((0,), (0,)))
        return sums.at[expert].add(more)

    sums = lax.fori_loop(0, tiles.used, one, jnp.zeros(w.shape, jnp.float32))
    rows = (tiles.counts > 0)[:, None, None]
    return jnp.where(rows, finish(sums, None if alpha is None else alpha[:, None, None], w.dtype), 0)
