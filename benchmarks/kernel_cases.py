"""What `gpu_kernels.py` times: the passes that quantize, each in the tiling that training gives it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from kernel_timing import Case, Function, random_array

from halfbyte import kernels as K
from halfbyte.formats import NVFP4, NVFP4_46_MSE, BlockFormat
from halfbyte.kernels import ColumnwiseOperand, RowwiseOperand

KEYS = jnp.asarray(np.array([[0x12345678, 0x9ABCDEF0], [7, 11]], np.uint32))
MLPS = ((16384, 8192), (8192, 14336))  # tokens and hidden width of 1B and 8B


def scale_of(amax: float) -> jax.Array:
    return K.compute_tensor_scale(K.amax_to_bits(jnp.float32(amax)))


def quantizer(
    rows: bool, columns: str, *, stochastic: bool = False, packed: bool = False, fmt: BlockFormat = NVFP4
) -> Function:
    """A quantize of (x, scale, key, key); `columns` is "", "plain" or "hadamard"."""
    rule = fmt.scale

    def fn(x, scale, k0, k1):
        keys = (k0, k1) if stochastic else (None, None)
        row = RowwiseOperand(scale, keys[0], rule=rule) if rows else None
        hadamard = columns == "hadamard"
        column = ColumnwiseOperand(scale, keys[1], hadamard=hadamard, packed=packed, rule=rule) if columns else None
        return K.quantize_tiled(x, rows=row, columns=column)

    return fn


QUANTIZERS: dict[str, tuple[Function, float]] = {  # and the bytes that they write for an element
    "rows": (quantizer(True, ""), 2.0),
    "rows_sr": (quantizer(True, "", stochastic=True), 2.0),
    "columns": (quantizer(False, "hadamard"), 2.0),
    "both": (quantizer(True, "hadamard"), 4.0),
    "both_plain": (quantizer(True, "plain"), 4.0),
    "both_sr": (quantizer(True, "hadamard", stochastic=True), 4.0),
    "both_packed": (quantizer(True, "hadamard", packed=True), 2.5625),
    "rows_46": (quantizer(True, "", fmt=NVFP4_46_MSE), 2.0),
    "columns_46": (quantizer(False, "hadamard", fmt=NVFP4_46_MSE), 2.0),
    "both_packed_46": (quantizer(True, "hadamard", packed=True, fmt=NVFP4_46_MSE), 2.5625),
}


def pass_cases(shapes: list[tuple[int, int]]) -> list[Case]:
    cases, unit = [], scale_of(5.0)
    pack = jax.jit(lambda x, s: K.quantize_tiled(x, columns=ColumnwiseOperand(s, packed=True)))
    for shape in shapes:
        xs, elements = [(random_array(shape, i),) for i in range(4)], float(np.prod(shape))
        cases.append(Case("copy", shape, "jnp.copy", jnp.copy, xs, 4 * elements))
        cases.append(Case("copy", shape, "negate", jnp.negative, xs, 4 * elements))
        cases.append(Case("maxima", shape, "", K.partial_amax, xs, 2 * elements))
        sets = [(*x, unit, *KEYS) for x in xs]
        for name, (fn, written) in QUANTIZERS.items():
            cases.append(Case(name, shape, "", fn, sets, (2 + written) * elements))
        packed = [tuple(pack(*x, unit)) for x in xs[:2]]
        cases.append(Case("unpack", shape, "", K.unpack_tiled, packed, 2.5625 * elements))
        partial_maxima = [(jnp.full((shape[0] // 16, shape[1] // 512), i, jnp.int32),) for i in range(32)]
        cases.append(Case("tensor_scale", shape, "", K.compute_tensor_scale, partial_maxima, elements / 2048))
    return cases


def weight_cases(shapes: list[tuple[int, int]]) -> list[Case]:
    cases = []
    for shape in ((2048, 8192), (4096, 14336)):
        sets = [(random_array(shape, i, jnp.float32, 0.02), scale_of(0.1)) for i in range(4)]
        weights, elements = [s[:1] for s in sets], float(np.prod(shape))
        cases.append(Case("weight", shape, "", K.quantize_weight_kernel, sets, 6 * elements))
        for name, axis in (("weight_46_rows", -1), ("weight_46_columns", -2)):
            along = functools.partial(K.quantize_weight_kernel, axis=axis, rule=NVFP4_46_MSE.scale)
            cases.append(Case(name, shape, "", along, sets, 6 * elements))
        cases.append(Case("weight_maxima", shape, "", K.weight_partial_amax, weights, 4 * elements))
        cases.append(Case("copy", shape, "float32", jnp.copy, weights, 8 * elements))
    return cases


def swiglu_cases(shapes: list[tuple[int, int]]) -> list[Case]:
    cases = []
    for shape in (s for s in MLPS if s in shapes):
        elements, unit = float(np.prod(shape)), scale_of(5.0)
        three = [tuple(random_array(shape, 3 * i + j) for j in range(3)) for i in range(2)]
        two, sets = [t[:2] for t in three], [(*t, unit, KEYS[0]) for t in three]
        rows = lambda g, u, d, s, k: K.swiglu_quantize_forward(g, u, rows=RowwiseOperand(s))  # noqa: E731
        cases.append(Case("swiglu_forward_maxima", shape, "", K.swiglu_forward_amax, two, 4 * elements))
        cases.append(Case("swiglu_forward", shape, "", rows, sets, 6 * elements))
        cases.append(Case("swiglu_backward_maxima", shape, "", K.swiglu_backward_amax, three, 6 * elements))
        cases.append(Case("swiglu_backward", shape, "", _backward, sets, 16 * elements))
    return cases


def _backward(g, u, d, s, k):
    sides = RowwiseOperand(s, k), ColumnwiseOperand(s, k)
    return K.swiglu_quantize_backward(g, u, d, dg=sides, du=sides, h=ColumnwiseOperand(s))
