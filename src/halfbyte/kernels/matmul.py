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

from halfbyte.kernels import layout as layouts
from halfbyte.kernels.interpret import is_interpreted
from halfbyte.kernels.launch import multiprocessors
from halfbyte.kernels.scale import GEMM, SIZE
from halfbyte.later import later

plgpu = later("jax.experimental.pallas.mosaic_gpu")
LAYOUTS = ("nn", "nt", "tn")
ALIGNED = 16  # elements of bf16 in the smallest piece of a row that the copy engine moves, 32 bytes


@dataclasses.dataclass(frozen=True)
class GemmTiling:
    """Tile of one warpgroup, and how the blocks of the grid share the work.

    `split` says along which output dim the two warpgroups lie; `minor` along which the snake runs first, `width` tiles
    wide. `in_flight` multiplications may be unfinished when the next one is issued.
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

    walk(work, tiles[0] * tiles[1], (a, b, out), depth=min(tiling.stages, turns), tiling=tiling, layout=layout)


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
    depth: int,
) -> None:  # fmt: skip
    """All `count` output tiles, block after block, the `Work` of each by its number. `depth` steps are under way at a
    time. Of `arrays` (a, b and out, whole) only types and widths are read here."""
    a, b, out = arrays
    block_m, block_n = tiling.block
    turned_a, turned_b = layout == "tn", layout == "nt"
    in_order = _transforms(tiling.k, jnp.bfloat16, a.shape[-1], b.shape[-1])
    out_order = _transforms(tiling.epilogue_n, out.dtype, out.shape[-1])

    def pipeline(multiply, context, turns, first=0):
        shape_a = (tiling.k, block_m) if turned_a else (block_m, tiling.k)
        shape_b = (block_n, tiling.k) if turned_b else (tiling.k, block_n)
        return plgpu.emit_pipeline_warp_specialized(
            multiply,
            grid=(turns,),
            memory_registers=40,
            in_specs=[
                _operand(shape_a, turned_a, 1, in_order, tiling, first),
                _operand(shape_b, turned_b, 0, in_order, tiling, first),
            ],
            wg_axis="warpgroup",
            num_compute_wgs=2,
            max_concurrent_steps=tiling.stages,
            compute_context=context,
        )

    slots = min(2, (tiling.m * tiling.n) // (tiling.epilogue_m * tiling.epilogue_n))
    stage_shape = (2, slots, tiling.epilogue_m, tiling.epilogue_n)

    @functools.partial(
        pl.run_scoped,
        buffers=pipeline(_nothing, _nothing, depth).get_allocations(a, b),
        staged=plgpu.SMEM(stage_shape, out.dtype, transforms=out_order),
        summed=plgpu.Barrier(num_arrivals=2),
        collective_axes="warpgroup",
    )
    def _(buffers, staged, summed):
        warpgroup = lax.axis_index("warpgroup")

        @plgpu.nd_loop((count,), collective_axes="block")
        def _(loop):
            work = work_of(loop.index[0])
            own_m = pl.ds(warpgroup * tiling.m, tiling.m) if tiling.split == "m" else slice(None)
            own_n = pl.ds(warpgroup * tiling.n, tiling.n) if tiling.split == "n" else slice(None)

            def multiply(_, a_tile, b_tile, sums):
                left_tile = transposed(a_tile.at[:, own_m], (1, 0)) if turned_a else a_tile.at[own_m]
                right_tile = transposed(b_tile.at[own_n], (1, 0)) if turned_b else b_tile.at[:, own_n]
                plgpu.wgmma(sums, left_tile, right_tile)
                plgpu.wgmma_wait(tiling.in_flight)
                return sums

            def context(run):
                @functools.partial(pl.run_scoped, sums=plgpu.ACC((tiling.m, tiling.n), jnp.float32))
                def _(sums):
                    run(sums)
                    if tiling.in_flight:
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(summed)
                    target = work.target.at[own_m, own_n]
                    _write(sums[...], work.alpha, staged, target, warpgroup, tiling, out.dtype)

            pipeline(multiply, context, work.turns, work.first)(work.left, work.right, allocations=buffers)

            # What is in flight at a tile's end still reads slots that the pipeline of the next would fill at once.
            if tiling.in_flight:
                pl.when(warpgroup == 2)(lambda: plgpu.barrier_wait(summed))

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _write(sums, alpha, staged, target, warpgroup, tiling: GemmTiling, dtype):
    """Scales and rounds the accumulator once, and sends it out in small tiles through two slots of shared memory."""
    result = (sums * alpha).astype(dtype)
    across = tiling.n // tiling.epilogue_n
    slots = min(2, (tiling.m * tiling.n) // (tiling.epilogue_m * tiling.epilogue_n))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for index in range((tiling.m // tiling.epilogue_m) * across):
        i, j = divmod(index, across)
        rows = slice(i * tiling.epilogue_m, (i + 1) * tiling.epilogue_m)
        columns = slice(j * tiling.epilogue_n, (j + 1) * tiling.epilogue_n)
        slot = index % slots
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
        staged[warpgroup, slot] = result[rows, columns]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged.at[warpgroup, slot], target.at[rows, columns])


def _operand(
    shape: tuple[int, int], turned: bool, summed: int, transforms: Sequence[Any], tiling: GemmTiling,
    first: jax.Array | int,
) -> Any:  # fmt: skip
    """Tiles that walk, from step `first` on, along the dim that is summed over: `summed`, or the other one if the
    operand is turned.
    """
    along = 1 - summed if turned else summed
    return plgpu.BlockSpec(
        shape,
        (lambda i: (first + i, 0)) if along == 0 else (lambda i: (0, first + i)),
        transforms=transforms,
        memory_space=plgpu.SMEM,
        delay_release=tiling.in_flight,
    )


def _transforms(columns: int, dtype: DTypeLike, *widths: int) -> tuple[Any, ...]:
    """The swizzled order of shared memory for tiles at least `columns` wide of arrays with rows of `widths`."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * size * 8)
    while any(width * size % swizzle for width in widths):
        swizzle //= 2
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def transposed(ref: Ref, order: tuple[int, ...]) -> Ref:
    """A view of a reference with its dims in `order`: a method since JAX 0.11, a function before."""
    return ref.transpose(order) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, order)


def _nothing(*_: object, **__: object) -> None:
    """Stands for a body where only the pipeline's allocations are asked for."""
