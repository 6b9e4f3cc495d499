"""SwiGLU fused into the quantize passes of the MLP, forward and backward: h, dg and du never reach memory.

    s = 1 / (1 + exp(-g)),   a = bf16(g s),   h = bf16(a u)
    du = bf16(dh a),   dg = bf16(bf16(dh u) (s (1 + g (1 - s))))

float32 arithmetic between the stated roundings.

How it works: the amax pass and the quantize pass both compute SwiGLU in registers. Forward: two reads of g and u, one
operand written. Backward: two reads of g, u and dh, five operands written. The amax pass of the forward direction can
also write g and u into the stacks of residuals, since it reads them anyway.

Bits: exp and the reciprocal are the GPU's approximations, a few units in the last place from XLA's. Both passes of one
tensor run the same code, so that scales and codes match. Equality with `reference` is therefore tested on the
quantizers' inputs: every operand equals `quantize_tiled` of the h, dg and du that the kernels compute, bit for bit.

Backward, registers decide: a lane keeps 48 words of g, u and dh. In tiles the pass took 799 us, as an untiled kernel of
five programs per SM, which leave 96 registers per lane, 689 us ([16384, 8192], H200). Six programs spill, and with four
too few warps hide the reads (docs/LOG.md, "Carriers without tiles").

g, u and dh may be GEMM outputs with a float32 deferred alpha each (`deferred_alpha`): the kernels then read
bf16(g * deferred_alpha), and so on. The tiled pass that writes block-dequantized operands does not support it.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from halfbyte.kernels import nvfp4_untiled, triton_launch
from halfbyte.kernels.lane_ops import LaneOps, TokenRows, Word, Words
from halfbyte.kernels.mosaic_launch import LaunchConfig, StackSlice
from halfbyte.kernels.nvfp4_tiled import (
    ColumnwiseOperand,
    RowwiseOperand,
    TileTransform,
    quantize_tiled_transform,
    tiled_partial_amax,
)
from halfbyte.kernels.triton_launch import NVFP4_BLOCK, PassTiling, emit_tile_body

FORWARD_TILING = PassTiling(4, 2)
BACKWARD_MAXIMA_TILING = PassTiling(2, 4)
# Lanes keep 48 words. Five programs per SM leave 96 registers, three leave 168 for a rule with two candidates.
BACKWARD_CODES, BACKWARD_CARRIERS, BACKWARD_CHOICES = LaunchConfig(2, 4), LaunchConfig(2, 5), LaunchConfig(2, 3)
H_FIRST_ORDER = (4, 0, 1, 2, 3)  # operand order of the backward pass: h first, whose registers are then free


def _gate(m: LaneOps, g_word: Word) -> tuple[list[Word], list[Word], Word]:
    """Returns g and sigmoid(g) of both halves, float32, and a = bf16(g sigmoid(g)) as a word."""
    g = [m.low_bf16(g_word), m.high_bf16(g_word)]
    s = [m.sigmoid(x) for x in g]
    return g, s, m.pack_round(*(m.fmul(x, y) for x, y in zip(g, s, strict=True)))


def swiglu_forward_row(m: LaneOps, g: Words, u: Words) -> list[Word]:
    """Returns h of one token row."""
    return [m.mul_bf16x2(_gate(m, a)[2], b) for a, b in zip(g, u, strict=True)]


def swiglu_backward_row(m: LaneOps, g: Words, u: Words, dh: Words) -> tuple[list[Word], ...]:
    """Returns dg, du and h of one token row."""
    dg, du, h = [], [], []
    for g_word, u_word, dh_word in zip(g, u, dh, strict=True):
        gate, s, a = _gate(m, g_word)
        da = m.mul_bf16x2(dh_word, u_word)
        slopes = [m.fmul(y, m.ffma(x, m.fsub(1.0, y), 1.0)) for x, y in zip(gate, s, strict=True)]
        dg.append(m.pack_round(m.fmul(m.low_bf16(da), slopes[0]), m.fmul(m.high_bf16(da), slopes[1])))
        du.append(m.mul_bf16x2(dh_word, a))
        h.append(m.mul_bf16x2(a, u_word))
    return dg, du, h


def swiglu_forward_tile(m: LaneOps, words: TokenRows) -> list[list[list[Word]]]:
    """Returns [h]. `words` are the token rows of g, then of u."""
    count = len(words) // 2
    return [[swiglu_forward_row(m, words[r], words[count + r]) for r in range(count)]]


def swiglu_backward_tile(m: LaneOps, words: TokenRows) -> list[list[list[Word]]]:
    """Returns [dg, du, h]. `words` are the token rows of g, of u, then of dh."""
    count = len(words) // 3
    rows = [swiglu_backward_row(m, words[r], words[count + r], words[2 * count + r]) for r in range(count)]
    return [[row[i] for row in rows] for i in range(3)]


SWIGLU_FORWARD = TileTransform(swiglu_forward_tile, 1)


def _swiglu_tile_producer(tiling: PassTiling) -> Callable[[list[jax.Array]], list[list[jax.Array]]]:
    """Returns a function from the tiles of g and u to [tiles of h]."""

    def body(m, words, _):
        return swiglu_forward_tile(m, words)[0]

    def make(tiles: list[jax.Array]) -> list[list[jax.Array]]:
        return [emit_tile_body(body, tiles, [], outputs=[jnp.bfloat16] * NVFP4_BLOCK, columns=tiling.columns)]

    return make


def swiglu_forward_amax(
    g: jax.Array,
    u: jax.Array,
    *,
    deferred_alpha: jax.Array | None = None,
    hadamard: bool = True,
    stack_slices: Sequence[StackSlice] = (),
    tiling: PassTiling = FORWARD_TILING,
) -> tuple[jax.Array, ...]:
    """Returns partial amaxes of h, and of its transform along tokens if `hadamard`, as `partial_amax`.

    With `stack_slices`, one of a stack for g and one for u, g and u are written there; the stacks are the last results.
    """
    run = functools.partial(
        tiled_partial_amax,
        [g, u],
        SWIGLU_FORWARD,
        deferred_alpha=deferred_alpha,
        hadamard=hadamard,
        stack_slices=stack_slices,
    )
    return run(tiling=tiling, name="swiglu_forward_maxima")


def swiglu_quantize_forward(
    g: jax.Array,
    u: jax.Array,
    *,
    deferred_alpha: jax.Array | None = None,
    rows: RowwiseOperand | None = None,
    columns: ColumnwiseOperand | None = None,
    tiling: PassTiling = FORWARD_TILING,
) -> tuple[jax.Array, ...]:
    """Returns the operands of h, from one read of g and u, as `quantize_tiled`."""
    jobs: list[tuple[RowwiseOperand | ColumnwiseOperand, int]] = [
        (side, 0) for side in (rows, columns) if side is not None
    ]
    if nvfp4_untiled.wants_codes([side for side, _ in jobs]) or not triton_launch.is_tileable(g.shape[1]):
        triton_launch.check_kernel_arrays(g, u)
        run = functools.partial(nvfp4_untiled.quantize_untiled, name="swiglu_forward_codes")
        return run([g, u], swiglu_forward_tile, jobs, lanes=LaunchConfig(4, 4), deferred_alpha=deferred_alpha)
    if deferred_alpha is not None:
        raise ValueError("the pass that writes carriers in tiles reads what owes nothing; multiply g and u first")
    return quantize_tiled_transform([g, u], _swiglu_tile_producer(tiling), jobs, tiling=tiling, name="swiglu_forward")


def swiglu_backward_amax(
    g: jax.Array | StackSlice,
    u: jax.Array | StackSlice,
    dh: jax.Array,
    *,
    deferred_alpha: jax.Array | None = None,
    hadamard: bool = True,
    tensors: int = 2,
    tiling: PassTiling = BACKWARD_MAXIMA_TILING,
) -> tuple[jax.Array, ...]:
    """Returns partial amaxes of dg and du, with `tensors=3` also of h; each then its transform's if `hadamard`."""
    run = functools.partial(
        tiled_partial_amax,
        [g, u, dh],
        TileTransform(swiglu_backward_tile, tensors),
        deferred_alpha=deferred_alpha,
        hadamard=hadamard,
    )
    return run(tiling=tiling, name="swiglu_backward_maxima")


def swiglu_quantize_backward(
    g: jax.Array | StackSlice,
    u: jax.Array | StackSlice,
    dh: jax.Array,
    *,
    deferred_alpha: jax.Array | None = None,
    dg: tuple[RowwiseOperand, ColumnwiseOperand],
    du: tuple[RowwiseOperand, ColumnwiseOperand],
    h: ColumnwiseOperand,
) -> tuple[jax.Array, ...]:
    """Returns five operands from one read of g, u and dh: rowwise and columnwise dg, the same of du, columnwise h.

    Each is as `quantize_tiled` returns it.
    """
    triton_launch.check_kernel_arrays(g, u, dh)
    jobs: list[tuple[RowwiseOperand | ColumnwiseOperand, int]] = [
        (dg[0], 0),
        (dg[1], 0),
        (du[0], 1),
        (du[1], 1),
        (h, 2),
    ]
    sides = [side for side, _ in jobs]
    name = "swiglu_backward_codes" if nvfp4_untiled.wants_codes(sides) else "swiglu_backward"
    run = functools.partial(
        nvfp4_untiled.quantize_untiled, [g, u, dh], swiglu_backward_tile, jobs, order=H_FIRST_ORDER, name=name
    )
    return run(lanes=_backward_lanes(sides), deferred_alpha=deferred_alpha)


def _backward_lanes(sides: Sequence[RowwiseOperand | ColumnwiseOperand]) -> LaunchConfig:
    if nvfp4_untiled.wants_codes(sides):
        return BACKWARD_CODES
    return BACKWARD_CHOICES if any(side.rule.has_candidates for side in sides) else BACKWARD_CARRIERS
