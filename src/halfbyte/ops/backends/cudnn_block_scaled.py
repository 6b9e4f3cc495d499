"""cuDNN's block-scaled GEMM as an FFI call: its requirements and the layout of its operands.

It reads K-major codes, block scales swizzled in tiles of 128x4, and a scalar of the result's dtype that multiplies the
result. XLA's `block_scaling_rewriter` writes the same call.
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
)  # earlier versions compile the call but do not apply the scalar
BLOCK_SCALED_SCOPE = "block_scaled_call"  # the name that native GEMMs carry in a compiled program
SCALE_TILE_ROWS = 128  # rows of operands are padded to whole tiles


def is_native_profitable(problem: LinearProblem, gemm: GemmKind) -> bool:
    """Returns True if the device has tensor cores that train in both formats and is not distrusted."""
    return has_block_scaled_tensor_cores(problem, gemm) and distrust_reason(problem.device) is None


def has_block_scaled_tensor_cores(problem: LinearProblem, gemm: GemmKind) -> bool:
    return all(
        native_training(problem.device, getattr(problem.recipe, role).format.hardware_unit) for role in gemm.roles
    )


def cudnn_call_refusal(problem: LinearProblem) -> str | None:
    """Returns why the FFI call is unsupported: no tensor cores, a partitioned program or an older cuDNN; or None."""
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
    """Returns float32 sums times `scale` [rows of left, rows of right], in `dtype`, which must hold `scale` exactly."""
    m, n = math.prod(left.rows), math.prod(right.rows)
    (a, a_scales), (b, b_scales) = (_cudnn_operand(operand) for operand in (left, right))
    y = cudnn_block_scaled_call(
        a, b, a_scales, b_scales, *(() if scale is None else (scale.astype(dtype),)), dtype=dtype
    )
    return y[0, :m, :n].reshape(*left.rows, *right.rows)


@jax.named_scope(BLOCK_SCALED_SCOPE)
def cudnn_block_scaled_call(a: jax.Array, b: jax.Array, *scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Calls cuDNN on elements [1, rows, k] with the swizzled scales of both and a scalar for the result."""
    shape = (1, a.shape[1], b.shape[1])
    # The second result is cuDNN's workspace, whose size XLA sets.
    results = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((0,), jnp.uint8)
    y: jax.Array = jax.ffi.ffi_call(TARGET, results, vmap_method="sequential", custom_call_api_version=1)(
        a, b, *scales
    )[0]
    return y


def _cudnn_operand(operand: BlockScaledOperand) -> tuple[jax.Array, jax.Array]:
    """Returns (elements [1, rows, k], swizzled scales [1, rows, blocks]), rows padded to whole tiles."""
    fmt = operand.policy.format
    assert fmt.element is not None and fmt.scale_dtype is not None
    codes = jnp.pad(operand.codes, ((0, -operand.codes.shape[0] % SCALE_TILE_ROWS), (0, 0)))
    # [rows, bytes] -> [rows, bytes, 2] where two codes share a byte -> [1, rows, k]
    elements = lax.bitcast_convert_type(codes, fmt.element.dtype).reshape(1, codes.shape[0], operand.k_size)
    return elements, lax.bitcast_convert_type(operand.scales, fmt.scale_dtype).reshape(1, codes.shape[0], -1)
