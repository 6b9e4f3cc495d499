"""MS-EDEN of 128-point Hadamard transforms, of an array [rows, columns], bf16 or float32 (`formats.Eden`).

    y = H x on runs of 128 down a column (axis -2) or along a row (-1), in float32: signs, then butterflies
    z = |y| / (s d),  q = nearest(z),  c = sum z^2 / sum z q over the run,  s' = a neighbour of s c on the grid of E4M3

x is the array itself, or the numbers of its `Forward` operand, whose blocks lie along the other axis: that is made anew
in registers, for q (s d) takes a scale that a carrier q s does not tell.

A lane has 16 rows of 4 columns, four lanes beside each other a tile of 16 x 16, and a warp eight tiles, one below the
other or side by side: a run of 128 for each of 16. So each lane's eight neighbours at a distance of 4 have the blocks
of its runs. Along a row lanes of a tile exchange first, until each has whole blocks of four rows.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from halfbyte.formats import E2M1, E4M3, TwoLevel
from halfbyte.kernels import arithmetic as q
from halfbyte.kernels import codes, layout
from halfbyte.kernels.blocks import (
    EXPONENT,
    ONE,
    Pair,
    PairRows,
    Quantizer,
    block_scales,
    both,
    floored,
    largest,
    nearest,
    ready,
    scaled,
    share_rows,
    signs,
)
from halfbyte.kernels.launch import Lanes, launch
from halfbyte.kernels.machine import MemoryMachine, Word, Words
from halfbyte.kernels.nvfp4 import Window
from halfbyte.kernels.place import BLOCK, WARPS, Place, place, programs
from halfbyte.kernels.rows import load_rows, store_rows
from halfbyte.kernels.scale import GEMM
from halfbyte.kernels.stacks import Layer

POINTS = 128
TILES = POINTS // BLOCK  # of a warp
LANES = Lanes(4, 4)  # 128 registers a lane
STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forward:
    """The forward operand whose numbers are transformed: its scales, their rule, and how elements are rounded."""

    scale: jax.Array
    rule: TwoLevel = dataclasses.field(metadata=STATIC)
    rounding: str = dataclasses.field(metadata=STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drawn:
    """How it is quantized: scales from `tensor_scale` under `rule`, random bits of `key`, uint32 [2]."""

    scale: jax.Array
    key: jax.Array | Layer
    rule: TwoLevel = dataclasses.field(metadata=STATIC)
    window: Window | None = None


def unsupported(rows: int, columns: int, *, axis: int) -> str | None:
    """Why these kernels cannot take runs along `axis` of an array [rows, columns], or None."""
    if (columns if axis == -1 else rows) % POINTS:
        return f"transforms of {POINTS} points along axis {axis} do not divide {rows} x {columns}"
    return f"tiles of {BLOCK} x {BLOCK} do not divide {rows} x {columns}" if rows % BLOCK or columns % BLOCK else None


@layout.once("axis")
def maxima(x: jax.Array | Layer, signs: jax.Array, *, axis: int, forward: Forward | None = None) -> jax.Array:
    """Maxima of |y|, int32 bits, one a warp; `signs` float32 [128]."""
    pass_ = _Pass(x, signs, axis, forward)

    def body(m: MemoryMachine) -> None:
        turned = pass_.transformed(m, pass_.place(m))
        codes.store_maxima(m, len(pass_.arrays), [q.amax_float(m, turned)])

    output = jax.ShapeDtypeStruct((pass_.programs * WARPS,), jnp.int32)
    return launch(body, pass_.arrays, [output], programs=pass_.programs, lanes=LANES, name=pass_.name("maxima"))[0]


@layout.once("axis", "packed")
def quantize(
    x: jax.Array | Layer, signs: jax.Array, drawn: Drawn, *, axis: int, forward: Forward | None = None,
    packed: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """The bf16 carrier as x lies, or, down columns, `packed` code bytes [rows / 2, columns] and scale bytes
    [rows / 16, columns].
    """
    pass_, window = _Pass(x, signs, axis, forward), drawn.window
    origin = [] if window is None else [window.origin]
    arrays = [*pass_.arrays, drawn.scale, drawn.key, *origin]
    scale_at, key_at, made_at = len(pass_.arrays), len(pass_.arrays) + 1, len(arrays)
    rows, columns = x.shape

    def body(m: MemoryMachine) -> None:
        at = pass_.place(m)
        turned = pass_.transformed(m, at)
        how = codes.quantizer(m, drawn.rule, "away", codes.Vector(scale_at), at)
        places = codes.Vector(key_at), codes.Vector(key_at + 1) if origin else None
        state = functools.partial(codes.random_state, m, *places, window)
        if axis == -1:
            _store_rows(m, made_at, at, turned, how, state)
            return
        made = _columns(m, turned, how, state(at)[0], packed)
        store_rows(m, made_at, at, made[: BLOCK // 2] if packed else made, 1 if packed else 2)
        if packed:
            store_rows(m, made_at + 1, at, made[BLOCK // 2 :], 1)

    outputs = [jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)]
    if packed:
        outputs = [jax.ShapeDtypeStruct((rows // n, columns), jnp.uint8) for n in (2, BLOCK)]
    return tuple(launch(body, arrays, outputs, programs=pass_.programs, lanes=LANES, name=pass_.name("quantize")))


class _Pass:
    """What both passes do: find their place, read x, make the forward operand's numbers, transform them."""

    def __init__(self, x: jax.Array | Layer, signs: jax.Array, axis: int, forward: Forward | None):
        layout.check(x)
        if reason := unsupported(*x.shape, axis=axis):
            raise ValueError(reason)
        self.shape, self.size, self.axis, self.forward = x.shape, x.dtype.itemsize, axis, forward
        factors = signs * jnp.float32(2.0**-3)  # 1 / sqrt(128), but for sqrt(1/2)
        self.arrays = [x, factors, *([] if forward is None else [forward.scale])]
        rows, columns = x.shape
        in_columns = rows // POINTS, -(-columns // (WARPS * BLOCK))
        self.grid = programs(rows, columns, LANES.columns) if axis == -1 else in_columns
        self.programs = self.grid[0] * self.grid[1]

    def name(self, what: str) -> str:
        return f"{what}_eden_{'rows' if self.axis == -1 else 'columns'}{'' if self.forward is None else '_again'}"

    def place(self, m: MemoryMachine) -> Place:
        rows, columns = self.shape
        if self.axis == -1:
            return place(m, rows, columns, self.grid)
        program, thread, across = m.program(), m.thread(), self.grid[1]
        first_token = m.imad(m.divide(program, across), POINTS, 0)
        first_column = m.imad(m.remainder(program, across), WARPS * BLOCK, 0)
        token = m.imad(m.shr(m.and_(thread, 31), 2), BLOCK, first_token)
        column = m.imad(m.and_(thread, 3), 4, m.imad(m.shr(thread, 5), BLOCK, first_column))
        inside = m.less(column, columns) if columns % (WARPS * BLOCK) else None
        return Place(rows, columns, token, column, inside, first_token, first_column, thread)

    def transformed(self, m: MemoryMachine, at: Place) -> list[list[Word]]:
        """y of the lane's 16 rows of 4 columns, float32."""
        words = load_rows(m, 0, at, self.size)
        rows: PairRows = words if self.size == 2 else q.float_pairs([[m.real(x) for x in row] for row in words])
        numbers = self._numbers(m, rows, at)
        lane = m.and_(at.thread, 31)
        if self.axis == -1:
            factors = [m.real(w) for w in m.load(m.address(1, m.imad(lane, 4, 0), 4), 4)]
            return [transform(m, row, factors, lane, (1, 2, 4, 8, 16)) for row in numbers]
        first = m.address(1, m.imad(m.shr(lane, 2), BLOCK, 0), 4)
        factors = [m.real(w) for i in range(0, BLOCK, 4) for w in m.load(first, 4, offset=4 * i)]
        columns = [transform(m, column, factors, lane, (4, 8, 16)) for column in zip(*numbers, strict=True)]
        return [list(row) for row in zip(*columns, strict=True)]

    def _numbers(self, m: MemoryMachine, rows: PairRows, at: Place) -> list[list[Word]]:
        if self.forward is None:
            return [[x for pair in row for x in both(m, pair)] for row in rows]
        how = codes.quantizer(m, self.forward.rule, self.forward.rounding, codes.Vector(2), at)
        owed = m.real(m.load(m.address(2, GEMM, 4))[0])  # d, or NaN where amax is not finite
        if self.axis != -1:
            encode, scale = q.row_scales(m, rows, how)
            steps = [m.fmul(m.low(s), owed) for s in scale]
            each = [(row, (e, e), (s, s)) for row, e, s in zip(rows, encode, steps, strict=True)]
            return [[x for pair in row for x in _stands_for(m, pair, e, s, how)] for row, e, s in each]
        columns: list[Sequence[Word]] = []
        for k in range(len(rows[0])):
            pairs = [row[k] for row in rows]
            _, values, encodes = q.column_scales(m, pairs, how)
            low, high = (m.fmul(value, owed) for value in values)
            columns += zip(*(_stands_for(m, pair, encodes, (low, high), how) for pair in pairs), strict=True)
        return [list(row) for row in zip(*columns, strict=True)]


def _stands_for(
    m: MemoryMachine, pair: Pair, encode: tuple[Word, Word], steps: tuple[Word, Word], how: Quantizer
) -> list[Word]:
    """Both numbers of a pair on the grid, times its steps s d."""
    grid = m.with_sign(q.round_pair(m, pair, encode, how), signs(m, pair))
    return [m.fmul(x, step) for x, step in zip(both(m, grid), steps, strict=True)]


def transform(m: MemoryMachine, values: Words, factors: Words, lane: Word, bits: Sequence[int]) -> list[Word]:
    """H of a run of which this lane has `values` and lanes whose numbers differ in `bits` have the rest."""
    v = [m.fmul(x, factor) for x, factor in zip(values, factors, strict=True)]
    for distance in (d for d in (1, 2, 4, 8) if d < len(v)):
        for i in (i for i in range(len(v)) if not i & distance):
            j = i | distance
            v[i], v[j] = m.fadd(v[i], v[j]), m.fsub(v[i], v[j])
    for bit in bits:  # the lane with the bit has b of (a + b, a - b)
        flip = m.real(m.or_(m.shl(m.and_(lane, bit), 32 - bit.bit_length()), ONE))
        v = [m.ffma(x, flip, m.real(m.swap(x, bit))) for x in v]
    return [m.fmul(x, 0.5**0.5) for x in v]


def settle(m: MemoryMachine, pairs: Sequence[Pair], how: Quantizer, uniforms: Words) -> tuple[list[Word], Word, Words]:
    """(grid pairs, E4M3 codes, values) of two blocks of this lane, each with the seven others of its run in lanes of
    the same place; `uniforms` in [0, 1), one a block.
    """
    _, values, steps = block_scales(m, largest(m, pairs), how, [])
    sides, drawn = [], []
    for side, value, step, uniform in zip(zip(*pairs, strict=True), values, steps, uniforms, strict=True):
        by = ready(m, step, how)
        z = [scaled(m, m.fabs(x), by, how) for x in side]
        rounded = [nearest(m, m.fmin(x, E2M1.max), "away") for x in z]
        square, cross = (_of_run(m, [m.fmul(a, b) for a, b in zip(z, other, strict=True)]) for other in (z, rounded))
        ratio = m.real(m.choose(m.fless(0.0, cross), m.fdiv(square, cross), ONE))
        drawn.append(_drawn(m, m.fmul(value, ratio), uniform))
        sides.append(rounded)
    grids = [m.pack_exact(low, high) for low, high in zip(*sides, strict=True)]
    made, kept = floored(m, (drawn[0], drawn[1]), how.rule.floor)
    return grids, made, kept


def _of_run(m: MemoryMachine, each: Words) -> Word:
    """The sum over a run: a block's in order, then its blocks in order."""
    total = functools.reduce(m.fadd, each)
    return functools.reduce(m.fadd, [m.real(m.from_tile(total, tile)) for tile in range(TILES)])


def _drawn(m: MemoryMachine, wanted: Word, uniform: Word) -> Word:
    """A neighbour of `wanted` among E4M3's values, by chance."""
    inside = m.fmin(wanted, E4M3.max)
    binade = m.fmax(m.real(m.and_(inside, EXPONENT)), E4M3.min_normal)
    gap = m.fmul(binade, 2.0**-E4M3.mantissa_bits)
    below = m.floor_grid(inside, m.fmul(gap, 2.0))
    up = m.fless(m.fmul(uniform, gap), m.fsub(wanted, below))
    return m.fmin(m.fadd(below, m.real(m.choose(up, gap, 0))), E4M3.max)


def _uniform(m: MemoryMachine, word: Word) -> Word:
    """Of 24 bits."""
    return m.fmul(m.number(word), 2.0**-24)


def _columns(m: MemoryMachine, turned: Sequence[Words], how: Quantizer, state: Words, packed: bool) -> list[list[Word]]:
    """`arithmetic.quantize_columns` by these scales: a block's three bytes are those of one random word."""
    k0, k1, index = state[:3]
    words = [q.random_word(m, m.iadd(index, column), k0, k1) for column in range(4)]
    uniforms = [_uniform(m, m.prmt(word, 0, 0x4012)) for word in words]
    made = []
    for k, pairs in enumerate(zip(*q.float_pairs(turned), strict=True)):
        grids, scale_codes, values = settle(m, pairs, how, uniforms[2 * k : 2 * k + 2])
        made.append((q.column_words(m, pairs, grids, m.pack_exact(*values), packed), scale_codes))
    return q.joined_columns(m, made, packed)


def _store_rows(m, array: int, at: Place, turned: Sequence[Words], how: Quantizer, state) -> None:
    """Writes carriers of blocks along rows. A lane has whole blocks of four rows, whose random bytes are those of three
    words.
    """
    part = m.and_(at.thread, 3)
    here = dataclasses.replace(at, token=m.imad(part, 4, at.token), column=m.imad(part, -4, at.column))
    k0, k1, index = state(here)[0][:3]
    words = [q.random_word(m, m.iadd(index, column), k0, k1) for column in range(3)]
    blocks = share_rows(m, q.float_pairs(turned), BLOCK // m.columns)
    for r in range(0, 4, 2):
        uniforms = [_uniform(m, _byte_of_each(m, words, r + i)) for i in range(2)]
        pairs = list(zip(*blocks[r : r + 2], strict=True))
        grids, _, values = settle(m, pairs, how, uniforms)
        scale = m.pack_exact(*values)
        carriers = [q.carrier_pair(m, pair, grid, scale) for pair, grid in zip(pairs, grids, strict=True)]
        for i, selector in enumerate((0x5410, 0x7632)):  # halves are rows
            row = [m.prmt(a, b, selector) for a, b in zip(carriers[::2], carriers[1::2], strict=True)]
            to = m.address(array, m.imad(m.iadd(here.token, r + i), at.width, here.column), 2)
            for half in (0, 4):
                m.store(to, row[half : half + 4], offset=4 * half, where=at.inside)


def _byte_of_each(m: MemoryMachine, words: Words, number: int) -> Word:
    """Byte `number` of each of three words, the first one's highest."""
    low = m.prmt(words[2], words[1], number | (4 + number) << 4)
    return m.and_(m.prmt(low, words[0], 0x0010 | (4 + number) << 8), 0x00FFFFFF)
