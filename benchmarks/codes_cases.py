"""Timings of the kernels that write what a block-scaled GEMM reads: packed codes and scales.

Whole passes, maxima to codes, by compulsory bytes: one read for the maxima, one for the codes, one write of each code
and scale; and the writing of codes alone.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from kernel_cases import KEYS, MLPS
from kernel_timing import Case, Function, random_array

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
UNIT = np.array([5, 537.6, 1 / 537.6, 89.6, 1 / 537.6, 0, 0, 0], np.float32)  # the scales of a tensor of amax 5


def _both(x, k0, k1, *, stochastic: bool = False, order: Any = TILED, hadamard: bool = True):
    scales = K.tensor_scales(*K.maxima(x, hadamard=hadamard))
    row = Rowwise(scales[0], k0 if stochastic else None, codes=order)
    column = Columnwise(scales[-1], k1 if stochastic else None, hadamard=hadamard, codes=order)
    return K.quantize(x, rows=row, columns=column)


def _rows(x, k0, k1):
    return K.quantize(x, rows=Rowwise(K.tensor_scale(K.maxima(x, hadamard=False)[0]), codes=TILED))


def _alone(x, k0, k1, *, stochastic: bool = False):
    """Codes of rows and columns, by scales that are there."""
    keys = (k0, k1) if stochastic else (None, None)
    sides = Rowwise(UNIT, keys[0], codes=TILED), Columnwise(UNIT, keys[1], codes=TILED)
    made = functools.partial(codes.quantize_made, [x], lambda m, rows: [rows], [(side, 0) for side in sides])
    return made(lanes=Lanes(4, 4), name="codes_alone")


PASSES: dict[str, tuple[Function, float]] = {  # over x and keys, and compulsory bytes an element
    "codes pass": (_both, PASS + 2 * CODES),
    "codes pass, plain scales": (functools.partial(_both, order=PLAIN), PASS + 2 * CODES),
    "codes pass, no hadamard": (functools.partial(_both, hadamard=False), PASS + 2 * CODES),
    "codes_sr pass": (functools.partial(_both, stochastic=True), PASS + 2 * CODES),
    "codes pass, rows": (_rows, PASS + CODES),
    "codes alone": (_alone, 2 + 2 * CODES),
    "codes_sr alone": (functools.partial(_alone, stochastic=True), 2 + 2 * CODES),
    "mxfp8": (lambda x, k0, k1: mxfp8.quantize(x, operands=MX_BOTH), 2 + 2 * MX_CODES),
    "copy": (lambda x, k0, k1: -x, 4.0),
}


def _forward(g, u, d, k):
    row, column = K.tensor_scales(*K.forward_maxima(g, u))
    return K.quantize_forward(g, u, rows=Rowwise(row, codes=TILED), columns=Columnwise(column, codes=TILED))


def _gated(g, u, d, k):
    scales = K.tensor_scales(*K.backward_maxima(g, u, d, tensors=3))
    sides = [(Rowwise(scales[i], k, codes=TILED), Columnwise(scales[i + 1], k, codes=TILED)) for i in (0, 2)]
    return K.quantize_backward(g, u, d, dg=sides[0], du=sides[1], h=Columnwise(scales[5], codes=TILED))


GATED: dict[str, tuple[Function, float]] = {  # over g, u, dh and a key
    "swiglu_codes forward": (_forward, 8 + 2 * CODES),
    "swiglu_codes backward": (_gated, 12 + 5 * CODES),
    "mxfp8_swiglu backward": (
        lambda g, u, d, k: mxfp8.quantize_backward(g, u, d, operands=MX_GRADIENTS),
        6 + 5 * MX_CODES,
    ),
}


def cases(shapes: list[tuple[int, int]]) -> list[Case]:
    out = []
    for shape in (s for s in shapes if s in (*MLPS, (16384, 2048))):
        elements = float(np.prod(shape))
        sets = [(random_array(shape, i), *KEYS) for i in range(3)]
        out += [Case(name, shape, "", fn, sets, each * elements) for name, (fn, each) in PASSES.items()]
        if shape in MLPS:
            triples = [(*(random_array(shape, 3 * i + j) for j in range(3)), KEYS[0]) for i in range(2)]
            out += [Case(name, shape, "", fn, triples, each * elements) for name, (fn, each) in GATED.items()]
    return out + _odd_cases()


def _carriers(x, k0, k1):
    row, column = K.tensor_scales(*K.maxima(x))
    return K.quantize(x, rows=Rowwise(row), columns=Columnwise(column, packed=True))


def _odd_cases() -> list[Case]:
    """Widths that no tile divides, and the next multiple of 128 of each: codes, carriers and the GEMM over them."""
    out = []
    for shape in ODD:
        sets, elements = [(random_array(shape, i), *KEYS) for i in range(3)], float(np.prod(shape))
        out.append(Case("codes alone", shape, "", _alone, sets, (2 + 2 * CODES) * elements))
        out.append(Case("carriers pass", shape, "", _carriers, sets, (PASS + 2 + CODES) * elements))
        if shape[1] % 8 == 0:
            scale, w = jnp.ones((8,), jnp.float32), random_array((shape[1], 2048), 9)
            products = [(s[0], w, scale, scale) for s in sets]
            work = 2.0 * elements * 2048
            out.append(Case("gemm", shape, "nn, 2048 outputs", K.matmul, products, work, "TFLOP/s"))
    return out
