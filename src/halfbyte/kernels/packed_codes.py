"""Packed E2M1 codes and their scales as a block-scaled GEMM reads them: encoding, memory layout and stores.

Codes are packed two per byte along the contraction, the even index in the low nibble. A *nibble pair* is a word whose
halves have a signed code in their top four bits. Along a row the halves are neighbours: one multiplication by 1 + 2**12
puts both codes into the top byte. Along a column each byte has two tokens, and byte permutes sort eight tokens of each
column into one word.

Scales are row-major, or in the 128x4 tiles of `formats.swizzle_scales` (`ScaleLayout`). Edges are masked. Blocks that
the array does not fill are padded with zeros: packed codes always have whole blocks.
"""

import enum

from halfbyte.formats.block_view import ROWS, SCALES
from halfbyte.kernels import nvfp4_arithmetic as q
from halfbyte.kernels.block_scales import KernelQuantizer, lane_row_scales, prepare_encode_scale
from halfbyte.kernels.lane_memory import SHARED_ARRAY_ID
from halfbyte.kernels.lane_ops import LaneMask, LaneMemoryOps, LaneOps, RandomWords, TokenRows, Word, Words
from halfbyte.kernels.row_access import TOKEN_BLOCK, WARPS, LanePosition, pack_units, round_up

PACK_MULTIPLIER = 1 + 2**12
UPPER = 0xF0F0F0F0  # the upper nibble of each byte
WARP_STRIDE = 72  # words between the columns of two warps: no two lanes of a transfer share an SMEM bank


class ScaleLayout(enum.Enum):
    PLAIN = "plain"  # [rows, scales]
    TILED = "tiled"  # flat, padded with zeros to multiples of (128, 4)

    def shape(self, rows: int, scales: int) -> tuple[int, ...]:
        if self is ScaleLayout.PLAIN:
            return rows, scales
        return (self.padded_size(rows, ROWS) * self.padded_size(scales, SCALES),)

    def padded_size(self, size: int, tile: int) -> int:
        """Returns `size`, padded to whole tiles under TILED."""
        return size if self is ScaleLayout.PLAIN else -(-size // tile) * tile

    def index(self, m: LaneMemoryOps, row: Word, scale: Word, scales: int) -> Word:
        """Returns the byte index of the scale at (`row`, `scale`), with `scales` per row."""
        if self is ScaleLayout.PLAIN:
            return m.imad(row, scales, scale)
        tiles = self.padded_size(scales, SCALES) // SCALES
        tile = m.imad(m.shr(row, 7), tiles, m.shr(scale, 2))
        inside = m.imad(m.and_(row, 31), 16, m.and_(scale, 3))
        return m.iadd(m.imad(tile, ROWS * SCALES, inside), m.and_(m.shr(row, 3), 12))


def encode_nibble_pair(
    m: LaneOps, word: Word, encode: tuple[Word, Word], noise: Word | None, quantizer: KernelQuantizer
) -> Word:
    """Returns the nibble pair of `word` times its encode scales, with its signs; with noise the bits below the codes
    are not zero.
    """
    if noise is None:
        return m.with_sign(m.grid_nibbles(q.round_nearest_pair(m, word, encode, quantizer)), word)
    return m.with_sign(m.shl(q.round_stochastic_pair(m, word, encode, noise, quantizer.rounding), 3), word)


def pack_row_nibbles(m: LaneOps, pairs: Words) -> Word:
    """Returns a lane's packed bytes of one row, in the low bytes of a word; pairs have zeros below their codes."""
    products = [m.imad(pair, PACK_MULTIPLIER, 0) for pair in pairs]
    return m.shr(products[0], 24) if len(products) == 1 else m.prmt(products[0], products[1], 0x0073)


def pack_stochastic_row_nibbles(m: LaneOps, rows: TokenRows) -> list[Word]:
    """`pack_row_nibbles` of each row, from pairs with arbitrary bits below their codes, four pairs at a time."""
    pairs, pairs_per_row = [pair for row in rows for pair in row], len(rows[0])
    packed = []
    for begin in range(0, len(pairs), 4):
        halves = [m.prmt(pairs[i], pairs[i + 1], 0x7351) for i in (begin, begin + 2)]  # even columns, then odd ones
        even, odd = m.prmt(halves[0], halves[1], 0x5410), m.prmt(halves[0], halves[1], 0x7632)
        word = m.bit_select(odd, m.shr(even, 4), UPPER)
        packed += [m.shr(word, 8 * i) if i else word for i in range(0, 4, pairs_per_row)]
    return packed


def pack_column_nibbles(m: LaneOps, pairs: Words) -> list[list[Word]]:
    """Returns, for each of two columns, the words of its tokens, eight per word, from a nibble pair per token."""
    halves = [m.bit_select(b, m.shr(a, 4), UPPER) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    sorted_two = [m.prmt(a, b, 0x7351) for a, b in zip(halves[::2], halves[1::2], strict=True)]
    fours = list(zip(sorted_two[::2], sorted_two[1::2], strict=True))
    return [[m.prmt(a, b, selector) for a, b in fours] for selector in (0x5410, 0x7632)]


def quantize_rows_to_codes(
    m: LaneOps, rows: TokenRows, quantizer: KernelQuantizer, random: RandomWords = None
) -> tuple[list[Word], list[Word]]:
    """Returns (packed bytes of each row, E4M3 codes of this lane's share of the rows, two rows per word)."""
    lane_scales = lane_row_scales(m, rows, quantizer)
    nibbles = []
    for t, words in enumerate(rows):
        lane, i = divmod(t // 2, len(lane_scales))
        encode = prepare_encode_scale(m, m.as_f32(m.shuffle_index(lane_scales[i][2][t % 2], lane)), quantizer)
        noises = [q.pair_noise(m, random, k, t) for k in range(len(words))]
        nibbles.append(
            [encode_nibble_pair(m, w, (encode, encode), n, quantizer) for w, n in zip(words, noises, strict=True)]
        )
    packed = (
        [pack_row_nibbles(m, row) for row in nibbles] if random is None else pack_stochastic_row_nibbles(m, nibbles)
    )
    return packed, [codes for codes, _, _ in lane_scales]


def quantize_columns_to_codes(
    m: LaneOps, rows: TokenRows, quantizer: KernelQuantizer, random: RandomWords = None, *, hadamard: bool
) -> tuple[list[list[Word]], Word]:
    """Returns (words of each column's packed tokens, E4M3 codes of the columns in the bytes of a word)."""
    columns, codes = [], []
    for k in range(len(rows[0])):
        words = q.column_pairs(m, rows, k, hadamard=hadamard)
        code, _, encode = q.column_scales(m, words, quantizer)
        noises = [q.pair_noise(m, random, k, t) for t in range(len(words))]
        pairs = [encode_nibble_pair(m, w, encode, n, quantizer) for w, n in zip(words, noises, strict=True)]
        columns += pack_column_nibbles(m, pairs)
        codes.append(code)
    return columns, codes[0] if len(codes) == 1 else m.prmt(codes[0], codes[1], 0x5410)


def store_row_codes(
    m: LaneMemoryOps,
    codes: int,
    scales: int,
    pos: LanePosition,
    order: ScaleLayout,
    operand: tuple[list[Word], list[Word]],
) -> None:
    """Stores the packed bytes of 16 rows, and the scales of this lane's share of them."""
    row_bytes, scale_codes = operand
    blocks, rows_per_lane = round_up(pos.width) // TOKEN_BLOCK, 2 * len(scale_codes)
    in_bounds = pos.in_bounds_of(m, pos.token, pos.tokens, pos.column, TOKEN_BLOCK * blocks)
    base = m.address(codes, m.imad(pos.token, 8 * blocks, m.shr(pos.column, 1)), 1)
    for r, word in enumerate(row_bytes):
        where = (
            in_bounds
            if pos.tokens % TOKEN_BLOCK == 0
            else m.logical_and(in_bounds, m.less(m.iadd(pos.token, r), pos.tokens))
        )
        m.store(base, [word], offset=r * 8 * blocks, size=m.columns // 2, where=where)
    lane = m.and_(pos.thread, TOKEN_BLOCK // m.columns - 1)
    row, block = m.imad(lane, rows_per_lane, pos.token), m.shr(pos.column, 4)
    tiled = order is ScaleLayout.TILED
    if tiled and in_bounds is not None:
        in_bounds = m.less(block, order.padded_size(blocks, 4))
    base = m.address(scales, order.index(m, row, block, blocks), 1)
    for i in range(rows_per_lane):
        word = scale_codes[i // 2] if i % 2 == 0 else m.shr(scale_codes[i // 2], 8)
        where = (
            in_bounds
            if tiled or pos.tokens % TOKEN_BLOCK == 0
            else m.logical_and(in_bounds, m.less(m.iadd(row, i), pos.tokens))
        )
        m.store(base, [word], offset=i * (16 if tiled else blocks), size=1, where=where)


def store_transposed_codes(
    m: LaneMemoryOps,
    codes: int,
    scales: int,
    pos: LanePosition,
    order: ScaleLayout,
    operand: tuple[list[list[Word]], Word],
) -> None:
    """Stores the packed tokens and scales of each column, transposed through shared memory.

    A lane has 16 tokens, 8 bytes, of each of its columns. With the bytes of the other three warps 32 are stored at
    once, and four scales as a word.
    """
    words, scale_word = operand
    start = m.alloc_shared(len(words) * WARPS * WARP_STRIDE * 4)
    scale_start = m.alloc_shared(WARPS * 32 * 4)
    warp, lane = m.shr(pos.thread, 5), m.and_(pos.thread, 31)
    lane_base = m.address(SHARED_ARRAY_ID, m.imad(warp, WARP_STRIDE, m.shl(lane, 1)), 4)
    for c, pair in enumerate(words):
        m.store(lane_base, pair, offset=start + c * WARPS * WARP_STRIDE * 4)
    m.store(m.address(SHARED_ARRAY_ID, pos.thread, 4), [scale_word], offset=scale_start)
    m.barrier()
    for iteration in range(len(words) // 2):
        _store_columns(m, codes, pos, start, iteration)
    _store_scales(m, scales, pos, order, scale_start)


def _store_columns(m: LaneMemoryOps, codes: int, pos: LanePosition, start: int, iteration: int) -> None:
    """Stores 16 bytes of a column per lane: the tokens of two warps. Two lanes store the 32 bytes of a column."""
    tokens = round_up(pos.tokens)
    half, column = m.and_(pos.thread, 1), m.shr(pos.thread, 1)  # 64 columns per iteration
    column_index, lane = m.iadd(m.shr(column, 5), 2 * iteration), m.and_(column, 31)
    shared = m.imad(column_index, WARPS * WARP_STRIDE, m.imad(half, 2 * WARP_STRIDE, m.shl(lane, 1)))
    source = m.address(SHARED_ARRAY_ID, shared, 4)
    words = [w for k in range(2) for w in m.load(source, 2, offset=start + k * WARP_STRIDE * 4)]
    feature = m.iadd(m.imad(lane, m.columns, pos.first_column), column_index)
    token = m.imad(half, 2 * TOKEN_BLOCK, pos.first_token)
    target = m.address(codes, m.imad(feature, tokens // 2, m.shr(token, 1)), 1)
    if tokens % (2 * TOKEN_BLOCK) == 0:
        m.store(target, words, where=pos.in_bounds_of(m, token, tokens, feature, pos.width))
        return
    for k in range(2):
        in_bounds = pos.in_bounds_of(m, m.iadd(token, k * TOKEN_BLOCK), tokens, feature, pos.width)
        m.store(target, words[2 * k : 2 * k + 2], offset=8 * k, where=in_bounds)


def _store_scales(m: LaneMemoryOps, scales: int, pos: LanePosition, order: ScaleLayout, start: int) -> None:
    """Stores the four scales of a column, one from each warp; one column per lane."""
    column_index, lane = m.shr(pos.thread, 5), m.and_(pos.thread, 31)
    source, shift = m.address(SHARED_ARRAY_ID, lane, 4), m.shl(column_index, 3)
    scale_bytes = [m.shr(m.load(source, offset=start + w * 128)[0], shift) for w in range(WARPS)]
    word = pack_units(m, scale_bytes, 1)[0]
    feature = m.iadd(m.imad(lane, m.columns, pos.first_column), column_index)
    group, groups = m.shr(pos.first_token, 4), round_up(pos.tokens) // TOKEN_BLOCK
    tiled = order is ScaleLayout.TILED
    rows, limit = (order.padded_size(pos.width, ROWS), order.padded_size(groups, 4)) if tiled else (pos.width, groups)
    active = None if m.columns == WARPS else m.less(column_index, m.columns)
    target = m.address(scales, order.index(m, feature, group, groups), 1)
    if tiled or groups % WARPS == 0:
        m.store(
            target, [word], where=_logical_and_optional(m, active, pos.in_bounds_of(m, group, limit, feature, rows))
        )
        return
    for w in range(WARPS):
        in_bounds = _logical_and_optional(m, active, pos.in_bounds_of(m, m.iadd(group, w), limit, feature, rows))
        m.store(target, [m.shr(word, 8 * w)], offset=w, size=1, where=in_bounds)


def _logical_and_optional(m: LaneMemoryOps, p: LaneMask, q: LaneMask) -> LaneMask:
    return q if p is None else p if q is None else m.logical_and(p, q)
