"""What a recipe gives: the six operands of a linear and its three results, from `formats` and derived keys alone.

Random bits are derived, never carried, so a stochastic rounding is as determined as one to nearest: on given x, w, dy
and key there is one right value of every number that a GEMM reads. Nothing of `ops`, which is what is judged, is used.
Of a result only the order of its sums is free. For operands a [m, k] and b [k, n] and the exact result r, a healthy one
is within

    |q - r| <= 2^-7 |r| + 2^-11 |a_i| |b_j|

of it: two roundings to bfloat16, and sums in float32 or in what the units of an accelerator have for that; rounding
noise of 4 bits is 0.1 |a_i| |b_j| / sqrt(k) for each element, and as much in its largest for four standard deviations.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.evaluation.step_replay import LinearCapture
from halfbyte.formats import (
    GridTensor,
    Key,
    amax_of,
    encode_qtensor,
    hadamard_transform,
    quantize_to_grid,
    random_bytes,
)
from halfbyte.formats.exact_float32 import round_bfloat16
from halfbyte.formats.hadamard import random_signs
from halfbyte.recipes import FORWARD_ROLE_OF, GEMM_ROLES, ROLES, OperandPolicy, role_key, signs_key

REMAINDER_ROLE = "fprop_rest"  # what rounding fprop's x has left over, where the recipe multiplies that as well
ROUNDED, SUMMED = 2.0**-7, 2.0**-11
CONTRACTION_OF_GEMM = {
    "fprop": (1, 0),
    "dgrad": (1, 1),
    "wgrad": (0, 0),
}  # the axis of each matrix that a GEMM sums over
ROLE_TENSOR_AXIS = {"fprop_x": ("x", -1), "fprop_w": ("w", -2), "dgrad_dy": ("dy", -1), "dgrad_w": ("w", -1),
           "wgrad_x": ("x", -2), "wgrad_dy": ("dy", -2)}  # fmt: skip
"""Each operand's tensor, as a matrix, and the axis along which it is blocked: that which its GEMM sums over."""


class ReferenceOperand(NamedTuple):
    """A matrix of numbers that are exact in bfloat16 (but for outer scales inside the sum), and the factor that sums of
    them owe the tensor's scale, or those of its rows."""

    values: jax.Array  # float32
    decode_scale: jax.Array  # float32, or one for each row or column


def as_matrix(x: jax.Array) -> jax.Array:
    """[..., features] as [tokens, features]."""
    return x.reshape(-1, x.shape[-1])


def reference_operand(
    x: jax.Array, policy: OperandPolicy, *, axis: int, key: Key | None, amax: jax.Array | None = None,
    signs: Key | None = None,
) -> ReferenceOperand:  # fmt: skip
    """A matrix under a policy, blocked along `axis`; `signs` is the key of its transform's, where they are drawn."""
    one = jnp.float32(1)
    x = _transform_operand(x, policy, axis, signs)
    if not policy.format.quantized:
        return ReferenceOperand(x.astype(jnp.float32), one)
    grid = _quantize_grid(x, policy, axis, key, amax)
    return ReferenceOperand(
        grid.dequantize_blocks(), jnp.where(jnp.isfinite(amax_of(x)), _alpha_part(grid, axis), jnp.nan * one)
    )


def _transform_operand(x: jax.Array, policy: OperandPolicy, axis: int, signs: Key | None) -> jax.Array:
    """What is quantized of a matrix."""
    if policy.source == "bfloat16" or not policy.format.quantized:
        x = round_bfloat16(x.astype(jnp.float32))
    if not policy.hadamard:
        return x
    drawn = random_signs(signs, policy.hadamard_size) if policy.uses_random_signs and signs is not None else None
    return hadamard_transform(x, axis=axis, points=policy.hadamard_size, signs=drawn)


def _quantize_grid(
    x: jax.Array, policy: OperandPolicy, axis: int, key: Key | None, amax: jax.Array | None = None
) -> GridTensor:
    noise = random_bytes(key, x.shape) if policy.uses_random_bits and key is not None else None
    fmt, rounding = policy.format, policy.rounding
    return quantize_to_grid(x, fmt, block=policy.block, axis=axis, noise=noise, amax=amax, rounding=rounding)


def _alpha_part(grid: GridTensor, axis: int) -> jax.Array:
    """What sums owe: the tensor's decode scale, those of rows or columns, or nothing where it is inside the sum."""
    scale = grid.scales.tensor_decode
    if grid.outer == "row":
        return scale[:, 0] if axis == -1 else scale[0]
    return scale if grid.outer == "tensor" else jnp.float32(1)


def compute_reference_operands(given: LinearCapture) -> dict[str, ReferenceOperand]:
    """The six of a linear, by role."""

    def key_of(role: str) -> Key | None:
        return None if given.bits is None else role_key(given.bits, role)

    def source(role: str) -> jax.Array:
        """The tensor as a matrix, or its forward operand, dequantized."""
        x, forward = as_matrix(getattr(given, ROLE_TENSOR_AXIS[role][0])), FORWARD_ROLE_OF.get(role, role)
        if getattr(given.recipe, role).source != "requantize_forward":
            return x
        policy, axis = getattr(given.recipe, forward), ROLE_TENSOR_AXIS[forward][1]
        grid = _quantize_grid(_transform_operand(x, policy, axis, None), policy, axis, key_of(forward))
        codes = encode_qtensor(grid, policy.format, block=policy.block, axis=axis)
        return jnp.where(codes.finite, codes.dequantize(), jnp.float32(jnp.nan))

    def made(role: str) -> ReferenceOperand:
        (name, axis), policy = ROLE_TENSOR_AXIS[role], getattr(given.recipe, role)
        signs = None if given.bits is None else signs_key(given.bits, role.partition("_")[0])
        amax = given.amax if name == "w" else None
        return reference_operand(source(role), policy, axis=axis, key=key_of(role), amax=amax, signs=signs)

    found = {role: made(role) for role in ROLES}
    if given.recipe.remainder:
        found[REMAINDER_ROLE] = _remainder_operand(
            as_matrix(given.x), found["fprop_x"], given.recipe.fprop_x, key_of("fprop_x")
        )
    return found


def _remainder_operand(
    x: jax.Array, first: ReferenceOperand, policy: OperandPolicy, key: Key | None
) -> ReferenceOperand:
    factor = first.decode_scale[:, None] if first.decode_scale.ndim else first.decode_scale
    left = x.astype(jnp.float32) - round_bfloat16(first.values * factor)
    return reference_operand(
        (round_bfloat16(left) if x.dtype == jnp.bfloat16 else left).astype(x.dtype), policy, axis=-1, key=key
    )


class ReferenceResult(NamedTuple):
    """A GEMM's result r, float32, and how far from it a healthy one may be."""

    values: jax.Array
    tolerance: jax.Array


def reference_result(gemm: str, made: dict[str, ReferenceOperand]) -> ReferenceResult:
    """The product of a GEMM's two operands, and for fprop that of what rounding x has left over."""
    left, right = GEMM_ROLES[gemm]
    products = [_product(gemm, made[role], made[right]) for role in operand_terms(left, made)]
    return ReferenceResult(*(functools.reduce(jnp.add, kind) for kind in zip(*products, strict=True)))


def operand_terms(role: str, made: dict[str, ReferenceOperand]) -> list[str]:
    """The operands that stand for `role`: itself, and what is left over of it."""
    return [role, REMAINDER_ROLE] if role == "fprop_x" and REMAINDER_ROLE in made else [role]


def _product(gemm: str, left: ReferenceOperand, right: ReferenceOperand) -> ReferenceResult:
    (a, factor_a), (b, factor_b) = left, right
    axes = CONTRACTION_OF_GEMM[gemm]
    factor = (factor_a[:, None] if factor_a.ndim else factor_a) * (factor_b[None] if factor_b.ndim else factor_b)
    dims = (((axes[0],), (axes[1],)), ((), ()))

    def dot(a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
        return lax.dot_general(a.astype(dtype), b.astype(dtype), dims, preferred_element_type=jnp.float32)

    # A CPU has no fast bfloat16 GEMM; the numbers are the same.
    sums = lax.platform_dependent(
        a, b, cpu=lambda a, b: dot(a, b, jnp.dtype("float32")), default=lambda a, b: dot(a, b, jnp.dtype("bfloat16"))
    )
    rows, columns = l2_norm(a, axes[0]), l2_norm(b, axes[1])
    bound = rows[:, None] * factor * columns[None]
    return ReferenceResult(sums * factor, ROUNDED * jnp.abs(sums * factor) + SUMMED * bound)


def l2_norm(x: jax.Array, axis: int) -> jax.Array:
    """The Euclidean length of each row or column, along `axis`, of whatever size its numbers are."""
    size = jnp.maximum(jnp.max(jnp.abs(x)), jnp.float32(1e-30))
    return jnp.sqrt(jnp.sum((x / size) ** 2, axis=axis)) * size
