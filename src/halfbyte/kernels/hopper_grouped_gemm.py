"""GEMMs of many experts for Hopper: the walk of `matmul.py`, in which a tile knows its expert.

Rows lie sorted by expert, and every expert begins on a new tile of ROWS rows, filled up with zero rows: a tile has one
expert, no store is masked, and no sum crosses two. float32 sums are multiplied by the expert's alpha and rounded once.

    rows         y [rows, n] of x [rows, k] and each tile's w [k, n] ("nn", fprop) or [n, k] ("nt", dgrad)
    contraction  dw [experts, m, n] of x [rows, m] and dy [rows, n], over each expert's own rows ("tn", wgrad)

A tile of rows without an expert and an expert without rows are zero, without a product.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from halfbyte.formats.bits import round_bfloat16
from halfbyte.kernels.architecture import record_architecture
from halfbyte.kernels.interpret import is_interpreted
from halfbyte.kernels.launch import multiprocessors
from halfbyte.kernels.matmul import ALIGNED, GemmTiling, Work, walk, with_float32_output
from halfbyte.later import later

plgpu = later("jax.experimental.pallas.mosaic_gpu")
ROWS = 128  # of a tile
NARROW, WIDE = 64, 128  # columns of a warpgroup


def unsupported(*sizes: int, capability: tuple[int, int] | None) -> str | None:
    """Why matrices with sides of these sizes are not served, or None."""
    if capability is None or capability[0] != 9:
        return "grouped GEMM kernels are written for compute capability 9.0"
    for size in sizes:
        if size % ALIGNED or size < 2 * NARROW:
            return f"grouped GEMM kernels need sizes of {2 * NARROW} or more, multiples of {ALIGNED}, got {size}"
    return None


def rows(
    x: jax.Array, w: jax.Array, alpha: jax.Array, experts: jax.Array, *, layout: str = "nn",
    tiling: GemmTiling | None = None,
) -> jax.Array:  # fmt: skip
    """bfloat16 [rows, n]: x [rows, k] times w[e] [k, n] (or [n, k] under "nt") of each tile's expert, times alpha[e];
    `experts` int32 [rows / ROWS], the number of experts where a tile has none."""
    n = w.shape[1 if layout == "nt" else 2]
    tiling = tiling or _tiling(n)
    count, known = w.shape[0], experts < w.shape[0]
    steps = -(-x.shape[1] // tiling.k)
    own = jnp.minimum(experts, count - 1)
    turns, factor = jnp.where(known, steps, 0), jnp.where(known, alpha[own], 0)
    if is_interpreted():
        return _rows_through_xla(x, w, own, factor, layout)
    body = functools.partial(_rows_kernel, tiling=tiling, layout=layout)
    return _launch(body, jax.ShapeDtypeStruct((x.shape[0], n), jnp.bfloat16), x, w, own, turns, factor)


def contraction(
    x: jax.Array, dy: jax.Array, alpha: jax.Array, counts: jax.Array, *, tiling: GemmTiling | None = None
) -> jax.Array:
    """float32 [experts, m, n]: x[own]^T dy[own] of each expert's own rows, times alpha[e]; `counts` int32 [experts]."""
    tiling = with_float32_output(tiling or _tiling(dy.shape[1]))
    turns = -(-counts // ROWS) * (ROWS // tiling.k)
    first, factor = jnp.cumsum(turns) - turns, jnp.where(counts > 0, alpha, 0)
    if is_interpreted():
        return _contraction_through_xla(x, dy, turns * tiling.k // ROWS, factor)
    shape = jax.ShapeDtypeStruct((counts.shape[0], x.shape[1], dy.shape[1]), jnp.float32)
    return _launch(functools.partial(_contraction_kernel, tiling=tiling), shape, x, dy, first, turns, factor)


def _tiling(n: int) -> GemmTiling:
    return GemmTiling(n=WIDE if n >= 2 * WIDE else NARROW)


def _rows_kernel(*refs, tiling: GemmTiling, layout: str):
    x, w, experts, turns, factor, y = refs
    across = -(-y.shape[1] // tiling.block[1])
    down = y.shape[0] // ROWS

    def work(index):
        i, j = plgpu.planar_snake(index, (down, across), 0 if tiling.minor == "m" else 1, tiling.width)
        own, columns = pl.ds(i * ROWS, ROWS), pl.ds(j * tiling.block[1], tiling.block[1])
        matrix = w.at[experts[i]]
        part = matrix.at[columns, :] if layout == "nt" else matrix.at[:, columns]
        return Work(x.at[own, :], part, y.at[own, columns], turns[i], factor[i])

    walk(work, down * across, (x, w.at[0], y), tiling=tiling, layout=layout)


def _contraction_kernel(x, dy, first, turns, factor, dw, *, tiling: GemmTiling):
    sides = tuple(-(-size // step) for size, step in zip(dw.shape[1:], tiling.block, strict=True))
    each = sides[0] * sides[1]

    def work(index):
        e, tile = lax.div(index, each), lax.rem(index, each)
        i, j = plgpu.planar_snake(tile, sides, 0 if tiling.minor == "m" else 1, tiling.width)
        down, across = (pl.ds(at * size, size) for at, size in zip((i, j), tiling.block, strict=True))
        return Work(x.at[:, down], dy.at[:, across], dw.at[e].at[down, across], turns[e], factor[e], first[e])

    walk(work, dw.shape[0] * each, (x, dy, dw.at[0]), tiling=tiling, layout="tn")


def _rows_through_xla(x, w, experts, factor, layout: str) -> jax.Array:
    parts, sums = x.reshape(-1, ROWS, x.shape[1]), "tmk,tnk->tmn" if layout == "nt" else "tmk,tkn->tmn"
    y = jnp.einsum(sums, parts, w[experts], preferred_element_type=jnp.float32) * factor[:, None, None]
    return round_bfloat16(y).astype(jnp.bfloat16).reshape(x.shape[0], -1)


def _contraction_through_xla(x, dy, tiles, factor) -> jax.Array:
    parts = (a.reshape(-1, ROWS, a.shape[1]) for a in (x, dy))
    sums = jnp.einsum("tkm,tkn->tmn", *parts, preferred_element_type=jnp.float32)
    experts = jnp.searchsorted(jnp.cumsum(tiles), jnp.arange(sums.shape[0]), side="right")
    return jnp.zeros((tiles.shape[0], *sums.shape[1:])).at[experts].add(sums, mode="drop") * factor[:, None, None]


def _launch(body: Callable[..., None], shape: jax.ShapeDtypeStruct, *arrays: jax.Array) -> jax.Array:
    record_architecture()
    run = plgpu.kernel(
        body,
        out_type=shape,
        grid=(multiprocessors(),),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="gemm",  # by which halfbyte.program finds it in compiled programs
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return run(*arrays)
