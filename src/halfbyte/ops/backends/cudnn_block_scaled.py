"""cuDNN's block-scaled GEMM, as XLA calls it: what the call needs, and how operands are handed to it.

It takes codes with the contraction last, block scales in tiles of 128x4, and a scalar of the result's type that
multiplies the result (`block_scaling_rewriter` of XLA writes the same).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.devices import cudnn_version, doubt, native_training
from halfbyte.ops.gemms import Gemm
from halfbyte.ops.operand import BlockScaled
from halfbyte.ops.problem import Problem

TARGET = "__cudnn$blockScaledDot"
GLOBAL_SCALE = (9, 13, 0)  # the first cuDNN that applies it; earlier ones compile the call and leave it out
SCOPE = "block_scaled_call"  # the name that native GEMMs carry in a compiled program
TILE = 128  # rows of operands come in whole tiles


def pays(problem: Problem, gemm: Gemm) -> bool:
    """Whether the device trains in both formats on units of its own, and is believed to do it right."""
    return has_units(problem, gemm) and doubt(problem.device) is None


def has_units(problem: Problem, gemm: Gemm) -> bool:
    return all(native_training(problem.device, getattr(problem.recipe, role).format.unit) for role in gemm.roles)


def uncalled(problem: Problem) -> str | None:
    """Why our own call cannot multiply: it needs units, arrays of one device, and a cuDNN that applies factors."""
    if problem.sharded:
        return "its call multiplies arrays of one device, and this program is sharded by the compiler"
    if not all(has_units(problem, gemm) for gemm in problem.quantized_gemms):
        return f"its call needs block-scaled units, and {problem.device.name} has none for training"
    version = cudnn_version(problem.device)
    if version < GLOBAL_SCALE:
        found, wanted = (".".join(map(str, v)) for v in (version, GLOBAL_SCALE))
        return f"cuDNN {found} leaves the factors of a block-scaled GEMM out; {wanted} applies them"
    return None


def block_scaled_dot(left: BlockScaled, right: BlockScaled, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """[rows of left, rows of right]: float32 sums times `scale`, which `dtype` must hold exactly, in `dtype`."""
    m, n = math.prod(left.rows), math.prod(right.rows)
    (a, a_scales), (b, b_scales) = (_side(operand) for operand in (left, right))
    y = call(a, b, a_scales, b_scales, *(() if scale is None else (scale.astype(dtype),)), dtype=dtype)
    return y[0, :m, :n].reshape(*left.rows, *right.rows)


@jax.named_scope(SCOPE)
def call(a: jax.Array, b: jax.Array, *scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """cuDNN's call over [1, rows, contraction] elements, with the tiled scales of both and a scalar for the result."""
    shape = (1, a.shape[1], b.shape[1])
    # The second result is cuDNN's workspace, whose size XLA sets.
    results = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((0,), jnp.uint8)
    y: jax.Array = jax.ffi.ffi_call(TARGET, results, vmap_method="sequential", custom_call_api_version=1)(
        a, b, *scales
    )[0]
    return y


def _side(operand: BlockScaled) -> tuple[jax.Array, jax.Array]:
    """([1, rows, contraction] elements, [1, rows, blocks] scales in tiles), rows in whole tiles."""
    fmt = operand.policy.format
    assert fmt.element is not None and fmt.scale_dtype is not None
    codes = jnp.pad(operand.codes, ((0, -operand.codes.shape[0] % TILE), (0, 0)))
    # [rows, bytes] -> [rows, bytes, 2] where two codes share a byte -> [1, rows, contraction]
    elements = lax.bitcast_convert_type(codes, fmt.element.dtype).reshape(1, codes.shape[0], operand.contraction)
    return elements, lax.bitcast_convert_type(operand.scales, fmt.scale_dtype).reshape(1, codes.shape[0], -1)
