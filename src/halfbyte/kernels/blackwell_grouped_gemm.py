"""Grouped GEMM for Blackwell (a GEMM per expert, one launch): `tcgen05.mma` over E2M1 codes with E4M3 block scales, and
the expert's alpha in the epilogue.

    rows         y [rows, n] = x [rows, k] times each tile's w [n, k]; fprop and dgrad, with W in one order or the other
    contraction  dw [experts, m, n] = x [m, rows] and dy [n, rows], contracted over each expert's own rows (wgrad)

The tensor cores read codes K-major on both sides, and scales from tensor memory (TMEM) in the 128x4 tiles of
`formats.swizzle_scales`. So every GEMM has one shape, a [m, k] times b [n, k]; the two kinds differ only in which tiles
of the operands an output tile reads. Rows are sorted by expert, and every expert begins on a new tile of
OUTPUT_TILE_SIZE rows, padded with zero codes, as in `hopper_grouped_gemm.py`.

How it works: a persistent, warp-specialized kernel of two warpgroups. In the first, one warp is the TMA producer of
codes and scales, another copies scales to TMEM and issues the MMAs; mbarriers order both over the SMEM stages. The
second warpgroup is the epilogue: it loads the float32 accumulator from TMEM, multiplies it by alpha, rounds once and
stores through SMEM. Accumulators are double-buffered in TMEM, so the epilogue overlaps the next tile's MMAs. A tile
without an expert, and an expert without rows, are written as zeros without an MMA.

How it differs: accumulators are in TMEM, not in the registers of the consumers (`hopper_gemm.py`), and one lane issues
an MMA for the whole CTA. The alternative, a GEMM of XLA's per tile in a loop, reads an expert's matrix once per tile
(docs/LOG.md, "A loop over tiles").

Compiled for 10.0 and 10.3, never executed: `train` compares it with `emulated` before its first step. Two optimizations
are open: both warps synchronize between two tiles, so that the first load of the next tile is exposed; and scales have
one buffer in TMEM: a copy there is assumed to follow the MMA before it, because one lane issues both.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from halfbyte.devices.compile_target import record_architecture
from halfbyte.devices.jax_versions import transpose_ref
from halfbyte.formats import E2M1, E4M3, unpack_nibbles, unswizzle_scales
from halfbyte.formats.elements import decode
from halfbyte.formats.exact_float32 import round_bfloat16
from halfbyte.io.lazy_import import lazy_module
from halfbyte.kernels.hopper_gemm import Ref
from halfbyte.kernels.mosaic_launch import is_interpreting, num_sms

plgpu = lazy_module("jax.experimental.pallas.mosaic_gpu")
OUTPUT_TILE_SIZE = 128  # rows and columns of an output tile; every dim is a multiple
NVFP4_SCALE_BLOCK = 16  # codes per scale
K_TILE = 64  # codes of a row whose scales are in one 128x4 tile
PREFETCHED_CODES_PER_ROW = 1024  # codes of a row in all SMEM stages together
GRID_TILE_WIDTH = 8  # of the snake, in tiles


class BlockScaledCodes(NamedTuple):
    """A K-major operand: `codes` uint8 [..., rows, k / 2], two per byte, and `scales`, flat, in 128x4 tiles."""

    codes: jax.Array
    scales: jax.Array


def unsupported_block_scaled_gemm(*sizes: int, capability: tuple[int, int] | None) -> str | None:
    """Returns why the kernels do not support matrices with these dims, or None."""
    if capability is None or capability[0] != 10:
        return "block-scaled GEMM kernels of experts are written for compute capability 10"
    for size in sizes:
        if size % OUTPUT_TILE_SIZE or not size:
            return (
                f"block-scaled GEMM kernels of experts need sizes that are multiples of {OUTPUT_TILE_SIZE}, got {size}"
            )
    return None


def block_scaled_grouped_gemm(
    x: BlockScaledCodes, w: BlockScaledCodes, alpha: jax.Array, experts: jax.Array, *, dtype: DTypeLike = jnp.bfloat16
) -> jax.Array:
    """Returns [rows, n]: x [rows, k] times w[e] [n, k] of each tile's expert, times alpha[e].

    `experts` int32 [rows / OUTPUT_TILE_SIZE] is the expert of each tile, or the number of experts if it has none.
    """
    num_experts, n, _ = w.codes.shape
    has_expert, expert = experts < num_experts, jnp.minimum(experts, num_experts - 1)
    k_step = _k_step(2 * x.codes.shape[1])
    num_k_steps = jnp.where(has_expert, 2 * x.codes.shape[1] // k_step, 0)
    tiles_across, tiles_down = n // OUTPUT_TILE_SIZE, experts.shape[0]

    def tile_of(index, expert, num_k_steps, alpha):
        i, j = plgpu.planar_snake(index, (tiles_down, tiles_across), 1, GRID_TILE_WIDTH)
        return GroupedOutputTile(i, expert[i] * tiles_across + j, i, j, num_k_steps[i], 0, alpha[i])

    shape = jax.ShapeDtypeStruct((x.codes.shape[0], n), dtype)
    return _launch(tile_of, tiles_down * tiles_across, k_step, shape, x, w, expert, num_k_steps, alpha[expert])


def block_scaled_grouped_wgrad_gemm(
    x: BlockScaledCodes, dy: BlockScaledCodes, alpha: jax.Array, counts: jax.Array
) -> jax.Array:
    """Returns float32 [experts, m, n]: x [m, rows] times dy [n, rows] over each expert's own rows, times alpha[e].

    `counts` int32 [experts] are the numbers of rows.
    """
    (m, _), (n, _) = x.codes.shape, dy.codes.shape
    num_k_steps = -(-counts // OUTPUT_TILE_SIZE)
    first_k_step, tile_counts = jnp.cumsum(num_k_steps) - num_k_steps, (m // OUTPUT_TILE_SIZE, n // OUTPUT_TILE_SIZE)
    tiles_per_expert = tile_counts[0] * tile_counts[1]

    def tile_of(index, first_k_step, num_k_steps, alpha):
        e = lax.div(index, jnp.int32(tiles_per_expert))
        i, j = plgpu.planar_snake(lax.rem(index, jnp.int32(tiles_per_expert)), tile_counts, 1, GRID_TILE_WIDTH)
        return GroupedOutputTile(i, j, e * tile_counts[0] + i, j, num_k_steps[e], first_k_step[e], alpha[e])

    shape = jax.ShapeDtypeStruct((counts.shape[0], m, n), jnp.float32)
    return _launch(
        tile_of, counts.shape[0] * tiles_per_expert, OUTPUT_TILE_SIZE, shape, x, dy, first_k_step, num_k_steps, alpha
    )


def _k_step(k: int) -> int:
    """Returns the codes of a row that one k step multiplies."""
    return 2 * OUTPUT_TILE_SIZE if k % (2 * OUTPUT_TILE_SIZE) == 0 else OUTPUT_TILE_SIZE


class GroupedOutputTile(NamedTuple):
    """One output tile: tile indices into the rows of a and of b, its position in tiles, `num_k_steps`, `first_k_step`
    and alpha. With `num_k_steps == 0` it is written as zeros."""

    a_tile: jax.Array
    b_tile: jax.Array
    tile_row: jax.Array
    tile_column: jax.Array
    num_k_steps: jax.Array
    first_k_step: jax.Array | int
    alpha: jax.Array


def _launch(
    work_of: Callable[..., GroupedOutputTile], count: int, k_step: int, shape: jax.ShapeDtypeStruct,
    a: BlockScaledCodes, b: BlockScaledCodes, *tables: jax.Array,
) -> jax.Array:  # fmt: skip
    """Returns an array of `shape`, computed in `count` output tiles; `work_of(index, *tables)` returns each."""
    if is_interpreting():
        return _through_xla(functools.partial(_reference_tile, work_of, k_step, a, b, tables), count, shape)
    stages, width = PREFETCHED_CODES_PER_ROW // k_step, 64 if shape.dtype == jnp.bfloat16 else 32
    code_transforms, out_transforms = (
        _transforms(k_step, 4),
        _transforms(width, 8 * jnp.dtype(shape.dtype).itemsize),
    )
    scales = plgpu.SMEM((stages, 1, k_step // K_TILE, 32, 16), jnp.float8_e4m3fn)
    scales_tmem = plgpu.TMEM(
        (OUTPUT_TILE_SIZE, k_step // NVFP4_SCALE_BLOCK), jnp.float8_e4m3fn, layout=plgpu.TMEMLayout.SCALES_LAYOUT
    )
    codes = plgpu.SMEM((stages, OUTPUT_TILE_SIZE, k_step), jnp.float4_e2m1fn, transforms=code_transforms)
    barrier = functools.partial(plgpu.Barrier, orders_tensor_core=True)
    record_architecture()
    run = plgpu.kernel(
        functools.partial(_kernel, work_of=work_of, count=count, step=k_step),
        out_type=shape,
        grid=(num_sms(),),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        # Not LoweringSemantics.Warpgroup as on Hopper: in JAX 0.10.2 a single warp cannot copy scales under it.
        kernel_name="gemm",  # halfbyte.hlo identifies the kernel in compiled programs by this name
        scratch_types={
            "operand_stages": (codes, codes, scales, scales),
            "scales": (scales_tmem, scales_tmem),
            "accumulators": plgpu.TMEM((OUTPUT_TILE_SIZE, 2 * OUTPUT_TILE_SIZE), jnp.float32),
            "epilogue_smem": plgpu.SMEM((2, OUTPUT_TILE_SIZE, width), shape.dtype, transforms=out_transforms),
            "tma_barriers": plgpu.Barrier(num_arrivals=4, num_barriers=stages),
            "mma_barriers": barrier(num_barriers=stages),
            "accumulator_ready": barrier(num_barriers=2),
            "accumulator_free": barrier(num_barriers=2),
        },
    )
    return run(
        *(_elements(operand.codes) for operand in (a, b)), *(_swizzled_scales(operand) for operand in (a, b)), *tables
    )


def _through_xla(
    tile_of: Callable[[jax.Array], tuple[jax.Array, ...]], count: int, shape: jax.ShapeDtypeStruct
) -> jax.Array:
    """Computes the output tiles through XLA and assembles them."""
    tiles_down, tiles_across = math.prod(shape.shape[:-1]) // OUTPUT_TILE_SIZE, shape.shape[-1] // OUTPUT_TILE_SIZE
    i, j, tiles = lax.map(tile_of, jnp.arange(count, dtype=jnp.int32))
    out = jnp.full((tiles_down, tiles_across, OUTPUT_TILE_SIZE, OUTPUT_TILE_SIZE), jnp.nan).at[i, j].set(tiles)
    out = round_bfloat16(out) if shape.dtype == jnp.bfloat16 else out
    return out.transpose(0, 2, 1, 3).reshape(shape.shape).astype(shape.dtype)


def _reference_tile(
    work_of: Callable[..., GroupedOutputTile],
    step: int,
    a: BlockScaledCodes,
    b: BlockScaledCodes,
    tables: Sequence[jax.Array],
    index: jax.Array,
) -> tuple[jax.Array, ...]:
    """Returns (tile row, tile column, values) of one output tile from decoded operands."""
    tile, k = work_of(index, *tables), 2 * a.codes.shape[-1]
    k_step = jnp.arange(k, dtype=jnp.int32) // step - tile.first_k_step
    in_range = (k_step >= 0) & (k_step < tile.num_k_steps)

    def dequantize(operand: BlockScaledCodes, row_tile: jax.Array) -> jax.Array:
        codes = lax.dynamic_slice_in_dim(
            operand.codes.reshape(-1, k // 2), row_tile * OUTPUT_TILE_SIZE, OUTPUT_TILE_SIZE
        )
        scales = lax.dynamic_slice_in_dim(
            operand.scales,
            row_tile * OUTPUT_TILE_SIZE * (k // NVFP4_SCALE_BLOCK),
            OUTPUT_TILE_SIZE * (k // NVFP4_SCALE_BLOCK),
        )
        values = decode(E4M3, unswizzle_scales(scales, OUTPUT_TILE_SIZE, k // NVFP4_SCALE_BLOCK))
        return jnp.where(
            in_range, decode(E2M1, unpack_nibbles(codes)) * jnp.repeat(values, NVFP4_SCALE_BLOCK, axis=1), 0
        )

    acc = jnp.dot(dequantize(a, tile.a_tile), dequantize(b, tile.b_tile).T, precision=lax.Precision.HIGHEST)
    return tile.tile_row, tile.tile_column, jnp.where(tile.num_k_steps > 0, acc * tile.alpha, 0)


def _elements(codes: jax.Array) -> jax.Array:
    """Bitcasts codes: uint8 [..., k / 2] -> float4 [..., k]."""
    return lax.bitcast_convert_type(codes, jnp.float4_e2m1fn).reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def _swizzled_scales(operand: BlockScaledCodes) -> jax.Array:
    """Returns the scales as E4M3 [row tiles, k tiles, 32, 16]."""
    k_tiles = 2 * operand.codes.shape[-1] // K_TILE
    return lax.bitcast_convert_type(operand.scales, jnp.float8_e4m3fn).reshape(-1, k_tiles, 32, 16)


def _transforms(columns: int, bits: int) -> tuple[object, ...]:
    swizzle = plgpu.find_swizzle(columns * bits)
    return plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle)


class SharedMemory(NamedTuple):
    """Scratch of a CTA: SMEM stages of a, b and their scales; in TMEM the scales of the current MMA and accumulators of
    two tiles; two epilogue buffers; the mbarriers between TMA, MMA and epilogue.
    """

    operand_stages: tuple[Ref, ...]
    scales: tuple[Ref, Ref]
    accumulators: Ref
    epilogue_smem: Ref
    tma_barriers: Ref
    mma_barriers: Ref
    accumulator_ready: Ref
    accumulator_free: Ref


def _kernel(*refs, work_of, count, step, **scratch):
    a, b, a_scales, b_scales, *tables, out = refs
    operand_stages, scales, acc, epilogue_smem, tma_barriers, mma_barriers, accumulator_ready, accumulator_free = (
        SharedMemory(**scratch)
    )
    stages = tma_barriers.shape[0]
    tiles_across = b.shape[-2] // OUTPUT_TILE_SIZE  # row tiles of one matrix of b

    def load_operands(tile, steps_done):
        a_rows, b_tile = pl.ds(tile.a_tile * OUTPUT_TILE_SIZE, OUTPUT_TILE_SIZE), tile.b_tile
        b_matrix = b.at[lax.div(b_tile, tiles_across)] if len(b.shape) == 3 else b
        b_rows = pl.ds(
            (lax.rem(b_tile, tiles_across) if len(b.shape) == 3 else b_tile) * OUTPUT_TILE_SIZE, OUTPUT_TILE_SIZE
        )

        def load_stage(k_step, _carry):
            pipeline_step = steps_done + k_step
            stage = lax.rem(pipeline_step, stages)

            @pl.when(pipeline_step >= stages)
            def _():
                plgpu.barrier_wait(mma_barriers.at[stage])  # the MMA that read this stage last

            k_index = tile.first_k_step + k_step
            codes, scale_tiles = pl.ds(k_index * step, step), pl.ds(k_index * (step // K_TILE), step // K_TILE)
            sources = (
                a.at[a_rows, codes],
                b_matrix.at[b_rows, codes],
                a_scales.at[pl.ds(tile.a_tile, 1), scale_tiles],
                b_scales.at[pl.ds(b_tile, 1), scale_tiles],
            )
            for source, buffer in zip(sources, operand_stages, strict=True):
                plgpu.copy_gmem_to_smem(source, buffer.at[stage], tma_barriers.at[stage])

        lax.fori_loop(0, tile.num_k_steps, load_stage, None)

    def multiply(tile, steps_done, half):
        accumulator = acc.at[:, pl.ds(half * OUTPUT_TILE_SIZE, OUTPUT_TILE_SIZE)]

        def issue_mma(k_step, _carry):
            stage = lax.rem(steps_done + k_step, stages)
            plgpu.barrier_wait(tma_barriers.at[stage])
            lhs, rhs, *stage_scales = (buffer.at[stage] for buffer in operand_stages)
            for source, target in zip(stage_scales, scales, strict=True):
                plgpu.async_copy_scales_to_tmem(source, target)
            plgpu.tcgen05_mma(
                accumulator,
                lhs,
                transpose_ref(rhs, (1, 0)),
                mma_barriers.at[stage],
                a_scale=scales[0],
                b_scale=scales[1],
                accumulate=k_step > 0,
            )

        lax.fori_loop(0, tile.num_k_steps, issue_mma, None)
        plgpu.tcgen05_commit_arrive(accumulator_ready.at[half])

    def store_tile(tile, chunk_of):
        matrix = out if len(out.shape) == 2 else out.at[lax.div(tile.tile_row, out.shape[1] // OUTPUT_TILE_SIZE)]
        tile_row = tile.tile_row if len(out.shape) == 2 else lax.rem(tile.tile_row, out.shape[1] // OUTPUT_TILE_SIZE)
        width = epilogue_smem.shape[2]
        for i in range(OUTPUT_TILE_SIZE // width):
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            epilogue_smem[i % 2] = chunk_of(i).astype(out.dtype)
            plgpu.commit_smem()
            columns = pl.ds(tile.tile_column * OUTPUT_TILE_SIZE + i * width, width)
            plgpu.copy_smem_to_gmem(
                epilogue_smem.at[i % 2], matrix.at[pl.ds(tile_row * OUTPUT_TILE_SIZE, OUTPUT_TILE_SIZE), columns]
            )

    def run_epilogue(tile, half):
        width = epilogue_smem.shape[2]

        @pl.when(tile.num_k_steps > 0)
        def _():
            plgpu.barrier_wait(accumulator_ready.at[half])
            accumulator = acc.at[:, pl.ds(half * OUTPUT_TILE_SIZE, OUTPUT_TILE_SIZE)]
            store_tile(tile, lambda i: plgpu.async_load_tmem(accumulator.at[:, pl.ds(i * width, width)]) * tile.alpha)
            plgpu.wait_load_tmem()
            plgpu.barrier_arrive(accumulator_free.at[half])

        @pl.when(tile.num_k_steps == 0)
        def _():
            zeros = jnp.zeros((OUTPUT_TILE_SIZE, width), jnp.float32)
            store_tile(tile, lambda i: plgpu.layout_cast(zeros, plgpu.Layout.TCGEN05))

    @plgpu.nd_loop((count,), collective_axes="block", init_carry=(jnp.int32(0), jnp.int32(0)))
    def _(loop, carry):
        steps_done, tiles_done = carry  # of this CTA: k steps, and tiles that have k steps
        tile = work_of(loop.index[0], *tables)
        half = lax.rem(tiles_done, jnp.int32(2))

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            @plgpu.warp_map
            def _(warp):
                @pl.when(warp == 0)
                def _():
                    load_operands(tile, steps_done)

                @pl.when((warp == 1) & (tile.num_k_steps > 0))
                def _():
                    @pl.when(tiles_done > 1)
                    def _():
                        plgpu.barrier_wait(accumulator_free.at[half])  # the epilogue that loads it from TMEM

                    multiply(tile, steps_done, half)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _():
            run_epilogue(tile, half)

        return steps_done + tile.num_k_steps, tiles_done + (tile.num_k_steps > 0).astype(jnp.int32)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
