"""How a quantize pass of any width writes packed codes and their scales.

Rows go to memory as they are made. Transposed columns meet in shared memory first: each lane has 16 tokens, 8 bytes, of
each of its columns, and with the other three warps' bytes 32 are written at once, and four scales as a word.

Edges are masked. Blocks that the array does not fill end in zeros: packed codes always have whole blocks.
"""

from halfbyte.formats.tiling import ROWS
from halfbyte.kernels.machine import MemoryMachine, Where, Word
from halfbyte.kernels.memory import SHARED
from halfbyte.kernels.place import BLOCK, WARPS, Place, whole
from halfbyte.kernels.rows import joined
from halfbyte.kernels.scale_order import ScaleOrder

WARP_STRIDE = 72  # words from one warp's columns to the next one's: no two lanes of a transfer share a bank


def store_codes(
    m: MemoryMachine, codes: int, scales: int, at: Place, order: ScaleOrder, made: tuple[list[Word], list[Word]]
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
    m: MemoryMachine, codes: int, scales: int, at: Place, order: ScaleOrder, made: tuple[list[list[Word]], Word]
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


def _store_columns(m: MemoryMachine, codes: int, at: Place, start: int, turn: int) -> None:
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


def _store_scales(m: MemoryMachine, scales: int, at: Place, order: ScaleOrder, start: int) -> None:
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


def _both(m: MemoryMachine, p: Where, q: Where) -> Where:
    return q if p is None else p if q is None else m.both(p, q)
