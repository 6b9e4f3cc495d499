"""Timings of the FP8 casts, and of the 8-bit GEMM over their codes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from kernel_timing import Case, random_array

from halfbyte import kernels as K
from halfbyte.kernels import f8
from halfbyte.kernels.scale import GEMM

TILINGS = (f8.F8Tiling(), f8.F8Tiling(128, 128, 8), f8.F8Tiling(64, 64, 4), f8.F8Tiling(128, 32, 4))


def cases(shapes: list[tuple[int, int]]) -> list[Case]:
    out = []
    for shape in shapes:
        elements = float(np.prod(shape))
        scale = K.tensor_scale(K.amax_bits(jnp.float32(5.0)), top=448.0)
        xs = [(random_array(shape, i), scale) for i in range(4)]
        three = [tuple(random_array(shape, 3 * i + j) for j in range(3)) + (scale,) for i in range(2)]
        out.append(Case("copy", shape, "jnp.copy", lambda: lambda x, s: jnp.copy(x), xs, 4 * elements))
        for t in TILINGS:
            name = f"{t.rows}x{t.columns} w{t.warps}"
            out.append(Case("f8_cast", shape, name, _cast(t), xs, 4 * elements))
            out.append(Case("f8_swiglu_backward", shape, name, _backward(t), three, 11 * elements))
    for m, n, k in ((16384, 8192, 2048), (16384, 2048, 8192), (8192, 14336, 4096), (8192, 4096, 14336)):
        scale = K.tensor_scale(K.amax_bits(jnp.float32(5.0)), top=448.0)
        sets = [(_f8((m, k), i), _f8((n, k), i), scale, scale) for i in range(2)]
        ways = {"float32 out, alpha": _scaled, "scales on the operands": _dequantized, "the same, split sums": _split}
        for name, fn in ways.items():
            for options in ({}, {"xla_gpu_enable_triton_gemm": False})[fn is _split :]:
                label = name + (", cuBLAS" if options else "")
                work = 2.0 * m * n * k
                out.append(Case("f8_gemm", (m, n, k), label, _constant(fn), sets, work, "TFLOP/s", options))
    return out


def _f8(shape: tuple[int, int], seed: int) -> jax.Array:
    return random_array(shape, seed, jnp.float8_e4m3fn)


def _constant(value: Any) -> Any:
    return lambda: value


def _cast(t: f8.F8Tiling) -> Any:
    return lambda: lambda x, s: f8.cast(x, s, tiling=t)


def _backward(t: f8.F8Tiling) -> Any:
    return lambda: lambda g, u, d, s: f8.cast_backward(g, u, d, [s, s, s], tiling=t)


def _scaled(a, b, s, t):
    y = lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32) * (s[GEMM] * t[GEMM])
    return lax.reduce_precision(y, 8, 7).astype(jnp.bfloat16)


def _split(a, b, s, t):
    """The 8-bit units' short sums added up in float32 more often: cuBLAS without its fast accumulation."""
    return _dequantized(a, b, s, t, lax.Precision.HIGHEST)


def _dequantized(a, b, s, t, precision=None):
    """As XLA's rewriter wants it: with its Triton GEMMs off this is one f8 GEMM that takes the float32 scales."""
    left = a.astype(jnp.bfloat16) * s[GEMM].astype(jnp.bfloat16)
    right = b.astype(jnp.bfloat16) * t[GEMM].astype(jnp.bfloat16)
    axes = (((1,), (1,)), ((), ()))
    return lax.dot_general(left, right, axes, precision=precision, preferred_element_type=jnp.bfloat16)
