"""Grouped GEMMs for Hopper (one GEMM per expert): the persistent loop of `hopper_gemm.py` over tiles of one expert
each.

Rows are sorted by expert, and every expert begins on a new tile of GROUP_TILE_ROWS rows, padded with zero rows: a tile
has one expert, no store is masked, and no sum crosses two. float32 sums are multiplied by the expert's alpha and
rounded once.

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

from halfbyte.devices.compile_target import record_architecture
from halfbyte.formats.exact_float32 import round_bfloat16
from halfbyte.io.lazy_import import lazy_module
from halfbyte.kernels.hopper_gemm import ALIGNMENT, GemmTiling, OutputTile, for_float32_output, persistent_gemm
from halfbyte.kernels.mosaic_launch import is_interpreting, num_sms

plgpu = lazy_module("jax.experimental.pallas.mosaic_gpu")
GROUP_TILE_ROWS = 128
NARROW, WIDE = 64, 128  # columns of a warpgroup


def unsupported_grouped_gemm(*sizes: int, capability: tuple[int, int] | None) -> str | None:
    """Why matrices with sides of these sizes are not served, or None."""
    if capability is None or capability[0] != 9:
        return "grouped GEMM kernels are written for compute capability 9.0"
    for size in sizes:
        if size % ALIGNMENT or size < 2 * NARROW:
            return f"grouped GEMM kernels need sizes of {2 * NARROW} or more, multiples of {ALIGNMENT}, got {size}"
    return None


def grouped_gemm(
    x: jax.Array, w: jax.Array, alpha: jax.Array, experts: jax.Array, *, layout: str = "nn",
    tiling: GemmTiling | None = None,
) -> jax.Array:  # fmt: skip
    """bfloat16 [rows, n]: x [rows, k] times w[e] [k, n] (or [n, k] under "nt") of each tile's expert, times alpha[e];
    `experts` int32 [rows / GROUP_TILE_ROWS], the number of experts where a tile has none."""
    n = w.shape[1 if layout == "nt" else 2]
    tiling = tiling or _tiling(n)
    count, known = w.shape[0], experts < w.shape[0]
    steps = -(-x.shape[1] // tiling.block_k)
    own = jnp.minimum(experts, count - 1)
    num_k_steps, factor = jnp.where(known, steps, 0), jnp.where(known, alpha[own], 0)
    if is_interpreting():
        return _xla_grouped_gemm(x, w, own, factor, layout)
    body = functools.partial(_rows_kernel, tiling=tiling, layout=layout)
    return _launch(body, jax.ShapeDtypeStruct((x.shape[0], n), jnp.bfloat16), x, w, own, num_k_steps, factor)


def grouped_wgrad_gemm(
    x: jax.Array, dy: jax.Array, alpha: jax.Array, counts: jax.Array, *, tiling: GemmTiling | None = None
) -> jax.Array:
    """float32 [experts, m, n]: x[own]^T dy[own] of each expert's own rows, times alpha[e]; `counts` int32 [experts]."""
    tiling = for_float32_output(tiling or _tiling(dy.shape[1]))
    num_k_steps = -(-counts // GROUP_TILE_ROWS) * (GROUP_TILE_ROWS // tiling.block_k)
    first, factor = jnp.cumsum(num_k_steps) - num_k_steps, jnp.where(counts > 0, alpha, 0)
    if is_interpreting():
        return _xla_grouped_wgrad_gemm(x, dy, num_k_steps * tiling.block_k // GROUP_TILE_ROWS, factor)
    shape = jax.ShapeDtypeStruct((counts.shape[0], x.shape[1], dy.shape[1]), jnp.float32)
    return _launch(functools.partial(_contraction_kernel, tiling=tiling), shape, x, dy, first, num_k_steps, factor)


def _tiling(n: int) -> GemmTiling:
    return GemmTiling(warpgroup_n=WIDE if n >= 2 * WIDE else NARROW)


def _rows_kernel(*refs, tiling: GemmTiling, layout: str):
    x, w, experts, num_k_steps, factor, y = refs
    across = -(-y.shape[1] // tiling.cta_tile[1])
    down = y.shape[0] // GROUP_TILE_ROWS

    def work(index):
        i, j = plgpu.planar_snake(
            index, (down, across), 0 if tiling.grid_minor_dim == "m" else 1, tiling.grid_tile_width
        )
        own, columns = pl.ds(i * GROUP_TILE_ROWS, GROUP_TILE_ROWS), pl.ds(j * tiling.cta_tile[1], tiling.cta_tile[1])
        matrix = w.at[experts[i]]
        part = matrix.at[columns, :] if layout == "nt" else matrix.at[:, columns]
        return OutputTile(x.at[own, :], part, y.at[own, columns], num_k_steps[i], factor[i])

    persistent_gemm(work, down * across, (x, w.at[0], y), tiling=tiling, layout=layout)


def _contraction_kernel(x, dy, first, num_k_steps, factor, dw, *, tiling: GemmTiling):
    sides = tuple(-(-size // step) for size, step in zip(dw.shape[1:], tiling.cta_tile, strict=True))
    each = sides[0] * sides[1]

    def work(index):
        e, tile = lax.div(index, each), lax.rem(index, each)
        i, j = plgpu.planar_snake(tile, sides, 0 if tiling.grid_minor_dim == "m" else 1, tiling.grid_tile_width)
        down, across = (pl.ds(at * size, size) for at, size in zip((i, j), tiling.cta_tile, strict=True))
        return OutputTile(
            x.at[:, down], dy.at[:, across], dw.at[e].at[down, across], num_k_steps[e], factor[e], first[e]
        )

    persistent_gemm(work, dw.shape[0] * each, (x, dy, dw.at[0]), tiling=tiling, layout="tn")


def _xla_grouped_gemm(x, w, experts, factor, layout: str) -> jax.Array:
    parts, sums = x.reshape(-1, GROUP_TILE_ROWS, x.shape[1]), "tmk,tnk->tmn" if layout == "nt" else "tmk,tkn->tmn"
    y = jnp.einsum(sums, parts, w[experts], preferred_element_type=jnp.float32) * factor[:, None, None]
    return round_bfloat16(y).astype(jnp.bfloat16).reshape(x.shape[0], -1)


def _xla_grouped_wgrad_gemm(x, dy, tiles, factor) -> jax.Array:
    parts = (a.reshape(-1, GROUP_TILE_ROWS, a.shape[1]) for a in (x, dy))
    sums = jnp.einsum("tkm,tkn->tmn", *parts, preferred_element_type=jnp.float32)
    experts = jnp.searchsorted(jnp.cumsum(tiles), jnp.arange(sums.shape[0]), side="right")
    return jnp.zeros((tiles.shape[0], *sums.shape[1:])).at[experts].add(sums, mode="drop") * factor[:, None, None]


def _launch(body: Callable[..., None], shape: jax.ShapeDtypeStruct, *arrays: jax.Array) -> jax.Array:
    record_architecture()
    run = plgpu.kernel(
        body,
        out_type=shape,
        grid=(num_sms(),),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="gemm",  # by which halfbyte.hlo finds it in compiled programs
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return run(*arrays)
