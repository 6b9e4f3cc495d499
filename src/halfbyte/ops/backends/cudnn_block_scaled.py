"""cuDNN's block-scaled GEMM, as XLA calls it: what the call needs, and how operands are handed to it.

It takes codes with the contraction last, block scales in tiles of 128x4, and a scalar of the result's type that
multiplies the result (`block_scaling_rewriter` of XLA writes the same).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.devices import cudnn_version, distrust_reason, native_training
from halfbyte.ops.gemm_problem import GemmKind, LinearProblem
from halfbyte.ops.operand import BlockScaledOperand

TARGET = "__cudnn$blockScaledDot"
MIN_CUDNN_FOR_GLOBAL_SCALE = (
    9,
    13,
    0,
)  # the first cuDNN that applies it; earlier ones compile the call and leave it out
BLOCK_SCALED_SCOPE = "block_scaled_call"  # the name that native GEMMs carry in a compiled program
SCALE_TILE_ROWS = 128  # rows of operands come in whole tiles


def is_native_profitable(problem: LinearProblem, gemm: GemmKind) -> bool:
    """Whether the device trains in both formats on units of its own, and is believed to do it right."""
    return has_block_scaled_tensor_cores(problem, gemm) and distrust_reason(problem.device) is None


def has_block_scaled_tensor_cores(problem: LinearProblem, gemm: GemmKind) -> bool:
    return all(
        native_training(problem.device, getattr(problem.recipe, role).format.hardware_unit) for role in gemm.roles
    )


def cudnn_call_refusal(problem: LinearProblem) -> str | None:
    """Why our own call cannot multiply: it needs units, arrays of one device, and a cuDNN that applies factors."""
    if problem.partitioned_by_xla:
        return "its call multiplies arrays of one device, and this program is sharded by the compiler"
    if not all(has_block_scaled_tensor_cores(problem, gemm) for gemm in problem.quantized_gemms):
        return f"its call needs block-scaled units, and {problem.device.name} has none for training"
    version = cudnn_version(problem.device)
    if version < MIN_CUDNN_FOR_GLOBAL_SCALE:
        found, wanted = (".".join(map(str, v)) for v in (version, MIN_CUDNN_FOR_GLOBAL_SCALE))
        return f"cuDNN {found} leaves the factors of a block-scaled GEMM out; {wanted} applies them"
    return None


def block_scaled_dot(
    left: BlockScaledOperand, right: BlockScaledOperand, scale: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
    """[rows of left, rows of right]: float32 sums times `scale`, which `dtype` must hold exactly, in `dtype`."""
    m, n = math.prod(left.rows), math.prod(right.rows)
    (a, a_scales), (b, b_scales) = (_cudnn_operand(operand) for operand in (left, right))
    y = cudnn_block_scaled_call(
        a, b, a_scales, b_scales, *(() if scale is None else (scale.astype(dtype),)), dtype=dtype
    )
    return y[0, :m, :n].reshape(*left.rows, *right.rows)


@jax.named_scope(BLOCK_SCALED_SCOPE)
def cudnn_block_scaled_call(a: jax.Array, b: jax.Array, *scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """cuDNN's call over [1, rows, contraction] elements, with the tiled scales of both and a scalar for the result."""
    shape = (1, a.shape[1], b.shape[1])
    # The second result is cuDNN's workspace, whose size XLA sets.
    results = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((0,), jnp.uint8)
    y: jax.Array = jax.ffi.ffi_call(TARGET, results, vmap_method="sequential", custom_call_api_version=1)(
        a, b, *scales
    )[0]
    return y


def _cudnn_operand(operand: BlockScaledOperand) -> tuple[jax.Array, jax.Array]:
    """([1, rows, contraction] elements, [1, rows, blocks] scales in tiles), rows in whole tiles."""
    fmt = operand.policy.format
    assert fmt.element is not None and fmt.scale_dtype is not None
    codes = jnp.pad(operand.codes, ((0, -operand.codes.shape[0] % SCALE_TILE_ROWS), (0, 0)))
    # [rows, bytes] -> [rows, bytes, 2] where two codes share a byte -> [1, rows, contraction]
    elements = lax.bitcast_convert_type(codes, fmt.element.dtype).reshape(1, codes.shape[0], operand.k_size)
    return elements, lax.bitcast_convert_type(operand.scales, fmt.scale_dtype).reshape(1, codes.shape[0], -1)
