"""MXFP8 operands as a block-scaled GEMM reads them: one 8-bit code per element, and one E8M0 scale per 32 elements.

    e    = the least power of two under which no element of the block saturates (Transformer Engine's rule)
    code = f8_rne_saturating(x / e)

There is no per-tensor scale, so there is no amax pass: one read writes the rowwise operand, the transposed columnwise
one, or both. A warp owns 32 tokens, so that a lane has all tokens of a column's block, 32 bytes that it stores at once.
Row scales are computed as in NVFP4: the lanes of a block split the rows and read each other's results.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte.formats import E4M3, E5M2
from halfbyte.kernels import triton_launch
from halfbyte.kernels.block_scales import lane_row_amax, pair_amax, reduce_amax_across_lanes
from halfbyte.kernels.lane_ops import LaneMask, LaneMemoryOps, LaneOps, TokenRows, Word, Words
from halfbyte.kernels.mosaic_launch import LaunchConfig, launch_flat
from halfbyte.kernels.packed_codes import ScaleLayout
from halfbyte.kernels.row_access import (
    LanePosition,
    lane_position,
    load_rows,
    pack_units,
    program_grid,
    round_up,
    store_rows,
)
from halfbyte.kernels.swiglu_quantize import swiglu_backward_tile, swiglu_forward_tile

MX_BLOCK = 32
MX_ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2}
INFINITY = 0x7F800000


@dataclasses.dataclass(frozen=True)
class MxOperandSpec:
    """One operand: blocks along features, or along tokens and transposed. `tensor` indexes the computed tensors."""

    along_tokens: bool
    order: ScaleLayout = ScaleLayout.PLAIN
    element: str = "e4m3"
    tensor: int = 0

    def outputs(self, tokens: int, width: int) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the codes and of the scales."""
        rows, k = (width, round_up(tokens, MX_BLOCK)) if self.along_tokens else (tokens, round_up(width, MX_BLOCK))
        shapes = (rows, k), self.order.shape(rows, k // MX_BLOCK)
        return [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes]


ROW, COLUMN = MxOperandSpec(False), MxOperandSpec(True)


def unsupported_mxfp8(tokens: int, columns: int, *, capability: tuple[int, int] | None = None) -> str | None:
    """Returns why the MXFP8 kernels do not support a [tokens, columns] array, or None."""
    if tokens % MX_BLOCK:
        return f"the MXFP8 kernels need a multiple of {MX_BLOCK} tokens, got {tokens}"
    if capability is not None and capability < (8, 9):
        return f"the MXFP8 kernels need compute capability 8.9 or newer, got {capability[0]}.{capability[1]}"
    return triton_launch.index_range_refusal(tokens, columns)


@triton_launch.jit_per_shape("operands")
def quantize_mxfp8(x: jax.Array, *, operands: tuple[MxOperandSpec, ...] = (ROW, COLUMN)) -> tuple[jax.Array, ...]:
    """Returns (codes, scales), uint8, of each of `operands` of x [tokens, features], bf16 or float32 (a weight).

    ROW: [tokens, features] and [tokens, features / 32]; COLUMN: [features, tokens] and [features, tokens / 32]; tiled
    scales are flat. ROW of a weight [k, n] serves dgrad, COLUMN fprop.
    """
    columns = 4 if x.dtype == jnp.bfloat16 else 2
    return _run([x], lambda m, rows: [rows], operands, columns, "mxfp8")


@triton_launch.jit_per_shape("operands")
def quantize_swiglu_mxfp8(
    g: jax.Array, u: jax.Array, *, operands: tuple[MxOperandSpec, ...] = (ROW, COLUMN)
) -> tuple[jax.Array, ...]:
    """Returns the operands of h = silu(g) u, as `quantize_mxfp8`."""
    return _run([g, u], swiglu_forward_tile, operands, 2, "mxfp8_swiglu_forward")


@triton_launch.jit_per_shape("operands")
def quantize_swiglu_backward_mxfp8(
    g: jax.Array, u: jax.Array, dh: jax.Array, *, operands: tuple[MxOperandSpec, ...]
) -> tuple[jax.Array, ...]:
    """Returns the operands of dg (`tensor` 0), du (1) and h (2), as `quantize_mxfp8`."""
    return _run([g, u, dh], swiglu_backward_tile, operands, 2, "mxfp8_swiglu_backward")


def _run(
    arrays: Sequence[jax.Array],
    make: Callable[[LaneOps, TokenRows], Sequence[TokenRows]],
    operands: Sequence[MxOperandSpec],
    columns: int,
    name: str,
) -> tuple[jax.Array, ...]:
    tokens, width = arrays[0].shape
    size = arrays[0].dtype.itemsize
    tiled = any(o.order is ScaleLayout.TILED for o in operands)
    grid = program_grid(tokens, width, columns, tiled=tiled, block=MX_BLOCK)

    def body(m: LaneMemoryOps) -> None:
        pos = lane_position(m, tokens, width, grid, block=MX_BLOCK)
        tensors = make(m, [row for i in range(len(arrays)) for row in load_rows(m, i, pos, size)])
        for i, spec in enumerate(operands):
            write = _write_columns if spec.along_tokens else _write_rows
            rows = (Bfloat16Rows if size == 2 else Float32Rows)(m, tensors[spec.tensor])
            write(m, len(arrays) + 2 * i, pos, spec, rows)

    outputs = [shape for o in operands for shape in o.outputs(tokens, width)]
    lanes = LaunchConfig(columns, lanes_per_block=MX_BLOCK // columns)
    return tuple(launch_flat(body, arrays, outputs, programs=grid[0] * grid[1], lanes=lanes, name=name))


@dataclasses.dataclass(frozen=True)
class Float32Rows:
    """The words of a lane's 32 rows, one float32 per word: their amaxes and values."""

    m: LaneMemoryOps
    words: TokenRows

    def block_amaxes(self) -> list[Word]:
        """Returns the amaxes of this lane's share of the rows, reduced over the lanes of their blocks."""
        m = self.m
        row_amaxes = [m.as_u32(_amax(m, [m.as_f32(w) for w in row])) for row in self.words]
        return reduce_amax_across_lanes(m, row_amaxes, m.lanes, lambda a, b: m.fmax_nan(m.as_f32(a), m.as_f32(b)))

    def row(self, r: int) -> list[Word]:
        return [self.m.as_f32(w) for w in self.words[r]]

    def column(self, c: int) -> tuple[Word, list[Word]]:
        """Returns (amax, values) of a column."""
        values = [self.m.as_f32(row[c]) for row in self.words]
        return _amax(self.m, values), values


class Bfloat16Rows(Float32Rows):
    """`Float32Rows` with two bf16 per word. Rows and columns are unpacked by different instructions: ptxas would share
    the results and keep all of them alive.
    """

    def block_amaxes(self) -> list[Word]:
        pairs = lane_row_amax(self.m, self.words, self.m.lanes)
        return [half(word) for word in pairs for half in (self.m.low_bf16, self.m.high_bf16)]

    def row(self, r: int) -> list[Word]:
        return [half(w) for w in self.words[r] for half in (self.m.low_bf16, self.m.high_bf16)]

    def column(self, c: int) -> tuple[Word, list[Word]]:
        m, words = self.m, [row[c // 2] for row in self.words]
        amax = pair_amax(m, words)
        selector = 0x3244 if c % 2 else 0x1044
        return (m.high_bf16 if c % 2 else m.low_bf16)(amax), [m.as_f32(m.prmt(w, 0, selector)) for w in words]


def _amax(m: LaneMemoryOps, values: Words) -> Word:
    return functools.reduce(m.fmax_nan, [m.fabs(v) for v in values])


def e8m0_scale_code(m: LaneMemoryOps, top: Word, element: str) -> tuple[Word, Word]:
    """Returns (E8M0 code of a block with amax `top`, code of its inverse); 255 for NaN, 254 for an infinity."""
    kind = MX_ELEMENTS[element]
    least, fraction = kind.max_exponent, int(np.float32(kind.max / 2.0**kind.max_exponent).view(np.uint32)) & 0x7FFFFF
    bits = m.as_u32(top)
    exponent = m.shr(bits, 23)
    # At the smallest scale the product is subnormal, and one more amax is rounded down to it.
    at_least = m.xor(m.predicate_to_u32(m.less(exponent, least + 1)), m.predicate_to_u32(m.less(exponent, least)))
    up = m.predicate_to_u32(m.less(m.iadd(at_least, fraction), m.and_(bits, 0x7FFFFF)))
    code = m.iadd(m.u32_max(m.iadd(exponent, up), least), -least)
    nan, finite = m.predicate_to_u32(m.less(INFINITY, bits)), m.predicate_to_u32(m.less(bits, INFINITY))
    infinite = m.xor(m.or_(nan, finite), 1)
    code = m.imad(infinite, least - 1, code)
    return m.u32_max(code, m.imad(nan, 255, 0)), m.iadd(m.xor(code, 0xFFFFFFFF), 255)


def _encode(m: LaneMemoryOps, inverse: Word) -> Word:
    """Returns the float32 power of two with this biased exponent."""
    return m.as_f32(m.shl(inverse, 23))


def _write_rows(m: LaneMemoryOps, output: int, pos: LanePosition, spec: MxOperandSpec, rows: Float32Rows) -> None:
    scale_codes = [e8m0_scale_code(m, top, spec.element) for top in rows.block_amaxes()]
    inverses = pack_units(m, [inverse for _, inverse in scale_codes], 1)[0]  # four rows, or two, in the bytes of a word
    shared, words = [m.shuffle_index(inverses, lane) for lane in range(m.lanes)], []
    for r in range(MX_BLOCK):
        lane, i = divmod(r, len(scale_codes))
        encode = _encode(m, m.and_(m.shr(shared[lane], 8 * i), 0xFF))
        words.append(_codes(m, [m.fmul(v, encode) for v in rows.row(r)], spec.element))
    padded_pos = dataclasses.replace(pos, width=round_up(pos.width, MX_BLOCK), in_bounds=_columns_in_bounds(m, pos))
    store_rows(m, output, padded_pos, words, 1)
    blocks, tiled = round_up(pos.width, MX_BLOCK) // MX_BLOCK, spec.order is ScaleLayout.TILED
    row = m.imad(m.and_(pos.thread, m.lanes - 1), len(scale_codes), pos.token)
    block = m.u32_div_const(pos.column, MX_BLOCK)
    base = m.address(output + 1, spec.order.index(m, row, block, blocks), 1)
    for i, (code, _) in enumerate(scale_codes):
        where = padded_pos.in_bounds
        if where is not None:
            where = m.less(block, spec.order.padded_size(blocks, 4)) if tiled else _row_inside(m, pos, row, i, where)
        m.store(base, [code], offset=i * (16 if tiled else blocks), size=1, where=where)


def _row_inside(m: LaneMemoryOps, pos: LanePosition, row: Word, i: int, where: LaneMask) -> LaneMask:
    return where if pos.tokens % MX_BLOCK == 0 else m.logical_and(where, m.less(m.iadd(row, i), pos.tokens))


def _columns_in_bounds(m: LaneMemoryOps, pos: LanePosition) -> LaneMask:
    """Returns the mask of lanes whose columns are in a block that begins in the array."""
    return pos.in_bounds_of(m, pos.token, pos.tokens, pos.column, round_up(pos.width, MX_BLOCK))


def _codes(m: LaneMemoryOps, values: Words, element: str) -> list[Word]:
    """Encodes values, four per word; two values leave the upper half of the word zero."""
    padded = [*values, *[0.0] * (-len(values) % 4)]
    return [m.f8_word(padded[i : i + 4], element) for i in range(0, len(padded), 4)]


def _write_columns(m: LaneMemoryOps, output: int, pos: LanePosition, spec: MxOperandSpec, rows: Float32Rows) -> None:
    """Stores the columns of a lane, which has all tokens of their block: 32 bytes per column."""
    tokens = round_up(pos.tokens, MX_BLOCK)
    group, groups = m.u32_div_const(pos.token, MX_BLOCK), tokens // MX_BLOCK
    tiled = spec.order is ScaleLayout.TILED
    for c in range(m.columns):
        amax, values = rows.column(c)
        code, inverse = e8m0_scale_code(m, amax, spec.element)
        encode = _encode(m, inverse)
        words = _codes(m, [m.fmul(v, encode) for v in values], spec.element)
        feature = m.iadd(pos.column, c)
        in_bounds = pos.in_bounds_of(m, pos.token, tokens, feature, pos.width)
        target = m.address(output, m.imad(feature, tokens, pos.token), 1)
        for k in range(0, len(words), 4):
            m.store(target, words[k : k + 4], offset=4 * k, where=in_bounds)
        if tiled:
            in_bounds = pos.in_bounds_of(
                m, group, spec.order.padded_size(groups, 4), feature, spec.order.padded_size(pos.width, 128)
            )
        scale = m.address(output + 1, spec.order.index(m, feature, group, groups), 1)
        m.store(scale, [code], size=1, where=in_bounds)
