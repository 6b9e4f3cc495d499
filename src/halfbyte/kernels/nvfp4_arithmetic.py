"""The NVFP4 arithmetic of one tile, in lane ops (`ptx_lanes.py` and `numpy_lanes.py`).

For a block with absolute maximum b in a tensor with the scale S (other scale rules: `block_scales.py`):

    s8   = e4m3_rne(min(b * (S * f32(1/6)), 448))     enc = min(1 / (s8 * (1/S)), FLT_MAX)
    code = e2m1(x * enc)                              carrier = e2m1(code) * s8, exact in bf16

E2M1 has the step e/2 where e = max(1, 2**floor(log2 |y|)). Rounding to nearest adds and subtracts 1.5 * 2**22 * e.
Values over 6, also the infinities that a block scale of zero makes, are clamped after rounding. The sign is put back
last, so zero keeps it.

The stochastic rounding works on codes. float16 has E2M1's shape where its subnormals end: the bits of |y| 2**-14, cut
off to float16, are the code in bits 9 to 11 and 9 bits of what lies between it and the next one, whatever the step. So
byte / 256 steps are an integer, 2 * byte, added to both halves of a word at once, and the code is what stands above.
The definition adds y and byte / 256 steps in float32 and cuts off then. Of sums that end below a grid value none is
rounded up to it but those of y < 1/4 that end in the last 2**-26 below 1/2. Adding 2**-26 to y, rounded toward zero,
gives the same: it changes no other y. Bytes at midpoints stand for (byte + 1/2) / 256 steps, 2 * byte + 1; there the
definition compares exact numbers, and y is cut off as it is.

A scale shared by the 16 columns of a row block is wanted by all lanes of the block. Computing it in each of them would
cost as much as the rounding itself, so the lanes split the rows: maxima are exchanged as bf16 pairs of two rows, each
lane computes the scales of its share of the rows, and the lanes read each other's results.
"""

import functools
from collections.abc import Sequence

from halfbyte.formats import E2M1
from halfbyte.kernels.block_scales import (
    MAGNITUDE,
    BlockScaleWords,
    KernelQuantizer,
    Pair,
    PairRows,
    apply_encode_scale,
    block_scales,
    lane_row_scales,
    pair_amax,
    pair_signs,
    prepare_encode_scale,
    round_nearest_e2m1,
    unpack_pair_f32,
)
from halfbyte.kernels.lane_ops import LaneOps, PreparedDivisor, RandomWords, TokenRows, Word, Words

RHT_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
COUNTER = 0x9E3779B9  # what a counter is multiplied by


def hadamard16_lane(m: LaneOps, values: Words, *, last_stage: bool = True) -> list[Word]:
    """diag(SIGNS) * Hadamard16 * 0.25 along a list of 16 float32, by butterflies of distance 1, 2, 4, 8."""
    v = list(values)
    for i in range(0, 16, 2):  # the signs and the factor ride on the first stage: their products are exact
        a = m.ffma(v[i], 0.25 * RHT_SIGNS[i], 0.0)  # the sum turns -0 into +0, so that no later sum can be -0
        b, c = v[i + 1], 0.25 * RHT_SIGNS[i + 1]
        v[i], v[i + 1] = m.ffma(b, c, a), m.ffma(b, -c, a)
    for distance in (2, 4, 8) if last_stage else (2, 4):
        for i in range(16):
            if not i & distance:
                j = i | distance
                v[i], v[j] = m.fadd(v[i], v[j]), m.fsub(v[i], v[j])
    return v


def hadamard_words(m: LaneOps, words: Words) -> list[Word]:
    """The transform of two neighbouring columns, 16 tokens each, rounded to bf16.

    The low halves are taken by a permutation, not by the shift that the row side uses: the compiler would share the
    results and keep 32 registers alive from one operand to the other.
    """
    low = hadamard16_lane(m, [m.as_f32(m.prmt(w, 0, 0x1044)) for w in words])
    high = hadamard16_lane(m, [m.high_bf16(w) for w in words])
    return [m.pack_round(a, b) for a, b in zip(low, high, strict=True)]


def hadamard_amax(m: LaneOps, words: Words) -> Word:
    """The larger absolute maximum of the transforms of two columns, before rounding to bf16; keeps NaN.

    The last butterfly is not carried out: the larger one of |a + b| and |a - b| is |a| + |b|.
    """
    sums = []
    for half in (m.low_bf16, m.high_bf16):
        v = hadamard16_lane(m, [half(w) for w in words], last_stage=False)
        sums += [m.fadd(m.fabs(v[i]), m.fabs(v[i + 8])) for i in range(8)]
    return functools.reduce(m.fmax_nan, sums)


def pairwise_amax(m: LaneOps, words: Words) -> Word:
    """The absolute maximum of each half over the words, as bf16 bits: NaN and inf survive."""
    return functools.reduce(m.max_u16x2, [m.and_(w, MAGNITUDE) for w in words])


def counter_hash_word(m: LaneOps, index: Word, k0: Word, k1: Word) -> Word:
    """The 32 random bits of counter `index` under the key words k0, k1."""
    h = _hash_rounds(m, m.imad(index, COUNTER, k0), k1)
    return m.xor(h, m.shr(h, 16))


def _hash_rounds(m: LaneOps, h: Word, k1: Word) -> Word:
    """All of the hash but its last step, h ^ (h >> 16)."""
    h = m.imad(m.xor(h, m.shr(h, 16)), 0x7FEB352D, k1)
    return m.imad(m.xor(h, m.shr(h, 15)), 0x846CA68B, 0)


def random_words(m: LaneOps, state: Words, *, tokens: int, stride: int) -> list[list[Word]]:
    """[pair of columns][token // 2] random words: one column's bytes of two tokens in each half. `state` is two key
    words and the counter of the lane's first column, for its first four tokens (`stride` leads to the next four), or
    such three for each four tokens.
    """
    k0, k1, index = (list(state[i::3]) for i in range(3))
    groups = tokens // 4
    begin = [m.imad(i, COUNTER, k) for i, k in zip(index, k0, strict=True)]
    if len(index) == 1:
        begin, k1 = [m.iadd(begin[0], q * stride * COUNTER) for q in range(groups)], k1 * groups
    mixed = [
        [_hash_rounds(m, m.iadd(b, column * COUNTER), k) for b, k in zip(begin, k1, strict=True)]
        for column in range(m.columns)
    ]
    return [_last_hash_round_pair(m, a, b) for a, b in zip(mixed[::2], mixed[1::2], strict=True)]


def _last_hash_round_pair(m: LaneOps, a: Words, b: Words) -> list[Word]:
    """The last step of the hash for two columns at once: the upper half of h stays, the lower is xored with it."""
    words = []
    for low, high in zip(a, b, strict=True):
        upper = m.prmt(low, high, 0x7632)
        words += [m.xor(m.prmt(low, high, 0x5410), upper), upper]
    return words


def round_nearest_pair(m: LaneOps, pair: Pair, encode: tuple[Word, Word], quantizer: KernelQuantizer) -> Word:
    """A pair on the E2M1 grid: both numbers under their encode scales, rounded; signs of zeros are lost, and all signs
    if ties go away from zero.
    """
    if quantizer.rounding == "away":
        numbers = [
            apply_encode_scale(m, m.fabs(x), e, quantizer)
            for x, e in zip(unpack_pair_f32(m, pair), encode, strict=True)
        ]
        return m.pack_exact(
            *(round_nearest_e2m1(m, m.fmin(y, E2M1.max), "away") for y in numbers)
        )  # 6 also where y is NaN
    rounded = [
        round_nearest_e2m1(m, apply_encode_scale(m, x, e, quantizer))
        for x, e in zip(unpack_pair_f32(m, pair), encode, strict=True)
    ]
    return m.clamp_e2m1_max(m.pack_exact(*rounded))


def round_stochastic_pair(m: LaneOps, pair: Pair, encode: tuple[Word, Word], noise: Word, rounding: str) -> Word:
    """Magnitudes of a pair, times their encode scales, rounded by the bytes of `noise`: codes in bits 9 to 11 of each
    half, 0 above, anything below.
    """
    scaled = [m.fmul(m.fabs(x), e) for x, e in zip(unpack_pair_f32(m, pair), encode, strict=True)]
    if rounding == "midpoint":
        cut = m.iadd(m.pack_f16_rz(*(m.fmul(y, 2.0**-14) for y in scaled)), 0x00010001)
    else:
        cut = m.pack_f16_rz(*(m.ffma_rz(y, 2.0**-14, 2.0**-40) for y in scaled))
    return m.min_u16x2(m.imad(noise, 2, cut), 0x0FFF0FFF)


def round_pair_to_grid(
    m: LaneOps, pair: Pair, encode: tuple[Word, Word], noise: Word | None, quantizer: KernelQuantizer
) -> Word:
    """Rounds as `round_nearest_pair`, or where there is noise as `round_stochastic_pair`."""
    if noise is None:
        return round_nearest_pair(m, pair, encode, quantizer)
    return m.grid_values(round_stochastic_pair(m, pair, encode, noise, quantizer.rounding), 9)


def dequantize_pair(m: LaneOps, pair: Pair, grid: Word, scale_pair: Word) -> Word:
    """grid * scale with the signs of `pair`."""
    return m.with_sign(m.mul_bf16x2(grid, scale_pair), pair_signs(m, pair))


def apply_deferred_alpha_bf16(m: LaneOps, rows: TokenRows, factors: Words) -> list[list[Word]]:
    """Multiplies rows of bf16 pairs of several arrays, as many of each, by the array's deferred alpha, float32, and
    rounds to bf16. Returns them unchanged without factors.
    """
    if not factors:
        return [list(row) for row in rows]
    each = len(rows) // len(factors)
    return [
        [m.pack_round(m.fmul(m.low_bf16(w), factor), m.fmul(m.high_bf16(w), factor)) for w in row]
        for i, factor in enumerate(factors)
        for row in rows[i * each : (i + 1) * each]
    ]


def apply_deferred_alpha_f32(m: LaneOps, rows: TokenRows, factors: Words) -> list[list[Word]]:
    """Multiplies rows of float32 by their deferred alpha; returns them unchanged without one."""
    return [[functools.reduce(m.fmul, factors, m.as_f32(x)) for x in row] for row in rows]


def encode_pair(m: LaneOps, pair: Pair, grid: Word) -> Word:
    """4-bit codes of a grid pair, one in each half, with the signs of `pair`."""
    return m.or_(m.grid_codes(grid), m.and_(m.shr(pair_signs(m, pair), 12), 0x00080008))


def row_scales(m: LaneOps, rows: PairRows, quantizer: KernelQuantizer) -> tuple[list[PreparedDivisor], list[Word]]:
    """Returns the prepared encode scale, and the pair of equal bf16 scales, of each row's block of 16 columns."""
    own = lane_row_scales(m, rows, quantizer)
    encodes, values = [encode for _, _, encode in own], [m.pack_exact(*value) for _, value, _ in own]
    encode_of, scale_of = [], []
    for k in range(len(rows) // 2):
        lane, i = divmod(k, len(own))
        encode_of += [prepare_encode_scale(m, m.as_f32(m.shuffle_index(e, lane)), quantizer) for e in encodes[i]]
        value = m.shuffle_index(values[i], lane)
        scale_of += [m.prmt(value, value, 0x1010), m.prmt(value, value, 0x3232)]
    return encode_of, scale_of


def quantize_rows_to_bf16(
    m: LaneOps, rows: PairRows, quantizer: KernelQuantizer, random: RandomWords = None
) -> list[list[Word]]:
    """Carriers of each row, blocks of 16 columns."""
    encode, scale = row_scales(m, rows, quantizer)
    out = []
    for t, pairs in enumerate(rows):
        carriers = []
        for k, pair in enumerate(pairs):
            grid = round_pair_to_grid(m, pair, (encode[t], encode[t]), pair_noise(m, random, k, t), quantizer)
            carriers.append(dequantize_pair(m, pair, grid, scale[t]))
        out.append(carriers)
    return out


def pair_noise(m: LaneOps, random: RandomWords, k: int, t: int) -> Word | None:
    """The random bytes of the k-th pair of columns of token t, one in each half; None without random words."""
    if random is None:
        return None
    word = random[k][t // 2]
    return m.prmt(word, 0, 0x4341) if t % 2 else m.and_(word, 0x00FF00FF)


def column_pairs(m: LaneOps, rows: PairRows, k: int, *, hadamard: bool) -> Sequence[Pair]:
    """The k-th pair of columns, as it is quantized."""
    pairs = [row[k] for row in rows]
    return hadamard_words(m, pairs) if hadamard else pairs


def column_scales(m: LaneOps, pairs: Sequence[Pair], quantizer: KernelQuantizer) -> BlockScaleWords:
    """Of the two blocks that are the sides of 16 pairs; encode scales prepared."""
    sides = (
        list(zip(*(unpack_pair_f32(m, pair) for pair in pairs), strict=True)) if quantizer.rule.has_candidates else []
    )
    codes, values, (low, high) = block_scales(m, pair_amax(m, pairs), quantizer, sides)
    return codes, values, (prepare_encode_scale(m, low, quantizer), prepare_encode_scale(m, high, quantizer))


def quantize_columns_to_bf16(
    m: LaneOps, rows: PairRows, quantizer: KernelQuantizer, random: RandomWords = None, *, hadamard: bool, packed: bool
) -> list[list[Word]]:
    """Columns in blocks of 16 tokens: 16 rows of carriers, or 8 rows of code bytes and one row of scale bytes."""
    made = []
    for k in range(len(rows[0])):
        words = column_pairs(m, rows, k, hadamard=hadamard)
        codes, values, encode = column_scales(m, words, quantizer)
        scale = m.pack_exact(*values)
        grids = [round_pair_to_grid(m, w, encode, pair_noise(m, random, k, t), quantizer) for t, w in enumerate(words)]
        made.append((column_pair_words(m, words, grids, scale, packed), codes))
    return interleave_columns(m, made, packed)


def column_pair_words(m: LaneOps, pairs: Sequence[Pair], grids: Words, scale: Word, packed: bool) -> list[Word]:
    """Of two columns: their carriers, or the codes of two tokens in the bytes of each half."""
    if not packed:
        return [dequantize_pair(m, w, g, scale) for w, g in zip(pairs, grids, strict=True)]
    nibbles = [encode_pair(m, w, g) for w, g in zip(pairs, grids, strict=True)]
    return [m.or_(a, m.shl(b, 4)) for a, b in zip(nibbles[::2], nibbles[1::2], strict=True)]


def interleave_columns(m: LaneOps, made: Sequence[tuple[Words, Word]], packed: bool) -> list[list[Word]]:
    """Rows of all columns, from the words and the scale codes of each two."""
    rows = [list(words) for words in zip(*(words for words, _ in made), strict=True)]
    if not packed:
        return rows
    return [*(_bytes(m, row, 0x6420) for row in rows), _bytes(m, [codes for _, codes in made], 0x5410)]


def _bytes(m: LaneOps, words: Words, selector: int) -> list[Word]:
    """Words of four bytes from words that hold two each."""
    return [m.prmt(a, b, selector) for a, b in zip(words[::2], words[1::2], strict=True)]


def unpack_columns(m: LaneOps, code_rows: TokenRows, scale_words: Words) -> list[list[Word]]:
    """Carriers of 16 token rows from 8 rows of code bytes (four columns a word) and one row of scale bytes."""
    scales = []
    for word in scale_words:
        for half in (0x4410, 0x4432):
            scales.append(m.pack_exact(*m.e4m3_decode(m.prmt(word, 0, half))))
    out = []
    for words in code_rows:
        halves = [m.prmt(word, 0, selector) for word in words for selector in (0x4140, 0x4342)]
        for nibble in (0, 4):
            codes = halves if nibble == 0 else [m.shr(h, 4) for h in halves]
            pairs = zip(codes, scales, strict=True)
            out.append([m.with_sign(m.mul_bf16x2(m.grid_values(c), s), m.shl(c, 12)) for c, s in pairs])
    return out


def amax_f32(m: LaneOps, rows: TokenRows) -> Word:
    """The absolute maximum of the lane's float32 values; keeps NaN."""
    return functools.reduce(m.fmax_nan, [m.fabs(x) for row in rows for x in row])


def block_2d_scale(m: LaneOps, rows: TokenRows, quantizer: KernelQuantizer) -> tuple[Word, Word, Word]:
    """E4M3 code, twice in a word, value and encode scale of a 16x16 tile of float32."""
    top, bit = amax_f32(m, rows), 8 // m.columns
    while bit:
        top, bit = m.fmax_nan(top, m.as_f32(m.shuffle_xor(top, bit))), bit // 2
    code, values, encodes = block_scales(m, (top, top), quantizer, [])
    return code, values[0], encodes[0]


def float_pairs(rows: TokenRows) -> list[list[Pair]]:
    """Pairs of neighbours, from rows of float32."""
    return [list(zip(row[::2], row[1::2], strict=True)) for row in rows]


def quantize_2d(m: LaneOps, rows: TokenRows, quantizer: KernelQuantizer, *, packed: bool) -> list[list[Word]]:
    """Of 16 float32 rows, one scale for each 16x16 tile, nearest: 16 rows of carriers, or 8 rows of code bytes and one
    of scale bytes, which repeats the tile's.
    """
    code, value, encode = block_2d_scale(m, rows, quantizer)
    grids = [
        [(pair, round_nearest_pair(m, pair, (encode, encode), quantizer)) for pair in row] for row in float_pairs(rows)
    ]
    if not packed:
        scale = m.pack_exact(value, value)
        return [[dequantize_pair(m, pair, g, scale) for pair, g in row] for row in grids]
    nibbles = [[encode_pair(m, pair, g) for pair, g in row] for row in grids]
    pairs = zip(nibbles[::2], nibbles[1::2], strict=True)
    joined = [[m.or_(a, m.shl(b, 4)) for a, b in zip(*pair, strict=True)] for pair in pairs]
    return [*(_bytes(m, row, 0x6420) for row in joined), [m.prmt(code, code, 0x1010)] * (m.columns // 4)]
