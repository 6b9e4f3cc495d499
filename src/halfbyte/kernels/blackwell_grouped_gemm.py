"""GEMMs of many experts for Blackwell: `tcgen05.mma` over E2M1 codes with E4M3 block scales, a factor in the epilogue.

The tensor cores read codes with the contraction last on both sides, and scales from tensor memory in the 128x4 tiles of
`formats.swizzle_scales`. So every GEMM is one of the same shape, a [m, k] times b [n, k], and differs only in which
tiles of the operands an output tile reads:

    rows         y [rows, n] of x [rows, k] and each tile's w [n, k]; fprop and dgrad, with W in one order or the other
    contraction  dw [experts, m, n] of x [m, rows] and dy [n, rows], over the columns of each expert's own rows

Rows are ordered as in `hopper_grouped_gemm.py`: every expert begins on a new tile of OUTPUT_TILE_SIZE rows, padded with
zero codes. One warp of a CTA loads codes and scales through TMA, another issues the MMAs. A warpgroup multiplies the
float32 accumulator by the expert's alpha, rounds once and stores, while the next tile accumulates in the other half of
tensor memory. A tile of rows without an expert, and an expert without rows, are written as zeros without an MMA.

Compiled for 10.0 and 10.3, never executed: `train` compares it with `emulated` before its first step. Two optimizations
are open: both warps synchronize between two tiles, so that the first copy of the next tile is waited for; and scales
have one buffer in tensor memory, so that a copy there is taken to follow the MMA before it, as one lane issues both.
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
OUTPUT_TILE_SIZE = 128  # of a tile of the result, and the unit of every size
NVFP4_SCALE_BLOCK = 16  # codes of a scale
K_TILE = 64  # codes of a row whose scales lie in one tile of 128x4
PREFETCHED_CODES_PER_ROW = 1024  # codes of a row that are fetched ahead
GRID_TILE_WIDTH = 8  # of the snake, in tiles


class BlockScaledCodes(NamedTuple):
    """An operand, contraction last: uint8 `codes` [..., rows, k / 2], two a byte, and `scales`, flat, in tiles."""

    codes: jax.Array
    scales: jax.Array


def unsupported_block_scaled_gemm(*sizes: int, capability: tuple[int, int] | None) -> str | None:
    """Why matrices with sides of these sizes are not served, or None."""
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
    """[rows, n] of x [rows, k] and w [experts, n, k] of each tile's expert, times alpha[e]; `experts` int32
    [rows / OUTPUT_TILE_SIZE], the number of experts where a tile has none."""
    count, n, _ = w.codes.shape
    known, own = experts < count, jnp.minimum(experts, count - 1)
    step = _k_step(2 * x.codes.shape[1])
    num_k_steps = jnp.where(known, 2 * x.codes.shape[1] // step, 0)
    across, down = n // OUTPUT_TILE_SIZE, experts.shape[0]

    def work(index, own, num_k_steps, factor):
        i, j = plgpu.planar_snake(index, (down, across), 1, GRID_TILE_WIDTH)
        return GroupedOutputTile(i, own[i] * across + j, i, j, num_k_steps[i], 0, factor[i])

    shape = jax.ShapeDtypeStruct((x.codes.shape[0], n), dtype)
    return _launch(work, down * across, step, shape, x, w, own, num_k_steps, alpha[own])


def block_scaled_grouped_wgrad_gemm(
    x: BlockScaledCodes, dy: BlockScaledCodes, alpha: jax.Array, counts: jax.Array
) -> jax.Array:
    """float32 [experts, m, n] of x [m, rows] and dy [n, rows], over each expert's own rows, times alpha[e]; `counts`
    int32 [experts], rows of each."""
    (m, _), (n, _) = x.codes.shape, dy.codes.shape
    num_k_steps = -(-counts // OUTPUT_TILE_SIZE)
    first, sides = jnp.cumsum(num_k_steps) - num_k_steps, (m // OUTPUT_TILE_SIZE, n // OUTPUT_TILE_SIZE)
    each = sides[0] * sides[1]

    def work(index, first, num_k_steps, factor):
        e = lax.div(index, jnp.int32(each))
        i, j = plgpu.planar_snake(lax.rem(index, jnp.int32(each)), sides, 1, GRID_TILE_WIDTH)
        return GroupedOutputTile(i, j, e * sides[0] + i, j, num_k_steps[e], first[e], factor[e])

    shape = jax.ShapeDtypeStruct((counts.shape[0], m, n), jnp.float32)
    return _launch(work, counts.shape[0] * each, OUTPUT_TILE_SIZE, shape, x, dy, first, num_k_steps, alpha)


def _k_step(k: int) -> int:
    """Codes of a row that one step multiplies."""
    return 2 * OUTPUT_TILE_SIZE if k % (2 * OUTPUT_TILE_SIZE) == 0 else OUTPUT_TILE_SIZE


class GroupedOutputTile(NamedTuple):
    """One output tile: index of its tile of a's rows and of b's, its row and column of tiles in the output,
    `num_k_steps` from `first_k_step` on, and alpha. With `num_k_steps == 0` it is written as zeros."""

    a_tile: jax.Array
    b_tile: jax.Array
    tile_row: jax.Array
    tile_column: jax.Array
    num_k_steps: jax.Array
    first_k_step: jax.Array | int
    alpha: jax.Array


def _launch(
    work_of: Callable[..., GroupedOutputTile], count: int, step: int, shape: jax.ShapeDtypeStruct,
    a: BlockScaledCodes, b: BlockScaledCodes, *tables: jax.Array,
) -> jax.Array:  # fmt: skip
    """Returns an array like `shape` of `count` tiles; `work_of(index, *tables)` returns the tile."""
    if is_interpreting():
        return _through_xla(functools.partial(_reference_tile, work_of, step, a, b, tables), count, shape)
    stages, wide = PREFETCHED_CODES_PER_ROW // step, 64 if shape.dtype == jnp.bfloat16 else 32
    order, out_order = _transforms(step, 4), _transforms(wide, 8 * jnp.dtype(shape.dtype).itemsize)
    scales = plgpu.SMEM((stages, 1, step // K_TILE, 32, 16), jnp.float8_e4m3fn)
    in_tensor_memory = plgpu.TMEM(
        (OUTPUT_TILE_SIZE, step // NVFP4_SCALE_BLOCK), jnp.float8_e4m3fn, layout=plgpu.TMEMLayout.SCALES_LAYOUT
    )
    codes = plgpu.SMEM((stages, OUTPUT_TILE_SIZE, step), jnp.float4_e2m1fn, transforms=order)
    barrier = functools.partial(plgpu.Barrier, orders_tensor_core=True)
    record_architecture()
    run = plgpu.kernel(
        functools.partial(_kernel, work_of=work_of, count=count, step=step),
        out_type=shape,
        grid=(num_sms(),),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        # No Warpgroup semantics, as Hopper's have: in JAX 0.10.2 a single warp cannot copy scales under them.
        kernel_name="gemm",  # by which halfbyte.hlo finds it in compiled programs
        scratch_types={
            "operand_stages": (codes, codes, scales, scales),
            "scales": (in_tensor_memory, in_tensor_memory),
            "accumulators": plgpu.TMEM((OUTPUT_TILE_SIZE, 2 * OUTPUT_TILE_SIZE), jnp.float32),
            "epilogue_smem": plgpu.SMEM((2, OUTPUT_TILE_SIZE, wide), shape.dtype, transforms=out_order),
            "tma_barriers": plgpu.Barrier(num_arrivals=4, num_barriers=stages),
            "mma_barriers": barrier(num_barriers=stages),
            "accumulator_ready": barrier(num_barriers=2),
            "accumulator_free": barrier(num_barriers=2),
        },
    )
    return run(*(_elements(each.codes) for each in (a, b)), *(_swizzled_scales(each) for each in (a, b)), *tables)


def _through_xla(
    tile_of: Callable[[jax.Array], tuple[jax.Array, ...]], count: int, shape: jax.ShapeDtypeStruct
) -> jax.Array:
    """Computes the same tiles through XLA and assembles them."""
    down, across = math.prod(shape.shape[:-1]) // OUTPUT_TILE_SIZE, shape.shape[-1] // OUTPUT_TILE_SIZE
    i, j, tiles = lax.map(tile_of, jnp.arange(count, dtype=jnp.int32))
    out = jnp.full((down, across, OUTPUT_TILE_SIZE, OUTPUT_TILE_SIZE), jnp.nan).at[i, j].set(tiles)
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
    work, k = work_of(index, *tables), 2 * a.codes.shape[-1]
    k_step = jnp.arange(k, dtype=jnp.int32) // step - work.first_k_step
    mine = (k_step >= 0) & (k_step < work.num_k_steps)

    def part(operand: BlockScaledCodes, tile: jax.Array) -> jax.Array:
        codes = lax.dynamic_slice_in_dim(operand.codes.reshape(-1, k // 2), tile * OUTPUT_TILE_SIZE, OUTPUT_TILE_SIZE)
        scales = lax.dynamic_slice_in_dim(
            operand.scales,
            tile * OUTPUT_TILE_SIZE * (k // NVFP4_SCALE_BLOCK),
            OUTPUT_TILE_SIZE * (k // NVFP4_SCALE_BLOCK),
        )
        values = decode(E4M3, unswizzle_scales(scales, OUTPUT_TILE_SIZE, k // NVFP4_SCALE_BLOCK))
        return jnp.where(mine, decode(E2M1, unpack_nibbles(codes)) * jnp.repeat(values, NVFP4_SCALE_BLOCK, axis=1), 0)

    acc = jnp.dot(part(a, work.a_tile), part(b, work.b_tile).T, precision=lax.Precision.HIGHEST)
    return work.tile_row, work.tile_column, jnp.where(work.num_k_steps > 0, acc * work.alpha, 0)


def _elements(codes: jax.Array) -> jax.Array:
    """uint8 [..., k / 2] -> float4 [..., k]."""
    return lax.bitcast_convert_type(codes, jnp.float4_e2m1fn).reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def _swizzled_scales(operand: BlockScaledCodes) -> jax.Array:
    """E4M3 [tiles down, tiles across, 32, 16]."""
    across = 2 * operand.codes.shape[-1] // K_TILE
    return lax.bitcast_convert_type(operand.scales, jnp.float8_e4m3fn).reshape(-1, across, 32, 16)


def _transforms(columns: int, bits: int) -> tuple[object, ...]:
    swizzle = plgpu.find_swizzle(columns * bits)
    return plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle)


class SharedMemory(NamedTuple):
    """Scratch of a CTA: `stages` buffers of a, b and their scales, the scales of the current MMA and accumulators of
    two tiles in tensor memory, two epilogue buffers; and the barriers between TMA, MMA and epilogue.
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
    across = b.shape[-2] // OUTPUT_TILE_SIZE  # tiles of a matrix

    def fetch(work, begun):
        left, right = pl.ds(work.a_tile * OUTPUT_TILE_SIZE, OUTPUT_TILE_SIZE), work.b_tile
        rows = b.at[lax.div(right, across)] if len(b.shape) == 3 else b
        rows_at = pl.ds((lax.rem(right, across) if len(b.shape) == 3 else right) * OUTPUT_TILE_SIZE, OUTPUT_TILE_SIZE)

        def one(k_step, _carry):
            number = begun + k_step
            stage = lax.rem(number, stages)

            @pl.when(number >= stages)
            def _():
                plgpu.barrier_wait(mma_barriers.at[stage])

            at = work.first_k_step + k_step
            columns, tiles = pl.ds(at * step, step), pl.ds(at * (step // K_TILE), step // K_TILE)
            parts = (
                a.at[left, columns],
                rows.at[rows_at, columns],
                a_scales.at[pl.ds(work.a_tile, 1), tiles],
                b_scales.at[pl.ds(right, 1), tiles],
            )
            for part, buffer in zip(parts, operand_stages, strict=True):
                plgpu.copy_gmem_to_smem(part, buffer.at[stage], tma_barriers.at[stage])

        lax.fori_loop(0, work.num_k_steps, one, None)

    def multiply(work, begun, half):
        into = acc.at[:, pl.ds(half * OUTPUT_TILE_SIZE, OUTPUT_TILE_SIZE)]

        def one(k_step, _carry):
            stage = lax.rem(begun + k_step, stages)
            plgpu.barrier_wait(tma_barriers.at[stage])
            lhs, rhs, *both = (buffer.at[stage] for buffer in operand_stages)
            for part, place in zip(both, scales, strict=True):
                plgpu.async_copy_scales_to_tmem(part, place)
            plgpu.tcgen05_mma(
                into,
                lhs,
                transpose_ref(rhs, (1, 0)),
                mma_barriers.at[stage],
                a_scale=scales[0],
                b_scale=scales[1],
                accumulate=k_step > 0,
            )

        lax.fori_loop(0, work.num_k_steps, one, None)
        plgpu.tcgen05_commit_arrive(accumulator_ready.at[half])

    def send(work, part_of):
        place = out if len(out.shape) == 2 else out.at[lax.div(work.tile_row, out.shape[1] // OUTPUT_TILE_SIZE)]
        down = work.tile_row if len(out.shape) == 2 else lax.rem(work.tile_row, out.shape[1] // OUTPUT_TILE_SIZE)
        wide = epilogue_smem.shape[2]
        for i in range(OUTPUT_TILE_SIZE // wide):
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            epilogue_smem[i % 2] = part_of(i).astype(out.dtype)
            plgpu.commit_smem()
            columns = pl.ds(work.tile_column * OUTPUT_TILE_SIZE + i * wide, wide)
            plgpu.copy_smem_to_gmem(
                epilogue_smem.at[i % 2], place.at[pl.ds(down * OUTPUT_TILE_SIZE, OUTPUT_TILE_SIZE), columns]
            )

    def store(work, half):
        wide = epilogue_smem.shape[2]

        @pl.when(work.num_k_steps > 0)
        def _():
            plgpu.barrier_wait(accumulator_ready.at[half])
            parts = acc.at[:, pl.ds(half * OUTPUT_TILE_SIZE, OUTPUT_TILE_SIZE)]
            send(work, lambda i: plgpu.async_load_tmem(parts.at[:, pl.ds(i * wide, wide)]) * work.alpha)
            plgpu.wait_load_tmem()
            plgpu.barrier_arrive(accumulator_free.at[half])

        @pl.when(work.num_k_steps == 0)
        def _():
            zero = jnp.zeros((OUTPUT_TILE_SIZE, wide), jnp.float32)
            send(work, lambda i: plgpu.layout_cast(zero, plgpu.Layout.TCGEN05))

    @plgpu.nd_loop((count,), collective_axes="block", init_carry=(jnp.int32(0), jnp.int32(0)))
    def _(loop, carry):
        begun, busy = carry  # steps and tiles with steps, of this block until now
        work = work_of(loop.index[0], *tables)
        half = lax.rem(busy, jnp.int32(2))

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            @plgpu.warp_map
            def _(warp):
                @pl.when(warp == 0)
                def _():
                    fetch(work, begun)

                @pl.when((warp == 1) & (work.num_k_steps > 0))
                def _():
                    @pl.when(busy > 1)
                    def _():
                        plgpu.barrier_wait(accumulator_free.at[half])

                    multiply(work, begun, half)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _():
            store(work, half)

        return begun + work.num_k_steps, busy + (work.num_k_steps > 0).astype(jnp.int32)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
