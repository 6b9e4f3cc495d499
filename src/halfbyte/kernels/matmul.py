"""bf16 GEMM for Hopper (Mosaic GPU) whose float32 accumulator is multiplied by a device scalar before its one rounding.

    out = round(alpha * (A . B)),   alpha = left * right

cuBLAS takes alpha from the host only, so XLA either writes a float32 result and reads it back to scale it, or takes a
slower GEMM. Here alpha costs one multiply an element in the epilogue. Three layouts serve the three GEMMs of a linear,
none of which moves its operands first:

    "nn"  FPROP  x [m, k]   w [k, n]
    "nt"  DGRAD  dy [m, k]  w [n, k]
    "tn"  WGRAD  x [k, m]   dy [k, n]

One warpgroup feeds shared memory through the copy engine, two multiply; a block stays on its multiprocessor and walks
over output tiles in a snake, so that neighbours share operands in L2. Where tiles do not divide a size, the copy engine
reads zeros beyond the array's end and writes nothing there; it moves rows in pieces of 128, 64 or 32 bytes, the largest
that divides them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from halfbyte.devices.jax_versions import transpose_ref
from halfbyte.kernels import layout as layouts
from halfbyte.kernels.architecture import record_architecture
from halfbyte.kernels.interpret import is_interpreted
from halfbyte.kernels.launch import multiprocessors
from halfbyte.kernels.scale import GEMM, SIZE
from halfbyte.later import later

plgpu = later("jax.experimental.pallas.mosaic_gpu")
LAYOUTS = ("nn", "nt", "tn")
FEEDING, MULTIPLYING = 40, 232  # registers of a thread, of the 65,536 that three warpgroups share
ALIGNED = 16  # elements of bf16 in the smallest piece of a row that the copy engine moves, 32 bytes


@dataclasses.dataclass(frozen=True)
class GemmTiling:
    """Tile of one warpgroup, and how the blocks of the grid share the work.

    `split` says along which output dim the two warpgroups lie; `minor` along which the snake runs first, `width` tiles
    wide. `in_flight` multiplications, fewer than `stages`, may be unfinished when the next one is issued.
    """

    m: int = 128
    n: int = 128
    k: int = 64
    stages: int = 4
    epilogue_m: int = 64
    epilogue_n: int = 64
    split: str = "n"
    minor: str = "n"
    width: int = 8
    in_flight: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.in_flight < self.stages:
            raise ValueError(f"in_flight must be from 0 to stages - 1, or no slot is ever free: got {self}")

    @property
    def block(self) -> tuple[int, int]:
        """Output tile of one multiprocessor."""
        return self.m * (2 if self.split == "m" else 1), self.n * (2 if self.split == "n" else 1)

    def steps(self, sizes: tuple[int, int, int]) -> tuple[int, ...]:
        """Steps along m, n and k, the last ones over the edge where they do not divide."""
        return tuple(-(-size // step) for size, step in zip(sizes, (*self.block, self.k), strict=True))


def with_float32_output(tiling: GemmTiling) -> GemmTiling:
    """`tiling` with half as wide an epilogue, so that float32 results fit beside the operands in shared memory."""
    return dataclasses.replace(tiling, epilogue_n=tiling.epilogue_n // 2)


def default_tiling(layout: str, m: int, n: int, k: int, out_dtype: DTypeLike) -> GemmTiling:
    """The fastest one measured on an H200 for shapes of this kind."""
    if layout == "tn":
        tiling = GemmTiling(in_flight=1)
    elif layout == "nt":
        tiling = GemmTiling(64, 256, in_flight=1, split="m")
    elif k > n:
        tiling = GemmTiling()
    elif k < 4096:
        tiling = GemmTiling(in_flight=1, split="m")
    else:
        tiling = GemmTiling(in_flight=1, minor="m")
    return with_float32_output(tiling) if jnp.dtype(out_dtype) == jnp.float32 else tiling


def dims(a_shape: tuple[int, ...], b_shape: tuple[int, ...], layout: str) -> tuple[int, int, int]:
    """m, n, k of a product; raises if the shapes do not match."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    k, m = a_shape if layout == "tn" else a_shape[::-1]
    n, k_right = b_shape if layout == "nt" else b_shape[::-1]
    if k != k_right:
        raise ValueError(f"layout {layout!r} contracts dims of {k} and {k_right}: shapes {a_shape} and {b_shape}")
    return m, n, k


def unsupported(
    m: int,
    n: int,
    k: int,
    *,
    layout: str = "nn",
    out_dtype: DTypeLike = jnp.bfloat16,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Why the GEMM kernel cannot serve, or None."""
    if capability is not None and capability[0] != 9:
        return f"the GEMM kernel is written for compute capability 9.0, got {capability[0]}.{capability[1]}"
    tiling = default_tiling(layout, m, n, k, out_dtype)
    for name, size, least in zip("mnk", (m, n, k), (*tiling.block, tiling.k), strict=True):
        if size % ALIGNED:
            return f"the GEMM kernel needs {name} to be a multiple of {ALIGNED}, got {size}"
        if size < least:
            return f"the GEMM kernel needs {name} to be at least {least}, got {size}"
    return None


@layouts.once("layout", "out_dtype", "tiling")
def matmul(
    a: jax.Array,
    b: jax.Array,
    left: jax.Array,
    right: jax.Array,
    *,
    layout: str = "nn",
    out_dtype: DTypeLike = jnp.bfloat16,
    tiling: GemmTiling | None = None,
) -> jax.Array:
    """alpha * (A . B) in `out_dtype` (bfloat16 or float32), rounded once; alpha = left * right in float32.

    a and b are bf16. left and right are float32 scalars on the device, or the vectors of `tensor_scale`, whose factor
    for GEMMs is taken: NaN for a non-finite operand. Interpreted, XLA computes the same, on any device.
    """
    m, n, k = dims(a.shape, b.shape, layout)
    tiling = tiling or default_tiling(layout, m, n, k, out_dtype)
    reason = unsupported(m, n, k, layout=layout, out_dtype=out_dtype)
    if reason:
        raise ValueError(f"{reason}; use the XLA path")
    for name, scale in (("left", left), ("right", right)):
        if scale.shape not in ((), (SIZE,)):
            raise ValueError(f"{name} must be a scalar or a vector of tensor_scale, ({SIZE},), got shape {scale.shape}")
    if is_interpreted():
        return _through_xla(a, b, _factor(left) * _factor(right), layout, out_dtype)
    record_architecture()
    run = plgpu.kernel(
        functools.partial(_kernel, tiling=tiling, layout=layout),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(multiprocessors(),),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="gemm",  # by which halfbyte.program finds it in compiled programs
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return run(a, b, left.reshape(-1), right.reshape(-1))


def _factor(scale: Any) -> Any:
    """The factor that a GEMM owes, from a scalar or a vector of `tensor_scale` (an array or a ref)."""
    if scale.shape == ():
        return scale
    return scale[GEMM if scale.shape == (SIZE,) else 0]


def _through_xla(a: jax.Array, b: jax.Array, alpha: jax.Array, layout: str, out_dtype: DTypeLike) -> jax.Array:
    summed = (0 if layout == "tn" else 1,), (1 if layout == "nt" else 0,)
    y = lax.dot_general(a, b, (summed, ((), ())), preferred_element_type=jnp.float32) * alpha
    if jnp.dtype(out_dtype) == jnp.bfloat16:
        y = lax.reduce_precision(y, 8, 7)  # a rounding that XLA does not remove
    return y.astype(out_dtype)


def _kernel(a, b, left, right, out, *, tiling: GemmTiling, layout: str):
    block_m, block_n = tiling.block
    *tiles, turns = tiling.steps(dims(a.shape, b.shape, layout))
    alpha = _factor(left) * _factor(right)

    def work(index):
        i, j = plgpu.planar_snake(index, tuple(tiles), 0 if tiling.minor == "m" else 1, tiling.width)
        rows, columns = pl.ds(i * block_m, block_m), pl.ds(j * block_n, block_n)
        left_part = a.at[:, rows] if layout == "tn" else a.at[rows, :]
        right_part = b.at[columns, :] if layout == "nt" else b.at[:, columns]
        return Work(left_part, right_part, out.at[rows, columns], turns, alpha)

    walk(work, tiles[0] * tiles[1], (a, b, out), tiling=tiling, layout=layout)


Ref = Any  # a view of memory, as Mosaic GPU hands it to a body


class Work(NamedTuple):
    """One output tile: its parts of the operands, where it goes, how many steps of k its sums take, the factor of the
    sums, and the first step. Without a turn it is zero."""

    left: Ref
    right: Ref
    target: Ref
    turns: jax.Array | int
    alpha: jax.Array
    first: jax.Array | int = 0


def walk(
    work_of: Callable[[jax.Array], Work], count: int, arrays: Sequence[Ref], *, tiling: GemmTiling, layout: str,
) -> None:  # fmt: skip
    """All `count` output tiles, block after block, the `Work` of each by its number. Of `arrays` (a, b and out, whole)
    only types and widths are read here.

    Steps of k pass through slots of shared memory, those of a tile right after those of the last: operands of the next
    tile arrive while the sums of this one are written. A slot is free again when both warpgroups have read it.
    """
    a, b, out = arrays
    block_m, block_n = tiling.block
    turned_a, turned_b = layout == "tn", layout == "nt"
    shape_a = (tiling.k, block_m) if turned_a else (block_m, tiling.k)
    shape_b = (block_n, tiling.k) if turned_b else (tiling.k, block_n)
    in_order = _transforms(tiling.k, jnp.bfloat16, a.shape[-1], b.shape[-1])
    out_order = _transforms(tiling.epilogue_n, out.dtype, out.shape[-1])
    places = min(2, (tiling.m * tiling.n) // (tiling.epilogue_m * tiling.epilogue_n))

    @functools.partial(
        pl.run_scoped,
        slots_a=plgpu.SMEM((tiling.stages, *shape_a), a.dtype, transforms=in_order),
        slots_b=plgpu.SMEM((tiling.stages, *shape_b), b.dtype, transforms=in_order),
        staged=plgpu.SMEM((2, places, tiling.epilogue_m, tiling.epilogue_n), out.dtype, transforms=out_order),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages),  # copies of a and of b
        free=plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages),  # warpgroups that multiply
        collective_axes="warpgroup",
    )
    def _(slots_a, slots_b, staged, full, free):
        warpgroup = lax.axis_index("warpgroup")

        def tiles(visit):
            """visit(work, steps before it) of every tile of this block."""
            block, blocks = lax.axis_index("block"), lax.axis_size("block")

            def one(turn, before):
                work = work_of(block + turn * blocks)
                visit(work, before)
                return before + work.turns

            lax.fori_loop(0, lax.div(count - block + blocks - 1, blocks), one, jnp.int32(0))

        def slot_of(step):
            return lax.rem(step, jnp.int32(tiling.stages))

        def feed():
            plgpu.set_max_registers(FEEDING, action="decrease")

            def visit(work, before):
                @pl.loop(0, work.turns)
                def _(turn):
                    slot, along = slot_of(before + turn), pl.ds((work.first + turn) * tiling.k, tiling.k)
                    plgpu.barrier_wait(free.at[slot])
                    part_a = work.left.at[along, :] if turned_a else work.left.at[:, along]
                    part_b = work.right.at[:, along] if turned_b else work.right.at[along, :]
                    plgpu.copy_gmem_to_smem(part_a, slots_a.at[slot], full.at[slot])
                    plgpu.copy_gmem_to_smem(part_b, slots_b.at[slot], full.at[slot])

            tiles(visit)
            for slot in range(tiling.stages):
                plgpu.barrier_wait(free.at[slot])

        def multiply():
            plgpu.set_max_registers(MULTIPLYING, action="increase")
            own_m = pl.ds(warpgroup * tiling.m, tiling.m) if tiling.split == "m" else slice(None)
            own_n = pl.ds(warpgroup * tiling.n, tiling.n) if tiling.split == "n" else slice(None)
            for slot in range(tiling.stages):
                plgpu.barrier_arrive(free.at[slot])

            def visit(work, before):
                @functools.partial(pl.run_scoped, sums=plgpu.ACC((tiling.m, tiling.n), jnp.float32))
                def _(sums):
                    @pl.loop(0, work.turns)
                    def _(turn):
                        slot = slot_of(before + turn)
                        plgpu.barrier_wait(full.at[slot])
                        tile_a, tile_b = slots_a.at[slot], slots_b.at[slot]
                        left = transpose_ref(tile_a.at[:, own_m], (1, 0)) if turned_a else tile_a.at[own_m]
                        right = transpose_ref(tile_b.at[own_n], (1, 0)) if turned_b else tile_b.at[:, own_n]
                        plgpu.wgmma(sums, left, right)
                        plgpu.wgmma_wait(tiling.in_flight)

                        @pl.when(turn >= tiling.in_flight)
                        def _():
                            plgpu.barrier_arrive(free.at[slot_of(before + turn - tiling.in_flight)])

                    plgpu.wgmma_wait(0)

                    @pl.loop(lax.max(work.turns - tiling.in_flight, 0), work.turns)
                    def _(turn):
                        plgpu.barrier_arrive(free.at[slot_of(before + turn)])

                    target = work.target.at[own_m, own_n]
                    _write(sums[...], work.alpha, staged, target, warpgroup, tiling, out.dtype)

            tiles(visit)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        lax.cond(warpgroup == 2, feed, multiply)


def _write(sums, alpha, staged, target, warpgroup, tiling: GemmTiling, dtype):
    """Scales and rounds the accumulator once, and sends it out in small tiles through two places of shared memory."""
    result = (sums * alpha).astype(dtype)
    across = tiling.n // tiling.epilogue_n
    places = staged.shape[1]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for index in range((tiling.m // tiling.epilogue_m) * across):
        i, j = divmod(index, across)
        rows = slice(i * tiling.epilogue_m, (i + 1) * tiling.epilogue_m)
        columns = slice(j * tiling.epilogue_n, (j + 1) * tiling.epilogue_n)
        place = index % places
        plgpu.wait_smem_to_gmem(places - 1, wait_read_only=True)
        staged[warpgroup, place] = result[rows, columns]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged.at[warpgroup, place], target.at[rows, columns])


def _transforms(columns: int, dtype: DTypeLike, *widths: int) -> tuple[Any, ...]:
    """The swizzled order of shared memory for tiles at least `columns` wide of arrays with rows of `widths`."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * size * 8)
    while any(width * size % swizzle for width in widths):
        swizzle //= 2
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)
