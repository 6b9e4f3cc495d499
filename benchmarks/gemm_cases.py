"""Timings of the GEMM with alpha on its accumulator, against XLA with and without alpha."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from kernel_cases import scale_of
from kernel_timing import Case, random_array

from halfbyte.kernels.matmul import GemmTiling, matmul, with_float32_output
from halfbyte.kernels.scale import GEMM

CONTRACTED = {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}
# (layout, m, n, k): the GEMMs of an MLP of 2048 x 8192 with 16384 tokens, and of 4096 x 14336 with 8192
PROBLEMS = (
    ("nn", 16384, 8192, 2048),
    ("nn", 16384, 2048, 8192),
    ("nt", 16384, 8192, 2048),
    ("nt", 16384, 2048, 8192),
    ("tn", 2048, 8192, 16384),
    ("tn", 8192, 2048, 16384),
    ("nn", 8192, 14336, 4096),
    ("nn", 8192, 4096, 14336),
    ("nt", 8192, 14336, 4096),
    ("nt", 8192, 4096, 14336),
    ("tn", 4096, 14336, 8192),
    ("tn", 14336, 4096, 8192),
)
VARIANTS = {
    "n": GemmTiling(),
    "m f1": GemmTiling(in_flight=1, split="m"),
    "64x256 f1": GemmTiling(64, 256, in_flight=1, split="m"),
    "64x256 f1 pair-m": GemmTiling(64, 256, in_flight=1, split="m", pair="m"),
    "m f1 pair-n": GemmTiling(in_flight=1, split="m", pair="n"),
    "n f1 pair-m": GemmTiling(in_flight=1, pair="m"),
    "n f1 pair-n": GemmTiling(in_flight=1, pair="n"),
    "n f1 3 stages, whole": GemmTiling(in_flight=1, stages=3, epilogue_m=128, epilogue_n=128),
    "64x256 f1 3 stages, whole": GemmTiling(64, 256, in_flight=1, split="m", stages=3, epilogue_n=256),
}


def shapes_of(layout: str, m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return ((k, m) if layout == "tn" else (m, k)), ((n, k) if layout == "nt" else (k, n))


def dot(a: jax.Array, b: jax.Array, layout: str, dtype: Any) -> jax.Array:
    left, right = CONTRACTED[layout]
    return lax.dot_general(a, b, (((left,), (right,)), ((), ())), preferred_element_type=dtype)


def cases(shapes: list[tuple[int, int]]) -> list[Case]:
    out = []
    scale = scale_of(5.0)
    for layout, m, n, k in PROBLEMS:
        a_shape, b_shape = shapes_of(layout, m, n, k)
        sets = [(random_array(a_shape, i), random_array(b_shape, 9 + i), scale, scale) for i in range(2)]
        dtype = jnp.float32 if layout == "tn" else jnp.bfloat16
        for name, make in _variants(layout, dtype).items():
            out.append(Case(f"gemm_{layout}", (m, n, k), name, make, sets, 2.0 * m * n * k, unit="TFLOP/s"))
    return out


def _variants(layout: str, dtype: Any) -> dict[str, Callable[[], Any]]:
    def scaled(a, b, s, t):
        return (dot(a, b, layout, jnp.float32) * (s[GEMM] * t[GEMM])).astype(dtype)

    made: dict[str, Callable[[], Any]] = {
        "default": lambda: lambda a, b, s, t: matmul(a, b, s, t, layout=layout, out_dtype=dtype),
        "xla, no alpha": lambda: lambda a, b, s, t: dot(a, b, layout, dtype),
        "xla, alpha": lambda: scaled,
    }
    for name, tiling in VARIANTS.items():
        if dtype == jnp.float32 and "whole" in name:
            continue  # a whole float32 tile does not fit beside the operands
        made[name] = _mosaic(layout, dtype, tiling)
    return made


def _mosaic(layout: str, dtype: Any, tiling: GemmTiling) -> Callable[[], Any]:
    if dtype == jnp.float32 and tiling.epilogue_n <= 64:
        tiling = with_float32_output(tiling)
    return lambda: lambda a, b, s, t: matmul(a, b, s, t, layout=layout, out_dtype=dtype, tiling=tiling)
