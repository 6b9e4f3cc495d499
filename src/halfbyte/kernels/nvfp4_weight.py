"""Quantization of a weight [k, n], float32 or bf16, once per step, to nearest, ties by `rounding`.

With one scale per 16x16 tile one bf16 carrier serves FPROP and DGRAD, because W and its transpose share codes and
scales; a weight that is all-gathered is packed instead. Blocks of 16 along an axis serve one of the two: along k (axis
-2) FPROP, along n (-1) DGRAD. With `deferred_alpha`, float32 [1], the kernels quantize the float32 product w
deferred_alpha: w may be a carrier, and deferred_alpha its tensor's decode scale.
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
WEIGHT_DTYPES = ("float32", "bfloat16")  # the dtypes of a weight that kernels read
WeightTransform = Callable[[LaneOps, TokenRows, KernelQuantizer], TokenRows]  # of 16 rows of float32


@triton_launch.jit_per_shape("tiling")
def weight_partial_amax(
    w: jax.Array | StackSlice, *, deferred_alpha: jax.Array | None = None, tiling: PassTiling = WEIGHT_TILING
) -> jax.Array:
    """Returns partial amaxes of w as int32 bits, one per program; `compute_tensor_scale` reduces them."""
    triton_launch.check_kernel_arrays(w)
    if not triton_launch.is_tileable(w.shape[1]):
        wide = [materialize_slice(w).astype(jnp.float32)]
        run = functools.partial(
            nvfp4_untiled.untiled_partial_amax, wide, lambda m, rows: [q.amax_f32(m, _as_f32(m, rows))], 1
        )
        return run(deferred_alpha=deferred_alpha, name="weight_maxima")[0]

    def body(m, rows, factors):
        return [[m.as_u32(q.amax_f32(m, q.apply_deferred_alpha_f32(m, rows, factors)))] * m.columns]

    def kernel(_, arrays, refs, __, tops):
        tiles = [arrays[0][r].astype(jnp.float32) for r in range(NVFP4_BLOCK)]
        factors = [ref[0] for ref in refs]
        (tile,) = emit_tile_body(body, tiles, factors, outputs=[jnp.int32], columns=tiling.columns)
        tops[0][0, 0] = jnp.max(tile)

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
    """Returns the bf16 carrier [k, n] of w for a vector of `compute_tensor_scale`: in tiles, or in blocks along an
    axis.
    """
    transform = _TRANSFORM_OF_AXIS[axis]
    name = "quantize_weight" + {None: "", -1: "_rows", -2: "_columns"}[axis]
    scalars = [scale] if deferred_alpha is None else [scale, deferred_alpha]
    return _quantize(w, scalars, [(NVFP4_BLOCK, jnp.bfloat16)], transform, (rule, rounding), tiling, name=name)[0]


_TRANSFORM_OF_AXIS: dict[int | None, WeightTransform] = {  # by the axis of blocks
    None: functools.partial(q.quantize_2d, packed=False),
    -1: lambda m, rows, quantizer: q.quantize_rows_to_bf16(m, q.float_pairs(rows), quantizer),
    -2: lambda m, rows, quantizer: q.quantize_columns_to_bf16(
        m, q.float_pairs(rows), quantizer, hadamard=False, packed=False
    ),
}


@triton_launch.jit_per_shape()
def pack_weight_kernel(w: jax.Array | StackSlice, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(uint8 codes [k / 2, n], two rows a byte; E4M3 scales [k / 16, n / 16]) of w."""
    outputs = [(NVFP4_BLOCK // 2, jnp.int8), (1, jnp.int8)]
    square = functools.partial(q.quantize_2d, packed=True)
    packed, scales = _quantize(w, [scale], outputs, square, (TWO_LEVEL, "rne"), WEIGHT_TILING, name="pack_weight")
    # [k / 16, n] -> [k / 16, n / 16]: the kernel repeats a tile's scale in each of its columns
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
    """Applies `transform` to w with `scalars` (its scale vector, and its deferred alpha if there is one), by a rule and
    a rounding.
    """
    rule, rounding = rule_and_rounding
    triton_launch.check_kernel_arrays(w)
    if not triton_launch.is_tileable(w.shape[1]):
        return nvfp4_untiled.quantize_weight_rows(
            materialize_slice(w).astype(jnp.float32), scalars, outputs, transform, rule, name=name, rounding=rounding
        )
    read = len(quantizer_entries(rule))

    def body(m, rows, given):
        return transform(
            m, q.apply_deferred_alpha_f32(m, rows, given[read:]), KernelQuantizer(rule, rounding, *given[:read])
        )

    def kernel(_, arrays, refs, out_refs, __):
        tiles = [arrays[0][r].astype(jnp.float32) for r in range(NVFP4_BLOCK)]
        given = [refs[0][entry] for entry in quantizer_entries(rule)] + [ref[0] for ref in refs[1:]]
        dtypes = [dtype for count, dtype in outputs for _ in range(count)]
        tiles = emit_tile_body(body, tiles, given, outputs=dtypes, columns=tiling.columns)
        places = [(ref, r) for ref, (count, _) in zip(out_refs, outputs, strict=True) for r in range(count)]
        for (ref, r), tile in zip(places, tiles, strict=True):
            ref[r] = tile

    return triton_launch.launch_tiled(kernel, [w], scalars, outputs=TiledOutputs(outputs), tiling=tiling, name=name)
