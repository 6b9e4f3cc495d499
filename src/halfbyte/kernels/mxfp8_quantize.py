"""MXFP8 operands as a block-scaled GEMM reads them: one 8-bit code per element, and an E8M0 scale for 32 of them.

    e    = the least power of two under which no element of the block saturates (Transformer Engine's rule)
    code = f8_rne_saturating(x / e)

There is no scale of the tensor, so there is no pass for its maxima: one read gives rows, columns transposed, or both.
A warp owns 32 tokens, so that a lane has all tokens of a column's block, 32 bytes that it writes at once. A row's
scale is found as in NVFP4: the lanes of a block split the rows, and read each other's results.
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
    """One operand: along features, or along tokens and transposed; `tensor` is its index among those computed."""

    along_tokens: bool
    order: ScaleLayout = ScaleLayout.PLAIN
    element: str = "e4m3"
    tensor: int = 0

    def outputs(self, tokens: int, width: int) -> list[jax.ShapeDtypeStruct]:
        """Of the codes and of the scales."""
        rows, summed = (width, round_up(tokens, MX_BLOCK)) if self.along_tokens else (tokens, round_up(width, MX_BLOCK))
        shapes = (rows, summed), self.order.shape(rows, summed // MX_BLOCK)
        return [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes]


ROW, COLUMN = MxOperandSpec(False), MxOperandSpec(True)


def unsupported_mxfp8(tokens: int, columns: int, *, capability: tuple[int, int] | None = None) -> str | None:
    """Why these kernels cannot take a [tokens, columns] array, or None."""
    if tokens % MX_BLOCK:
        return f"the MXFP8 kernels need a multiple of {MX_BLOCK} tokens, got {tokens}"
    if capability is not None and capability < (8, 9):
        return f"the MXFP8 kernels need compute capability 8.9 or newer, got {capability[0]}.{capability[1]}"
    return triton_launch.index_range_refusal(tokens, columns)


@triton_launch.jit_per_shape("operands")
def quantize_mxfp8(x: jax.Array, *, operands: tuple[MxOperandSpec, ...] = (ROW, COLUMN)) -> tuple[jax.Array, ...]:
    """(codes, scales), all uint8, of each of `operands` of x [tokens, features], bf16 or float32 (a weight).

    A row: [tokens, features] and [tokens, features / 32]; a column: [features, tokens] and [features, tokens / 32];
    tiled scales are flat. A row of a weight [k, n] serves DGRAD, a column FPROP.
    """
    columns = 4 if x.dtype == jnp.bfloat16 else 2
    return _run([x], lambda m, rows: [rows], operands, columns, "mxfp8")


@triton_launch.jit_per_shape("operands")
def quantize_swiglu_mxfp8(
    g: jax.Array, u: jax.Array, *, operands: tuple[MxOperandSpec, ...] = (ROW, COLUMN)
) -> tuple[jax.Array, ...]:
    """As `quantize_mxfp8`, of h = silu(g) u."""
    return _run([g, u], swiglu_forward_tile, operands, 2, "mxfp8_swiglu_forward")


@triton_launch.jit_per_shape("operands")
def quantize_swiglu_backward_mxfp8(
    g: jax.Array, u: jax.Array, dh: jax.Array, *, operands: tuple[MxOperandSpec, ...]
) -> tuple[jax.Array, ...]:
    """As `quantize_mxfp8`; an operand's `tensor` 0 is dg, 1 is du, 2 is h."""
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
        at = lane_position(m, tokens, width, grid, block=MX_BLOCK)
        tensors = make(m, [row for i in range(len(arrays)) for row in load_rows(m, i, at, size)])
        for i, wanted in enumerate(operands):
            write = _write_columns if wanted.along_tokens else _write_rows
            rows = (Bfloat16Rows if size == 2 else Float32Rows)(m, tensors[wanted.tensor])
            write(m, len(arrays) + 2 * i, at, wanted, rows)

    outputs = [shape for o in operands for shape in o.outputs(tokens, width)]
    lanes = LaunchConfig(columns, lanes_per_block=MX_BLOCK // columns)
    return tuple(launch_flat(body, arrays, outputs, programs=grid[0] * grid[1], lanes=lanes, name=name))


@dataclasses.dataclass(frozen=True)
class Float32Rows:
    """The words of a lane's 32 rows, a float32 in each: their maxima and values."""

    m: LaneMemoryOps
    words: TokenRows

    def block_amaxes(self) -> list[Word]:
        """The maxima of this lane's share of the rows, over all lanes of their blocks."""
        m = self.m
        tops = [m.as_u32(_largest(m, [m.as_f32(w) for w in row])) for row in self.words]
        return reduce_amax_across_lanes(m, tops, m.lanes, lambda a, b: m.fmax_nan(m.as_f32(a), m.as_f32(b)))

    def row(self, r: int) -> list[Word]:
        return [self.m.as_f32(w) for w in self.words[r]]

    def column(self, c: int) -> tuple[Word, list[Word]]:
        """(the maximum, the values) of a column."""
        values = [self.m.as_f32(row[c]) for row in self.words]
        return _largest(self.m, values), values


class Bfloat16Rows(Float32Rows):
    """The same with two bf16 in a word. Rows and columns are unpacked by different instructions: the compiler would
    share the results and keep all of them alive.
    """

    def block_amaxes(self) -> list[Word]:
        own = lane_row_amax(self.m, self.words, self.m.lanes)
        return [half(word) for word in own for half in (self.m.low_bf16, self.m.high_bf16)]

    def row(self, r: int) -> list[Word]:
        return [half(w) for w in self.words[r] for half in (self.m.low_bf16, self.m.high_bf16)]

    def column(self, c: int) -> tuple[Word, list[Word]]:
        m, words = self.m, [row[c // 2] for row in self.words]
        top = pair_amax(m, words)
        selector = 0x3244 if c % 2 else 0x1044
        return (m.high_bf16 if c % 2 else m.low_bf16)(top), [m.as_f32(m.prmt(w, 0, selector)) for w in words]


def _largest(m: LaneMemoryOps, values: Words) -> Word:
    return functools.reduce(m.fmax_nan, [m.fabs(v) for v in values])


def e8m0_scale_code(m: LaneMemoryOps, top: Word, element: str) -> tuple[Word, Word]:
    """(E8M0 code of a block with amax `top`, code of its inverse): NaN is 255; a block with an infinity has 254."""
    kind = MX_ELEMENTS[element]
    least, fraction = kind.max_exponent, int(np.float32(kind.max / 2.0**kind.max_exponent).view(np.uint32)) & 0x7FFFFF
    bits = m.as_u32(top)
    exponent = m.shr(bits, 23)
    # At the least scale the product is subnormal, and one number more is rounded down to it.
    at_least = m.xor(m.predicate_to_u32(m.less(exponent, least + 1)), m.predicate_to_u32(m.less(exponent, least)))
    up = m.predicate_to_u32(m.less(m.iadd(at_least, fraction), m.and_(bits, 0x7FFFFF)))
    code = m.iadd(m.u32_max(m.iadd(exponent, up), least), -least)
    nan, finite = m.predicate_to_u32(m.less(INFINITY, bits)), m.predicate_to_u32(m.less(bits, INFINITY))
    infinite = m.xor(m.or_(nan, finite), 1)
    code = m.imad(infinite, least - 1, code)
    return m.u32_max(code, m.imad(nan, 255, 0)), m.iadd(m.xor(code, 0xFFFFFFFF), 255)


def _encode(m: LaneMemoryOps, inverse: Word) -> Word:
    """The float32 power of two whose biased exponent is given."""
    return m.as_f32(m.shl(inverse, 23))


def _write_rows(m: LaneMemoryOps, output: int, at: LanePosition, wanted: MxOperandSpec, rows: Float32Rows) -> None:
    own = [e8m0_scale_code(m, top, wanted.element) for top in rows.block_amaxes()]
    inverses = pack_units(m, [inverse for _, inverse in own], 1)[0]  # four rows, or two, in the bytes of a word
    shared, words = [m.shuffle_index(inverses, lane) for lane in range(m.lanes)], []
    for r in range(MX_BLOCK):
        lane, i = divmod(r, len(own))
        encode = _encode(m, m.and_(m.shr(shared[lane], 8 * i), 0xFF))
        words.append(_codes(m, [m.fmul(v, encode) for v in rows.row(r)], wanted.element))
    filled = dataclasses.replace(at, width=round_up(at.width, MX_BLOCK), in_bounds=_columns_in_bounds(m, at))
    store_rows(m, output, filled, words, 1)
    blocks, tiled = round_up(at.width, MX_BLOCK) // MX_BLOCK, wanted.order is ScaleLayout.TILED
    row = m.imad(m.and_(at.thread, m.lanes - 1), len(own), at.token)
    block = m.u32_div_const(at.column, MX_BLOCK)
    begin = m.address(output + 1, wanted.order.index(m, row, block, blocks), 1)
    for i, (code, _) in enumerate(own):
        where = filled.in_bounds
        if where is not None:
            where = m.less(block, wanted.order.padded_size(blocks, 4)) if tiled else _row_inside(m, at, row, i, where)
        m.store(begin, [code], offset=i * (16 if tiled else blocks), size=1, where=where)


def _row_inside(m: LaneMemoryOps, at: LanePosition, row: Word, i: int, where: LaneMask) -> LaneMask:
    return where if at.tokens % MX_BLOCK == 0 else m.logical_and(where, m.less(m.iadd(row, i), at.tokens))


def _columns_in_bounds(m: LaneMemoryOps, at: LanePosition) -> LaneMask:
    """Whether the lane's columns lie in a block that the array begins."""
    return at.in_bounds_of(m, at.token, at.tokens, at.column, round_up(at.width, MX_BLOCK))


def _codes(m: LaneMemoryOps, values: Words, element: str) -> list[Word]:
    """Words of four codes each; the upper half of the last one is empty if there are two."""
    filled = [*values, *[0.0] * (-len(values) % 4)]
    return [m.f8_word(filled[i : i + 4], element) for i in range(0, len(filled), 4)]


def _write_columns(m: LaneMemoryOps, output: int, at: LanePosition, wanted: MxOperandSpec, rows: Float32Rows) -> None:
    """A lane has all tokens of its columns' block: 32 bytes each."""
    tokens = round_up(at.tokens, MX_BLOCK)
    group, groups = m.u32_div_const(at.token, MX_BLOCK), tokens // MX_BLOCK
    tiled = wanted.order is ScaleLayout.TILED
    for c in range(m.columns):
        top, values = rows.column(c)
        code, inverse = e8m0_scale_code(m, top, wanted.element)
        encode = _encode(m, inverse)
        words = _codes(m, [m.fmul(v, encode) for v in values], wanted.element)
        feature = m.iadd(at.column, c)
        inside = at.in_bounds_of(m, at.token, tokens, feature, at.width)
        target = m.address(output, m.imad(feature, tokens, at.token), 1)
        for k in range(0, len(words), 4):
            m.store(target, words[k : k + 4], offset=4 * k, where=inside)
        if tiled:
            inside = at.in_bounds_of(
                m, group, wanted.order.padded_size(groups, 4), feature, wanted.order.padded_size(at.width, 128)
            )
        scale = m.address(output + 1, wanted.order.index(m, feature, group, groups), 1)
        m.store(scale, [code], size=1, where=inside)
