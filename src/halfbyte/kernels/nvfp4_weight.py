"""Quantize passes of a weight [k, n], float32 or bf16, to NVFP4; elements are rounded to nearest, ties by `rounding`.

    pass 1  `weight_partial_amax`     per-tensor scale from the partial amaxes
    pass 2  `quantize_weight_kernel`  block-dequantized bf16 [k, n], in 16x16 tiles or in blocks along one axis
            `pack_weight_kernel`      codes and scales of 16x16 tiles, for a weight that is all-gathered

Why 16x16 tiles: W and its transpose then share codes and scales, so one bf16 array serves fprop and dgrad, and both
GEMMs multiply the same weight. Blocks of 16 along an axis serve one GEMM each: along k (axis -2) fprop, along n (-1)
dgrad. The kernels read the float32 master weight itself, a layer of a stack in place (`StackSlice`), so no bf16 copy is
written. At [16384, 8192] the pass runs at the bandwidth of a copy (1.00; H200, docs/speed.md).

How it works: a lane holds 16 rows of its columns, as in `nvfp4_tiled.py`. A tile's amax is the lane's own over the
rows, then shuffles over the lanes of the block; one block scale serves all 256 elements. Elements stay float32 until
they are rounded to E2M1.

How it differs: Transformer Engine's JAX modules cast the weight to bf16 first (docs/numerics.md) and store codes; here
the emulated GEMM reads one bf16 array in both directions. In a loop over layers the backward pass quantizes the master
weight once more instead of saving the operand as a residual.

With `deferred_alpha`, float32 [1], the kernels quantize the float32 product w * deferred_alpha: w may be
block-dequantized, and deferred_alpha its tensor's decode scale.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from halfbyte.formats import TwoLevelScale
from halfbyte.formats.scale_rules import TWO_LEVEL
from halfbyte.kernels import nvfp4_arithmetic as q
from halfbyte.kernels import nvfp4_untiled, triton_launch
from halfbyte.kernels.block_scales import KernelQuantizer
from halfbyte.kernels.lane_ops import LaneOps, TokenRows, Word
from halfbyte.kernels.mosaic_launch import StackSlice, materialize_slice
from halfbyte.kernels.tensor_scale_kernel import quantizer_entries
from halfbyte.kernels.triton_launch import NVFP4_BLOCK, PassTiling, TiledOutputs, emit_tile_body

WEIGHT_TILING = PassTiling(4, 4)
WEIGHT_DTYPES = ("float32", "bfloat16")  # weight dtypes that the kernels read
WeightTransform = Callable[
    [LaneOps, TokenRows, KernelQuantizer], TokenRows
]  # (lane ops, 16 float32 rows, quantizer) -> output rows


@triton_launch.jit_per_shape("tiling")
def weight_partial_amax(
    w: jax.Array | StackSlice, *, deferred_alpha: jax.Array | None = None, tiling: PassTiling = WEIGHT_TILING
) -> jax.Array:
    """Returns partial amaxes of w, int32 bits of float32, one per program; `compute_tensor_scale` reduces them."""
    triton_launch.check_kernel_arrays(w)
    if not triton_launch.is_tileable(w.shape[1]):
        arrays_f32 = [materialize_slice(w).astype(jnp.float32)]
        run = functools.partial(
            nvfp4_untiled.untiled_partial_amax, arrays_f32, lambda m, rows: [q.amax_f32(m, _as_f32(m, rows))], 1
        )
        return run(deferred_alpha=deferred_alpha, name="weight_maxima")[0]

    def body(m, rows, alphas):
        return [[m.as_u32(q.amax_f32(m, q.apply_deferred_alpha_f32(m, rows, alphas)))] * m.columns]

    def kernel(_, arrays, refs, __, amax_refs):
        tiles = [arrays[0][r].astype(jnp.float32) for r in range(NVFP4_BLOCK)]
        alphas = [ref[0] for ref in refs]
        (tile,) = emit_tile_body(body, tiles, alphas, outputs=[jnp.int32], columns=tiling.columns)
        amax_refs[0][0, 0] = jnp.max(tile)

    scalars = [] if deferred_alpha is None else [deferred_alpha]
    return triton_launch.launch_tiled(
        kernel, [w], scalars, outputs=TiledOutputs(num_amaxes=1), tiling=tiling, name="weight_maxima"
    )[0]


def _as_f32(m: LaneOps, rows: TokenRows) -> list[list[Word]]:
    return [[m.as_f32(x) for x in row] for row in rows]


@triton_launch.jit_per_shape("axis", "rule", "rounding", "tiling")
def quantize_weight_kernel(
    w: jax.Array | StackSlice,
    scale: jax.Array,
    *,
    axis: int | None = None,
    rule: TwoLevelScale = TWO_LEVEL,
    rounding: str = "rne",
    deferred_alpha: jax.Array | None = None,
    tiling: PassTiling = WEIGHT_TILING,
) -> jax.Array:
    """Returns w block-dequantized, bf16 [k, n], in 16x16 tiles (`axis` None) or in blocks along `axis`.

    `scale` is the vector of `compute_tensor_scale`.
    """
    transform = _TRANSFORM_OF_AXIS[axis]
    name = "quantize_weight" + {None: "", -1: "_rows", -2: "_columns"}[axis]
    scalars = [scale] if deferred_alpha is None else [scale, deferred_alpha]
    return _quantize(w, scalars, [(NVFP4_BLOCK, jnp.bfloat16)], transform, (rule, rounding), tiling, name=name)[0]


_TRANSFORM_OF_AXIS: dict[int | None, WeightTransform] = {  # key: the axis of the blocks
    None: functools.partial(q.quantize_2d, packed=False),
    -1: lambda m, rows, quantizer: q.quantize_rows_to_bf16(m, q.float_pairs(rows), quantizer),
    -2: lambda m, rows, quantizer: q.quantize_columns_to_bf16(
        m, q.float_pairs(rows), quantizer, hadamard=False, packed=False
    ),
}


@triton_launch.jit_per_shape()
def pack_weight_kernel(w: jax.Array | StackSlice, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (uint8 codes [k / 2, n], two rows per byte; E4M3 scales [k / 16, n / 16]) of w in 16x16 tiles."""
    outputs = [(NVFP4_BLOCK // 2, jnp.int8), (1, jnp.int8)]
    transform = functools.partial(q.quantize_2d, packed=True)
    packed, scales = _quantize(w, [scale], outputs, transform, (TWO_LEVEL, "rne"), WEIGHT_TILING, name="pack_weight")
    # [k / 16, n] -> [k / 16, n / 16]: the kernel writes a tile's scale once per column
    return lax.bitcast_convert_type(packed, jnp.uint8), lax.bitcast_convert_type(scales[:, ::NVFP4_BLOCK], jnp.uint8)


def _quantize(
    w: jax.Array | StackSlice,
    scalars: Sequence[jax.Array],
    outputs: Sequence[tuple[int, DTypeLike]],
    transform: WeightTransform,
    rule_and_rounding: tuple[TwoLevelScale, str],
    tiling: PassTiling,
    *,
    name: str,
) -> list[jax.Array]:
    """Applies `transform` to every 16 rows of w; `scalars` are its scale vector and, if any, its deferred alpha."""
    rule, rounding = rule_and_rounding
    triton_launch.check_kernel_arrays(w)
    if not triton_launch.is_tileable(w.shape[1]):
        return nvfp4_untiled.quantize_weight_rows(
            materialize_slice(w).astype(jnp.float32), scalars, outputs, transform, rule, name=name, rounding=rounding
        )
    num_entries = len(quantizer_entries(rule))

    def body(m, rows, numbers):
        return transform(
            m,
            q.apply_deferred_alpha_f32(m, rows, numbers[num_entries:]),
            KernelQuantizer(rule, rounding, *numbers[:num_entries]),
        )

    def kernel(_, arrays, refs, out_refs, __):
        tiles = [arrays[0][r].astype(jnp.float32) for r in range(NVFP4_BLOCK)]
        numbers = [refs[0][entry] for entry in quantizer_entries(rule)] + [ref[0] for ref in refs[1:]]
        dtypes = [dtype for count, dtype in outputs for _ in range(count)]
        tiles = emit_tile_body(body, tiles, numbers, outputs=dtypes, columns=tiling.columns)
        output_rows = [(ref, r) for ref, (count, _) in zip(out_refs, outputs, strict=True) for r in range(count)]
        for (ref, r), tile in zip(output_rows, tiles, strict=True):
            ref[r] = tile

    return triton_launch.launch_tiled(kernel, [w], scalars, outputs=TiledOutputs(outputs), tiling=tiling, name=name)
