"""How a pass reads and writes the rows of a [rows, width] array of any width.

A lane has `columns` elements side by side of each of its rows, its *span*, and moves them at once. Where no multiple of
`columns` is as wide as the array, rows begin anywhere, and spans lie across the places where so many bytes can be moved
at once (*aligned* ones). A lane then reads the two aligned spans that its own lies across. It writes one, with what is
missing from the next lane; what no lane of its warp can write whole, at both ends of the warp and at the row's, is
written in pieces.
"""

import dataclasses

from halfbyte.kernels.machine import Address, MemoryMachine, TokenRows, Where, Word, Words
from halfbyte.kernels.place import Place


def load_rows(m: MemoryMachine, array: int, at: Place, size: int, *, rows: int | None = None) -> list[list[Word]]:
    """The words of a lane's columns of each of `rows` rows for a block of tokens (all of them unless given), elements
    of `size` bytes; zero outside.
    """
    return Rows(m, array, at, rows or at.block, size).load()


def store_rows(m: MemoryMachine, array: int, at: Place, made: TokenRows, size: int) -> None:
    """Writes the words of a lane's columns, `len(made)` rows for a block of tokens, elements of `size` bytes."""
    Rows(m, array, at, len(made), size).store(made)


def joined(m: MemoryMachine, units: Words, size: int) -> list[Word]:
    """Words from units of `size` bytes, each in a word of its own."""
    if size == 4:
        return list(units)
    pairs = [m.prmt(a, b, 0x5410 if size == 2 else 0x0040) for a, b in zip(units[::2], units[1::2], strict=True)]
    return pairs if size == 2 or len(pairs) == 1 else joined(m, pairs, 2)


def parted(m: MemoryMachine, words: Words, size: int) -> list[Word]:
    """The inverse of `joined`; bytes above a unit are left over."""
    return [w if i == 0 else m.shr(w, 8 * i) for w in words for i in range(0, 4, size)]


def words_from(m: MemoryMachine, words: Words, byte: int, count: int) -> list[Word]:
    """`count` words that begin at a byte of `words`."""
    first, rest = divmod(byte, 4)
    if rest == 0:
        return list(words[first : first + count])
    selector = 0x3210 + 0x1111 * rest
    return [m.prmt(words[k], words[k + 1], selector) for k in range(first, first + count)]


@dataclasses.dataclass(frozen=True)
class Rows:
    """A lane's columns of `rows` rows of an array that has so many for a block of tokens."""

    m: MemoryMachine
    array: int
    at: Place
    rows: int
    size: int

    @property
    def split(self) -> bool:
        """Whether a lane's columns may lie across an edge."""
        return self.at.width % self.m.columns != 0

    @property
    def span(self) -> int:
        """Bytes of a lane's columns."""
        return int(self.m.columns) * self.size

    @property
    def shifted(self) -> bool:
        """Whether split rows are moved by aligned spans: a block's first row and the array's end have to be aligned, as
        every array's begin is.
        """
        aligned = self.rows % self.m.columns == 0 == self.at.tokens % self.at.block and self.span % 4 == 0
        return self.split and aligned and self.m.columns <= 4  # more columns have more pieces of a kind

    def _index(self) -> Word:
        """The lane's first element."""
        first = self.m.divide(self.at.token, self.at.block // self.rows)
        return self.m.imad(first, self.at.width, self.at.column)

    def load(self) -> list[list[Word]]:
        begin = self.m.address(self.array, self._index(), self.size)
        if self.shifted:
            inside = self._inside_bits()
            return [self._load_shifted(begin, r, inside) for r in range(self.rows)]
        return [self._load(begin, r) for r in range(self.rows)]

    def store(self, made: TokenRows) -> None:
        index = self._index()
        begin = self.m.address(self.array, index, self.size)
        for r, row in enumerate(made):
            if self.shifted and self.size < 4:
                self._store_shifted(begin, index, r, row)
            else:
                self._store(begin, r, row)

    # spans as they lie, or element by element
    def _inside(self, row: int) -> list[Where]:
        """Whether each unit that is moved lies inside."""
        m, at = self.m, self.at
        inside = at.inside
        if at.tokens % at.block and self.rows == at.block:
            inside = m.both(inside, m.less(m.iadd(at.token, row), at.tokens))
        if not self.split:
            return [inside]
        return [m.both(inside, m.less(m.iadd(at.column, c), at.width)) for c in range(m.columns)]

    def _load(self, begin: Address, row: int) -> list[Word]:
        m, offset, inside = self.m, row * self.at.width * self.size, self._inside(row)
        if not self.split:
            unit = min(4, self.span)
            return m.load(begin, self.span // unit, offset=offset, size=unit, where=inside[0])
        units: list[Word] = []
        for c, where in enumerate(inside):
            units += m.load(begin, offset=offset + c * self.size, size=self.size, where=where)
        return joined(m, units, self.size)

    def _store(self, begin: Address, number: int, row: Words) -> None:
        m, offset, inside = self.m, number * self.at.width * self.size, self._inside(number)
        if not self.split:
            m.store(begin, row, offset=offset, size=min(4, self.span), where=inside[0])
            return
        for c, (part, where) in enumerate(zip(parted(m, row, self.size), inside, strict=True)):
            m.store(begin, [part], offset=offset + c * self.size, size=self.size, where=where)

    # aligned spans
    def _inside_bits(self) -> list[Word]:
        """For each word of a lane's columns, ones where they lie in the row."""
        m, at, out = self.m, self.at, []
        for first in range(0, m.columns, 4 // self.size):
            bits: Word = 0
            for i in range(4 // self.size):
                up_to_here = 2 ** (8 * self.size * (i + 1)) - 1
                bits = m.choose(m.less(m.iadd(at.column, first + i), at.width), up_to_here, bits)
            out.append(bits)
        return out

    def _load_shifted(self, begin: Address, row: int, inside: Words) -> list[Word]:
        m, at, count = self.m, self.at, self.span // 4
        past = row * at.width % m.columns  # this lane's columns begin so many elements past an aligned place
        offset = (row * at.width - past) * self.size
        words = m.load(begin, count, offset=offset, where=at.inside)
        if past:
            reached = m.both(at.inside, m.less(m.iadd(at.column, m.columns - past), at.width))
            words += m.load(begin, count, offset=offset + self.span, where=reached)
        made = words_from(m, words, past * self.size, count)
        return [m.and_(word, bits) for word, bits in zip(made, inside, strict=True)]

    def _store_shifted(self, begin: Address, index: Word, number: int, row: Words) -> None:
        m, at, columns = self.m, self.at, self.m.columns
        offset, first = number * at.width * self.size, -number * at.width % columns  # up to the next aligned place
        lane = m.and_(at.thread, 31)
        missing = [m.next_lane(word) for word in row[: -(-first * self.size // 4)]]
        filled = m.both(at.inside, m.less(m.iadd(at.column, first + columns - 1), at.width))
        where = m.both(filled, m.less(lane, 31)) if first else filled
        span = words_from(m, [*row, *missing], first * self.size, len(row))
        m.store(begin, span, offset=offset + first * self.size, where=where)
        if first:
            self._store_ends_of_warp(index, offset, first, row)
        self._store_end_of_row(begin, offset, first, row)

    def _store_ends_of_warp(self, index: Word, offset: int, first: int, row: Words) -> None:
        """The first lane's elements before `first`, and the last lane's from there on: one of either at a time."""
        m, at, columns = self.m, self.at, self.m.columns
        lane = m.and_(at.thread, 31)
        last, ends = m.less(30, lane), m.less(m.and_(m.iadd(lane, 1), 31), 2)
        whole = m.both(at.inside, m.less(m.iadd(at.column, columns - 1), at.width))
        heads = {count: c for c, count in self._pieces(0, first, first)}
        tails = {count: c for c, count in self._pieces(first, columns, first)}
        for count in {**heads, **tails}:
            c = heads.get(count, tails.get(count, 0))
            to = tails.get(count, c)
            where = m.less(lane, 1) if count not in tails else ends if count in heads else last
            place = m.address(self.array, m.imad(m.flag(last), to - c, index), self.size)
            word = m.choose(last, self._piece(row, to), self._piece(row, c))
            size = count * self.size
            m.store(place, [word], offset=offset + c * self.size, size=size, where=m.both(whole, where))

    def _store_end_of_row(self, begin: Address, offset: int, first: int, row: Words) -> None:
        """What the last lane of a row has, which is not whole, and the lane before it cannot write with its own."""
        m, at, columns = self.m, self.at, self.m.columns
        rest = at.width % columns
        column, alone = at.width - rest, (at.width - rest) % (32 * columns) == 0  # of the last lane; in its warp
        parts = [(column, 0 if alone or first > rest else first, rest)]
        if first > rest and not alone:
            parts.append((column - columns, first, columns))
        for held_from, begins, ends in parts:
            for c, count in self._pieces(begins, ends, first):
                where = m.both(at.inside, m.less(m.xor(at.column, held_from), 1))
                size = count * self.size
                m.store(begin, [self._piece(row, c)], offset=offset + c * self.size, size=size, where=where)

    def _pieces(self, begin: int, end: int, aligned: int) -> list[tuple[int, int]]:
        """(first, count) of pairs and single elements, pairs where they lie as element `aligned` does."""
        out, c = [], begin
        while c < end:
            count = 2 if (c - aligned) % 2 == 0 and c + 1 < end else 1
            out.append((c, count))
            c += count
        return out

    def _piece(self, row: Words, first: int) -> Word:
        """The word that begins with an element of the lane's."""
        return words_from(self.m, [*row, row[-1]], first * self.size, 1)[0]
