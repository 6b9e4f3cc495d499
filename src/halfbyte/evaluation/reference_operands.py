"""Reference of a recipe: the six operands of a linear and its three results, from `formats` and derived keys only.

Random bits are derived from keys, never passed along, so stochastic rounding is as deterministic as RNE: x, w, dy and
key determine every element that a GEMM reads. No code of `ops` is used, because `ops` is what is judged. In a result
only the order of summation is unspecified. For operands a [m, k] and b [k, n] and the exact result r, a correct GEMM
satisfies

    |q - r| <= 2^-7 |r| + 2^-11 |a_i| |b_j|

which allows two roundings to bfloat16, and accumulation in float32 or in the accumulators of the device. |a_i| and
|b_j| are the norms of row and column. For comparison, the noise of 4-bit rounding is 0.1 |a_i| |b_j| / sqrt(k) per
element.
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

REMAINDER_ROLE = "fprop_rest"  # remainder of fprop's x, for recipes with a two-term operand
ROUNDED, SUMMED = 2.0**-7, 2.0**-11  # tolerance of two bfloat16 roundings, and of the accumulation
# GEMM -> contracting axis of its left and of its right operand.
CONTRACTION_OF_GEMM = {
    "fprop": (1, 0),
    "dgrad": (1, 1),
    "wgrad": (0, 0),
}
ROLE_TENSOR_AXIS = {"fprop_x": ("x", -1), "fprop_w": ("w", -2), "dgrad_dy": ("dy", -1), "dgrad_w": ("w", -1),
           "wgrad_x": ("x", -2), "wgrad_dy": ("dy", -2)}  # fmt: skip
"""Role -> (tensor, axis along which its matrix is blocked, which is the contracting axis of its GEMM)."""


class ReferenceOperand(NamedTuple):
    """Values of an operand that are exact in bfloat16 (except for outer scales inside the sum), and the decode scale
    that is applied after the sum, per tensor, row or column."""

    values: jax.Array  # float32
    decode_scale: jax.Array  # float32: a scalar, or one per row or column


def as_matrix(x: jax.Array) -> jax.Array:
    """Reshape [..., features] to [tokens, features]."""
    return x.reshape(-1, x.shape[-1])


def reference_operand(
    x: jax.Array, policy: OperandPolicy, *, axis: int, key: Key | None, amax: jax.Array | None = None,
    signs: Key | None = None,
) -> ReferenceOperand:  # fmt: skip
    """Returns a matrix quantized under a policy, blocked along `axis`. `signs` is the key of random Hadamard signs. A
    non-finite x has NaN as decode scale."""
    one = jnp.float32(1)
    x = _transform_operand(x, policy, axis, signs)
    if not policy.format.quantized:
        return ReferenceOperand(x.astype(jnp.float32), one)
    grid = _quantize_grid(x, policy, axis, key, amax)
    return ReferenceOperand(
        grid.dequantize_blocks(), jnp.where(jnp.isfinite(amax_of(x)), _alpha_part(grid, axis), jnp.nan * one)
    )


def _transform_operand(x: jax.Array, policy: OperandPolicy, axis: int, signs: Key | None) -> jax.Array:
    """Returns the values that are quantized: x in the policy's source dtype, after the Hadamard transform."""
    if policy.source == "bfloat16" or not policy.format.quantized:
        x = round_bfloat16(x.astype(jnp.float32))
    if not policy.hadamard:
        return x
    sign_bits = random_signs(signs, policy.hadamard_size) if policy.uses_random_signs and signs is not None else None
    return hadamard_transform(x, axis=axis, points=policy.hadamard_size, signs=sign_bits)


def _quantize_grid(
    x: jax.Array, policy: OperandPolicy, axis: int, key: Key | None, amax: jax.Array | None = None
) -> GridTensor:
    noise = random_bytes(key, x.shape) if policy.uses_random_bits and key is not None else None
    fmt, rounding = policy.format, policy.rounding
    return quantize_to_grid(x, fmt, block=policy.block, axis=axis, noise=noise, amax=amax, rounding=rounding)


def _alpha_part(grid: GridTensor, axis: int) -> jax.Array:
    """Returns the operand's factor of alpha: the decode scale per tensor, row or column; 1 if it is inside the sum."""
    scale = grid.scales.tensor_decode
    if grid.outer == "row":
        return scale[:, 0] if axis == -1 else scale[0]
    return scale if grid.outer == "tensor" else jnp.float32(1)


def compute_reference_operands(capture: LinearCapture) -> dict[str, ReferenceOperand]:
    """Returns the reference operands of a linear by role: six, and the remainder of a two-term operand."""

    def key_of(role: str) -> Key | None:
        return None if capture.bits is None else role_key(capture.bits, role)

    def source(role: str) -> jax.Array:
        """Returns the tensor as a matrix, or the dequantized forward operand that the role requantizes."""
        x, forward = as_matrix(getattr(capture, ROLE_TENSOR_AXIS[role][0])), FORWARD_ROLE_OF.get(role, role)
        if getattr(capture.recipe, role).source != "requantize_forward":
            return x
        policy, axis = getattr(capture.recipe, forward), ROLE_TENSOR_AXIS[forward][1]
        grid = _quantize_grid(_transform_operand(x, policy, axis, None), policy, axis, key_of(forward))
        codes = encode_qtensor(grid, policy.format, block=policy.block, axis=axis)
        return jnp.where(codes.finite, codes.dequantize(), jnp.float32(jnp.nan))

    def operand(role: str) -> ReferenceOperand:
        (name, axis), policy = ROLE_TENSOR_AXIS[role], getattr(capture.recipe, role)
        signs = None if capture.bits is None else signs_key(capture.bits, role.partition("_")[0])
        amax = capture.amax if name == "w" else None
        return reference_operand(source(role), policy, axis=axis, key=key_of(role), amax=amax, signs=signs)

    operands = {role: operand(role) for role in ROLES}
    if capture.recipe.remainder:
        operands[REMAINDER_ROLE] = _remainder_operand(
            as_matrix(capture.x), operands["fprop_x"], capture.recipe.fprop_x, key_of("fprop_x")
        )
    return operands


def _remainder_operand(
    x: jax.Array, first: ReferenceOperand, policy: OperandPolicy, key: Key | None
) -> ReferenceOperand:
    decode_scale = first.decode_scale[:, None] if first.decode_scale.ndim else first.decode_scale
    remainder = x.astype(jnp.float32) - round_bfloat16(first.values * decode_scale)
    return reference_operand(
        (round_bfloat16(remainder) if x.dtype == jnp.bfloat16 else remainder).astype(x.dtype), policy, axis=-1, key=key
    )


class ReferenceResult(NamedTuple):
    """Reference result r of a GEMM, float32 [m, n], and the tolerance of each element."""

    values: jax.Array
    tolerance: jax.Array


def reference_result(gemm: str, operands: dict[str, ReferenceOperand]) -> ReferenceResult:
    """Returns the product of a GEMM's two operands; with a two-term x the sum of both products."""
    lhs, rhs = GEMM_ROLES[gemm]
    products = [_product(gemm, operands[role], operands[rhs]) for role in operand_terms(lhs, operands)]
    return ReferenceResult(*(functools.reduce(jnp.add, field) for field in zip(*products, strict=True)))


def operand_terms(role: str, operands: dict[str, ReferenceOperand]) -> list[str]:
    """Returns the terms of the operand `role`: itself and, if it has one, its remainder."""
    return [role, REMAINDER_ROLE] if role == "fprop_x" and REMAINDER_ROLE in operands else [role]


def _product(gemm: str, lhs: ReferenceOperand, rhs: ReferenceOperand) -> ReferenceResult:
    (a, scale_a), (b, scale_b) = lhs, rhs
    axes = CONTRACTION_OF_GEMM[gemm]
    alpha = (scale_a[:, None] if scale_a.ndim else scale_a) * (scale_b[None] if scale_b.ndim else scale_b)
    dims = (((axes[0],), (axes[1],)), ((), ()))

    def dot(a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
        return lax.dot_general(a.astype(dtype), b.astype(dtype), dims, preferred_element_type=jnp.float32)

    # A CPU has no fast bfloat16 GEMM. Values that are exact in bfloat16 have the same products in float32.
    acc = lax.platform_dependent(
        a, b, cpu=lambda a, b: dot(a, b, jnp.dtype("float32")), default=lambda a, b: dot(a, b, jnp.dtype("bfloat16"))
    )
    row_norms, column_norms = l2_norm(a, axes[0]), l2_norm(b, axes[1])
    bound = row_norms[:, None] * alpha * column_norms[None]
    return ReferenceResult(acc * alpha, ROUNDED * jnp.abs(acc * alpha) + SUMMED * bound)


def l2_norm(x: jax.Array, axis: int) -> jax.Array:
    """Returns the Euclidean norm along `axis`, scaled by the amax so that squares neither overflow nor underflow."""
    amax = jnp.maximum(jnp.max(jnp.abs(x)), jnp.float32(1e-30))
    return jnp.sqrt(jnp.sum((x / amax) ** 2, axis=axis)) * amax
