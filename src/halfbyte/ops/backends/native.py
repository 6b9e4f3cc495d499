"""`native`: block-scaled FP4 and FP8 tensor cores, through `jax.nn.scaled_matmul`.

Codes go in as float4_e2m1fn with their E4M3 scales (or as MX formats with E8M0), and on Blackwell each GEMM becomes one
`__cudnn$blockScaledDot`. On older NVIDIA GPUs XLA dequantizes and calls a bfloat16 GEMM: right, but slower than
`carrier`. The tensor factors multiply the float32 result.
"""

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.formats import QTensor
from halfbyte.ops.backends.gemm import Contraction, alpha, contraction_last, finish, result_shape
from halfbyte.ops.operand import Operand
from halfbyte.ops.problem import Problem
from halfbyte.recipe import GEMMS

NAME = "native"
MULTIPLE = 32  # compilation does not check it; execution needs it


def unsupported(problem: Problem) -> str | None:
    """Needs an NVIDIA GPU, a block-scaled format on both sides of every GEMM, and contractions that are multiples of
    32.
    """
    if problem.device.capability is None:
        name = problem.device.name
        return f"jax.nn.scaled_matmul has no implementation for {name}; it needs an NVIDIA GPU (use carrier)"
    for gemm, size in problem.contractions().items():
        left, right = (getattr(problem.recipe, role).format for role in GEMMS[gemm])
        if left.unit is None or left.block is None or left.unit != right.unit:
            return f"{gemm} multiplies {left} by {right}; block-scaled units take one block-scaled format on both sides"
        if size % MULTIPLE:
            return f"{gemm} sums over {size}, and block-scaled units need a multiple of {MULTIPLE}"
    return None


def gemm(left: Operand, right: Operand, axes: Contraction, dtype: jnp.dtype) -> jax.Array:
    """Exact products, float32 sums, the operands' factors, one rounding to `dtype`."""
    codes = [o.codes() for o in (left, right)]
    (a, a_scales), (b, b_scales) = (_rows(q, summed) for q, summed in zip(codes, axes, strict=True))
    y = jax.nn.scaled_matmul(a, b, a_scales, b_scales, preferred_element_type=jnp.float32)
    y = y.reshape(result_shape(codes[0].shape, codes[1].shape, axes))
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
