"""Timings of the GEMM with alpha on its accumulator, against XLA with and without alpha."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from kernel_cases import scale_of
from kernel_timing import Case, Function, random_array

from halfbyte.kernels.matmul import GemmTiling, matmul, with_float32_output
from halfbyte.kernels.scale import GEMM

CONTRACTED = {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}
MLPS = ((16384, 2048, 8192), (8192, 4096, 14336))  # tokens, width, hidden
TILINGS = {  # beside the default: the pairs that no default uses
    "64x256 f1 pair-m": GemmTiling(64, 256, in_flight=1, split="m", pair="m"),
    "m f1 pair-n": GemmTiling(in_flight=1, split="m", pair="n"),
    "n f1 pair-m": GemmTiling(in_flight=1, pair="m"),
    "n f1 pair-n": GemmTiling(in_flight=1, pair="n"),
}


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
        return (dot(a, b, layout, jnp.float32) * (s[GEMM] * t[GEMM])).astype(dtype)

    ours = functools.partial(matmul, layout=layout, out_dtype=dtype)
    wide = with_float32_output if dtype == jnp.float32 else lambda tiling: tiling
    return {
        "default": ours,
        "xla, no alpha": lambda a, b, s, t: dot(a, b, layout, dtype),
        "xla, alpha": scaled,
        **{name: functools.partial(ours, tiling=wide(tiling)) for name, tiling in TILINGS.items()},
    }
