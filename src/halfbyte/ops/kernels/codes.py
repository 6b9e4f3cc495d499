"""Operands as block-scaled tensor cores read them: packed E2M1 codes with the contraction last, and E4M3 scales.

A warp owns 16 tokens of 32 x `columns` features, a program four such warps, one above the other: 64 tokens. Rows go to
memory as they are made. Columns are transposed: each lane has 16 tokens, 8 bytes, of each of its columns, and the four
warps' bytes of one column meet in shared memory, so that 32 bytes of it are written at once, and four scales as a word.

Edges are masked: any width, and a multiple of 16 tokens. A width that is no multiple of 16 ends in a block filled up
with zeros, so that packed rows have ceil(width / 16) * 8 bytes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from halfbyte.formats.noise import ROUNDS
from halfbyte.formats.tiling import ROWS
from halfbyte.ops.kernels import arithmetic as q
from halfbyte.ops.kernels import nibbles
from halfbyte.ops.kernels.launch import launch
from halfbyte.ops.kernels.memory import SHARED
from halfbyte.ops.kernels.scale import DECODE, MULT
from halfbyte.ops.kernels.scale_order import ScaleOrder

BLOCK = 16
WARPS = 4
TOKENS = BLOCK * WARPS  # of a program
WARP_STRIDE = 72  # words from one warp's columns to the next one's: no two lanes of a transfer share a bank


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a lane stands in an array [tokens, width]: its warp's first token, its own first column."""

    tokens: int
    width: int
    token: Any
    column: Any
    inside: Any  # whether both lie in the array; None where all do
    first_token: Any  # of the program
    first_column: Any
    thread: Any

    @property
    def packed_width(self) -> int:
        """Bytes of a packed row."""
        return -(-self.width // BLOCK) * BLOCK // 2


def programs(tokens: int, width: int, columns: int, *, tiled: bool) -> tuple[int, int]:
    """Programs down and across an array; tiles of scales are filled up with zeros, by programs of their own."""
    whole = ROWS if tiled else 1
    covered = [-(-size // whole) * whole for size in (tokens, width)]
    return -(-covered[0] // TOKENS), -(-covered[1] // (32 * columns))


def place(m: Any, tokens: int, width: int, grid: tuple[int, int]) -> Place:
    down, across = grid
    program, thread = m.program(), m.thread()
    first_token = m.imad(m.divide(program, across), TOKENS, 0)
    first_column = m.imad(m.remainder(program, across), 32 * m.columns, 0)
    token = m.imad(m.shr(thread, 5), BLOCK, first_token)
    column = m.imad(m.and_(thread, 31), m.columns, first_column)
    exact = down * TOKENS == tokens and across * 32 * m.columns == width
    inside = None if exact else m.both(m.less(token, tokens), m.less(column, width))
    return Place(tokens, width, token, column, inside, first_token, first_column, thread)


def load_rows(m: Any, array: int, at: Place, words: int, size: int) -> list[list[Any]]:
    """16 rows of a lane's columns: bf16 pairs (`size` 2) or float32 (`size` 4); zero outside."""
    begin = m.address(array, m.imad(at.token, at.width, at.column), size)
    row = at.width * size
    if at.width % m.columns == 0:
        return [m.load(begin, words, offset=r * row, where=at.inside) for r in range(BLOCK)]
    inside = [m.both(at.inside, m.less(m.iadd(at.column, c), at.width)) for c in range(m.columns)]
    rows = []
    for r in range(BLOCK):
        units = [m.load(begin, offset=r * row + c * size, size=size, where=w)[0] for c, w in enumerate(inside)]
        rows.append(
            units if size == 4 else [m.prmt(a, b, 0x5410) for a, b in zip(units[::2], units[1::2], strict=True)]
        )
    return rows


def store_rows(
    m: Any, codes: int, scales: int, at: Place, order: ScaleOrder, made: tuple[list[Any], list[Any]]
) -> None:
    """Packed bytes of 16 rows, and the scales of this lane's share of them."""
    bytes_of, own = made
    blocks, share = at.packed_width // 8, 2 * len(own)
    inside = _also(m, at, at.token, at.tokens, at.column, 16 * blocks)
    begin = m.address(codes, m.imad(at.token, at.packed_width, m.shr(at.column, 1)), 1)
    for r, word in enumerate(bytes_of):
        m.store(begin, [word], offset=r * at.packed_width, size=m.columns // 2, where=inside)
    lane = m.and_(at.thread, 16 // m.columns - 1)
    row, block = m.imad(lane, share, at.token), m.shr(at.column, 4)
    tiled = order is ScaleOrder.TILED
    if tiled:
        inside = None if at.inside is None else m.less(block, order.extent(blocks, 4))
    begin = m.address(scales, order.index(m, row, block, blocks), 1)
    for i in range(share):
        word = own[i // 2] if i % 2 == 0 else m.shr(own[i // 2], 8)
        m.store(begin, [word], offset=i * (16 if tiled else blocks), size=1, where=inside)


def _also(m: Any, at: Place, row: Any, rows: int, column: Any, columns: int) -> Any:
    """Whether (row, column) lies in [rows, columns]; None where every lane's does."""
    return None if at.inside is None else m.both(m.less(row, rows), m.less(column, columns))


def store_columns(
    m: Any, codes: int, scales: int, at: Place, order: ScaleOrder, made: tuple[list[list[Any]], Any]
) -> None:
    """Packed tokens of each column and its scales, transposed through shared memory."""
    words, scale_word = made
    start = m.share(len(words) * WARPS * WARP_STRIDE * 4)
    scale_start = m.share(WARPS * 32 * 4)
    warp, lane = m.shr(at.thread, 5), m.and_(at.thread, 31)
    mine = m.address(SHARED, m.imad(warp, WARP_STRIDE, m.shl(lane, 1)), 4)
    for c, pair in enumerate(words):
        m.store(mine, pair, offset=start + c * WARPS * WARP_STRIDE * 4)
    m.store(m.address(SHARED, at.thread, 4), [scale_word], offset=scale_start)
    m.barrier()
    for turn in range(len(words) // 2):
        _store_codes(m, codes, at, start, turn)
    _store_scales(m, scales, at, order, scale_start)


def _store_codes(m: Any, codes: int, at: Place, start: int, turn: int) -> None:
    """16 bytes of a column a lane: the tokens of two warps. Two lanes write the 32 bytes of a column."""
    part, found = m.and_(at.thread, 1), m.shr(at.thread, 1)  # 64 columns a turn
    number, lane = m.iadd(m.shr(found, 5), 2 * turn), m.and_(found, 31)
    shared = m.imad(number, WARPS * WARP_STRIDE, m.imad(part, 2 * WARP_STRIDE, m.shl(lane, 1)))
    source = m.address(SHARED, shared, 4)
    words = [w for k in range(2) for w in m.load(source, 2, offset=start + k * WARP_STRIDE * 4)]
    feature = m.iadd(m.imad(lane, m.columns, at.first_column), number)
    token = m.imad(part, 2 * BLOCK, at.first_token)
    target = m.address(codes, m.imad(feature, at.tokens // 2, m.shr(token, 1)), 1)
    if at.tokens % (2 * BLOCK) == 0:
        m.store(target, words, where=_also(m, at, token, at.tokens, feature, at.width))
        return
    for k in range(2):
        inside = _also(m, at, m.iadd(token, k * BLOCK), at.tokens, feature, at.width)
        m.store(target, words[2 * k : 2 * k + 2], offset=8 * k, where=inside)


def _store_scales(m: Any, scales: int, at: Place, order: ScaleOrder, start: int) -> None:
    """The four scales of a column, one from each warp, a lane each."""
    number, lane = m.shr(at.thread, 5), m.and_(at.thread, 31)
    source, shift = m.address(SHARED, lane, 4), m.shl(number, 3)
    each = [m.shr(m.load(source, offset=start + w * 128)[0], shift) for w in range(WARPS)]
    word = m.prmt(m.prmt(each[0], each[1], 0x0040), m.prmt(each[2], each[3], 0x0040), 0x5410)
    feature = m.iadd(m.imad(lane, m.columns, at.first_column), number)
    group, groups = m.shr(at.first_token, 4), at.tokens // BLOCK
    tiled = order is ScaleOrder.TILED
    rows, limit = (order.extent(at.width, ROWS), order.extent(groups, 4)) if tiled else (at.width, groups)
    asked = None if m.columns == WARPS else m.less(number, m.columns)
    target = m.address(scales, order.index(m, feature, group, groups), 1)
    if tiled or groups % WARPS == 0:
        m.store(target, [word], where=_both(m, asked, _also(m, at, group, limit, feature, rows)))
        return
    for w in range(WARPS):
        inside = _both(m, asked, _also(m, at, m.iadd(group, w), limit, feature, rows))
        m.store(target, [m.shr(word, 8 * w)], offset=w, size=1, where=inside)


def _both(m: Any, p: Any, q: Any) -> Any:
    return q if p is None else p if q is None else m.both(p, q)


def random_state(m: Any, key: int, origin: int | None, window: Any, at: Place) -> tuple[list[Any], int]:
    """What `arithmetic.random_words` takes, and its stride: for the whole array of which `window` places this part."""
    k0, k1 = m.load(m.address(key, 0, 4), 2)
    row, column, stride = m.shr(at.token, 2), at.column, at.width
    if window is not None and origin is not None:
        begin = [m.load(m.address(origin, i, 4))[0] for i in range(3)]
        sequence, position = m.divide(at.token, window.local_seq), m.remainder(at.token, window.local_seq)
        token = m.iadd(m.imad(m.iadd(begin[0], sequence), window.seq, begin[1]), position)
        row, column, stride = m.shr(token, 2), m.iadd(column, begin[2]), window.width
    if window is None or window.words <= 2**32:
        return [k0, k1, m.imad(row, stride, column)], stride
    wide = [_wide(m, k0, k1, m.iadd(row, group), column, stride) for group in range(BLOCK // 4)]
    return [word for state in wide for word in state], stride


def _wide(m: Any, k0: Any, k1: Any, row: Any, column: Any, stride: int) -> list[Any]:
    """Key words and low halves of counters whose high halves go into the key, as `formats.noise.wide_key` has it."""
    if stride % m.columns:
        raise ValueError(f"random numbers of more than 32 bits need a width that is a multiple of 4, got {stride}")
    low = m.imad(row, stride, 0)
    counter = m.iadd(low, column)
    high = m.iadd(m.multiply_high(row, stride), m.flag(m.less(counter, low)))
    keys = []
    for key, constant in zip((k0, k1), ROUNDS, strict=False):
        mixed = m.xor(q.random_word(m, high, constant, constant), q.random_word(m, m.and_(high, 0), constant, constant))
        keys.append(m.xor(key, mixed))
    return [*keys, counter]


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The numbers of a kernel's arrays: sources, then for each job its scale, key and origin, then its outputs."""

    sources: Sequence[jax.Array]
    given: list[jax.Array] = dataclasses.field(default_factory=list)
    made: list[jax.ShapeDtypeStruct] = dataclasses.field(default_factory=list)

    def take(self, array: jax.Array | None) -> int | None:
        if array is None:
            return None
        self.given.append(array)
        return len(self.sources) + len(self.given) - 1

    def make(self, *outputs: tuple[int, ...]) -> int:
        """The first of these outputs, counted among the outputs alone."""
        self.made.extend(jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in outputs)
        return len(self.made) - len(outputs)

    @property
    def outputs_begin(self) -> int:
        return len(self.sources) + len(self.given)


def quantize_made(
    arrays: Sequence[jax.Array],
    make: Callable[[Any, list[list[list[Any]]]], Sequence[list[list[Any]]]],
    jobs: Sequence[tuple[Any, int]],
    *,
    columns: int,
    interpret: bool,
    name: str,
) -> tuple[jax.Array, ...]:
    """(codes, scales) of each of `jobs`: a `Rowwise` or `Columnwise` with `codes`, and which of the tensors of rows
    that `make(machine, rows of each array)` returns.
    """
    tokens, width = arrays[0].shape
    check(tokens, width)
    known = Arrays(arrays)
    places = [_given(known, side) for side, _ in jobs]
    firsts = [known.make(*output_shapes(side, tokens, width)) for side, _ in jobs]
    grid = programs(tokens, width, columns, tiled=any(s.codes is ScaleOrder.TILED for s, _ in jobs))

    def body(m: Any) -> None:
        at = place(m, tokens, width, grid)
        tensors = make(m, [load_rows(m, i, at, m.columns // 2, 2) for i in range(len(arrays))])
        for (side, which), (scale, key, origin), first in zip(jobs, places, firsts, strict=True):
            factors = [m.real(m.load(m.address(scale, entry, 4))[0]) for entry in (MULT, DECODE)]
            random = None
            if key is not None:
                state, stride = random_state(m, key, origin, side.window, at)
                random = q.random_words(m, state, tokens=BLOCK, stride=stride)
            outputs = known.outputs_begin + first, known.outputs_begin + first + 1
            if side.along_tokens:
                made = nibbles.quantize_columns(m, tensors[which], *factors, random, hadamard=side.hadamard)
                store_columns(m, *outputs, at, side.codes, made)
            else:
                store_rows(m, *outputs, at, side.codes, nibbles.quantize_rows(m, tensors[which], *factors, random))

    run = functools.partial(launch, body, [*arrays, *known.given], known.made, programs=grid[0] * grid[1])
    return tuple(run(warps=WARPS, columns=columns, interpret=interpret, name=name))


def _given(known: Arrays, side: Any) -> tuple[Any, Any, Any]:
    """The numbers of an operand's scale, key and origin."""
    key, window = side.key, side.window
    origin = None if key is None or window is None else window.origin
    return known.take(side.scale), known.take(key), known.take(origin)


def asked(sides: Sequence[Any]) -> bool:
    """Whether these operands are wanted as codes; all of a call are, or none."""
    kinds = {side.codes is not None for side in sides}
    if len(kinds) > 1:
        raise ValueError("a pass writes carriers or codes: give `codes` to all of its operands, or to none")
    return kinds == {True}


def output_shapes(side: Any, tokens: int, width: int) -> list[tuple[int, ...]]:
    """Of the codes and of the scales of one operand."""
    blocks = -(-width // BLOCK)
    if side.along_tokens:
        return [(width, tokens // 2), side.codes.shape(width, tokens // BLOCK)]
    return [(tokens, 8 * blocks), side.codes.shape(tokens, blocks)]


def check(tokens: int, width: int) -> None:
    if tokens % BLOCK or not tokens or not width:
        raise ValueError(f"the kernels of codes need a multiple of {BLOCK} tokens, got [{tokens}, {width}]")


def quantize_weight(
    w: jax.Array, scale: jax.Array, orders: Sequence[tuple[bool, ScaleOrder]], *, interpret: bool, name: str
) -> tuple[jax.Array, ...]:
    """(codes, scales) of float32 w [k, n] in 16x16 tiles for each (whether k is to be last, order of the scales)."""
    k, n = w.shape
    check(k, n)
    known = Arrays([w])
    known.take(scale)
    sides = [Square(along_tokens, order) for along_tokens, order in orders]
    firsts = [known.make(*output_shapes(side, k, n)) for side in sides]
    grid = programs(k, n, 4, tiled=any(side.codes is ScaleOrder.TILED for side in sides))

    def body(m: Any) -> None:
        at = place(m, k, n, grid)
        rows = [[m.real(x) for x in row] for row in load_rows(m, 0, at, m.columns, 4)]
        factors = [m.real(m.load(m.address(1, entry, 4))[0]) for entry in (MULT, DECODE)]
        made = nibbles.quantize_square(m, rows, *factors)
        for side, first in zip(sides, firsts, strict=True):
            outputs = known.outputs_begin + first, known.outputs_begin + first + 1
            if side.along_tokens:
                store_columns(m, *outputs, at, side.codes, made[1:])
            else:
                store_rows(m, *outputs, at, side.codes, (made[0], [made[2]] * (m.columns // 2)))

    run = functools.partial(launch, body, [w, scale], known.made, programs=grid[0] * grid[1])
    return tuple(run(warps=WARPS, columns=4, interpret=interpret, name=name))


@dataclasses.dataclass(frozen=True)
class Square:
    """One order of a weight's codes."""

    along_tokens: bool
    codes: ScaleOrder
