"""MXFP8 operands as a block-scaled GEMM reads them: one 8-bit code an element, and an E8M0 scale for 32 of them.

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
from halfbyte.kernels import layout
from halfbyte.kernels.blocks import largest, own_row_maxima, share_maxima
from halfbyte.kernels.gated import backward_made, forward_made
from halfbyte.kernels.launch import Lanes, launch
from halfbyte.kernels.machine import Machine, MemoryMachine, TokenRows, Where, Word, Words
from halfbyte.kernels.place import Place, place, programs, whole
from halfbyte.kernels.rows import joined, load_rows, store_rows
from halfbyte.kernels.scale_order import ScaleOrder

BLOCK = 32
ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2}
INFINITY = 0x7F800000


@dataclasses.dataclass(frozen=True)
class MxOperand:
    """One operand wanted: along features, or along tokens and transposed; `tensor` is which of those made."""

    along_tokens: bool
    order: ScaleOrder = ScaleOrder.PLAIN
    element: str = "e4m3"
    tensor: int = 0

    def outputs(self, tokens: int, width: int) -> list[jax.ShapeDtypeStruct]:
        """Of the codes and of the scales."""
        rows, summed = (width, whole(tokens, BLOCK)) if self.along_tokens else (tokens, whole(width, BLOCK))
        shapes = (rows, summed), self.order.shape(rows, summed // BLOCK)
        return [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes]


ROW, COLUMN = MxOperand(False), MxOperand(True)


def unsupported(tokens: int, columns: int, *, capability: tuple[int, int] | None = None) -> str | None:
    """Why these kernels cannot take a [tokens, columns] array, or None."""
    if tokens % BLOCK:
        return f"the MXFP8 kernels need a multiple of {BLOCK} tokens, got {tokens}"
    if capability is not None and capability < (8, 9):
        return f"the MXFP8 kernels need compute capability 8.9 or newer, got {capability[0]}.{capability[1]}"
    return layout.too_many(tokens, columns)


@layout.once("operands")
def quantize(x: jax.Array, *, operands: tuple[MxOperand, ...] = (ROW, COLUMN)) -> tuple[jax.Array, ...]:
    """(codes, scales), all uint8, of each of `operands` of x [tokens, features], bf16 or float32 (a weight).

    A row: [tokens, features] and [tokens, features / 32]; a column: [features, tokens] and [features, tokens / 32];
    tiled scales are flat. A row of a weight [k, n] serves DGRAD, a column FPROP.
    """
    columns = 4 if x.dtype == jnp.bfloat16 else 2
    return _run([x], lambda m, rows: [rows], operands, columns, "mxfp8")


@layout.once("operands")
def quantize_forward(
    g: jax.Array, u: jax.Array, *, operands: tuple[MxOperand, ...] = (ROW, COLUMN)
) -> tuple[jax.Array, ...]:
    """As `quantize`, of h = silu(g) u."""
    return _run([g, u], forward_made, operands, 2, "mxfp8_swiglu_forward")


@layout.once("operands")
def quantize_backward(
    g: jax.Array, u: jax.Array, dh: jax.Array, *, operands: tuple[MxOperand, ...]
) -> tuple[jax.Array, ...]:
    """As `quantize`; an operand's `tensor` 0 is dg, 1 is du, 2 is h."""
    return _run([g, u, dh], backward_made, operands, 2, "mxfp8_swiglu_backward")


def _run(
    arrays: Sequence[jax.Array],
    make: Callable[[Machine, TokenRows], Sequence[TokenRows]],
    operands: Sequence[MxOperand],
    columns: int,
    name: str,
) -> tuple[jax.Array, ...]:
    tokens, width = arrays[0].shape
    size = arrays[0].dtype.itemsize
    tiled = any(o.order is ScaleOrder.TILED for o in operands)
    grid = programs(tokens, width, columns, tiled=tiled, block=BLOCK)

    def body(m: MemoryMachine) -> None:
        at = place(m, tokens, width, grid, block=BLOCK)
        tensors = make(m, [row for i in range(len(arrays)) for row in load_rows(m, i, at, size)])
        for i, wanted in enumerate(operands):
            write = _write_columns if wanted.along_tokens else _write_rows
            rows = (BfloatRows if size == 2 else FloatRows)(m, tensors[wanted.tensor])
            write(m, len(arrays) + 2 * i, at, wanted, rows)

    outputs = [shape for o in operands for shape in o.outputs(tokens, width)]
    lanes = Lanes(columns, count=BLOCK // columns)
    return tuple(launch(body, arrays, outputs, programs=grid[0] * grid[1], lanes=lanes, name=name))


@dataclasses.dataclass(frozen=True)
class FloatRows:
    """The words of a lane's 32 rows, a float32 in each: their maxima and values."""

    m: MemoryMachine
    words: TokenRows

    def shared_tops(self) -> list[Word]:
        """The maxima of this lane's share of the rows, over all lanes of their blocks."""
        m = self.m
        tops = [m.bits(_largest(m, [m.real(w) for w in row])) for row in self.words]
        return share_maxima(m, tops, m.lanes, lambda a, b: m.fmax_nan(m.real(a), m.real(b)))

    def row(self, r: int) -> list[Word]:
        return [self.m.real(w) for w in self.words[r]]

    def column(self, c: int) -> tuple[Word, list[Word]]:
        """(the maximum, the values) of a column."""
        values = [self.m.real(row[c]) for row in self.words]
        return _largest(self.m, values), values


class BfloatRows(FloatRows):
    """The same with two bf16 in a word. Rows and columns are unpacked by different instructions: the compiler would
    share the results and keep all of them alive.
    """

    def shared_tops(self) -> list[Word]:
        own = own_row_maxima(self.m, self.words, self.m.lanes)
        return [half(word) for word in own for half in (self.m.low, self.m.high)]

    def row(self, r: int) -> list[Word]:
        return [half(w) for w in self.words[r] for half in (self.m.low, self.m.high)]

    def column(self, c: int) -> tuple[Word, list[Word]]:
        m, words = self.m, [row[c // 2] for row in self.words]
        top = largest(m, words)
        selector = 0x3244 if c % 2 else 0x1044
        return (m.high if c % 2 else m.low)(top), [m.real(m.prmt(w, 0, selector)) for w in words]


def _largest(m: MemoryMachine, values: Words) -> Word:
    return functools.reduce(m.fmax_nan, [m.fabs(v) for v in values])


def scale_code(m: MemoryMachine, top: Word, element: str) -> tuple[Word, Word]:
    """(E8M0 code of a block with amax `top`, code of its inverse): NaN is 255; a block with an infinity has 254."""
    kind = ELEMENTS[element]
    least, fraction = kind.max_exponent, int(np.float32(kind.max / 2.0**kind.max_exponent).view(np.uint32)) & 0x7FFFFF
    bits = m.bits(top)
    exponent = m.shr(bits, 23)
    # At the least scale the product is subnormal, and one number more is rounded down to it.
    at_least = m.xor(m.flag(m.less(exponent, least + 1)), m.flag(m.less(exponent, least)))
    up = m.flag(m.less(m.iadd(at_least, fraction), m.and_(bits, 0x7FFFFF)))
    code = m.iadd(m.larger(m.iadd(exponent, up), least), -least)
    nan, finite = m.flag(m.less(INFINITY, bits)), m.flag(m.less(bits, INFINITY))
    infinite = m.xor(m.or_(nan, finite), 1)
    code = m.imad(infinite, least - 1, code)
    return m.larger(code, m.imad(nan, 255, 0)), m.iadd(m.xor(code, 0xFFFFFFFF), 255)


def _encode(m: MemoryMachine, inverse: Word) -> Word:
    """The float32 power of two whose biased exponent is given."""
    return m.real(m.shl(inverse, 23))


def _write_rows(m: MemoryMachine, output: int, at: Place, wanted: MxOperand, rows: FloatRows) -> None:
    own = [scale_code(m, top, wanted.element) for top in rows.shared_tops()]
    inverses = joined(m, [inverse for _, inverse in own], 1)[0]  # four rows, or two, in the bytes of a word
    shared, words = [m.from_lane(inverses, lane) for lane in range(m.lanes)], []
    for r in range(BLOCK):
        lane, i = divmod(r, len(own))
        encode = _encode(m, m.and_(m.shr(shared[lane], 8 * i), 0xFF))
        words.append(_codes(m, [m.fmul(v, encode) for v in rows.row(r)], wanted.element))
    filled = dataclasses.replace(at, width=whole(at.width, BLOCK), inside=_inside_blocks(m, at))
    store_rows(m, output, filled, words, 1)
    blocks, tiled = whole(at.width, BLOCK) // BLOCK, wanted.order is ScaleOrder.TILED
    row = m.imad(m.and_(at.thread, m.lanes - 1), len(own), at.token)
    block = m.divide(at.column, BLOCK)
    begin = m.address(output + 1, wanted.order.index(m, row, block, blocks), 1)
    for i, (code, _) in enumerate(own):
        where = filled.inside
        if where is not None:
            where = m.less(block, wanted.order.extent(blocks, 4)) if tiled else _row_inside(m, at, row, i, where)
        m.store(begin, [code], offset=i * (16 if tiled else blocks), size=1, where=where)


def _row_inside(m: MemoryMachine, at: Place, row: Word, i: int, where: Where) -> Where:
    return where if at.tokens % BLOCK == 0 else m.both(where, m.less(m.iadd(row, i), at.tokens))


def _inside_blocks(m: MemoryMachine, at: Place) -> Where:
    """Whether the lane's columns lie in a block that the array begins."""
    return at.within(m, at.token, at.tokens, at.column, whole(at.width, BLOCK))


def _codes(m: MemoryMachine, values: Words, element: str) -> list[Word]:
    """Words of four codes each; the upper half of the last one is empty if there are two."""
    filled = [*values, *[0.0] * (-len(values) % 4)]
    return [m.f8_word(filled[i : i + 4], element) for i in range(0, len(filled), 4)]


def _write_columns(m: MemoryMachine, output: int, at: Place, wanted: MxOperand, rows: FloatRows) -> None:
    """A lane has all tokens of its columns' block: 32 bytes each."""
    tokens = whole(at.tokens, BLOCK)
    group, groups = m.divide(at.token, BLOCK), tokens // BLOCK
    tiled = wanted.order is ScaleOrder.TILED
    for c in range(m.columns):
        top, values = rows.column(c)
        code, inverse = scale_code(m, top, wanted.element)
        encode = _encode(m, inverse)
        words = _codes(m, [m.fmul(v, encode) for v in values], wanted.element)
        feature = m.iadd(at.column, c)
        inside = at.within(m, at.token, tokens, feature, at.width)
        target = m.address(output, m.imad(feature, tokens, at.token), 1)
        for k in range(0, len(words), 4):
            m.store(target, words[k : k + 4], offset=4 * k, where=inside)
        if tiled:
            inside = at.within(m, group, wanted.order.extent(groups, 4), feature, wanted.order.extent(at.width, 128))
        scale = m.address(output + 1, wanted.order.index(m, feature, group, groups), 1)
        m.store(scale, [code], size=1, where=inside)
