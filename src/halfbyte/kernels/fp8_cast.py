"""FP8 codes of a tensor from one read, token-major and transposed.

    code = f8_rne_saturating(x * S),   S = top / amax, per tensor

An 8-bit GEMM on Hopper needs both operands K-major. With one per-tensor scale x and x^T have the same codes, so fprop
reads the codes of x [tokens, inputs] and wgrad those of x^T, and likewise for dy and W. Each program casts a tile and
stores it twice; the transpose goes through shared memory.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from halfbyte.formats import E4M3, E5M2
from halfbyte.io.lazy_import import lazy_module
from halfbyte.kernels import triton_launch
from halfbyte.kernels.lane_ops import LaneOps, Word, Words
from halfbyte.kernels.mosaic_launch import StackSlice, is_interpreting
from halfbyte.kernels.swiglu_quantize import swiglu_backward_row, swiglu_forward_row
from halfbyte.kernels.tensor_scale_kernel import ENCODE
from halfbyte.kernels.triton_launch import emit_tile_body

plgpu = lazy_module("jax.experimental.pallas.triton")
FP8_DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
FP8_MAX = {"e4m3": E4M3.max, "e5m2": E5M2.max}
COLUMNS_PER_LANE = 4  # elements per assembly block: four codes are one word


@dataclasses.dataclass(frozen=True)
class Fp8Tiling:
    rows: int = 128
    columns: int = 64
    warps: int = 4


TILING = Fp8Tiling(64, 64, 4)
BACKWARD_TILING = Fp8Tiling(128, 128, 8)


def unsupported_fp8(rows: int, columns: int, *, capability: tuple[int, int] | None = None) -> str | None:
    """Returns why the FP8 kernels do not support a [rows, columns] array, or None."""
    for name, size, tile in (("rows", rows, BACKWARD_TILING.rows), ("columns", columns, BACKWARD_TILING.columns)):
        if size % tile:
            return f"the FP8 kernels need a multiple of {tile} {name}, got {size}"
    if capability is not None and capability < (8, 9):
        return f"the FP8 kernels need compute capability 8.9 or newer, got {capability[0]}.{capability[1]}"
    return None


@dataclasses.dataclass(frozen=True)
class Fp8Cast:
    """One tensor to cast: its index among the computed tensors, its element, and the layouts to write."""

    tensor: int
    element: str
    as_stored: bool = True
    transposed: bool = True


@triton_launch.jit_per_shape("element", "plain", "turned", "tiling")
def fp8_cast_transpose(
    x: jax.Array | StackSlice,
    scale: jax.Array,
    *,
    element: str = "e4m3",
    plain: bool = True,
    turned: bool = True,
    tiling: Fp8Tiling = TILING,
) -> tuple[jax.Array, ...]:
    """Returns the float8 codes of x [rows, columns], bf16 or float32.

    Args:
        scale: The vector of `compute_tensor_scale(..., top=FP8_MAX[element])`.
        plain: Returns codes in the layout of x.
        turned: Returns codes of the transpose [columns, rows], last.
    """
    jobs = [Fp8Cast(0, element, plain, turned)]
    return _run([x], lambda m, words: [words[0]], jobs, [scale], tiling, "f8_cast")


def fp8_swiglu_cast_forward(
    g: jax.Array,
    u: jax.Array,
    scale: jax.Array,
    *,
    element: str = "e4m3",
    plain: bool = True,
    turned: bool = False,
    tiling: Fp8Tiling = TILING,
) -> tuple[jax.Array, ...]:
    """Returns the codes of h = silu(g) * u, as `fp8_cast_transpose`, from one read of g and u."""
    jobs = [Fp8Cast(0, element, plain, turned)]
    return _run([g, u], lambda m, w: [swiglu_forward_row(m, *w)], jobs, [scale], tiling, "f8_swiglu_forward")


def fp8_swiglu_cast_backward(
    g: jax.Array | StackSlice,
    u: jax.Array | StackSlice,
    dh: jax.Array,
    scales: Sequence[jax.Array],
    *,
    gradient: str = "e5m2",
    element: str = "e4m3",
    tiling: Fp8Tiling = BACKWARD_TILING,
) -> tuple[jax.Array, ...]:
    """Returns dg, dg^T, du, du^T in `gradient` and h^T in `element`; `scales` are those of dg, du and h."""
    jobs = [Fp8Cast(0, gradient), Fp8Cast(1, gradient), Fp8Cast(2, element, as_stored=False)]
    make = lambda m, words: list(swiglu_backward_row(m, *words))  # noqa: E731
    return _run([g, u, dh], make, jobs, scales, tiling, "f8_swiglu_backward")


def _run(
    arrays: Sequence[jax.Array | StackSlice],
    make: Callable[..., Sequence[Any]],
    jobs: Sequence[Fp8Cast],
    scales: Sequence[jax.Array],
    tiling: Fp8Tiling,
    name: str,
) -> tuple[jax.Array, ...]:
    rows, columns = arrays[0].shape
    if rows % tiling.rows or columns % tiling.columns:
        raise ValueError(f"the FP8 kernels need multiples of {tiling.rows} x {tiling.columns}, got {rows} x {columns}")

    def body(m, words, encodes):
        tensors = make(m, words)
        return [[_code_word(m, tensors[job.tensor], encodes[job.tensor], job.element)] for job in jobs]

    indices = [array.index.reshape(1) for array in arrays if isinstance(array, StackSlice)]

    def kernel(*refs):
        all_refs, a, s = list(refs), len(arrays), len(arrays) + len(scales)
        scale_refs, index_refs, outs = all_refs[a:s], all_refs[s : s + len(indices)], all_refs[s + len(indices) :]
        inputs = triton_launch.stack_slice_refs(arrays, all_refs[:a], index_refs)
        encodes = [ref[ENCODE] for ref in scale_refs]
        tiles = emit_tile_body(
            body, [ref[...] for ref in inputs], encodes, outputs=[jnp.int8] * len(jobs), columns=COLUMNS_PER_LANE
        )
        for job, tile in zip(jobs, tiles, strict=True):
            if job.as_stored:
                outs.pop(0)[...] = tile
            if job.transposed:
                outs.pop(0)[...] = tile.T

    block = pl.BlockSpec((tiling.rows, tiling.columns), lambda j, i: (i, j))
    transposed_block = pl.BlockSpec((tiling.columns, tiling.rows), lambda j, i: (j, i))
    specs, shapes, elements = [], [], []
    for job in jobs:
        for is_written, spec, shape in (
            (job.as_stored, block, (rows, columns)),
            (job.transposed, transposed_block, (columns, rows)),
        ):
            if is_written:
                specs.append(spec)
                shapes.append(jax.ShapeDtypeStruct(shape, jnp.int8))
                elements.append(FP8_DTYPES[job.element])
    vectors = [*scales, *indices]
    vector_specs = [pl.BlockSpec(s.shape, functools.partial(lambda n, *_: (0,) * n, s.ndim)) for s in vectors]

    def in_spec(array: jax.Array | StackSlice) -> pl.BlockSpec:
        if not isinstance(array, StackSlice):
            return block
        return pl.BlockSpec((array.stack.shape[0], tiling.rows, tiling.columns), lambda j, i: (0, i, j))

    results = pl.pallas_call(
        kernel,
        grid=(columns // tiling.columns, rows // tiling.rows),
        in_specs=[*map(in_spec, arrays), *vector_specs],
        out_specs=specs,
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=1),
        interpret=is_interpreting(),
        name=name,
    )(*(array.stack if isinstance(array, StackSlice) else array for array in arrays), *vectors)
    return tuple(lax.bitcast_convert_type(a, e) for a, e in zip(results, elements, strict=True))


def _code_word(m: LaneOps, words: Words, encode: Word, element: str) -> Word:
    """Returns a word of four codes, from two words of bf16 pairs or from four float32."""
    values = words if len(words) == COLUMNS_PER_LANE else [half(w) for w in words for half in (m.low_bf16, m.high_bf16)]
    return m.f8_word([m.fmul(v, encode) for v in values], element)
