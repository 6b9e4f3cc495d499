"""GEMMs of many experts for Blackwell: `tcgen05.mma` over E2M1 codes with E4M3 block scales, a factor in the epilogue.

The tensor cores read codes with the contraction last on both sides, and scales from tensor memory in the 128x4 tiles of
`formats.tile_scales`. So every GEMM is one of the same shape, a [m, k] times b [n, k], and differs only in where a tile
of the result finds its parts:

    rows         y [rows, n] of x [rows, k] and each tile's w [n, k]; fprop and dgrad, with W in one order or the other
    contraction  dw [experts, m, n] of x [m, rows] and dy [n, rows], over the columns of each expert's own rows

Rows lie as `grouped.py` has them: every expert begins on a new tile of SIDE rows, filled up with zero codes. One warp
of a block has the copy engine fetch codes and scales, another has them multiplied; a warpgroup multiplies the float32
sums by the expert's factor, rounds them once and sends them out, while the next tile's sums are made in the other half
of the accumulator. A tile of rows without an expert, and an expert without rows, are zero, without a product.

Compiled for 10.0 and 10.3, never executed: `train` compares it with `carrier` before its first step. Two things are
left: between two tiles both warps meet, so that the first copy of the next one is waited for; and scales lie in tensor
memory once, so that a copy there is taken to follow the product before it, as both are issued by one lane.
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

from halfbyte.devices.jax_versions import transpose_ref
from halfbyte.formats import E2M1, E4M3, unpack, untile_scales
from halfbyte.formats.bits import round_bfloat16
from halfbyte.formats.elements import decode
from halfbyte.kernels.architecture import record_architecture
from halfbyte.kernels.interpret import is_interpreted
from halfbyte.kernels.launch import multiprocessors
from halfbyte.kernels.matmul import Ref
from halfbyte.later import later

plgpu = later("jax.experimental.pallas.mosaic_gpu")
SIDE = 128  # of a tile of the result, and the unit of every size
BLOCK = 16  # codes of a scale
TILE = 64  # codes of a row whose scales lie in one tile of 128x4
IN_FLIGHT = 1024  # codes of a row that are fetched ahead
WIDTH = 8  # of the snake, in tiles


class Codes(NamedTuple):
    """An operand, contraction last: uint8 `codes` [..., rows, k / 2], two a byte, and `scales`, flat, in tiles."""

    codes: jax.Array
    scales: jax.Array


def unsupported(*sizes: int, capability: tuple[int, int] | None) -> str | None:
    """Why matrices with sides of these sizes are not served, or None."""
    if capability is None or capability[0] != 10:
        return "block-scaled GEMM kernels of experts are written for compute capability 10"
    for size in sizes:
        if size % SIDE or not size:
            return f"block-scaled GEMM kernels of experts need sizes that are multiples of {SIDE}, got {size}"
    return None


def rows(x: Codes, w: Codes, alpha: jax.Array, experts: jax.Array, *, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
    """[rows, n] of x [rows, k] and w [experts, n, k] of each tile's expert, times alpha[e]; `experts` int32
    [rows / SIDE], the number of experts where a tile has none."""
    count, n, _ = w.codes.shape
    known, own = experts < count, jnp.minimum(experts, count - 1)
    step = _step(2 * x.codes.shape[1])
    turns = jnp.where(known, 2 * x.codes.shape[1] // step, 0)
    across, down = n // SIDE, experts.shape[0]

    def work(index, own, turns, factor):
        i, j = plgpu.planar_snake(index, (down, across), 1, WIDTH)
        return Work(i, own[i] * across + j, i, j, turns[i], 0, factor[i])

    shape = jax.ShapeDtypeStruct((x.codes.shape[0], n), dtype)
    return _launch(work, down * across, step, shape, x, w, own, turns, alpha[own])


def contraction(x: Codes, dy: Codes, alpha: jax.Array, counts: jax.Array) -> jax.Array:
    """float32 [experts, m, n] of x [m, rows] and dy [n, rows], over each expert's own rows, times alpha[e]; `counts`
    int32 [experts], rows of each."""
    (m, _), (n, _) = x.codes.shape, dy.codes.shape
    turns = -(-counts // SIDE)
    first, sides = jnp.cumsum(turns) - turns, (m // SIDE, n // SIDE)
    each = sides[0] * sides[1]

    def work(index, first, turns, factor):
        e = lax.div(index, jnp.int32(each))
        i, j = plgpu.planar_snake(lax.rem(index, jnp.int32(each)), sides, 1, WIDTH)
        return Work(i, j, e * sides[0] + i, j, turns[e], first[e], factor[e])

    shape = jax.ShapeDtypeStruct((counts.shape[0], m, n), jnp.float32)
    return _launch(work, counts.shape[0] * each, SIDE, shape, x, dy, first, turns, alpha)


def _step(k: int) -> int:
    """Codes of a row that one step multiplies."""
    return 2 * SIDE if k % (2 * SIDE) == 0 else SIDE


class Work(NamedTuple):
    """One tile of the result: the number of its tile of a's rows and of b's, its row and column of tiles in the result,
    how many steps its sums take, from which one on, and their factor. Without a turn it is zero."""

    left: jax.Array
    right: jax.Array
    down: jax.Array
    across: jax.Array
    turns: jax.Array
    first: jax.Array | int
    alpha: jax.Array


def _launch(
    work_of: Callable[..., Work], count: int, step: int, shape: jax.ShapeDtypeStruct, a: Codes, b: Codes,
    *tables: jax.Array,
) -> jax.Array:  # fmt: skip
    """An array like `shape`, of `count` tiles, the `Work` of each by its number."""
    if is_interpreted():
        return _through_xla(functools.partial(_multiplied, work_of, step, a, b, tables), count, shape)
    stages, wide = IN_FLIGHT // step, 64 if shape.dtype == jnp.bfloat16 else 32
    order, out_order = _transforms(step, 4), _transforms(wide, 8 * jnp.dtype(shape.dtype).itemsize)
    scales = plgpu.SMEM((stages, 1, step // TILE, 32, 16), jnp.float8_e4m3fn)
    in_tensor_memory = plgpu.TMEM((SIDE, step // BLOCK), jnp.float8_e4m3fn, layout=plgpu.TMEMLayout.SCALES_LAYOUT)
    codes = plgpu.SMEM((stages, SIDE, step), jnp.float4_e2m1fn, transforms=order)
    barrier = functools.partial(plgpu.Barrier, orders_tensor_core=True)
    record_architecture()
    run = plgpu.kernel(
        functools.partial(_kernel, work_of=work_of, count=count, step=step),
        out_type=shape,
        grid=(multiprocessors(),),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        # No Warpgroup semantics, as Hopper's have: in JAX 0.10.2 a single warp cannot copy scales under them.
        kernel_name="gemm",  # by which halfbyte.program finds it in compiled programs
        scratch_types={
            "fetched": (codes, codes, scales, scales),
            "scales": (in_tensor_memory, in_tensor_memory),
            "sums": plgpu.TMEM((SIDE, 2 * SIDE), jnp.float32),
            "staged": plgpu.SMEM((2, SIDE, wide), shape.dtype, transforms=out_order),
            "arrived": plgpu.Barrier(num_arrivals=4, num_barriers=stages),
            "consumed": barrier(num_barriers=stages),
            "made": barrier(num_barriers=2),
            "stored": barrier(num_barriers=2),
        },
    )
    return run(*(_elements(each.codes) for each in (a, b)), *(_in_tiles(each) for each in (a, b)), *tables)


def _through_xla(
    tile_of: Callable[[jax.Array], tuple[jax.Array, ...]], count: int, shape: jax.ShapeDtypeStruct
) -> jax.Array:
    """The tiles of the same walk, where each of them goes."""
    down, across = math.prod(shape.shape[:-1]) // SIDE, shape.shape[-1] // SIDE
    i, j, tiles = lax.map(tile_of, jnp.arange(count, dtype=jnp.int32))
    out = jnp.full((down, across, SIDE, SIDE), jnp.nan).at[i, j].set(tiles)
    out = round_bfloat16(out) if shape.dtype == jnp.bfloat16 else out
    return out.transpose(0, 2, 1, 3).reshape(shape.shape).astype(shape.dtype)


def _multiplied(
    work_of: Callable[..., Work], step: int, a: Codes, b: Codes, tables: Sequence[jax.Array], index: jax.Array
) -> tuple[jax.Array, ...]:
    """(row, column, numbers) of one tile, its parts decoded."""
    work, k = work_of(index, *tables), 2 * a.codes.shape[-1]
    turn = jnp.arange(k, dtype=jnp.int32) // step - work.first
    mine = (turn >= 0) & (turn < work.turns)

    def part(operand: Codes, tile: jax.Array) -> jax.Array:
        codes = lax.dynamic_slice_in_dim(operand.codes.reshape(-1, k // 2), tile * SIDE, SIDE)
        scales = lax.dynamic_slice_in_dim(operand.scales, tile * SIDE * (k // BLOCK), SIDE * (k // BLOCK))
        values = decode(E4M3, untile_scales(scales, SIDE, k // BLOCK))
        return jnp.where(mine, decode(E2M1, unpack(codes)) * jnp.repeat(values, BLOCK, axis=1), 0)

    sums = jnp.dot(part(a, work.left), part(b, work.right).T, precision=lax.Precision.HIGHEST)
    return work.down, work.across, jnp.where(work.turns > 0, sums * work.alpha, 0)


def _elements(codes: jax.Array) -> jax.Array:
    """uint8 [..., k / 2] -> float4 [..., k]."""
    return lax.bitcast_convert_type(codes, jnp.float4_e2m1fn).reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def _in_tiles(operand: Codes) -> jax.Array:
    """E4M3 [tiles down, tiles across, 32, 16]."""
    across = 2 * operand.codes.shape[-1] // TILE
    return lax.bitcast_convert_type(operand.scales, jnp.float8_e4m3fn).reshape(-1, across, 32, 16)


def _transforms(columns: int, bits: int) -> tuple[object, ...]:
    swizzle = plgpu.find_swizzle(columns * bits)
    return plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle)


class Room(NamedTuple):
    """What a block works in: parts of a, b and their scales `stages` times, the scales that are being multiplied, sums
    of two tiles, results on their way out; barriers of what has arrived, was consumed, is made and is stored."""

    fetched: tuple[Ref, ...]
    scales: tuple[Ref, Ref]
    sums: Ref
    staged: Ref
    arrived: Ref
    consumed: Ref
    made: Ref
    stored: Ref


def _kernel(*refs, work_of, count, step, **room):
    a, b, a_scales, b_scales, *tables, out = refs
    fetched, scales, sums, staged, arrived, consumed, made, stored = Room(**room)
    stages = arrived.shape[0]
    across = b.shape[-2] // SIDE  # tiles of a matrix

    def fetch(work, begun):
        left, right = pl.ds(work.left * SIDE, SIDE), work.right
        rows = b.at[lax.div(right, across)] if len(b.shape) == 3 else b
        rows_at = pl.ds((lax.rem(right, across) if len(b.shape) == 3 else right) * SIDE, SIDE)

        def one(turn, _carry):
            number = begun + turn
            slot = lax.rem(number, stages)

            @pl.when(number >= stages)
            def _():
                plgpu.barrier_wait(consumed.at[slot])

            at = work.first + turn
            columns, tiles = pl.ds(at * step, step), pl.ds(at * (step // TILE), step // TILE)
            parts = (
                a.at[left, columns],
                rows.at[rows_at, columns],
                a_scales.at[pl.ds(work.left, 1), tiles],
                b_scales.at[pl.ds(right, 1), tiles],
            )
            for part, room in zip(parts, fetched, strict=True):
                plgpu.copy_gmem_to_smem(part, room.at[slot], arrived.at[slot])

        lax.fori_loop(0, work.turns, one, None)

    def multiply(work, begun, half):
        into = sums.at[:, pl.ds(half * SIDE, SIDE)]

        def one(turn, _carry):
            slot = lax.rem(begun + turn, stages)
            plgpu.barrier_wait(arrived.at[slot])
            left, right, *both = (room.at[slot] for room in fetched)
            for part, place in zip(both, scales, strict=True):
                plgpu.async_copy_scales_to_tmem(part, place)
            plgpu.tcgen05_mma(
                into,
                left,
                transpose_ref(right, (1, 0)),
                consumed.at[slot],
                a_scale=scales[0],
                b_scale=scales[1],
                accumulate=turn > 0,
            )

        lax.fori_loop(0, work.turns, one, None)
        plgpu.tcgen05_commit_arrive(made.at[half])

    def send(work, part_of):
        place = out if len(out.shape) == 2 else out.at[lax.div(work.down, out.shape[1] // SIDE)]
        down = work.down if len(out.shape) == 2 else lax.rem(work.down, out.shape[1] // SIDE)
        wide = staged.shape[2]
        for i in range(SIDE // wide):
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            staged[i % 2] = part_of(i).astype(out.dtype)
            plgpu.commit_smem()
            columns = pl.ds(work.across * SIDE + i * wide, wide)
            plgpu.copy_smem_to_gmem(staged.at[i % 2], place.at[pl.ds(down * SIDE, SIDE), columns])

    def store(work, half):
        wide = staged.shape[2]

        @pl.when(work.turns > 0)
        def _():
            plgpu.barrier_wait(made.at[half])
            parts = sums.at[:, pl.ds(half * SIDE, SIDE)]
            send(work, lambda i: plgpu.async_load_tmem(parts.at[:, pl.ds(i * wide, wide)]) * work.alpha)
            plgpu.wait_load_tmem()
            plgpu.barrier_arrive(stored.at[half])

        @pl.when(work.turns == 0)
        def _():
            zero = jnp.zeros((SIDE, wide), jnp.float32)
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

                @pl.when((warp == 1) & (work.turns > 0))
                def _():
                    @pl.when(busy > 1)
                    def _():
                        plgpu.barrier_wait(stored.at[half])

                    multiply(work, begun, half)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _():
            store(work, half)

        return begun + work.turns, busy + (work.turns > 0).astype(jnp.int32)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
