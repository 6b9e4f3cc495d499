"""How a quantize pass of any width reads a [tokens, width] array, and writes what it made of it.

A warp owns a block of tokens, 16 for NVFP4, of 32 x `columns` features, a program four such warps, one above the other.
Rows go to memory as they are made. Transposed columns meet in shared memory first: each lane has 16 tokens, 8 bytes, of
each of its columns, and with the other three warps' bytes 32 are written at once, and four scales as a word.

Edges are masked. Blocks that the array does not fill end in zeros: packed codes always have whole blocks.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from halfbyte.formats.tiling import ROWS
from halfbyte.ops.kernels.memory import SHARED
from halfbyte.ops.kernels.scale_order import ScaleOrder

BLOCK = 16
WARPS = 4
WARP_STRIDE = 72  # words from one warp's columns to the next one's: no two lanes of a transfer share a bank


def whole(size: int, unit: int = BLOCK) -> int:
    """`size`, filled up to whole units."""
    return -(-size // unit) * unit


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
    block: int = BLOCK  # tokens of a warp

    def within(self, m: Any, row: Any, rows: int, column: Any, columns: int) -> Any:
        """Whether (row, column) lies in [rows, columns]; None where every lane's does."""
        return None if self.inside is None else m.both(m.less(row, rows), m.less(column, columns))


def programs(tokens: int, width: int, columns: int, *, tiled: bool = False, block: int = BLOCK) -> tuple[int, int]:
    """Programs down and across an array; tiles of scales are filled up with zeros, by programs of their own."""
    covered = [whole(size, ROWS if tiled else 1) for size in (tokens, width)]
    return -(-covered[0] // (WARPS * block)), -(-covered[1] // (32 * columns))


def prefetch(m: Any, arrays: int, tokens: int, width: int, grid: tuple[int, int], size: int) -> None:
    """Has the cache read what the next program of these lanes will: half a row of its warp's columns a lane."""
    program = m.following()
    at = place(m, tokens, width, grid, program=program)
    row, half = m.shr(m.and_(at.thread, 31), 1), m.and_(at.thread, 1)
    token, column = m.iadd(at.token, row), m.imad(half, 16 * m.columns, at.first_column)
    inside = m.less(program, grid[0] * grid[1])
    if at.inside is not None:
        inside = m.both(inside, m.both(m.less(token, tokens), m.less(column, width)))
    for array in range(arrays):
        m.prefetch(m.address(array, m.imad(token, width, column), size), inside)


def place(m: Any, tokens: int, width: int, grid: tuple[int, int], *, block: int = BLOCK, program: Any = None) -> Place:
    down, across = grid
    program, thread = m.program() if program is None else program, m.thread()
    first_token = m.imad(m.divide(program, across), WARPS * block, 0)
    first_column = m.imad(m.remainder(program, across), 32 * m.columns, 0)
    token = m.imad(m.shr(thread, 5), block, first_token)
    column = m.imad(m.and_(thread, 31), m.columns, first_column)
    exact = down * WARPS * block == tokens and across * 32 * m.columns == width
    inside = None if exact else m.both(m.less(token, tokens), m.less(column, width))
    return Place(tokens, width, token, column, inside, first_token, first_column, thread, block)


def load_rows(m: Any, array: int, at: Place, size: int, *, rows: int | None = None) -> list[list[Any]]:
    """The words of a lane's columns of each of `rows` rows for a block of tokens (all of them unless given), elements
    of `size` bytes; zero outside.
    """
    return Rows(m, array, at, rows or at.block, size).load()


def store_rows(m: Any, array: int, at: Place, made: Sequence[Sequence[Any]], size: int) -> None:
    """Writes the words of a lane's columns, `len(made)` rows for a block of tokens, elements of `size` bytes."""
    Rows(m, array, at, len(made), size).store(made)


@dataclasses.dataclass(frozen=True)
class Rows:
    """A lane's columns of `rows` rows of an array that has so many for a block of tokens."""

    m: Any
    array: int
    at: Place
    rows: int
    size: int

    @property
    def split(self) -> bool:
        """Whether elements are moved one by one, because a lane's columns may lie across an edge."""
        return self.at.width % self.m.columns != 0

    def _begin(self) -> Any:
        first = self.m.divide(self.at.token, self.at.block // self.rows)
        return self.m.address(self.array, self.m.imad(first, self.at.width, self.at.column), self.size)

    def _inside(self, row: int) -> list[Any]:
        """Whether each unit that is moved lies inside."""
        m, at = self.m, self.at
        inside = at.inside
        if at.tokens % at.block and self.rows == at.block:
            inside = m.both(inside, m.less(m.iadd(at.token, row), at.tokens))
        if not self.split:
            return [inside]
        return [m.both(inside, m.less(m.iadd(at.column, c), at.width)) for c in range(m.columns)]

    @property
    def unit(self) -> int:
        """Bytes of a unit that is moved: an element, or as much of a lane's columns as a word holds."""
        return self.size if self.split else min(4, self.m.columns * self.size)

    def load(self) -> list[list[Any]]:
        begin = self._begin()
        return [self._load(begin, r) for r in range(self.rows)]

    def _load(self, begin: Any, row: int) -> list[Any]:
        m, offset, inside = self.m, row * self.at.width * self.size, self._inside(row)
        if not self.split:
            count = m.columns * self.size // self.unit
            words: list[Any] = m.load(begin, count, offset=offset, size=self.unit, where=inside[0])
            return words
        units = []
        for c, where in enumerate(inside):
            units += m.load(begin, offset=offset + c * self.size, size=self.size, where=where)
        return joined(m, units, self.size)

    def store(self, made: Sequence[Sequence[Any]]) -> None:
        m, begin = self.m, self._begin()
        for r, row in enumerate(made):
            offset, inside = r * self.at.width * self.size, self._inside(r)
            if not self.split:
                m.store(begin, row, offset=offset, size=self.unit, where=inside[0])
                continue
            if self.size == 2 and self.rows == BLOCK:
                self._store_chunks(begin, row, offset, inside)
                continue
            for c, (part, where) in enumerate(zip(parted(m, row, self.size), inside, strict=True)):
                m.store(begin, [part], offset=offset + c * self.size, size=self.size, where=where)

    def _store_chunks(self, begin: Any, row: Sequence[Any], offset: int, inside: Sequence[Any]) -> None:
        """A row of 16-bit elements, as many at a time as a lane has, from where so many are aligned: this lane's
        element `first` on, with what is missing from the next lane. What no whole chunk holds, at both ends of a warp
        and at the row's, goes one by one.
        """
        m, at, columns = self.m, self.at, self.m.columns
        first = -(offset // 2) % columns
        words = [*row, *(m.next_lane(word) for word in row[: (first + 1) // 2])]
        held = range(first // 2, first // 2 + len(row))
        chunk = [m.prmt(words[k], words[k + 1], 0x5432) if first % 2 else words[k] for k in held]
        lane = m.and_(at.thread, 31)
        filled = m.less(m.iadd(at.column, first + columns - 1), at.width)
        mine = m.both(filled, m.less(lane, 31)) if first else filled
        m.store(begin, chunk, offset=offset + 2 * first, where=m.both(inside[0], mine))
        before = m.both(m.less(m.iadd(at.column, first - 1), at.width), m.less(0, lane)) if first else None
        for c, part in enumerate(parted(m, row, 2)):
            alone = m.less(m.flag(before if c < first else mine), 1)
            m.store(begin, [part], offset=offset + 2 * c, size=2, where=m.both(inside[c], alone))


def joined(m: Any, units: Sequence[Any], size: int) -> list[Any]:
    """Words from units of `size` bytes, each in a word of its own."""
    if size == 4:
        return list(units)
    pairs = [m.prmt(a, b, 0x5410 if size == 2 else 0x0040) for a, b in zip(units[::2], units[1::2], strict=True)]
    return pairs if size == 2 or len(pairs) == 1 else joined(m, pairs, 2)


def parted(m: Any, words: Sequence[Any], size: int) -> list[Any]:
    """The inverse of `joined`; bytes above a unit are left over."""
    return [w if i == 0 else m.shr(w, 8 * i) for w in words for i in range(0, 4, size)]


def store_codes(
    m: Any, codes: int, scales: int, at: Place, order: ScaleOrder, made: tuple[list[Any], list[Any]]
) -> None:
    """Packed bytes of 16 rows, and the scales of this lane's share of them."""
    bytes_of, own = made
    blocks, share = whole(at.width) // BLOCK, 2 * len(own)
    inside = at.within(m, at.token, at.tokens, at.column, BLOCK * blocks)
    begin = m.address(codes, m.imad(at.token, 8 * blocks, m.shr(at.column, 1)), 1)
    for r, word in enumerate(bytes_of):
        where = inside if at.tokens % BLOCK == 0 else m.both(inside, m.less(m.iadd(at.token, r), at.tokens))
        m.store(begin, [word], offset=r * 8 * blocks, size=m.columns // 2, where=where)
    lane = m.and_(at.thread, BLOCK // m.columns - 1)
    row, block = m.imad(lane, share, at.token), m.shr(at.column, 4)
    tiled = order is ScaleOrder.TILED
    if tiled and inside is not None:
        inside = m.less(block, order.extent(blocks, 4))
    begin = m.address(scales, order.index(m, row, block, blocks), 1)
    for i in range(share):
        word = own[i // 2] if i % 2 == 0 else m.shr(own[i // 2], 8)
        where = inside if tiled or at.tokens % BLOCK == 0 else m.both(inside, m.less(m.iadd(row, i), at.tokens))
        m.store(begin, [word], offset=i * (16 if tiled else blocks), size=1, where=where)


def store_turned_codes(
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
        _store_columns(m, codes, at, start, turn)
    _store_scales(m, scales, at, order, scale_start)


def _store_columns(m: Any, codes: int, at: Place, start: int, turn: int) -> None:
    """16 bytes of a column a lane: the tokens of two warps. Two lanes write the 32 bytes of a column."""
    tokens = whole(at.tokens)
    part, found = m.and_(at.thread, 1), m.shr(at.thread, 1)  # 64 columns a turn
    number, lane = m.iadd(m.shr(found, 5), 2 * turn), m.and_(found, 31)
    shared = m.imad(number, WARPS * WARP_STRIDE, m.imad(part, 2 * WARP_STRIDE, m.shl(lane, 1)))
    source = m.address(SHARED, shared, 4)
    words = [w for k in range(2) for w in m.load(source, 2, offset=start + k * WARP_STRIDE * 4)]
    feature = m.iadd(m.imad(lane, m.columns, at.first_column), number)
    token = m.imad(part, 2 * BLOCK, at.first_token)
    target = m.address(codes, m.imad(feature, tokens // 2, m.shr(token, 1)), 1)
    if tokens % (2 * BLOCK) == 0:
        m.store(target, words, where=at.within(m, token, tokens, feature, at.width))
        return
    for k in range(2):
        inside = at.within(m, m.iadd(token, k * BLOCK), tokens, feature, at.width)
        m.store(target, words[2 * k : 2 * k + 2], offset=8 * k, where=inside)


def _store_scales(m: Any, scales: int, at: Place, order: ScaleOrder, start: int) -> None:
    """The four scales of a column, one from each warp, a lane each."""
    number, lane = m.shr(at.thread, 5), m.and_(at.thread, 31)
    source, shift = m.address(SHARED, lane, 4), m.shl(number, 3)
    each = [m.shr(m.load(source, offset=start + w * 128)[0], shift) for w in range(WARPS)]
    word = joined(m, each, 1)[0]
    feature = m.iadd(m.imad(lane, m.columns, at.first_column), number)
    group, groups = m.shr(at.first_token, 4), whole(at.tokens) // BLOCK
    tiled = order is ScaleOrder.TILED
    rows, limit = (order.extent(at.width, ROWS), order.extent(groups, 4)) if tiled else (at.width, groups)
    asked = None if m.columns == WARPS else m.less(number, m.columns)
    target = m.address(scales, order.index(m, feature, group, groups), 1)
    if tiled or groups % WARPS == 0:
        m.store(target, [word], where=_both(m, asked, at.within(m, group, limit, feature, rows)))
        return
    for w in range(WARPS):
        inside = _both(m, asked, at.within(m, m.iadd(group, w), limit, feature, rows))
        m.store(target, [m.shr(word, 8 * w)], offset=w, size=1, where=inside)


def _both(m: Any, p: Any, q: Any) -> Any:
    return q if p is None else p if q is None else m.both(p, q)
