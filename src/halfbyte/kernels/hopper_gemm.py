"""bf16 GEMM for Hopper (Mosaic GPU) whose float32 accumulator is multiplied by a device scalar before its one rounding.

    out = round(alpha * (A . B)),   alpha = left * right

cuBLAS takes alpha from the host only, so XLA either writes a float32 result and reads it back to scale it, or takes a
slower GEMM. Here alpha costs one multiply an element in the epilogue. Three layouts serve the three GEMMs of a linear,
none of which moves its operands first:

    "nn"  FPROP  x [m, k]   w [k, n]
    "nt"  DGRAD  dy [m, k]  w [n, k]
    "tn"  WGRAD  x [k, m]   dy [k, n]

One producer warpgroup loads shared memory through TMA, two consumer warpgroups multiply. The kernel is persistent: one
CTA per SM loops over output tiles in a snake, so that neighbours share operands in L2. Where tiles do not divide a
size, TMA reads zeros beyond the array's end and writes nothing there. It moves rows in chunks of 128, 64 or 32 bytes,
the largest that divides them.
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
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # registers of a thread, of the 65,536 that three warpgroups share
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
    """m, n, k of a product; raises if the shapes do not match."""
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
    """Why the GEMM kernel cannot serve, or None."""
    if capability is not None and capability[0] != 9:
        return f"the GEMM kernel is written for compute capability 9.0, got {capability[0]}.{capability[1]}"
    tiling = default_tiling(layout, m, n, k, out_dtype)
    for name, size, least in zip("mnk", (m, n, k), (*tiling.cta_tile, tiling.block_k), strict=True):
        if size % ALIGNMENT:
            return f"the GEMM kernel needs {name} to be a multiple of {ALIGNMENT}, got {size}"
        if size < least:
            return f"the GEMM kernel needs {name} to be at least {least}, got {size}"
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
    """alpha * (A . B) in `out_dtype` (bfloat16 or float32), rounded once; alpha = left * right in float32.

    a and b are bf16. left and right are float32 scalars on the device, or the vectors of `compute_tensor_scale`, whose
    alpha is taken: NaN for a non-finite operand. Interpreted, XLA computes the same, on any device.
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
        kernel_name="gemm",  # by which halfbyte.hlo finds it in compiled programs
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return run(a, b, left.reshape(-1), right.reshape(-1))


def _alpha_of(scale: Any) -> Any:
    """Returns the GEMM's alpha from a scalar or a vector of `compute_tensor_scale` (an array or a ref)."""
    if scale.shape == ():
        return scale
    return scale[GEMM_ALPHA_INDEX if scale.shape == (SCALE_VECTOR_SIZE,) else 0]


def _xla_gemm(a: jax.Array, b: jax.Array, alpha: jax.Array, layout: str, out_dtype: DTypeLike) -> jax.Array:
    summed = (0 if layout == "tn" else 1,), (1 if layout == "nt" else 0,)
    y = lax.dot_general(a, b, (summed, ((), ())), preferred_element_type=jnp.float32) * alpha
    if jnp.dtype(out_dtype) == jnp.bfloat16:
        y = lax.reduce_precision(y, 8, 7)  # a rounding that XLA does not remove
    return y.astype(out_dtype)


def _kernel(a, b, left, right, out, *, tiling: GemmTiling, layout: str):
    block_m, block_n = tiling.cta_tile
    *tiles, num_k_steps = tiling.tile_counts(gemm_sizes(a.shape, b.shape, layout))
    alpha = _alpha_of(left) * _alpha_of(right)

    def work(index):
        i, j = plgpu.planar_snake(index, tuple(tiles), 0 if tiling.grid_minor_dim == "m" else 1, tiling.grid_tile_width)
        rows, columns = pl.ds(i * block_m, block_m), pl.ds(j * block_n, block_n)
        a_tile = a.at[:, rows] if layout == "tn" else a.at[rows, :]
        b_tile = b.at[columns, :] if layout == "nt" else b.at[:, columns]
        return OutputTile(a_tile, b_tile, out.at[rows, columns], num_k_steps, alpha)

    persistent_gemm(work, tiles[0] * tiles[1], (a, b, out), tiling=tiling, layout=layout)


Ref = Any  # a view of memory, as Mosaic GPU hands it to a body


class OutputTile(NamedTuple):
    """One output tile: refs to its slices of a, b and out, `num_k_steps` from `first_k_step` on, and alpha. With
    `num_k_steps == 0` (an expert without rows) the tile is written as zeros."""

    a: Ref
    b: Ref
    out: Ref
    num_k_steps: jax.Array | int
    alpha: jax.Array
    first_k_step: jax.Array | int = 0


def persistent_gemm(
    work_of: Callable[[jax.Array], OutputTile], count: int, arrays: Sequence[Ref], *, tiling: GemmTiling, layout: str,
) -> None:  # fmt: skip
    """Loops over the `count` output tiles, each CTA over every `num_sms()`-th; `work_of(index)` returns the tile. Of
    `arrays` (a, b and out, whole) only dtypes and widths are read here.

    The pipeline of shared memory is not drained between tiles: the producer loads the next tile's operands while the
    consumers run this tile's epilogue. A stage is empty again when both consumer warpgroups have read it.
    """
    a, b, out = arrays
    block_m, block_n = tiling.cta_tile
    transposed_a, transposed_b = layout == "tn", layout == "nt"
    shape_a = (tiling.block_k, block_m) if transposed_a else (block_m, tiling.block_k)
    shape_b = (block_n, tiling.block_k) if transposed_b else (tiling.block_k, block_n)
    in_order = _transforms(tiling.block_k, jnp.bfloat16, a.shape[-1], b.shape[-1])
    out_order = _transforms(tiling.epilogue_n, out.dtype, out.shape[-1])
    num_epilogue_buffers = min(2, (tiling.warpgroup_m * tiling.warpgroup_n) // (tiling.epilogue_m * tiling.epilogue_n))

    @functools.partial(
        pl.run_scoped,
        a_smem=plgpu.SMEM((tiling.stages, *shape_a), a.dtype, transforms=in_order),
        b_smem=plgpu.SMEM((tiling.stages, *shape_b), b.dtype, transforms=in_order),
        out_smem=plgpu.SMEM(
            (2, num_epilogue_buffers, tiling.epilogue_m, tiling.epilogue_n), out.dtype, transforms=out_order
        ),
        full_barriers=plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages),  # copies of a and of b
        empty_barriers=plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages),  # warpgroups that multiply
        collective_axes="warpgroup",
    )
    def _(a_smem, b_smem, out_smem, full_barriers, empty_barriers):
        warpgroup = lax.axis_index("warpgroup")

        def tiles(visit):
            """Calls visit(work, k steps before it) for every output tile of this CTA."""
            block, blocks = lax.axis_index("block"), lax.axis_size("block")

            def one(iteration, before):
                work = work_of(block + iteration * blocks)
                visit(work, before)
                return before + work.num_k_steps

            lax.fori_loop(0, lax.div(count - block + blocks - 1, blocks), one, jnp.int32(0))

        def stage_of(step):
            return lax.rem(step, jnp.int32(tiling.stages))

        def producer():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def visit(work, before):
                @pl.loop(0, work.num_k_steps)
                def _(k_step):
                    stage, along = (
                        stage_of(before + k_step),
                        pl.ds((work.first_k_step + k_step) * tiling.block_k, tiling.block_k),
                    )
                    plgpu.barrier_wait(empty_barriers.at[stage])
                    part_a = work.a.at[along, :] if transposed_a else work.a.at[:, along]
                    part_b = work.b.at[:, along] if transposed_b else work.b.at[along, :]
                    plgpu.copy_gmem_to_smem(part_a, a_smem.at[stage], full_barriers.at[stage])
                    plgpu.copy_gmem_to_smem(part_b, b_smem.at[stage], full_barriers.at[stage])

            tiles(visit)
            for stage in range(tiling.stages):
                plgpu.barrier_wait(empty_barriers.at[stage])

        def consumer():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            own_m = (
                pl.ds(warpgroup * tiling.warpgroup_m, tiling.warpgroup_m)
                if tiling.warpgroup_split_dim == "m"
                else slice(None)
            )
            own_n = (
                pl.ds(warpgroup * tiling.warpgroup_n, tiling.warpgroup_n)
                if tiling.warpgroup_split_dim == "n"
                else slice(None)
            )
            for stage in range(tiling.stages):
                plgpu.barrier_arrive(empty_barriers.at[stage])

            def visit(work, before):
                @functools.partial(pl.run_scoped, acc=plgpu.ACC((tiling.warpgroup_m, tiling.warpgroup_n), jnp.float32))
                def _(acc):
                    @pl.loop(0, work.num_k_steps)
                    def _(k_step):
                        stage = stage_of(before + k_step)
                        plgpu.barrier_wait(full_barriers.at[stage])
                        tile_a, tile_b = a_smem.at[stage], b_smem.at[stage]
                        lhs = transpose_ref(tile_a.at[:, own_m], (1, 0)) if transposed_a else tile_a.at[own_m]
                        rhs = transpose_ref(tile_b.at[own_n], (1, 0)) if transposed_b else tile_b.at[:, own_n]
                        plgpu.wgmma(acc, lhs, rhs)
                        plgpu.wgmma_wait(tiling.max_wgmma_in_flight)

                        @pl.when(k_step >= tiling.max_wgmma_in_flight)
                        def _():
                            plgpu.barrier_arrive(
                                empty_barriers.at[stage_of(before + k_step - tiling.max_wgmma_in_flight)]
                            )

                    plgpu.wgmma_wait(0)

                    @pl.loop(lax.max(work.num_k_steps - tiling.max_wgmma_in_flight, 0), work.num_k_steps)
                    def _(k_step):
                        plgpu.barrier_arrive(empty_barriers.at[stage_of(before + k_step)])

                    target = work.out.at[own_m, own_n]
                    _epilogue(acc[...], work.alpha, out_smem, target, warpgroup, tiling, out.dtype)

            tiles(visit)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        lax.cond(warpgroup == 2, producer, consumer)


def _epilogue(acc, alpha, out_smem, target, warpgroup, tiling: GemmTiling, dtype):
    """Scales and rounds the accumulator once, and stores it in small tiles through two buffers of shared memory."""
    result = (acc * alpha).astype(dtype)
    across = tiling.warpgroup_n // tiling.epilogue_n
    num_epilogue_buffers = out_smem.shape[1]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for index in range((tiling.warpgroup_m // tiling.epilogue_m) * across):
        i, j = divmod(index, across)
        rows = slice(i * tiling.epilogue_m, (i + 1) * tiling.epilogue_m)
        columns = slice(j * tiling.epilogue_n, (j + 1) * tiling.epilogue_n)
        place = index % num_epilogue_buffers
        plgpu.wait_smem_to_gmem(num_epilogue_buffers - 1, wait_read_only=True)
        out_smem[warpgroup, place] = result[rows, columns]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[warpgroup, place], target.at[rows, columns])


def _transforms(columns: int, dtype: DTypeLike, *widths: int) -> tuple[Any, ...]:
    """The swizzled order of shared memory for tiles at least `columns` wide of arrays with rows of `widths`."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * size * 8)
    while any(width * size % swizzle for width in widths):
        swizzle //= 2
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)
