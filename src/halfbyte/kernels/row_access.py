"""Position of the lanes of an untiled kernel in a [tokens, width] array, and loads and stores of their rows.

A warp owns a block of tokens, 16 for NVFP4, of 32 x `columns` features; a program has four such warps, stacked along
tokens. A lane has `columns` neighbouring elements of each of its rows, its *span*, which it loads or stores at once.

If the width is not a multiple of `columns`, rows begin at any element and spans cross the alignment that a transfer of
their size needs. A lane then loads the two *aligned* spans that overlap its own. It stores one aligned span, with the
missing elements shuffled from the next lane. Elements that no lane of the warp can store in a whole span, at both ends
of the warp and at the end of the row, are stored in pieces. At 2731 columns transfers of single elements had 0.48 of
the bytes per second of aligned rows (H200; docs/LOG.md, "Rows of an odd width").
"""

import dataclasses

from halfbyte.formats.block_view import ROWS
from halfbyte.kernels.lane_ops import Address, LaneMask, LaneMemoryOps, TokenRows, Word, Words

TOKEN_BLOCK = 16
WARPS = 4


def round_up(size: int, unit: int = TOKEN_BLOCK) -> int:
    """Returns `size`, rounded up to whole units."""
    return -(-size // unit) * unit


@dataclasses.dataclass(frozen=True)
class LanePosition:
    """Position of a lane in an array [tokens, width]: its warp's first token, its own first column."""

    tokens: int
    width: int
    token: Word
    column: Word
    in_bounds: LaneMask  # true where both are in the array; None where all lanes are
    first_token: Word  # the program's
    first_column: Word
    thread: Word
    block: int = TOKEN_BLOCK  # tokens per warp

    def in_bounds_of(self, m: LaneMemoryOps, row: Word, rows: int, column: Word, columns: int) -> LaneMask:
        """Returns the mask of (row, column) in [rows, columns]; None where all lanes are inside the array."""
        return None if self.in_bounds is None else m.logical_and(m.less(row, rows), m.less(column, columns))


def program_grid(
    tokens: int, width: int, columns: int, *, tiled: bool = False, block: int = TOKEN_BLOCK
) -> tuple[int, int]:
    """Returns the numbers of programs along tokens and along features; extra programs zero-pad tiles of scales."""
    covered = [round_up(size, ROWS if tiled else 1) for size in (tokens, width)]
    return -(-covered[0] // (WARPS * block)), -(-covered[1] // (32 * columns))


def prefetch_next_program(
    m: LaneMemoryOps, arrays: int, tokens: int, width: int, grid: tuple[int, int], size: int
) -> None:
    """Prefetches into L2 what the next program of these lanes reads: half a row of its warp's columns per lane."""
    program = m.next_program_id()
    pos = lane_position(m, tokens, width, grid, program=program)
    row, half = m.shr(m.and_(pos.thread, 31), 1), m.and_(pos.thread, 1)
    token, column = m.iadd(pos.token, row), m.imad(half, 16 * m.columns, pos.first_column)
    in_bounds = m.less(program, grid[0] * grid[1])
    if pos.in_bounds is not None:
        in_bounds = m.logical_and(in_bounds, m.logical_and(m.less(token, tokens), m.less(column, width)))
    for array in range(arrays):
        m.prefetch(m.address(array, m.imad(token, width, column), size), in_bounds)


def lane_position(
    m: LaneMemoryOps,
    tokens: int,
    width: int,
    grid: tuple[int, int],
    *,
    block: int = TOKEN_BLOCK,
    program: Word | None = None,
) -> LanePosition:
    down, across = grid
    program, thread = m.program_id() if program is None else program, m.thread_id()
    first_token = m.imad(m.u32_div_const(program, across), WARPS * block, 0)
    first_column = m.imad(m.u32_mod_const(program, across), 32 * m.columns, 0)
    token = m.imad(m.shr(thread, 5), block, first_token)
    column = m.imad(m.and_(thread, 31), m.columns, first_column)
    divides = down * WARPS * block == tokens and across * 32 * m.columns == width
    in_bounds = None if divides else m.logical_and(m.less(token, tokens), m.less(column, width))
    return LanePosition(tokens, width, token, column, in_bounds, first_token, first_column, thread, block)


def load_rows(
    m: LaneMemoryOps, array: int, at: LanePosition, size: int, *, rows: int | None = None
) -> list[list[Word]]:
    """Loads the words of a lane's columns of each of `rows` rows per block of tokens (by default one per token).

    Elements have `size` bytes; those out of bounds are zero.
    """
    return LaneRows(m, array, at, rows or at.block, size).load()


def store_rows(m: LaneMemoryOps, array: int, at: LanePosition, words: TokenRows, size: int) -> None:
    """Stores the words of a lane's columns, `len(words)` rows per block of tokens, elements of `size` bytes."""
    LaneRows(m, array, at, len(words), size).store(words)


def pack_units(m: LaneMemoryOps, units: Words, size: int) -> list[Word]:
    """Packs units of `size` bytes, each in the low bytes of a word, into words."""
    if size == 4:
        return list(units)
    pairs = [m.prmt(a, b, 0x5410 if size == 2 else 0x0040) for a, b in zip(units[::2], units[1::2], strict=True)]
    return pairs if size == 2 or len(pairs) == 1 else pack_units(m, pairs, 2)


def unpack_units(m: LaneMemoryOps, words: Words, size: int) -> list[Word]:
    """Inverse of `pack_units`; the bytes above a unit are arbitrary."""
    return [w if i == 0 else m.shr(w, 8 * i) for w in words for i in range(0, 4, size)]


def slice_words(m: LaneMemoryOps, words: Words, byte: int, count: int) -> list[Word]:
    """Returns `count` words that begin at byte `byte` of `words`."""
    first, remainder = divmod(byte, 4)
    if remainder == 0:
        return list(words[first : first + count])
    selector = 0x3210 + 0x1111 * remainder
    return [m.prmt(words[k], words[k + 1], selector) for k in range(first, first + count)]


@dataclasses.dataclass(frozen=True)
class LaneRows:
    """A lane's columns of an array with `rows` rows per block of tokens."""

    m: LaneMemoryOps
    array: int
    at: LanePosition
    rows: int
    size: int

    @property
    def split(self) -> bool:
        """True if a lane's columns may cross the edge of the array."""
        return self.at.width % self.m.columns != 0

    @property
    def span(self) -> int:
        """Bytes of a lane's columns."""
        return int(self.m.columns) * self.size

    @property
    def shifted(self) -> bool:
        """True if split rows are moved by aligned spans.

        The first row of each block and the end of the array have to be aligned, as the begin of an array is.
        """
        aligned = self.rows % self.m.columns == 0 == self.at.tokens % self.at.block and self.span % 4 == 0
        return self.split and aligned and self.m.columns <= 4  # with more columns, several pieces have the same size

    def _index(self) -> Word:
        """Returns the index of the lane's first element."""
        first = self.m.u32_div_const(self.at.token, self.at.block // self.rows)
        return self.m.imad(first, self.at.width, self.at.column)

    def load(self) -> list[list[Word]]:
        begin = self.m.address(self.array, self._index(), self.size)
        if self.shifted:
            inside = self._inside_bits()
            return [self._load_shifted(begin, r, inside) for r in range(self.rows)]
        return [self._load(begin, r) for r in range(self.rows)]

    def store(self, words: TokenRows) -> None:
        index = self._index()
        begin = self.m.address(self.array, index, self.size)
        for r, row in enumerate(words):
            if self.shifted and self.size < 4:
                self._store_shifted(begin, index, r, row)
            else:
                self._store(begin, r, row)

    # Rows that are not shifted: whole spans, or element by element.
    def _inside(self, row: int) -> list[LaneMask]:
        """Returns the mask of each unit that is moved: in bounds or not."""
        m, at = self.m, self.at
        in_bounds = at.in_bounds
        if at.tokens % at.block and self.rows == at.block:
            in_bounds = m.logical_and(in_bounds, m.less(m.iadd(at.token, row), at.tokens))
        if not self.split:
            return [in_bounds]
        return [m.logical_and(in_bounds, m.less(m.iadd(at.column, c), at.width)) for c in range(m.columns)]

    def _load(self, base: Address, row: int) -> list[Word]:
        m, offset, masks = self.m, row * self.at.width * self.size, self._inside(row)
        if not self.split:
            unit = min(4, self.span)
            return m.load(base, self.span // unit, offset=offset, size=unit, where=masks[0])
        units: list[Word] = []
        for c, where in enumerate(masks):
            units += m.load(base, offset=offset + c * self.size, size=self.size, where=where)
        return pack_units(m, units, self.size)

    def _store(self, base: Address, row_index: int, row: Words) -> None:
        m, offset, masks = self.m, row_index * self.at.width * self.size, self._inside(row_index)
        if not self.split:
            m.store(base, row, offset=offset, size=min(4, self.span), where=masks[0])
            return
        for c, (unit, where) in enumerate(zip(unpack_units(m, row, self.size), masks, strict=True)):
            m.store(base, [unit], offset=offset + c * self.size, size=self.size, where=where)

    # Shifted rows: aligned spans.
    def _inside_bits(self) -> list[Word]:
        """Returns a bit mask per word of a lane's columns: ones where the element is in bounds."""
        m, at, masks = self.m, self.at, []
        for first in range(0, m.columns, 4 // self.size):
            bits: Word = 0
            for i in range(4 // self.size):
                mask_up_to_i = 2 ** (8 * self.size * (i + 1)) - 1
                bits = m.select_if(m.less(m.iadd(at.column, first + i), at.width), mask_up_to_i, bits)
            masks.append(bits)
        return masks

    def _load_shifted(self, base: Address, row: int, masks: Words) -> list[Word]:
        m, at, count = self.m, self.at, self.span // 4
        past = row * at.width % m.columns  # elements from the aligned address before this lane's columns
        offset = (row * at.width - past) * self.size
        words = m.load(base, count, offset=offset, where=at.in_bounds)
        if past:
            next_in_bounds = m.logical_and(at.in_bounds, m.less(m.iadd(at.column, m.columns - past), at.width))
            words += m.load(base, count, offset=offset + self.span, where=next_in_bounds)
        span = slice_words(m, words, past * self.size, count)
        return [m.and_(word, mask) for word, mask in zip(span, masks, strict=True)]

    def _store_shifted(self, base: Address, index: Word, row_index: int, row: Words) -> None:
        m, at, columns = self.m, self.at, self.m.columns
        # `first`: elements up to the next aligned address
        offset, first = row_index * at.width * self.size, -row_index * at.width % columns
        lane = m.and_(at.thread, 31)
        missing = [m.shuffle_down_1(word) for word in row[: -(-first * self.size // 4)]]
        span_in_bounds = m.logical_and(at.in_bounds, m.less(m.iadd(at.column, first + columns - 1), at.width))
        where = m.logical_and(span_in_bounds, m.less(lane, 31)) if first else span_in_bounds
        span = slice_words(m, [*row, *missing], first * self.size, len(row))
        m.store(base, span, offset=offset + first * self.size, where=where)
        if first:
            self._store_ends_of_warp(index, offset, first, row)
        self._store_end_of_row(base, offset, first, row)

    def _store_ends_of_warp(self, index: Word, offset: int, first: int, row: Words) -> None:
        """Stores the first lane's elements before `first` and the last lane's from there on, one piece of each at a
        time.
        """
        m, at, columns = self.m, self.at, self.m.columns
        lane = m.and_(at.thread, 31)
        last, ends = m.less(30, lane), m.less(m.and_(m.iadd(lane, 1), 31), 2)
        row_in_bounds = m.logical_and(at.in_bounds, m.less(m.iadd(at.column, columns - 1), at.width))
        heads = {count: c for c, count in self._pieces(0, first, first)}
        tails = {count: c for c, count in self._pieces(first, columns, first)}
        for count in {**heads, **tails}:
            c = heads.get(count, tails.get(count, 0))
            tail = tails.get(count, c)
            where = m.less(lane, 1) if count not in tails else ends if count in heads else last
            address = m.address(self.array, m.imad(m.predicate_to_u32(last), tail - c, index), self.size)
            piece = m.select_if(last, self._piece(row, tail), self._piece(row, c))
            size = count * self.size
            m.store(
                address, [piece], offset=offset + c * self.size, size=size, where=m.logical_and(row_in_bounds, where)
            )

    def _store_end_of_row(self, base: Address, offset: int, first: int, row: Words) -> None:
        """Stores the partial span of the last lane of a row, as far as the lane before it cannot."""
        m, at, columns = self.m, self.at, self.m.columns
        tail = at.width % columns
        # first column of the last lane; True if that lane is the only one of its warp
        last_column, is_only = at.width - tail, (at.width - tail) % (32 * columns) == 0
        pieces_of = [(last_column, 0 if is_only or first > tail else first, tail)]
        if first > tail and not is_only:
            pieces_of.append((last_column - columns, first, columns))
        for holder, first_element, end_element in pieces_of:
            for c, count in self._pieces(first_element, end_element, first):
                where = m.logical_and(at.in_bounds, m.less(m.xor(at.column, holder), 1))
                size = count * self.size
                m.store(base, [self._piece(row, c)], offset=offset + c * self.size, size=size, where=where)

    def _pieces(self, begin: int, end: int, aligned: int) -> list[tuple[int, int]]:
        """Returns (first, count) of pairs and single elements; pairs are aligned as element `aligned` is."""
        pieces, c = [], begin
        while c < end:
            count = 2 if (c - aligned) % 2 == 0 and c + 1 < end else 1
            pieces.append((c, count))
            c += count
        return pieces

    def _piece(self, row: Words, first: int) -> Word:
        """Returns the word that begins with element `first` of the lane's."""
        return slice_words(self.m, [*row, row[-1]], first * self.size, 1)[0]
