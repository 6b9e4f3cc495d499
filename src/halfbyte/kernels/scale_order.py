"""Where a block's scale lies in memory: row by row, or in the tiles of 128 rows by 4 scales that tensor cores read.

`formats.tiling` is the definition of the tiles; this is their address, for kernels that write them in place.
"""

import enum

from halfbyte.formats.tiling import ROWS, SCALES
from halfbyte.kernels.machine import MemoryMachine, Word


class ScaleOrder(enum.Enum):
    PLAIN = "plain"  # [rows, scales]
    TILED = "tiled"  # flat, padded with zeros to multiples of (128, 4)

    def shape(self, rows: int, scales: int) -> tuple[int, ...]:
        if self is ScaleOrder.PLAIN:
            return rows, scales
        return (self.extent(rows, ROWS) * self.extent(scales, SCALES),)

    def extent(self, size: int, tile: int) -> int:
        """`size`, padded to whole tiles where there are tiles."""
        return size if self is ScaleOrder.PLAIN else -(-size // tile) * tile

    def index(self, m: MemoryMachine, row: Word, scale: Word, scales: int) -> Word:
        """The number of the byte of `scale` of `row`, of `scales` a row."""
        if self is ScaleOrder.PLAIN:
            return m.imad(row, scales, scale)
        tiles = self.extent(scales, SCALES) // SCALES
        tile = m.imad(m.shr(row, 7), tiles, m.shr(scale, 2))
        inside = m.imad(m.and_(row, 31), 16, m.and_(scale, 3))
        return m.iadd(m.imad(tile, ROWS * SCALES, inside), m.and_(m.shr(row, 3), 12))
