"""Grouped linears by tiles: each row times its expert's matrix, at a cost proportional to the rows in use.

    fprop  y_e = Q(x_e) Q(W_e)     dgrad  dx_e = Q(dy_e) Q(W_e)^T     wgrad  dW_e = Q(x_e)^T Q(dy_e)

Rows are sorted into the tiles of `expert_tiles.py`, one expert per tile. A loop multiplies each used tile by its
expert's matrix, or a kernel multiplies all tiles. No array of rows x experts exists, and no row is multiplied by the
matrix of another expert. Codes, scales and random bits equal those of the loop over experts that defines
`grouped_dot.grouped_qdot`. Only the order of wgrad's float32 sums differs (tile by tile).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.formats import amax_of, hadamard_transform, quantize_to_grid, random_bytes
from halfbyte.formats.exact_float32 import bitcast_to_uint32
from halfbyte.kernels import ScaleLayout, blackwell_grouped_gemm, hopper_grouped_gemm
from halfbyte.ops import expert_tiles
from halfbyte.ops.expert_tiles import ExpertTiles
from halfbyte.ops.gemm_problem import ContractingAxes, apply_epilogue, dot_f32, target_device
from halfbyte.ops.linear import quantize_weight_shard, weight_operand
from halfbyte.ops.operand import BlockScaledOperand, round_to_bfloat16, round_to_dtype
from halfbyte.ops.trace_context import pvary_to_common_axes
from halfbyte.recipes import ROLES, OperandPolicy, Recipe, layer_key, role_key

GROUPED_BACKENDS = ("auto", "emulated", "reference")


def unsupported_grouped(recipe: Recipe) -> str | None:
    """Returns why this recipe cannot quantize tile by tile, or None if it can."""
    if recipe.remainder:
        return "fprop multiplies what rounding x has left over as well"
    if recipe.amax_history_len:
        return "its scales come from a history of maxima, which is kept for dense linears alone"
    for role in ROLES:
        policy: OperandPolicy = getattr(recipe, role)
        if (
            policy.format.scale.outer_granularity != "tensor"
            or policy.source == "requantize_forward"
            or policy.uses_random_signs
        ):
            return f"{role} ({policy}) is more than codes under one scale an expert"
    return None


def check_grouped_support(recipes: Sequence[Recipe | None], backend: str = "auto") -> None:
    """Raises ValueError if a recipe is not supported for experts or `backend` is not in GROUPED_BACKENDS."""
    for recipe in (recipe for recipe in recipes if recipe is not None and recipe.quantized):
        reason = unsupported_grouped(recipe)
        if reason is not None or backend not in GROUPED_BACKENDS:
            reason = (
                reason or f"backend {backend} has no grouped GEMM, only {', '.join(GROUPED_BACKENDS)} serve experts"
            )
            raise ValueError(
                f"recipe {recipe.name} for experts: {reason}; choose another recipe, or a policy that leaves them out"
            )


@dataclasses.dataclass(frozen=True)
class GroupedOperand:
    """One operand of a grouped GEMM.

    `array`: [rows, features] or [experts, inputs, outputs]. `decode_scale`: float32 [experts], None for 1. With
    `scales` (tiled block scales) `array` holds codes with the contracted dim last, as `kernels.blackwell_grouped_gemm`
    reads them.
    """

    array: jax.Array
    decode_scale: jax.Array | None
    scales: jax.Array | None = None

    @property
    def codes(self) -> blackwell_grouped_gemm.BlockScaledCodes:
        """Returns codes and block scales as a block-scaled GEMM reads them."""
        assert self.scales is not None
        return blackwell_grouped_gemm.BlockScaledCodes(self.array, self.scales)

    def values(self, role: str, policy: OperandPolicy) -> jax.Array:
        """Returns the values that are multiplied, in the shape that `array` has without `scales`."""
        if self.scales is None:
            return self.array
        *experts, rows, half = self.array.shape
        shape = math.prod(experts) * rows, 2 * half
        tall = BlockScaledOperand(self.array.reshape(-1, half), self.scales, None, policy, shape, -1)
        values = tall.values().reshape(*experts, rows, 2 * half).astype(jnp.bfloat16)
        return jnp.swapaxes(values, -1, -2) if _stored_contraction_axis(role) == -2 else values


def grouped_matmul(
    x: jax.Array, w: jax.Array, tiles: ExpertTiles, *, recipe: Recipe | None, key: jax.Array | None,
    amax: jax.Array | None = None, first: jax.Array | int = 0,
) -> jax.Array:  # fmt: skip
    """Multiplies x [rows, inputs] in `tiles` by w [experts, inputs, outputs]: [rows, outputs] in x's dtype.

    Without a recipe nothing is quantized. Rows without an expert give 0. `amax`, float32 [experts], replaces the
    weights' own amaxes where several weights share a scale. `first` is the index of w's first expert among all experts:
    keys belong to experts, not to their position on a device.
    """
    static, keys = _keys(recipe, key, w.shape[0], first)
    return _grouped(static, x, w, tiles, keys, amax)


def grouped_operands(
    x: jax.Array, w: jax.Array, dy: jax.Array, tiles: ExpertTiles, *, recipe: Recipe, key: jax.Array | None,
    amax: jax.Array | None = None,
) -> dict[str, GroupedOperand]:  # fmt: skip
    """Returns the six operands of `grouped_matmul` by role, as its GEMMs read them, for inspection."""
    static, keys = _keys(recipe, key, w.shape[0])
    forward, backward = ("fprop_x", "wgrad_x"), ("dgrad_dy", "wgrad_dy")
    codes = _uses_block_scaled_gemm(static, x, w, tiles)
    quantize = functools.partial(_rows, static, codes=codes)
    rows = [*quantize(x, tiles, keys, *forward), *quantize(dy, tiles, keys, *backward)]
    weights = {role: _weights(static, w, tiles, keys, role, amax, codes=codes) for role in ("fprop_w", "dgrad_w")}
    return dict(zip(forward + backward, rows, strict=True)) | weights


def _keys(
    recipe: Recipe | None, key: jax.Array | None, experts: int, first: jax.Array | int = 0
) -> tuple["GroupedStatic", jax.Array | None]:
    """Returns the static arguments of `_grouped` and the key data of each expert, uint32 [experts, words]."""
    if key is None:
        return (recipe, None), None
    indices = jnp.arange(experts, dtype=jnp.int32) + first
    folded = jax.vmap(functools.partial(layer_key, key))(indices)
    return (recipe, str(jax.random.key_impl(folded))), jax.random.key_data(folded)


GroupedStatic = tuple[Recipe | None, str | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(
    static: GroupedStatic,
    x: jax.Array,
    w: jax.Array,
    tiles: ExpertTiles,
    keys: jax.Array | None,
    amax: jax.Array | None,
) -> jax.Array:
    codes = _uses_block_scaled_gemm(static, x, w, tiles)
    (fprop_x,) = _rows(static, x, tiles, keys, "fprop_x", codes=codes)
    return grouped_fprop(fprop_x, _weights(static, w, tiles, keys, "fprop_w", amax, codes=codes), tiles, x.dtype)


def _grouped_fwd(static, x, w, tiles, keys, amax):
    codes = _uses_block_scaled_gemm(static, x, w, tiles)
    fprop_x, wgrad_x = _rows(static, x, tiles, keys, "fprop_x", "wgrad_x", codes=codes)
    y = grouped_fprop(fprop_x, _weights(static, w, tiles, keys, "fprop_w", amax, codes=codes), tiles, x.dtype)
    return y, (wgrad_x, w, tiles, keys, amax)


def _grouped_bwd(static, residuals, dy):
    wgrad_x, w, tiles, keys, amax = residuals
    codes = wgrad_x.scales is not None
    dgrad_dy, wgrad_dy = _rows(static, dy, tiles, keys, "dgrad_dy", "wgrad_dy", codes=codes)
    dx = grouped_dgrad(dgrad_dy, _weights(static, w, tiles, keys, "dgrad_w", amax, codes=codes), tiles, dy.dtype)
    return dx, grouped_wgrad(wgrad_x, wgrad_dy, tiles, w.dtype), None, None, None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)
jax.tree_util.register_dataclass(GroupedOperand, data_fields=["array", "decode_scale", "scales"], meta_fields=[])


def _stored_contraction_axis(role: str) -> int:
    """Returns the axis of the operand in its stored layout that the GEMM contracts."""
    return -2 if role.startswith("wgrad") or role == "fprop_w" else -1


def _uses_block_scaled_gemm(static: GroupedStatic, x: jax.Array, w: jax.Array, tiles: ExpertTiles) -> bool:
    """Returns True if all operands are codes for block-scaled tensor cores."""
    recipe, sides, dtypes = static[0], w.shape[1:], (x.dtype, w.dtype)
    reason = expert_tiles.block_scaled_refusal(
        recipe, sides, target_device(), backend=tiles.backend, tile=tiles.tile, dtypes=dtypes
    )
    return reason is None and not tiles.partitioned_by_xla


def _key(static: GroupedStatic, words: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(words, impl=static[1])


def _rows(
    static: GroupedStatic, x: jax.Array, tiles: ExpertTiles, keys: jax.Array | None, *roles: str, codes: bool
) -> list[GroupedOperand]:
    """Quantizes x [rows, features] as operands `roles`, each expert with its own tensor scale and random bytes."""
    if static[0] is None:
        return [GroupedOperand(x, None)] * len(roles)
    policies = {role: getattr(static[0], role) for role in roles}
    bits = {role: _role_key_words(static, keys, role) for role, policy in policies.items() if policy.uses_random_bits}
    if x.dtype == jnp.bfloat16 and all(
        _has_kernel(role, policy, (x.shape[1], x.shape[1]), tiles) for role, policy in policies.items()
    ):
        order = ScaleLayout.TILED if codes else None
        return [
            GroupedOperand(*arrays)
            for arrays in expert_tiles.quantize_expert_rows(x, policies, bits, tiles, order=order)
        ]
    assert not codes, f"kernels make codes of {', '.join(roles)}"
    return [_quantize_reference(x, policy, role, bits.get(role), tiles) for role, policy in policies.items()]


def _has_kernel(role: str, policy: OperandPolicy, sides: tuple[int, ...], tiles: ExpertTiles) -> bool:
    """Returns True if a kernel of the target device quantizes operand `role`."""
    return not tiles.partitioned_by_xla and expert_tiles.has_quantize_kernel(role, policy, sides, target_device())


def _role_key_words(static: GroupedStatic, keys: jax.Array | None, role: str) -> jax.Array:
    """Returns the key data of the role's random bytes, uint32 [experts, words]."""
    if keys is None:
        assert static[0] is not None
        raise ValueError(f"{role} of {static[0].name} rounds stochastically and needs a key; pass key=...")
    return jax.vmap(lambda words: jax.random.key_data(role_key(_key(static, words), role)))(keys)


def _quantize_reference(
    x: jax.Array, policy: OperandPolicy, role: str, bits: jax.Array | None, tiles: ExpertTiles
) -> GroupedOperand:
    """Quantizes one operand in plain JAX, without kernels. A non-finite amax gives its expert a NaN scale."""
    axis = _stored_contraction_axis(role)
    if not policy.format.quantized and not policy.hadamard:
        return GroupedOperand(round_to_bfloat16(x), None)
    x = round_to_dtype(round_to_bfloat16(x) if policy.source == "bfloat16" else x)
    if policy.hadamard:
        x = hadamard_transform(x, axis=axis, points=policy.hadamard_size)
    if not policy.format.quantized:
        return GroupedOperand(round_to_bfloat16(x), None)
    parts = x.reshape(-1, tiles.tile, x.shape[-1])  # [rows, features] -> [tiles, tile, features]
    amax, noise = _amaxes(parts, tiles), None if bits is None else _random_bytes(bits, parts.shape, tiles)
    default = "stochastic" if policy.uses_random_bits else "rne"
    rounding = {} if policy.rounding == default else {"rounding": policy.rounding}

    def grid(part: jax.Array, amax: jax.Array, noise: jax.Array | None) -> jax.Array:
        quantized = quantize_to_grid(
            part, policy.format, block=policy.block, axis=axis, noise=noise, amax=amax, **rounding
        )
        return quantized.dequantize_blocks()

    values = jax.vmap(grid, in_axes=(0, 0, None if noise is None else 0))(parts, tiles.per_tile(amax), noise)
    decode = jax.vmap(lambda each: policy.format.tensor_scales(each).decode)(amax)
    return GroupedOperand(
        _as_gemm_input(values.reshape(x.shape)), jnp.where(jnp.isfinite(amax), decode, jnp.float32(jnp.nan))
    )


def _as_gemm_input(values: jax.Array) -> jax.Array:
    """Casts values that are exact in bfloat16 to bfloat16, except on CPU, which has no bfloat16 GEMM."""
    return values if target_device().platform == "cpu" else values.astype(jnp.bfloat16)


def _amaxes(parts: jax.Array, tiles: ExpertTiles) -> jax.Array:
    """Returns the amax of each expert, float32 [experts]."""
    return tiles.amax_per_expert(jax.vmap(lambda part: bitcast_to_uint32(amax_of(part)))(parts))


def _random_bytes(words: jax.Array, shape: tuple[int, ...], tiles: ExpertTiles) -> jax.Array:
    """Returns random bytes by the index of each row in its expert."""
    whole = (shape[0] * shape[1], shape[2])

    def bytes_of_tile(words: jax.Array, first: jax.Array) -> jax.Array:
        return random_bytes(words, shape[1:], offset=(first, 0), global_shape=whole, aligned=True)

    return jax.vmap(bytes_of_tile)(tiles.per_tile(words), tiles.first_tile_of_expert)


def _weights(
    static: GroupedStatic, w: jax.Array, tiles: ExpertTiles, keys: jax.Array | None, role: str,
    amax: jax.Array | None, *, codes: bool,
) -> GroupedOperand:  # fmt: skip
    """Quantizes w [experts, inputs, outputs] as operand `role`, each expert as a separate weight."""
    recipe = static[0]
    if recipe is None:
        return GroupedOperand(w, None)
    if not getattr(recipe, role).format.quantized:
        return GroupedOperand(round_to_bfloat16(w), None)
    if codes:
        return GroupedOperand(*expert_tiles.expert_weight_codes(w, amax, _stored_contraction_axis(role)))
    if w.dtype == jnp.float32 and _has_kernel(role, getattr(recipe, role), w.shape[1:], tiles):
        return GroupedOperand(*expert_tiles.quantize_expert_weights(w, amax))

    def quantize_expert(w: jax.Array, words: jax.Array | None, amax: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        key = None if words is None else _key(static, words)
        operand = weight_operand(quantize_weight_shard(w, recipe, key, amax=amax), role)
        return _as_gemm_input(operand.values()), jnp.ones(
            (), jnp.float32
        ) if operand.decode_scale is None else operand.decode_scale

    mapped = tuple(None if array is None else 0 for array in (keys, amax))
    return GroupedOperand(*jax.vmap(quantize_expert, in_axes=(0, *mapped))(w, keys, amax))


def _alpha(left: GroupedOperand, right: GroupedOperand) -> jax.Array | None:
    """Returns the alpha of each expert, float32 [experts], or None if neither operand has a decode scale."""
    scales = [operand.decode_scale for operand in (left, right) if operand.decode_scale is not None]
    return functools.reduce(jnp.multiply, scales) if scales else None


def _alpha_or_ones(alpha: jax.Array | None, tiles: ExpertTiles) -> jax.Array:
    return jnp.ones(tiles.counts.shape, jnp.float32) if alpha is None else alpha


def _multiplied_by_kernels(
    left: GroupedOperand, right: GroupedOperand, sides: tuple[int, ...], tiles: ExpertTiles
) -> bool:
    dtypes = {left.array.dtype, right.array.dtype}
    fit = (
        not tiles.partitioned_by_xla
        and tiles.tile == hopper_grouped_gemm.GROUP_TILE_ROWS
        and dtypes == {jnp.dtype("bfloat16")}
    )
    return fit and expert_tiles.has_grouped_gemm_kernel(*sides, device=target_device())


def _product(a: jax.Array, b: jax.Array, axes: ContractingAxes) -> jax.Array:
    """Returns the float32 product of a and b, contracted along `axes`."""
    if target_device().platform == "cpu" or a.dtype == jnp.float32:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return dot_f32(a, b, axes, precision=lax.Precision.HIGHEST)


def grouped_fprop(x: GroupedOperand, w: GroupedOperand, tiles: ExpertTiles, dtype: jnp.dtype) -> jax.Array:
    """Returns y [rows, outputs] = x W with the matrix of each row's expert."""
    return _by_expert(x, w, tiles, ((1,), (0,)), dtype)


def grouped_dgrad(dy: GroupedOperand, w: GroupedOperand, tiles: ExpertTiles, dtype: jnp.dtype) -> jax.Array:
    """Returns dx [rows, inputs] = dy W^T with the matrix of each row's expert."""
    return _by_expert(dy, w, tiles, ((1,), (1,)), dtype)


def _by_expert(
    left: GroupedOperand, right: GroupedOperand, tiles: ExpertTiles, axes: ContractingAxes, dtype: jnp.dtype
) -> jax.Array:
    """Multiplies each tile by its expert's matrix and rounds the float32 sums once to `dtype`."""
    alpha = _alpha(left, right)
    if left.scales is not None:
        return blackwell_grouped_gemm.block_scaled_grouped_gemm(
            left.codes, right.codes, _alpha_or_ones(alpha, tiles), tiles.experts, dtype=dtype
        )
    outputs = right.array.shape[1:][1 - axes[1][0]]
    if _multiplied_by_kernels(left, right, right.array.shape[1:], tiles) and dtype == jnp.bfloat16:
        expert_alpha, layout = _alpha_or_ones(alpha, tiles), "nt" if axes[1] == (1,) else "nn"
        return hopper_grouped_gemm.grouped_gemm(left.array, right.array, expert_alpha, tiles.experts, layout=layout)

    def multiply_tile(number: jax.Array, y: jax.Array) -> jax.Array:
        expert = tiles.experts[number]
        sums = _product(tiles.slice(left.array, number), right.array[expert], axes)
        rows = apply_epilogue(sums, None if alpha is None else alpha[expert], dtype)
        return lax.dynamic_update_slice_in_dim(y, rows, number * tiles.tile, 0)

    zeros, *_ = pvary_to_common_axes(
        jnp.zeros((left.array.shape[0], outputs), dtype), left.array, right.array, tiles.experts
    )
    return lax.fori_loop(0, tiles.num_used, multiply_tile, zeros)


def grouped_wgrad(x: GroupedOperand, dy: GroupedOperand, tiles: ExpertTiles, dtype: jnp.dtype) -> jax.Array:
    """Returns dW [experts, inputs, outputs] = x^T dy over each expert's rows; zero for an expert without rows."""
    alpha = _alpha(x, dy)
    if x.scales is not None:
        return blackwell_grouped_gemm.block_scaled_grouped_wgrad_gemm(
            x.codes, dy.codes, _alpha_or_ones(alpha, tiles), tiles.counts
        )
    sides = x.array.shape[1], dy.array.shape[1]
    if _multiplied_by_kernels(x, dy, sides, tiles) and dtype == jnp.float32:
        return hopper_grouped_gemm.grouped_wgrad_gemm(x.array, dy.array, _alpha_or_ones(alpha, tiles), tiles.counts)

    def add_tile(number: jax.Array, sums: jax.Array) -> jax.Array:
        expert = tiles.experts[number]
        product = _product(tiles.slice(x.array, number), tiles.slice(dy.array, number), ((0,), (0,)))
        return sums.at[expert].add(product)

    zeros, *_ = pvary_to_common_axes(
        jnp.zeros((tiles.counts.shape[0], *sides), jnp.float32), x.array, dy.array, tiles.experts
    )
    sums = lax.fori_loop(0, tiles.num_used, add_tile, zeros)
    has_rows = (tiles.counts > 0)[:, None, None]
    return jnp.where(has_rows, apply_epilogue(sums, None if alpha is None else alpha[:, None, None], dtype), 0)
