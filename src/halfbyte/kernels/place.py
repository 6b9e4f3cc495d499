"""Where the lanes of a kernel without tiles stand in a [tokens, width] array.

A warp owns a block of tokens, 16 for NVFP4, of 32 x `columns` features, a program four such warps, one above the other.
"""

import dataclasses

from halfbyte.formats.tiling import ROWS
from halfbyte.kernels.machine import MemoryMachine, Where, Word

BLOCK = 16
WARPS = 4


def whole(size: int, unit: int = BLOCK) -> int:
    """`size`, filled up to whole units."""
    return -(-size // unit) * unit


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a lane stands in an array [tokens, width]: its warp's first token, its own first column."""

    tokens: int
    width: int
    token: Word
    column: Word
    inside: Where  # whether both lie in the array; None where all do
    first_token: Word  # of the program
    first_column: Word
    thread: Word
    block: int = BLOCK  # tokens of a warp

    def within(self, m: MemoryMachine, row: Word, rows: int, column: Word, columns: int) -> Where:
        """Whether (row, column) lies in [rows, columns]; None where every lane's does."""
        return None if self.inside is None else m.both(m.less(row, rows), m.less(column, columns))


def programs(tokens: int, width: int, columns: int, *, tiled: bool = False, block: int = BLOCK) -> tuple[int, int]:
    """Programs down and across an array; tiles of scales are filled up with zeros, by programs of their own."""
    covered = [whole(size, ROWS if tiled else 1) for size in (tokens, width)]
    return -(-covered[0] // (WARPS * block)), -(-covered[1] // (32 * columns))


def prefetch(m: MemoryMachine, arrays: int, tokens: int, width: int, grid: tuple[int, int], size: int) -> None:
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


def place(
    m: MemoryMachine, tokens: int, width: int, grid: tuple[int, int], *, block: int = BLOCK, program: Word | None = None
) -> Place:
    down, across = grid
    program, thread = m.program() if program is None else program, m.thread()
    first_token = m.imad(m.divide(program, across), WARPS * block, 0)
    first_column = m.imad(m.remainder(program, across), 32 * m.columns, 0)
    token = m.imad(m.shr(thread, 5), block, first_token)
    column = m.imad(m.and_(thread, 31), m.columns, first_column)
    exact = down * WARPS * block == tokens and across * 32 * m.columns == width
    inside = None if exact else m.both(m.less(token, tokens), m.less(column, width))
    return Place(tokens, width, token, column, inside, first_token, first_column, thread, block)
