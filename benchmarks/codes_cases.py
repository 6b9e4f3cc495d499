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
from halfbyte.kernels import ColumnwiseOperand, RowwiseOperand, ScaleLayout, mxfp8_quantize, nvfp4_untiled
from halfbyte.kernels.mosaic_launch import LaunchConfig
from halfbyte.kernels.mxfp8_quantize import MxOperandSpec

# Enough tokens that kernels are timed, and not their launches.
ODD = ((65536, 1376), (65536, 1408), (65536, 2731), (65536, 2816), (16384, 10944), (16384, 11008))
PASS, CODES = 2.0 + 2.0, 0.5 + 1 / 16  # bytes an element: two reads of bf16; a code and its share of the scale
PLAIN, TILED = ScaleLayout.PLAIN, ScaleLayout.TILED
MX_CODES = 1 + 1 / 32
MX_BOTH = MxOperandSpec(False, TILED), MxOperandSpec(True, TILED)
MX_GRADIENTS = tuple(
    MxOperandSpec(bool(along), TILED, tensor=i) for i, along in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 1))
)
UNIT = np.array([5, 537.6, 1 / 537.6, 89.6, 1 / 537.6, 0, 0, 0], np.float32)  # the scales of a tensor of amax 5


def _both(x, k0, k1, *, stochastic: bool = False, order: Any = TILED, hadamard: bool = True):
    scales = K.compute_tensor_scales(*K.partial_amax(x, hadamard=hadamard))
    row = RowwiseOperand(scales[0], k0 if stochastic else None, code_scale_layout=order)
    column = ColumnwiseOperand(scales[-1], k1 if stochastic else None, hadamard=hadamard, code_scale_layout=order)
    return K.quantize_tiled(x, rows=row, columns=column)


def _rows(x, k0, k1):
    return K.quantize_tiled(
        x, rows=RowwiseOperand(K.compute_tensor_scale(K.partial_amax(x, hadamard=False)[0]), code_scale_layout=TILED)
    )


def _alone(x, k0, k1, *, stochastic: bool = False):
    """Codes of rows and columns, by scales that are there."""
    keys = (k0, k1) if stochastic else (None, None)
    sides = (
        RowwiseOperand(UNIT, keys[0], code_scale_layout=TILED),
        ColumnwiseOperand(UNIT, keys[1], code_scale_layout=TILED),
    )
    made = functools.partial(nvfp4_untiled.quantize_untiled, [x], lambda m, rows: [rows], [(side, 0) for side in sides])
    return made(lanes=LaunchConfig(4, 4), name="codes_alone")


PASSES: dict[str, tuple[Function, float]] = {  # over x and keys, and compulsory bytes an element
    "codes pass": (_both, PASS + 2 * CODES),
    "codes pass, plain scales": (functools.partial(_both, order=PLAIN), PASS + 2 * CODES),
    "codes pass, no hadamard": (functools.partial(_both, hadamard=False), PASS + 2 * CODES),
    "codes_sr pass": (functools.partial(_both, stochastic=True), PASS + 2 * CODES),
    "codes pass, rows": (_rows, PASS + CODES),
    "codes alone": (_alone, 2 + 2 * CODES),
    "codes_sr alone": (functools.partial(_alone, stochastic=True), 2 + 2 * CODES),
    "mxfp8": (lambda x, k0, k1: mxfp8_quantize.quantize_mxfp8(x, operands=MX_BOTH), 2 + 2 * MX_CODES),
    "copy": (lambda x, k0, k1: -x, 4.0),
}


def _forward(g, u, d, k):
    row, column = K.compute_tensor_scales(*K.swiglu_forward_amax(g, u))
    return K.swiglu_quantize_forward(
        g,
        u,
        rows=RowwiseOperand(row, code_scale_layout=TILED),
        columns=ColumnwiseOperand(column, code_scale_layout=TILED),
    )


def _gated(g, u, d, k):
    scales = K.compute_tensor_scales(*K.swiglu_backward_amax(g, u, d, tensors=3))
    sides = [
        (
            RowwiseOperand(scales[i], k, code_scale_layout=TILED),
            ColumnwiseOperand(scales[i + 1], k, code_scale_layout=TILED),
        )
        for i in (0, 2)
    ]
    return K.swiglu_quantize_backward(
        g, u, d, dg=sides[0], du=sides[1], h=ColumnwiseOperand(scales[5], code_scale_layout=TILED)
    )


GATED: dict[str, tuple[Function, float]] = {  # over g, u, dh and a key
    "swiglu_codes forward": (_forward, 8 + 2 * CODES),
    "swiglu_codes backward": (_gated, 12 + 5 * CODES),
    "mxfp8_swiglu backward": (
        lambda g, u, d, k: mxfp8_quantize.quantize_swiglu_backward_mxfp8(g, u, d, operands=MX_GRADIENTS),
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
    row, column = K.compute_tensor_scales(*K.partial_amax(x))
    return K.quantize_tiled(x, rows=RowwiseOperand(row), columns=ColumnwiseOperand(column, packed=True))


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
