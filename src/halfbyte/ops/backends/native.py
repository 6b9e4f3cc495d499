"""`native`: block-scaled FP4 and FP8 tensor cores, through `jax.nn.scaled_matmul`.

Codes go in as float4_e2m1fn with their E4M3 scales (or as MX formats with E8M0), and on Blackwell each GEMM becomes one
`__cudnn$blockScaledDot`. On older NVIDIA GPUs XLA dequantizes and calls a bfloat16 GEMM: right, but slower than
`carrier`. The tensor factors multiply the float32 result.
"""

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.devices import native_training
from halfbyte.formats import QTensor
from halfbyte.ops.backends.backend import Backend
from halfbyte.ops.gemms import Gemm, alpha, contraction_last, finish, result_shape
from halfbyte.ops.operand import Operand, Quantized
from halfbyte.ops.problem import Problem
from halfbyte.recipe import Recipe

MULTIPLE = 32  # compilation does not check it; execution needs it


def foreign(recipe: Recipe) -> str | None:
    """Needs something quantized."""
    return None if recipe.quantized else f"recipe {recipe.name} quantizes nothing"


def unsupported(problem: Problem, gemm: Gemm) -> str | None:
    """Needs an NVIDIA GPU, a block-scaled format on both sides, and a contraction that is a multiple of 32."""
    if problem.device.capability is None:
        name = problem.device.name
        return f"jax.nn.scaled_matmul has no implementation for {name}; it needs an NVIDIA GPU (use carrier)"
    left, right = (getattr(problem.recipe, role).format for role in gemm.roles)
    if left.unit is None or left.block is None or left.unit != right.unit:
        return f"{gemm} multiplies {left} by {right}; block-scaled units take one block-scaled format on both sides"
    size = problem.contraction(gemm)
    return f"{gemm} sums over {size}, and block-scaled units need a multiple of {MULTIPLE}" if size % MULTIPLE else None


def pays(problem: Problem, gemm: Gemm) -> bool:
    """Whether the device trains in both formats on units of its own."""
    return all(native_training(problem.device, getattr(problem.recipe, role).format.unit) for role in gemm.roles)


def multiply(gemm: Gemm, left: Operand, right: Operand, dtype: jnp.dtype) -> jax.Array:
    """Exact products, float32 sums, the operands' factors, one rounding to `dtype`."""
    assert isinstance(left, Quantized) and isinstance(right, Quantized), "block-scaled units read codes"
    axes = gemm.axes(left.codes.codes.ndim)
    (a, a_scales), (b, b_scales) = (_rows(o.codes, summed) for o, summed in zip((left, right), axes, strict=True))
    y = jax.nn.scaled_matmul(a, b, a_scales, b_scales, preferred_element_type=jnp.float32)
    y = y.reshape(result_shape(left.codes.shape, right.codes.shape, axes))  # [1, rows, columns] -> [free dims of both]
    return finish(y, alpha(left, right), dtype)


def _rows(tensor: QTensor, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """([1, rows, contraction] elements, [1, rows, contraction / block] scales)."""
    element, block = tensor.format.element, tensor.format.block
    assert tensor.scales is not None and element is not None and block is not None
    scales = lax.bitcast_convert_type(tensor.scales, jnp.uint8)
    if tensor.block == "2d":  # one scale a tile: repeat it on each of the tile's rows
        scales = jnp.repeat(scales, block, axis=1 - axes[0])
    codes, scales = (contraction_last(t, axes) for t in (tensor.codes, scales))
    narrow = codes.astype(jnp.uint4) if element.bits == 4 else codes
    elements = lax.bitcast_convert_type(narrow, element.dtype)
    return elements[None], lax.bitcast_convert_type(scales, tensor.scales.dtype)[None]


BACKEND = Backend("native", unsupported, multiply, foreign=foreign, pays=pays)
