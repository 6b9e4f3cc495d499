"""Timings of the GEMM with alpha on its accumulator, against XLA with and without alpha; of the FP8 casts, and of the
8-bit GEMM over their codes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from kernel_cases import scale_of
from kernel_timing import Case, Function, random_array

from halfbyte import kernels as K
from halfbyte.kernels import fp8_cast
from halfbyte.kernels.hopper_gemm import matmul
from halfbyte.kernels.tensor_scale_kernel import GEMM_ALPHA_INDEX

LAST = (((1,), (1,)), ((), ()))  # the contraction, of both
CUBLAS = {"xla_gpu_enable_triton_gemm": False}
CONTRACTED = {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}
MLPS = ((16384, 2048, 8192), (8192, 4096, 14336))  # tokens, width, hidden


def shapes_of(layout: str, m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return ((k, m) if layout == "tn" else (m, k)), ((n, k) if layout == "nt" else (k, n))


def dot(a: jax.Array, b: jax.Array, layout: str, dtype: Any) -> jax.Array:
    left, right = CONTRACTED[layout]
    return lax.dot_general(a, b, (((left,), (right,)), ((), ())), preferred_element_type=dtype)


def cases(shapes: list[tuple[int, int]]) -> list[Case]:
    out, scale = [], scale_of(5.0)
    for tokens, width, hidden in MLPS:
        for a, b in ((width, hidden), (hidden, width)):
            for layout, m, n, k in (("nn", tokens, b, a), ("nt", tokens, b, a), ("tn", a, b, tokens)):
                left, right = shapes_of(layout, m, n, k)
                sets = [(random_array(left, i), random_array(right, 9 + i), scale, scale) for i in range(2)]
                for name, fn in _variants(layout, jnp.float32 if layout == "tn" else jnp.bfloat16).items():
                    out.append(Case(f"gemm_{layout}", (m, n, k), name, fn, sets, 2.0 * m * n * k, "TFLOP/s"))
    return out


def _variants(layout: str, dtype: Any) -> dict[str, Function]:
    def scaled(a, b, s, t):
        return (dot(a, b, layout, jnp.float32) * (s[GEMM_ALPHA_INDEX] * t[GEMM_ALPHA_INDEX])).astype(dtype)

    ours = functools.partial(matmul, layout=layout, out_dtype=dtype)
    return {"default": ours, "xla, no alpha": lambda a, b, s, t: dot(a, b, layout, dtype), "xla, alpha": scaled}


def f8_cases(shapes: list[tuple[int, int]]) -> list[Case]:
    out, scale = [], K.compute_tensor_scale(K.amax_to_bits(jnp.float32(5.0)), top=448.0)
    for shape in shapes:
        elements = float(np.prod(shape))
        xs = [(random_array(shape, i), scale) for i in range(4)]
        three = [(*(random_array(shape, 3 * i + j) for j in range(3)), scale) for i in range(2)]
        out.append(Case("copy", shape, "jnp.copy", jnp.copy, [x[:1] for x in xs], 4 * elements))
        out.append(Case("f8_cast", shape, "", fp8_cast.fp8_cast_transpose, xs, 4 * elements))
        out.append(Case("f8_swiglu_backward", shape, "", cast_backward, three, 11 * elements))
    ways = {"float32 out, alpha": scaled_sums, "scales on the operands": dequantized, "the same, split sums": split}
    for m, n, k in ((16384, 8192, 2048), (16384, 2048, 8192), (8192, 14336, 4096), (8192, 4096, 14336)):
        sets = [tuple(random_array(s, i, jnp.float8_e4m3fn) for s in ((m, k), (n, k))) + (scale,) * 2 for i in range(2)]
        for name, fn in ways.items():
            for options in (CUBLAS,) if fn is split else ({}, CUBLAS):
                label = name + (", cuBLAS" if options else "")
                out.append(Case("f8_gemm", (m, n, k), label, fn, sets, 2.0 * m * n * k, "TFLOP/s", options))
    return out


def cast_backward(g, u, d, s):
    return fp8_cast.fp8_swiglu_cast_backward(g, u, d, [s, s, s])


def scaled_sums(a, b, s, t):
    y = lax.dot_general(a, b, LAST, preferred_element_type=jnp.float32) * (s[GEMM_ALPHA_INDEX] * t[GEMM_ALPHA_INDEX])
    return lax.reduce_precision(y, 8, 7).astype(jnp.bfloat16)


def split(a, b, s, t):
    """The 8-bit units' short sums added up in float32 more often: cuBLAS without its fast accumulation."""
    return dequantized(a, b, s, t, lax.Precision.HIGHEST)


def dequantized(a, b, s, t, precision=None):
    """As XLA's rewriter wants it: with its Triton GEMMs off this is one f8 GEMM that takes the float32 scales."""
    left, right = (
        codes.astype(jnp.bfloat16) * scale[GEMM_ALPHA_INDEX].astype(jnp.bfloat16) for codes, scale in ((a, s), (b, t))
    )
    return lax.dot_general(left, right, LAST, precision=precision, preferred_element_type=jnp.bfloat16)
