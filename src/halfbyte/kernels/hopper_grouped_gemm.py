"""Grouped GEMM for Hopper (one GEMM per expert) in one launch: the persistent loop of `hopper_gemm.py` over the output
tiles of all experts.

Rows are sorted by expert, and every expert begins on a new tile of GROUP_TILE_ROWS rows, padded with zero rows. So a
tile has one expert, no store is masked, and no accumulator sums over two experts. The epilogue multiplies the float32
accumulator by the expert's alpha and rounds once.

    rows         y [rows, n] = x [rows, k] times each tile's w [k, n] ("nn", fprop) or [n, k] ("nt", dgrad)
    contraction  dw [experts, m, n] = x [rows, m] and dy [rows, n] contracted over each expert's own rows ("tn", wgrad)

A tile without an expert, and an expert without rows, are written as zeros without a WGMMA.
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
NARROW, WIDE = 64, 128  # accumulator columns per consumer warpgroup


def unsupported_grouped_gemm(*sizes: int, capability: tuple[int, int] | None) -> str | None:
    """Returns why the kernels do not support matrices with these dims, or None."""
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
    """Returns bf16 [rows, n]: x [rows, k] times w[e] [k, n] ([n, k] under "nt") of each tile's expert, times alpha[e].

    `experts` int32 [rows / GROUP_TILE_ROWS] is the expert of each tile, or the number of experts if it has none.
    """
    n = w.shape[1 if layout == "nt" else 2]
    tiling = tiling or _tiling(n)
    num_experts, has_expert = w.shape[0], experts < w.shape[0]
    k_steps = -(-x.shape[1] // tiling.block_k)
    expert = jnp.minimum(experts, num_experts - 1)
    num_k_steps, tile_alpha = jnp.where(has_expert, k_steps, 0), jnp.where(has_expert, alpha[expert], 0)
    if is_interpreting():
        return _xla_grouped_gemm(x, w, expert, tile_alpha, layout)
    body = functools.partial(_rows_kernel, tiling=tiling, layout=layout)
    return _launch(body, jax.ShapeDtypeStruct((x.shape[0], n), jnp.bfloat16), x, w, expert, num_k_steps, tile_alpha)


def grouped_wgrad_gemm(
    x: jax.Array, dy: jax.Array, alpha: jax.Array, counts: jax.Array, *, tiling: GemmTiling | None = None
) -> jax.Array:
    """Returns float32 [experts, m, n]: x[own]^T dy[own] over each expert's own rows, times alpha[e].

    `counts` int32 [experts] are the numbers of rows.
    """
    tiling = for_float32_output(tiling or _tiling(dy.shape[1]))
    num_k_steps = -(-counts // GROUP_TILE_ROWS) * (GROUP_TILE_ROWS // tiling.block_k)
    first_k_step, expert_alpha = jnp.cumsum(num_k_steps) - num_k_steps, jnp.where(counts > 0, alpha, 0)
    if is_interpreting():
        return _xla_grouped_wgrad_gemm(x, dy, num_k_steps * tiling.block_k // GROUP_TILE_ROWS, expert_alpha)
    shape = jax.ShapeDtypeStruct((counts.shape[0], x.shape[1], dy.shape[1]), jnp.float32)
    return _launch(
        functools.partial(_contraction_kernel, tiling=tiling), shape, x, dy, first_k_step, num_k_steps, expert_alpha
    )


def _tiling(n: int) -> GemmTiling:
    return GemmTiling(warpgroup_n=WIDE if n >= 2 * WIDE else NARROW)


def _rows_kernel(*refs, tiling: GemmTiling, layout: str):
    x, w, experts, num_k_steps, alpha, y = refs
    tiles_across = -(-y.shape[1] // tiling.cta_tile[1])
    tiles_down = y.shape[0] // GROUP_TILE_ROWS

    def tile_of(index):
        i, j = plgpu.planar_snake(
            index, (tiles_down, tiles_across), 0 if tiling.grid_minor_dim == "m" else 1, tiling.grid_tile_width
        )
        rows, columns = pl.ds(i * GROUP_TILE_ROWS, GROUP_TILE_ROWS), pl.ds(j * tiling.cta_tile[1], tiling.cta_tile[1])
        expert_w = w.at[experts[i]]
        w_tile = expert_w.at[columns, :] if layout == "nt" else expert_w.at[:, columns]
        return OutputTile(x.at[rows, :], w_tile, y.at[rows, columns], num_k_steps[i], alpha[i])

    persistent_gemm(tile_of, tiles_down * tiles_across, (x, w.at[0], y), tiling=tiling, layout=layout)


def _contraction_kernel(x, dy, first_k_step, num_k_steps, alpha, dw, *, tiling: GemmTiling):
    tile_counts = tuple(-(-size // step) for size, step in zip(dw.shape[1:], tiling.cta_tile, strict=True))
    tiles_per_expert = tile_counts[0] * tile_counts[1]

    def tile_of(index):
        e, tile = lax.div(index, tiles_per_expert), lax.rem(index, tiles_per_expert)
        i, j = plgpu.planar_snake(tile, tile_counts, 0 if tiling.grid_minor_dim == "m" else 1, tiling.grid_tile_width)
        rows, columns = (pl.ds(position * size, size) for position, size in zip((i, j), tiling.cta_tile, strict=True))
        return OutputTile(
            x.at[:, rows], dy.at[:, columns], dw.at[e].at[rows, columns], num_k_steps[e], alpha[e], first_k_step[e]
        )

    persistent_gemm(tile_of, dw.shape[0] * tiles_per_expert, (x, dy, dw.at[0]), tiling=tiling, layout="tn")


def _xla_grouped_gemm(x, w, experts, alpha, layout: str) -> jax.Array:
    tiles, equation = x.reshape(-1, GROUP_TILE_ROWS, x.shape[1]), "tmk,tnk->tmn" if layout == "nt" else "tmk,tkn->tmn"
    y = jnp.einsum(equation, tiles, w[experts], preferred_element_type=jnp.float32) * alpha[:, None, None]
    return round_bfloat16(y).astype(jnp.bfloat16).reshape(x.shape[0], -1)


def _xla_grouped_wgrad_gemm(x, dy, tiles, alpha) -> jax.Array:
    row_tiles = (a.reshape(-1, GROUP_TILE_ROWS, a.shape[1]) for a in (x, dy))
    products = jnp.einsum("tkm,tkn->tmn", *row_tiles, preferred_element_type=jnp.float32)
    experts = jnp.searchsorted(jnp.cumsum(tiles), jnp.arange(products.shape[0]), side="right")
    return (
        jnp.zeros((tiles.shape[0], *products.shape[1:])).at[experts].add(products, mode="drop") * alpha[:, None, None]
    )


def _launch(body: Callable[..., None], shape: jax.ShapeDtypeStruct, *arrays: jax.Array) -> jax.Array:
    record_architecture()
    run = plgpu.kernel(
        body,
        out_type=shape,
        grid=(num_sms(),),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="gemm",  # halfbyte.hlo identifies the kernel in compiled programs by this name
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return run(*arrays)
