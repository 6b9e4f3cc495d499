"""bf16 GEMM for Hopper (Mosaic GPU) that multiplies its float32 accumulator by a device scalar and rounds once.

    out = round(alpha * (A . B)),   alpha = left * right, the decode scales of both operands

Why a kernel: code * block scale is exact in bf16, so a bf16 GEMM over block-dequantized operands computes the products
of an NVFP4 GEMM, up to alpha. cuBLAS takes alpha from the host only. XLA then writes a float32 result and reads it back
to scale it, or takes a slower GEMM. Here alpha costs one multiply per element in the epilogue: same bits, 5-11% faster
than XLA's two passes on an H200 (docs/LOG.md, "A GEMM with alpha in its epilogue").

    "nn"  fprop  x [m, k]   w [k, n]
    "nt"  dgrad  dy [m, k]  w [n, k]
    "tn"  wgrad  x [k, m]   dy [k, n]

How it works: a persistent, warp-specialized kernel. Each CTA has one producer warpgroup, which loads stages of a and b
through TMA, and two consumer warpgroups, which split the CTA tile and issue WGMMAs; full and empty mbarriers guard each
stage. WGMMA reads transposed tiles from SMEM, so no layout copies an operand. CTAs walk the output tiles in a snake, so
that neighbours share operands in L2. TMA reads zeros and writes nothing beyond an array's end, which serves sizes that
no tile divides; it moves rows in chunks of 128, 64 or 32 bytes, the widest that divides them.

How it differs: JAX's `emit_pipeline_warp_specialized` drains its stages after every output tile, and with a WGMMA in
flight it overwrote operands that were still being read (docs/LOG.md, "Operands overwritten while they were read").
Here k steps of all tiles of a CTA share one pipeline, so the next tile's loads overlap this tile's epilogue. Both
consumers work on one tile, as in CUTLASS's cooperative schedule; its ping-pong schedule was not tried.
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

from halfbyte.devices.compile_target import record_architecture
from halfbyte.devices.jax_versions import transpose_ref
from halfbyte.io.lazy_import import lazy_module
from halfbyte.kernels import triton_launch
from halfbyte.kernels.mosaic_launch import is_interpreting, num_sms
from halfbyte.kernels.tensor_scale_kernel import GEMM_ALPHA_INDEX, SCALE_VECTOR_SIZE

plgpu = lazy_module("jax.experimental.pallas.mosaic_gpu")
GEMM_LAYOUTS = ("nn", "nt", "tn")
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # per thread; three warpgroups share 65,536 registers
ALIGNMENT = 16  # bf16 elements in the smallest chunk of a row that TMA moves, 32 bytes


@dataclasses.dataclass(frozen=True)
class GemmTiling:
    """Tile of one consumer warpgroup, and the order in which CTAs take output tiles.

    The two consumer warpgroups split the CTA's tile along `warpgroup_split_dim`. Tiles are numbered in a snake that
    runs along `grid_minor_dim` first and is `grid_tile_width` tiles wide. Up to `max_wgmma_in_flight` WGMMAs, fewer
    than `stages`, may be unfinished when the next one is issued.
    """

    warpgroup_m: int = 128
    warpgroup_n: int = 128
    block_k: int = 64
    stages: int = 4
    epilogue_m: int = 64
    epilogue_n: int = 64
    warpgroup_split_dim: str = "n"
    grid_minor_dim: str = "n"
    grid_tile_width: int = 8
    max_wgmma_in_flight: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.max_wgmma_in_flight < self.stages:
            raise ValueError(f"max_wgmma_in_flight must be from 0 to stages - 1, or no slot is ever free: got {self}")

    @property
    def cta_tile(self) -> tuple[int, int]:
        """Output tile of one CTA."""
        return self.warpgroup_m * (2 if self.warpgroup_split_dim == "m" else 1), self.warpgroup_n * (
            2 if self.warpgroup_split_dim == "n" else 1
        )

    def tile_counts(self, sizes: tuple[int, int, int]) -> tuple[int, ...]:
        """Number of tiles along m, n and k, including partial ones at the edges."""
        return tuple(-(-size // step) for size, step in zip(sizes, (*self.cta_tile, self.block_k), strict=True))


def for_float32_output(tiling: GemmTiling) -> GemmTiling:
    """Returns `tiling` with half as wide an epilogue: float32 results then fit into shared memory with the operands."""
    return dataclasses.replace(tiling, epilogue_n=tiling.epilogue_n // 2)


def default_tiling(layout: str, m: int, n: int, k: int, out_dtype: DTypeLike) -> GemmTiling:
    """Returns the fastest tiling measured on an H200 for shapes of this kind."""
    if layout == "tn":
        tiling = GemmTiling(max_wgmma_in_flight=1)
    elif layout == "nt":
        tiling = GemmTiling(64, 256, max_wgmma_in_flight=1, warpgroup_split_dim="m")
    elif k > n:
        tiling = GemmTiling()
    elif k < 4096:
        tiling = GemmTiling(max_wgmma_in_flight=1, warpgroup_split_dim="m")
    else:
        tiling = GemmTiling(max_wgmma_in_flight=1, grid_minor_dim="m")
    return for_float32_output(tiling) if jnp.dtype(out_dtype) == jnp.float32 else tiling


def gemm_sizes(a_shape: tuple[int, ...], b_shape: tuple[int, ...], layout: str) -> tuple[int, int, int]:
    """Returns (m, n, k) of a GEMM; raises ValueError if the shapes do not match."""
    if layout not in GEMM_LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(GEMM_LAYOUTS)}, got {layout!r}")
    k, m = a_shape if layout == "tn" else a_shape[::-1]
    n, k_right = b_shape if layout == "nt" else b_shape[::-1]
    if k != k_right:
        raise ValueError(f"layout {layout!r} contracts dims of {k} and {k_right}: shapes {a_shape} and {b_shape}")
    return m, n, k


def unsupported_gemm(
    m: int,
    n: int,
    k: int,
    *,
    layout: str = "nn",
    out_dtype: DTypeLike = jnp.bfloat16,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Returns why the GEMM kernel does not support the shape or device, or None."""
    if capability is not None and capability[0] != 9:
        return f"the GEMM kernel is written for compute capability 9.0, got {capability[0]}.{capability[1]}"
    tiling = default_tiling(layout, m, n, k, out_dtype)
    for name, size, minimum in zip("mnk", (m, n, k), (*tiling.cta_tile, tiling.block_k), strict=True):
        if size % ALIGNMENT:
            return f"the GEMM kernel needs {name} to be a multiple of {ALIGNMENT}, got {size}"
        if size < minimum:
            return f"the GEMM kernel needs {name} to be at least {minimum}, got {size}"
    return None


@triton_launch.jit_per_shape("layout", "out_dtype", "tiling")
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
    """Returns round(alpha * (A . B)) as `out_dtype` (bfloat16 or float32), rounded once; alpha = left * right.

    Args:
        a: bf16 [m, k], or [k, m] under "tn".
        b: bf16 [k, n], or [n, k] under "nt".
        left: float32 scalar on the device, or the vector of `compute_tensor_scale`, of which the kernel reads alpha.
            Alpha is NaN for a non-finite operand.
        right: The same for b.

    Interpreted, XLA computes the same on any device.
    """
    m, n, k = gemm_sizes(a.shape, b.shape, layout)
    tiling = tiling or default_tiling(layout, m, n, k, out_dtype)
    reason = unsupported_gemm(m, n, k, layout=layout, out_dtype=out_dtype)
    if reason:
        raise ValueError(f"{reason}; use the XLA path")
    for name, scale in (("left", left), ("right", right)):
        if scale.shape not in ((), (SCALE_VECTOR_SIZE,)):
            raise ValueError(
                f"{name} must be a scalar or a vector of tensor_scale, ({SCALE_VECTOR_SIZE},), got shape {scale.shape}"
            )
    if is_interpreting():
        return _xla_gemm(a, b, _alpha_of(left) * _alpha_of(right), layout, out_dtype)
    record_architecture()
    run = plgpu.kernel(
        functools.partial(_kernel, tiling=tiling, layout=layout),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(num_sms(),),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="gemm",  # halfbyte.hlo identifies the kernel in compiled programs by this name
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return run(a, b, left.reshape(-1), right.reshape(-1))


def _alpha_of(scale: Any) -> Any:
    """Returns the operand's share of alpha: the scalar, or the entry of its scale vector (an array or a ref)."""
    if scale.shape == ():
        return scale
    return scale[GEMM_ALPHA_INDEX if scale.shape == (SCALE_VECTOR_SIZE,) else 0]


def _xla_gemm(a: jax.Array, b: jax.Array, alpha: jax.Array, layout: str, out_dtype: DTypeLike) -> jax.Array:
    contracting = (0 if layout == "tn" else 1,), (1 if layout == "nt" else 0,)
    y = lax.dot_general(a, b, (contracting, ((), ())), preferred_element_type=jnp.float32) * alpha
    if jnp.dtype(out_dtype) == jnp.bfloat16:
        y = lax.reduce_precision(y, 8, 7)  # XLA may drop the rounding of a cast, but not reduce_precision
    return y.astype(out_dtype)


def _kernel(a, b, left, right, out, *, tiling: GemmTiling, layout: str):
    block_m, block_n = tiling.cta_tile
    *tiles, num_k_steps = tiling.tile_counts(gemm_sizes(a.shape, b.shape, layout))
    alpha = _alpha_of(left) * _alpha_of(right)

    def tile_of(index):
        i, j = plgpu.planar_snake(index, tuple(tiles), 0 if tiling.grid_minor_dim == "m" else 1, tiling.grid_tile_width)
        rows, columns = pl.ds(i * block_m, block_m), pl.ds(j * block_n, block_n)
        a_tile = a.at[:, rows] if layout == "tn" else a.at[rows, :]
        b_tile = b.at[columns, :] if layout == "nt" else b.at[:, columns]
        return OutputTile(a_tile, b_tile, out.at[rows, columns], num_k_steps, alpha)

    persistent_gemm(tile_of, tiles[0] * tiles[1], (a, b, out), tiling=tiling, layout=layout)


Ref = Any  # a Mosaic GPU memory reference


class OutputTile(NamedTuple):
    """One output tile: refs to its slices of a, b and out, `first_k_step`, `num_k_steps` and alpha.

    With `num_k_steps == 0` (an expert without rows) the tile is written as zeros.
    """

    a: Ref
    b: Ref
    out: Ref
    num_k_steps: jax.Array | int
    alpha: jax.Array
    first_k_step: jax.Array | int = 0


def persistent_gemm(
    work_of: Callable[[jax.Array], OutputTile], count: int, arrays: Sequence[Ref], *, tiling: GemmTiling, layout: str,
) -> None:  # fmt: skip
    """Persistent loop over `count` output tiles, of which each CTA computes every `num_sms()`-th.

    The SMEM pipeline is not drained between tiles: the producer loads the next tile's operands while the consumers run
    this tile's epilogue. A stage is empty when both consumer warpgroups have read it.

    Args:
        work_of: Returns the output tile of an index.
        arrays: a, b and out, whole; only their dtypes and widths are read here.
    """
    a, b, out = arrays
    block_m, block_n = tiling.cta_tile
    transposed_a, transposed_b = layout == "tn", layout == "nt"
    shape_a = (tiling.block_k, block_m) if transposed_a else (block_m, tiling.block_k)
    shape_b = (block_n, tiling.block_k) if transposed_b else (tiling.block_k, block_n)
    operand_transforms = _transforms(tiling.block_k, jnp.bfloat16, a.shape[-1], b.shape[-1])
    out_transforms = _transforms(tiling.epilogue_n, out.dtype, out.shape[-1])
    num_epilogue_buffers = min(2, (tiling.warpgroup_m * tiling.warpgroup_n) // (tiling.epilogue_m * tiling.epilogue_n))

    @functools.partial(
        pl.run_scoped,
        a_smem=plgpu.SMEM((tiling.stages, *shape_a), a.dtype, transforms=operand_transforms),
        b_smem=plgpu.SMEM((tiling.stages, *shape_b), b.dtype, transforms=operand_transforms),
        out_smem=plgpu.SMEM(
            (2, num_epilogue_buffers, tiling.epilogue_m, tiling.epilogue_n), out.dtype, transforms=out_transforms
        ),
        full_barriers=plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages),  # TMA loads of a and b
        empty_barriers=plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages),  # consumer warpgroups
        collective_axes="warpgroup",
    )
    def _(a_smem, b_smem, out_smem, full_barriers, empty_barriers):
        warpgroup = lax.axis_index("warpgroup")

        def for_each_tile(visit):
            """Calls visit(tile, number of k steps of earlier tiles) for every output tile of this CTA."""
            block, blocks = lax.axis_index("block"), lax.axis_size("block")

            def run_tile(iteration, steps_done):
                tile = work_of(block + iteration * blocks)
                visit(tile, steps_done)
                return steps_done + tile.num_k_steps

            lax.fori_loop(0, lax.div(count - block + blocks - 1, blocks), run_tile, jnp.int32(0))

        def stage_of(step):
            return lax.rem(step, jnp.int32(tiling.stages))

        def producer():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def visit(tile, steps_done):
                @pl.loop(0, tile.num_k_steps)
                def _(k_step):
                    stage, k_range = (
                        stage_of(steps_done + k_step),
                        pl.ds((tile.first_k_step + k_step) * tiling.block_k, tiling.block_k),
                    )
                    plgpu.barrier_wait(empty_barriers.at[stage])
                    a_slice = tile.a.at[k_range, :] if transposed_a else tile.a.at[:, k_range]
                    b_slice = tile.b.at[:, k_range] if transposed_b else tile.b.at[k_range, :]
                    plgpu.copy_gmem_to_smem(a_slice, a_smem.at[stage], full_barriers.at[stage])
                    plgpu.copy_gmem_to_smem(b_slice, b_smem.at[stage], full_barriers.at[stage])

            for_each_tile(visit)
            for stage in range(tiling.stages):
                plgpu.barrier_wait(empty_barriers.at[stage])

        def consumer():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            rows = (
                pl.ds(warpgroup * tiling.warpgroup_m, tiling.warpgroup_m)
                if tiling.warpgroup_split_dim == "m"
                else slice(None)
            )
            columns = (
                pl.ds(warpgroup * tiling.warpgroup_n, tiling.warpgroup_n)
                if tiling.warpgroup_split_dim == "n"
                else slice(None)
            )
            for stage in range(tiling.stages):
                plgpu.barrier_arrive(empty_barriers.at[stage])

            def visit(tile, steps_done):
                @functools.partial(pl.run_scoped, acc=plgpu.ACC((tiling.warpgroup_m, tiling.warpgroup_n), jnp.float32))
                def _(acc):
                    @pl.loop(0, tile.num_k_steps)
                    def _(k_step):
                        stage = stage_of(steps_done + k_step)
                        plgpu.barrier_wait(full_barriers.at[stage])
                        a_stage, b_stage = a_smem.at[stage], b_smem.at[stage]
                        lhs = transpose_ref(a_stage.at[:, rows], (1, 0)) if transposed_a else a_stage.at[rows]
                        rhs = transpose_ref(b_stage.at[columns], (1, 0)) if transposed_b else b_stage.at[:, columns]
                        plgpu.wgmma(acc, lhs, rhs)
                        plgpu.wgmma_wait(tiling.max_wgmma_in_flight)

                        # A WGMMA in flight still reads its stage: release the stage of the last finished one.
                        @pl.when(k_step >= tiling.max_wgmma_in_flight)
                        def _():
                            plgpu.barrier_arrive(
                                empty_barriers.at[stage_of(steps_done + k_step - tiling.max_wgmma_in_flight)]
                            )

                    plgpu.wgmma_wait(0)

                    @pl.loop(lax.max(tile.num_k_steps - tiling.max_wgmma_in_flight, 0), tile.num_k_steps)
                    def _(k_step):
                        plgpu.barrier_arrive(empty_barriers.at[stage_of(steps_done + k_step)])

                    out_tile = tile.out.at[rows, columns]
                    _epilogue(acc[...], tile.alpha, out_smem, out_tile, warpgroup, tiling, out.dtype)

            for_each_tile(visit)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        lax.cond(warpgroup == 2, producer, consumer)


def _epilogue(acc, alpha, out_smem, out_tile, warpgroup, tiling: GemmTiling, dtype):
    """Multiplies the accumulator by alpha, rounds once and stores it through double-buffered tiles in SMEM."""
    result = (acc * alpha).astype(dtype)
    num_columns = tiling.warpgroup_n // tiling.epilogue_n
    num_epilogue_buffers = out_smem.shape[1]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # TMA stores of the previous tile still read the buffers
    for index in range((tiling.warpgroup_m // tiling.epilogue_m) * num_columns):
        i, j = divmod(index, num_columns)
        rows = slice(i * tiling.epilogue_m, (i + 1) * tiling.epilogue_m)
        columns = slice(j * tiling.epilogue_n, (j + 1) * tiling.epilogue_n)
        buffer = index % num_epilogue_buffers
        plgpu.wait_smem_to_gmem(num_epilogue_buffers - 1, wait_read_only=True)
        out_smem[warpgroup, buffer] = result[rows, columns]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[warpgroup, buffer], out_tile.at[rows, columns])


def _transforms(columns: int, dtype: DTypeLike, *widths: int) -> tuple[Any, ...]:
    """Returns the SMEM tiling and swizzle for tiles at least `columns` wide of arrays with rows of `widths`."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * size * 8)
    while any(width * size % swizzle for width in widths):
        swizzle //= 2
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)
