"""Grouped linears by tiles: each row with its expert's weight, at the cost of the rows that there are.

    fprop  y_e = Q(x_e) Q(W_e)     dgrad  dx_e = Q(dy_e) Q(W_e)^T     wgrad  dW_e = Q(x_e)^T Q(dy_e)

Rows lie in the tiles of `tiles.py`, of one expert each. A loop over the tiles that are used multiplies each with its
expert's matrix, or a kernel multiplies all of them: no array of rows x experts, no product with another expert's zeros.
`grouped.grouped_qdot` is defined by a loop over experts, and has the same codes, scales and random bits; only the order
of wgrad's float32 sums differs (tile by tile).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.formats import amax_of, random_bytes, to_grid, transform_runs
from halfbyte.formats.bits import float32_bits
from halfbyte.kernels import ScaleOrder, block_scaled, grouped
from halfbyte.ops import tile_kernels
from halfbyte.ops.gemms import Contraction, dot, finish
from halfbyte.ops.linear import quantize_part, weight_operand
from halfbyte.ops.operand import BlockScaled, pinned, to_bfloat16
from halfbyte.ops.problem import target
from halfbyte.ops.surroundings import vary_alike
from halfbyte.ops.tiles import Tiles
from halfbyte.recipe import ROLES, OperandPolicy, Recipe, role_key

SERVED = ("auto", "carrier", "reference")


def unserved(recipe: Recipe) -> str | None:
    """Why tiles cannot be quantized one by one under this recipe; None if they can."""
    if recipe.remainder:
        return "fprop multiplies what rounding x has left over as well"
    if recipe.history:
        return "its scales come from a history of maxima, which is kept for dense linears alone"
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
class TileOperand:
    """`array` [rows, features] or [experts, inputs, outputs]; `factor` float32 [experts], None for 1. With `scales`,
    those of blocks in tiles, the array has codes, contraction last, as `kernels.block_scaled` reads them."""

    array: jax.Array
    factor: jax.Array | None
    scales: jax.Array | None = None

    @property
    def codes(self) -> block_scaled.Codes:
        """What a block-scaled GEMM reads."""
        assert self.scales is not None
        return block_scaled.Codes(self.array, self.scales)

    def values(self, role: str, policy: OperandPolicy) -> jax.Array:
        """The numbers that are multiplied, in the shape that `array` has without `scales`."""
        if self.scales is None:
            return self.array
        *experts, rows, half = self.array.shape
        shape = math.prod(experts) * rows, 2 * half
        tall = BlockScaled(self.array.reshape(-1, half), self.scales, None, policy, shape, -1)
        made = tall.values().reshape(*experts, rows, 2 * half).astype(jnp.bfloat16)
        return jnp.swapaxes(made, -1, -2) if _axis(role) == -2 else made


def grouped_tiles(
    x: jax.Array, w: jax.Array, tiles: Tiles, *, recipe: Recipe | None, key: jax.Array | None,
    amax: jax.Array | None = None, first: jax.Array | int = 0,
) -> jax.Array:  # fmt: skip
    """x [rows, inputs] in `tiles` times w [experts, inputs, outputs], in x's dtype; None as recipe: plain products.

    Rows without an expert give 0. `amax` float32 [experts] stands for the weights' own where several share a scale.
    `first` is the number of w's first expert: keys are those of experts, wherever they lie.
    """
    static, keys = _keys(recipe, key, w.shape[0], first)
    return _grouped(static, x, w, tiles, keys, amax)


def grouped_operands(
    x: jax.Array, w: jax.Array, dy: jax.Array, tiles: Tiles, *, recipe: Recipe, key: jax.Array | None,
    amax: jax.Array | None = None,
) -> dict[str, TileOperand]:  # fmt: skip
    """The six operands of `grouped_tiles` by role, as its GEMMs read them, for whoever looks at them."""
    static, keys = _keys(recipe, key, w.shape[0])
    forward, backward = ("fprop_x", "wgrad_x"), ("dgrad_dy", "wgrad_dy")
    codes = _as_codes(static, x, w, tiles)
    made = functools.partial(_rows, static, codes=codes)
    rows = [*made(x, tiles, keys, *forward), *made(dy, tiles, keys, *backward)]
    weights = {role: _weights(static, w, tiles, keys, role, amax, codes=codes) for role in ("fprop_w", "dgrad_w")}
    return dict(zip(forward + backward, rows, strict=True)) | weights


def _keys(
    recipe: Recipe | None, key: jax.Array | None, experts: int, first: jax.Array | int = 0
) -> tuple["Static", jax.Array | None]:
    """What is static, and the words of each expert's key."""
    if key is None:
        return (recipe, None), None
    numbers = jnp.arange(experts, dtype=jnp.int32) + first
    words = jax.random.key_data(jax.vmap(functools.partial(jax.random.fold_in, key))(numbers))
    return (recipe, str(jax.random.key_impl(key))), words


Static = tuple[Recipe | None, str | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(
    static: Static, x: jax.Array, w: jax.Array, tiles: Tiles, keys: jax.Array | None, amax: jax.Array | None
) -> jax.Array:
    codes = _as_codes(static, x, w, tiles)
    (left,) = _rows(static, x, tiles, keys, "fprop_x", codes=codes)
    return fprop(left, _weights(static, w, tiles, keys, "fprop_w", amax, codes=codes), tiles, x.dtype)


def _grouped_fwd(static, x, w, tiles, keys, amax):
    codes = _as_codes(static, x, w, tiles)
    left, kept = _rows(static, x, tiles, keys, "fprop_x", "wgrad_x", codes=codes)
    y = fprop(left, _weights(static, w, tiles, keys, "fprop_w", amax, codes=codes), tiles, x.dtype)
    return y, (kept, w, tiles, keys, amax)


def _grouped_bwd(static, residuals, dy):
    kept, w, tiles, keys, amax = residuals
    codes = kept.scales is not None
    row, column = _rows(static, dy, tiles, keys, "dgrad_dy", "wgrad_dy", codes=codes)
    dx = dgrad(row, _weights(static, w, tiles, keys, "dgrad_w", amax, codes=codes), tiles, dy.dtype)
    return dx, wgrad(kept, column, tiles, w.dtype), None, None, None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)
jax.tree_util.register_dataclass(TileOperand, data_fields=["array", "factor", "scales"], meta_fields=[])


def _axis(role: str) -> int:
    """That a GEMM sums over, of the operand as it lies."""
    return -2 if role.startswith("wgrad") or role == "fprop_w" else -1


def _as_codes(static: Static, x: jax.Array, w: jax.Array, tiles: Tiles) -> bool:
    """Whether all operands are codes, for block-scaled units."""
    recipe, sides, dtypes = static[0], w.shape[1:], (x.dtype, w.dtype)
    reason = tile_kernels.unscaled(recipe, sides, target(), backend=tiles.backend, tile=tiles.tile, dtypes=dtypes)
    return reason is None and not tiles.sharded


def _key(static: Static, words: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(words, impl=static[1])


def _rows(
    static: Static, x: jax.Array, tiles: Tiles, keys: jax.Array | None, *roles: str, codes: bool
) -> list[TileOperand]:
    """x [rows, features] as operands `roles`: each expert under its own tensor scale and with its own random bytes."""
    if static[0] is None:
        return [TileOperand(x, None)] * len(roles)
    policies = {role: getattr(static[0], role) for role in roles}
    bits = {role: _bits(static, keys, role) for role, policy in policies.items() if policy.draws_bytes}
    if x.dtype == jnp.bfloat16 and all(
        _makes(role, policy, (x.shape[1], x.shape[1]), tiles) for role, policy in policies.items()
    ):
        order = ScaleOrder.TILED if codes else None
        return [TileOperand(*made) for made in tile_kernels.rows(x, policies, bits, tiles, order=order)]
    assert not codes, f"kernels make codes of {', '.join(roles)}"
    return [_defined(x, policy, role, bits.get(role), tiles) for role, policy in policies.items()]


def _makes(role: str, policy: OperandPolicy, sides: tuple[int, ...], tiles: Tiles) -> bool:
    """Whether a kernel makes operand `role` here."""
    return not tiles.sharded and tile_kernels.makes(role, policy, sides, target())


def _bits(static: Static, keys: jax.Array | None, role: str) -> jax.Array:
    """uint32 [experts, words]: the keys of the role's random bytes."""
    if keys is None:
        assert static[0] is not None
        raise ValueError(f"{role} of {static[0].name} rounds stochastically and needs a key; pass key=...")
    return jax.vmap(lambda words: jax.random.key_data(role_key(_key(static, words), role)))(keys)


def _defined(x: jax.Array, policy: OperandPolicy, role: str, bits: jax.Array | None, tiles: Tiles) -> TileOperand:
    """One operand in plain JAX."""
    axis = _axis(role)
    if not policy.format.quantized and not policy.hadamard:
        return TileOperand(to_bfloat16(x), None)
    x = pinned(to_bfloat16(x) if policy.source == "bfloat16" else x)
    if policy.hadamard:
        x = transform_runs(x, axis=axis, points=policy.hadamard_size)
    if not policy.format.quantized:
        return TileOperand(to_bfloat16(x), None)
    parts = x.reshape(-1, tiles.tile, x.shape[-1])  # [rows, features] -> [tiles, tile, features]
    amax, noise = _amaxes(parts, tiles), None if bits is None else _noise(bits, parts.shape, tiles)
    usual = "stochastic" if policy.draws_bytes else "rne"
    how = {} if policy.rounding == usual else {"rounding": policy.rounding}

    def grid(part: jax.Array, amax: jax.Array, noise: jax.Array | None) -> jax.Array:
        made = to_grid(part, policy.format, block=policy.block, axis=axis, noise=noise, amax=amax, **how)
        return made.carrier()

    made = jax.vmap(grid, in_axes=(0, 0, None if noise is None else 0))(parts, tiles.per_tile(amax), noise)
    decode = jax.vmap(lambda each: policy.format.tensor_scales(each).decode)(amax)
    return TileOperand(_carried(made.reshape(x.shape)), jnp.where(jnp.isfinite(amax), decode, jnp.float32(jnp.nan)))


def _carried(values: jax.Array) -> jax.Array:
    """Numbers that are exact in bfloat16, as what is multiplied: a CPU has no bfloat16 GEMM."""
    return values if target().platform == "cpu" else values.astype(jnp.bfloat16)


def _amaxes(parts: jax.Array, tiles: Tiles) -> jax.Array:
    """float32 [experts]."""
    return tiles.largest(jax.vmap(lambda part: float32_bits(amax_of(part)))(parts))


def _noise(words: jax.Array, shape: tuple[int, ...], tiles: Tiles) -> jax.Array:
    """Random bytes of each row's place in its expert."""
    whole = (shape[0] * shape[1], shape[2])

    def one(words: jax.Array, first: jax.Array) -> jax.Array:
        return random_bytes(words, shape[1:], offset=(first, 0), global_shape=whole, aligned=True)

    return jax.vmap(one)(tiles.per_tile(words), tiles.first)


def _weights(
    static: Static, w: jax.Array, tiles: Tiles, keys: jax.Array | None, role: str, amax: jax.Array | None, *,
    codes: bool,
) -> TileOperand:  # fmt: skip
    """w [experts, inputs, outputs] as operand `role`, each expert quantized as a weight of its own."""
    recipe = static[0]
    if recipe is None:
        return TileOperand(w, None)
    if not getattr(recipe, role).format.quantized:
        return TileOperand(to_bfloat16(w), None)
    if codes:
        return TileOperand(*tile_kernels.weight_codes(w, amax, _axis(role)))
    if w.dtype == jnp.float32 and _makes(role, getattr(recipe, role), w.shape[1:], tiles):
        return TileOperand(*tile_kernels.weights(w, amax))

    def one(w: jax.Array, words: jax.Array | None, amax: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        key = None if words is None else _key(static, words)
        made = weight_operand(quantize_part(w, recipe, key, amax=amax), role)
        return _carried(made.values()), jnp.ones((), jnp.float32) if made.factor is None else made.factor

    mapped = tuple(None if each is None else 0 for each in (keys, amax))
    return TileOperand(*jax.vmap(one, in_axes=(0, *mapped))(w, keys, amax))


def _alpha(left: TileOperand, right: TileOperand) -> jax.Array | None:
    factors = [operand.factor for operand in (left, right) if operand.factor is not None]
    return functools.reduce(jnp.multiply, factors) if factors else None


def _ones(alpha: jax.Array | None, tiles: Tiles) -> jax.Array:
    return jnp.ones(tiles.counts.shape, jnp.float32) if alpha is None else alpha


def _multiplied_by_kernels(left: TileOperand, right: TileOperand, sides: tuple[int, ...], tiles: Tiles) -> bool:
    dtypes = {left.array.dtype, right.array.dtype}
    fit = not tiles.sharded and tiles.tile == grouped.ROWS and dtypes == {jnp.dtype("bfloat16")}
    return fit and tile_kernels.multiplies(*sides, device=target())


def _product(a: jax.Array, b: jax.Array, axes: Contraction) -> jax.Array:
    """float32 sums."""
    if target().platform == "cpu" or a.dtype == jnp.float32:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return dot(a, b, axes, precision=lax.Precision.HIGHEST)


def fprop(x: TileOperand, w: TileOperand, tiles: Tiles, dtype: jnp.dtype) -> jax.Array:
    """y [rows, outputs] = x W of each row's expert."""
    return _by_expert(x, w, tiles, ((1,), (0,)), dtype)


def dgrad(dy: TileOperand, w: TileOperand, tiles: Tiles, dtype: jnp.dtype) -> jax.Array:
    """dx [rows, inputs] = dy W^T of each row's expert."""
    return _by_expert(dy, w, tiles, ((1,), (1,)), dtype)


def _by_expert(left: TileOperand, right: TileOperand, tiles: Tiles, axes: Contraction, dtype: jnp.dtype) -> jax.Array:
    """Each tile times its expert's matrix, one rounding to `dtype`."""
    alpha = _alpha(left, right)
    if left.scales is not None:
        return block_scaled.rows(left.codes, right.codes, _ones(alpha, tiles), tiles.experts, dtype=dtype)
    outputs = right.array.shape[1:][1 - axes[1][0]]
    if _multiplied_by_kernels(left, right, right.array.shape[1:], tiles) and dtype == jnp.bfloat16:
        factor, layout = _ones(alpha, tiles), "nt" if axes[1] == (1,) else "nn"
        return grouped.rows(left.array, right.array, factor, tiles.experts, layout=layout)

    def one(number: jax.Array, y: jax.Array) -> jax.Array:
        expert = tiles.experts[number]
        sums = _product(tiles.slice(left.array, number), right.array[expert], axes)
        made = finish(sums, None if alpha is None else alpha[expert], dtype)
        return lax.dynamic_update_slice_in_dim(y, made, number * tiles.tile, 0)

    begun, *_ = vary_alike(jnp.zeros((left.array.shape[0], outputs), dtype), left.array, right.array, tiles.experts)
    return lax.fori_loop(0, tiles.used, one, begun)


def wgrad(x: TileOperand, dy: TileOperand, tiles: Tiles, dtype: jnp.dtype) -> jax.Array:
    """dW [experts, inputs, outputs] = x^T dy of each expert's rows; zero where it has none."""
    alpha = _alpha(x, dy)
    if x.scales is not None:
        return block_scaled.contraction(x.codes, dy.codes, _ones(alpha, tiles), tiles.counts)
    sides = x.array.shape[1], dy.array.shape[1]
    if _multiplied_by_kernels(x, dy, sides, tiles) and dtype == jnp.float32:
        return grouped.contraction(x.array, dy.array, _ones(alpha, tiles), tiles.counts)

    def one(number: jax.Array, sums: jax.Array) -> jax.Array:
        expert = tiles.experts[number]
        more = _product(tiles.slice(x.array, number), tiles.slice(dy.array, number), ((0,), (0,)))
        return sums.at[expert].add(more)

    begun, *_ = vary_alike(jnp.zeros((tiles.counts.shape[0], *sides), jnp.float32), x.array, dy.array, tiles.experts)
    sums = lax.fori_loop(0, tiles.used, one, begun)
    rows = (tiles.counts > 0)[:, None, None]
    return jnp.where(rows, finish(sums, None if alpha is None else alpha[:, None, None], dtype), 0)
