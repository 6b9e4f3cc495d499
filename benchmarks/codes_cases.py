"""Timings of the kernels that write what a block-scaled GEMM reads: packed codes and scales.

Whole passes, maxima to codes, by compulsory bytes: one read for the maxima, one for the codes, one write of each code
and scale; and the writing of codes alone.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_cases import KEY, KEY2
from kernel_timing import Case, random_array

from halfbyte import kernels as K
from halfbyte.kernels import Columnwise, Rowwise, ScaleOrder, codes, mxfp8
from halfbyte.kernels.launch import Lanes
from halfbyte.kernels.mxfp8 import MxOperand

# Enough tokens that kernels are timed, and not their launches.
ODD = ((65536, 1376), (65536, 1408), (65536, 2731), (65536, 2816), (16384, 10944), (16384, 11008))
PASS, CODES = 2.0 + 2.0, 0.5 + 1 / 16  # bytes an element: two reads of bf16; a code and its share of the scale
PLAIN, TILED = ScaleOrder.PLAIN, ScaleOrder.TILED
MX_CODES = 1 + 1 / 32
MX_BOTH = MxOperand(False, TILED), MxOperand(True, TILED)
MX_GRADIENTS = tuple(MxOperand(bool(along), TILED, tensor=i) for i, along in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 1)))


def _passes() -> dict[str, tuple[Callable[..., Any], float]]:
    """Name -> (pass over x and keys, compulsory bytes an element)."""

    def both(x, k0, k1, *, stochastic, order=TILED, hadamard=True):
        scales = K.tensor_scales(*K.maxima(x, hadamard=hadamard))
        row = Rowwise(scales[0], k0 if stochastic else None, codes=order)
        column = Columnwise(scales[-1], k1 if stochastic else None, hadamard=hadamard, codes=order)
        return K.quantize(x, rows=row, columns=column)

    def rows(x, k0, k1):
        return K.quantize(x, rows=Rowwise(K.tensor_scale(K.maxima(x, hadamard=False)[0]), codes=TILED))

    return {
        "codes pass": (lambda *a: both(*a, stochastic=False), PASS + 2 * CODES),
        "codes pass, plain scales": (lambda *a: both(*a, stochastic=False, order=PLAIN), PASS + 2 * CODES),
        "codes pass, no hadamard": (lambda *a: both(*a, stochastic=False, hadamard=False), PASS + 2 * CODES),
        "codes_sr pass": (lambda *a: both(*a, stochastic=True), PASS + 2 * CODES),
        "codes pass, rows": (rows, PASS + CODES),
    }


UNIT = np.array([5, 537.6, 1 / 537.6, 89.6, 1 / 537.6, 0, 0, 0], np.float32)  # the scales of a tensor of amax 5


def _made(x: jax.Array, sides: Sequence[Any], columns: int, name: str) -> tuple[jax.Array, ...]:
    run = functools.partial(codes.quantize_made, [x], lambda m, rows: [rows], [(side, 0) for side in sides])
    return run(lanes=Lanes(columns, 16 // columns), name=name)


def _quantize_only(stochastic: bool, columns: int = 4) -> Callable[..., Any]:
    def fn(x, k0, k1):
        keys = (k0, k1) if stochastic else (None, None)
        sides = Rowwise(UNIT, keys[0], codes=TILED), Columnwise(UNIT, keys[1], codes=TILED)
        return _made(x, sides, columns, "codes_alone")

    return fn


def _gated(g, u, d, k):
    scales = K.tensor_scales(*K.backward_maxima(g, u, d, tensors=3))
    sides = [(Rowwise(scales[i], k, codes=TILED), Columnwise(scales[i + 1], k, codes=TILED)) for i in (0, 2)]
    return K.quantize_backward(g, u, d, dg=sides[0], du=sides[1], h=Columnwise(scales[5], codes=TILED))


def _forward(g, u, d, k):
    row, column = K.tensor_scales(*K.forward_maxima(g, u))
    return K.quantize_forward(g, u, rows=Rowwise(row, codes=TILED), columns=Columnwise(column, codes=TILED))


def cases(shapes: list[tuple[int, int]]) -> list[Case]:
    out = []
    for shape in [s for s in shapes if s in ((16384, 8192), (8192, 14336), (16384, 2048))]:
        elements, keys = float(np.prod(shape)), (jnp.asarray(KEY), jnp.asarray(KEY2))
        sets = [(random_array(shape, i), *keys) for i in range(3)]
        out.append(Case("copy", shape, "negate", lambda: lambda x, k0, k1: -x, sets, 4 * elements))
        for name, (fn, bytes_of) in _passes().items():
            out.append(Case(name, shape, "", lambda fn=fn: fn, sets, bytes_of * elements))
        make = lambda: lambda x, k0, k1: mxfp8.quantize(x, operands=MX_BOTH)  # noqa: E731
        out.append(Case("mxfp8", shape, "", make, sets, (2 + 2 * MX_CODES) * elements))
        for (name, stochastic), columns in itertools.product((("codes", False), ("codes_sr", True)), (4, 2)):
            make = functools.partial(_quantize_only, stochastic, columns)
            out.append(Case(f"{name} alone", shape, f"c{columns}", make, sets, (2 + 2 * CODES) * elements))
        if shape != (16384, 2048):
            triples = [(*(random_array(shape, 3 * i + j) for j in range(3)), keys[0]) for i in range(2)]
            out.append(Case("swiglu_codes forward", shape, "", lambda: _forward, triples, (8 + 2 * CODES) * elements))
            make = lambda: lambda g, u, d, k: mxfp8.quantize_backward(g, u, d, operands=MX_GRADIENTS)  # noqa: E731
            out.append(Case("mxfp8_swiglu backward", shape, "", make, triples, (6 + 5 * MX_CODES) * elements))
            out.append(Case("swiglu_codes backward", shape, "", lambda: _gated, triples, (12 + 5 * CODES) * elements))
    return out + _odd_cases()


def _carriers(x, k0, k1):
    row, column = K.tensor_scales(*K.maxima(x))
    return K.quantize(x, rows=Rowwise(row), columns=Columnwise(column, packed=True))


def _product(x, w, scale):
    return K.matmul(x, w, scale, scale)


def _odd_cases() -> list[Case]:
    """Widths that no tile divides, and the next multiple of 128 of each: codes, carriers and the GEMM over them."""
    out = []
    for shape in ODD:
        sets = [(random_array(shape, i), jnp.asarray(KEY), jnp.asarray(KEY2)) for i in range(3)]
        elements = float(np.prod(shape))
        out.append(Case("codes alone", shape, "", lambda: _quantize_only(False), sets, (2 + 2 * CODES) * elements))
        out.append(Case("carriers pass", shape, "", lambda: _carriers, sets, (PASS + 2 + CODES) * elements))
        if shape[1] % 8 == 0:
            scale, w = jnp.ones((8,), jnp.float32), random_array((shape[1], 2048), 9)
            products = [(s[0], w, scale) for s in sets]
            work = 2.0 * shape[0] * shape[1] * 2048
            out.append(Case("gemm", shape, "nn, 2048 outputs", lambda: _product, products, work, "TFLOP/s"))
    return out
