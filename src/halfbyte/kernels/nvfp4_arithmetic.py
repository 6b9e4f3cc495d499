"""NVFP4 arithmetic of one tile, in lane ops (`ptx_lanes.py` and `numpy_lanes.py`).

For a block with amax b in a tensor with encode scale S (other scale rules: `block_scales.py`):

    s8   = e4m3_rne(min(b * (S * f32(1/6)), 448))     enc = min(1 / (s8 * (1/S)), FLT_MAX)
    code = e2m1(x * enc)                              value = e2m1(code) * s8, exact in bf16

Nearest: E2M1 has the step e/2 where e = max(1, 2**floor(log2 |y|)); adding and subtracting 1.5 * 2**22 * e rounds to
it. Values over 6, also the infinities under a block scale of zero, are clamped after rounding, two at a time. The sign
is restored last, so zero keeps it.

Stochastic rounding works on codes. float16 has E2M1's shape where its subnormals end: the bits of |y| 2**-14, truncated
to float16, are the code in bits 9 to 11 and 9 bits of the position between it and the next code, whatever the step. So
byte / 256 steps are an integer, 2 * byte, added to both halves of a word at once, and the code is in the top bits. The
reference adds y and byte / 256 steps in float32 and truncates then. Of the sums that end below a grid value, float32
rounds up to it only those of y < 1/4 that end in the last 2**-26 below 1/2. Adding 2**-26 to y, rounded toward zero,
gives the same and changes no other y. Midpoint bytes are (byte + 1/2) / 256 steps, 2 * byte + 1; there the reference
compares exact values, and y is truncated as it is.

All 16 columns' lanes of a row block need its scale. Computing it in each lane would cost as much as the rounding, so
the lanes split the rows: amaxes are exchanged as bf16 pairs of two rows, each lane computes the scales of its share of
the rows, and the lanes read each other's results by shuffles.
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
COUNTER = 0x9E3779B9  # counter multiplier of `random_bits.counter_hash`


def hadamard16_lane(m: LaneOps, values: Words, *, last_stage: bool = True) -> list[Word]:
    """Applies diag(SIGNS) * Hadamard16 * 0.25 to 16 float32, by butterflies of distance 1, 2, 4, 8."""
    v = list(values)
    for i in range(0, 16, 2):  # signs and 0.25 are folded into the first stage: exact products
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
    """Returns the transform of two neighbouring columns, 16 tokens each, rounded to bf16.

    Low halves are extracted by `prmt`, not by the shift that the rowwise operand uses: ptxas would share the results
    and keep 32 registers alive from one operand to the other.
    """
    low = hadamard16_lane(m, [m.as_f32(m.prmt(w, 0, 0x1044)) for w in words])
    high = hadamard16_lane(m, [m.high_bf16(w) for w in words])
    return [m.pack_round(a, b) for a, b in zip(low, high, strict=True)]


def hadamard_amax(m: LaneOps, words: Words) -> Word:
    """Returns the amax of the transforms of two columns, before rounding to bf16; keeps NaN.

    The last butterfly is skipped: max(|a + b|, |a - b|) = |a| + |b|.
    """
    sums = []
    for half in (m.low_bf16, m.high_bf16):
        v = hadamard16_lane(m, [half(w) for w in words], last_stage=False)
        sums += [m.fadd(m.fabs(v[i]), m.fabs(v[i + 8])) for i in range(8)]
    return functools.reduce(m.fmax_nan, sums)


def pairwise_amax(m: LaneOps, words: Words) -> Word:
    """Returns the amax of each half over the words, as bf16 bits; NaN and inf survive."""
    return functools.reduce(m.max_u16x2, [m.and_(w, MAGNITUDE) for w in words])


def counter_hash_word(m: LaneOps, index: Word, k0: Word, k1: Word) -> Word:
    """Returns the 32 random bits of counter `index` under the key words k0, k1."""
    h = _hash_rounds(m, m.imad(index, COUNTER, k0), k1)
    return m.xor(h, m.shr(h, 16))


def _hash_rounds(m: LaneOps, h: Word, k1: Word) -> Word:
    """Computes the hash except its last step, h ^ (h >> 16)."""
    h = m.imad(m.xor(h, m.shr(h, 16)), 0x7FEB352D, k1)
    return m.imad(m.xor(h, m.shr(h, 15)), 0x846CA68B, 0)


def random_words(m: LaneOps, state: Words, *, tokens: int, stride: int) -> list[list[Word]]:
    """Returns random words [pair of columns][token // 2]: in each half the bytes of two tokens of one column.

    `state` is two key words and the counter of the lane's first column, for its first four tokens (`stride` is the
    distance to the next four), or these three for every four tokens.
    """
    k0, k1, index = (list(state[i::3]) for i in range(3))
    groups = tokens // 4
    base = [m.imad(i, COUNTER, k) for i, k in zip(index, k0, strict=True)]
    if len(index) == 1:
        base, k1 = [m.iadd(base[0], group * stride * COUNTER) for group in range(groups)], k1 * groups
    hashed = [
        [_hash_rounds(m, m.iadd(b, column * COUNTER), k) for b, k in zip(base, k1, strict=True)]
        for column in range(m.columns)
    ]
    return [_last_hash_round_pair(m, a, b) for a, b in zip(hashed[::2], hashed[1::2], strict=True)]


def _last_hash_round_pair(m: LaneOps, a: Words, b: Words) -> list[Word]:
    """Applies the last step of the hash to two columns at once: the upper half stays, the lower is xored with it."""
    words = []
    for low, high in zip(a, b, strict=True):
        upper = m.prmt(low, high, 0x7632)
        words += [m.xor(m.prmt(low, high, 0x5410), upper), upper]
    return words


def round_nearest_pair(m: LaneOps, pair: Pair, encode: tuple[Word, Word], quantizer: KernelQuantizer) -> Word:
    """Rounds a pair, times its encode scales, to the E2M1 grid. Signs of zeros are lost; all signs if ties go away from
    zero.
    """
    if quantizer.rounding == "away":
        scaled = [
            apply_encode_scale(m, m.fabs(x), e, quantizer)
            for x, e in zip(unpack_pair_f32(m, pair), encode, strict=True)
        ]
        return m.pack_exact(*(round_nearest_e2m1(m, m.fmin(y, E2M1.max), "away") for y in scaled))  # 6 for NaN as well
    rounded = [
        round_nearest_e2m1(m, apply_encode_scale(m, x, e, quantizer))
        for x, e in zip(unpack_pair_f32(m, pair), encode, strict=True)
    ]
    return m.clamp_e2m1_max(m.pack_exact(*rounded))


def round_stochastic_pair(m: LaneOps, pair: Pair, encode: tuple[Word, Word], noise: Word, rounding: str) -> Word:
    """Rounds the magnitudes of a pair, times its encode scales, stochastically by the bytes of `noise`.

    Returns codes in bits 9 to 11 of each half; the bits above are 0, those below arbitrary.
    """
    scaled = [m.fmul(m.fabs(x), e) for x, e in zip(unpack_pair_f32(m, pair), encode, strict=True)]
    if rounding == "midpoint":
        truncated = m.iadd(m.pack_f16_rz(*(m.fmul(y, 2.0**-14) for y in scaled)), 0x00010001)
    else:
        truncated = m.pack_f16_rz(*(m.ffma_rz(y, 2.0**-14, 2.0**-40) for y in scaled))
    return m.min_u16x2(m.imad(noise, 2, truncated), 0x0FFF0FFF)


def round_pair_to_grid(
    m: LaneOps, pair: Pair, encode: tuple[Word, Word], noise: Word | None, quantizer: KernelQuantizer
) -> Word:
    """Rounds to the grid as `round_nearest_pair`, or with noise as `round_stochastic_pair`."""
    if noise is None:
        return round_nearest_pair(m, pair, encode, quantizer)
    return m.grid_values(round_stochastic_pair(m, pair, encode, noise, quantizer.rounding), 9)


def dequantize_pair(m: LaneOps, pair: Pair, grid: Word, scale_pair: Word) -> Word:
    """Returns grid * scale with the signs of `pair`, as bf16."""
    return m.with_sign(m.mul_bf16x2(grid, scale_pair), pair_signs(m, pair))


def apply_deferred_alpha_bf16(m: LaneOps, rows: TokenRows, alphas: Words) -> list[list[Word]]:
    """Multiplies rows of bf16 pairs by the deferred alpha of their array, float32, and rounds to bf16.

    The rows are those of `len(alphas)` arrays, equally many of each. Without alphas they are returned unchanged.
    """
    if not alphas:
        return [list(row) for row in rows]
    rows_per_array = len(rows) // len(alphas)
    return [
        [m.pack_round(m.fmul(m.low_bf16(w), alpha), m.fmul(m.high_bf16(w), alpha)) for w in row]
        for i, alpha in enumerate(alphas)
        for row in rows[i * rows_per_array : (i + 1) * rows_per_array]
    ]


def apply_deferred_alpha_f32(m: LaneOps, rows: TokenRows, alphas: Words) -> list[list[Word]]:
    """Multiplies rows of float32 by their deferred alpha; returns them unchanged without one."""
    return [[functools.reduce(m.fmul, alphas, m.as_f32(x)) for x in row] for row in rows]


def encode_pair(m: LaneOps, pair: Pair, grid: Word) -> Word:
    """Returns the 4-bit codes of a grid pair, one in each half, with the signs of `pair`."""
    return m.or_(m.grid_codes(grid), m.and_(m.shr(pair_signs(m, pair), 12), 0x00080008))


def row_scales(m: LaneOps, rows: PairRows, quantizer: KernelQuantizer) -> tuple[list[PreparedDivisor], list[Word]]:
    """Returns the prepared encode scale, and the pair of equal bf16 scales, of each row's block of 16 columns."""
    lane_scales = lane_row_scales(m, rows, quantizer)
    encodes, values = [encode for _, _, encode in lane_scales], [m.pack_exact(*value) for _, value, _ in lane_scales]
    encode_of, scale_of = [], []
    for k in range(len(rows) // 2):
        lane, i = divmod(k, len(lane_scales))
        encode_of += [prepare_encode_scale(m, m.as_f32(m.shuffle_index(e, lane)), quantizer) for e in encodes[i]]
        value = m.shuffle_index(values[i], lane)
        scale_of += [m.prmt(value, value, 0x1010), m.prmt(value, value, 0x3232)]
    return encode_of, scale_of


def quantize_rows_to_bf16(
    m: LaneOps, rows: PairRows, quantizer: KernelQuantizer, random: RandomWords = None
) -> list[list[Word]]:
    """Returns each row block-dequantized, as bf16 pairs; blocks of 16 columns."""
    encode, scale = row_scales(m, rows, quantizer)
    rows_out = []
    for t, pairs in enumerate(rows):
        values = []
        for k, pair in enumerate(pairs):
            grid = round_pair_to_grid(m, pair, (encode[t], encode[t]), pair_noise(m, random, k, t), quantizer)
            values.append(dequantize_pair(m, pair, grid, scale[t]))
        rows_out.append(values)
    return rows_out


def pair_noise(m: LaneOps, random: RandomWords, k: int, t: int) -> Word | None:
    """Returns the random bytes of the k-th pair of columns of token t, one in each half; None without random words."""
    if random is None:
        return None
    word = random[k][t // 2]
    return m.prmt(word, 0, 0x4341) if t % 2 else m.and_(word, 0x00FF00FF)


def column_pairs(m: LaneOps, rows: PairRows, k: int, *, hadamard: bool) -> Sequence[Pair]:
    """Returns the k-th pair of columns, transformed if `hadamard`."""
    pairs = [row[k] for row in rows]
    return hadamard_words(m, pairs) if hadamard else pairs


def column_scales(m: LaneOps, pairs: Sequence[Pair], quantizer: KernelQuantizer) -> BlockScaleWords:
    """Returns `block_scales` of the two blocks of 16 pairs, with prepared encode scales."""
    sides = (
        list(zip(*(unpack_pair_f32(m, pair) for pair in pairs), strict=True)) if quantizer.rule.has_candidates else []
    )
    codes, values, (low, high) = block_scales(m, pair_amax(m, pairs), quantizer, sides)
    return codes, values, (prepare_encode_scale(m, low, quantizer), prepare_encode_scale(m, high, quantizer))


def quantize_columns_to_bf16(
    m: LaneOps, rows: PairRows, quantizer: KernelQuantizer, random: RandomWords = None, *, hadamard: bool, packed: bool
) -> list[list[Word]]:
    """Quantizes columns in blocks of 16 tokens: 16 bf16 rows, or 8 rows of code bytes and one row of scale bytes."""
    pair_words = []
    for k in range(len(rows[0])):
        words = column_pairs(m, rows, k, hadamard=hadamard)
        codes, values, encode = column_scales(m, words, quantizer)
        scale = m.pack_exact(*values)
        grids = [round_pair_to_grid(m, w, encode, pair_noise(m, random, k, t), quantizer) for t, w in enumerate(words)]
        pair_words.append((column_pair_words(m, words, grids, scale, packed), codes))
    return interleave_columns(m, pair_words, packed)


def column_pair_words(m: LaneOps, pairs: Sequence[Pair], grids: Words, scale: Word, packed: bool) -> list[Word]:
    """Returns two columns block-dequantized, or as codes of two tokens in each byte of each half."""
    if not packed:
        return [dequantize_pair(m, w, g, scale) for w, g in zip(pairs, grids, strict=True)]
    nibbles = [encode_pair(m, w, g) for w, g in zip(pairs, grids, strict=True)]
    return [m.or_(a, m.shl(b, 4)) for a, b in zip(nibbles[::2], nibbles[1::2], strict=True)]


def interleave_columns(m: LaneOps, pair_words: Sequence[tuple[Words, Word]], packed: bool) -> list[list[Word]]:
    """Returns the rows of all columns, from the (words, scale codes) of every two columns."""
    rows = [list(words) for words in zip(*(words for words, _ in pair_words), strict=True)]
    if not packed:
        return rows
    return [*(_bytes(m, row, 0x6420) for row in rows), _bytes(m, [codes for _, codes in pair_words], 0x5410)]


def _bytes(m: LaneOps, words: Words, selector: int) -> list[Word]:
    """Packs words that hold two bytes each into words of four bytes."""
    return [m.prmt(a, b, selector) for a, b in zip(words[::2], words[1::2], strict=True)]


def unpack_columns(m: LaneOps, code_rows: TokenRows, scale_words: Words) -> list[list[Word]]:
    """Block-dequantizes 16 token rows from 8 rows of code bytes (four columns per word) and one row of scale bytes."""
    scales = []
    for word in scale_words:
        for half in (0x4410, 0x4432):
            scales.append(m.pack_exact(*m.e4m3_decode(m.prmt(word, 0, half))))
    rows_out = []
    for words in code_rows:
        halves = [m.prmt(word, 0, selector) for word in words for selector in (0x4140, 0x4342)]
        for nibble in (0, 4):
            codes = halves if nibble == 0 else [m.shr(h, 4) for h in halves]
            pairs = zip(codes, scales, strict=True)
            rows_out.append([m.with_sign(m.mul_bf16x2(m.grid_values(c), s), m.shl(c, 12)) for c, s in pairs])
    return rows_out


def amax_f32(m: LaneOps, rows: TokenRows) -> Word:
    """Returns the amax of the lane's float32 values; keeps NaN."""
    return functools.reduce(m.fmax_nan, [m.fabs(x) for row in rows for x in row])


def block_2d_scale(m: LaneOps, rows: TokenRows, quantizer: KernelQuantizer) -> tuple[Word, Word, Word]:
    """Returns the E4M3 code (twice in a word), the value and the encode scale of a 16x16 tile of float32."""
    amax, bit = amax_f32(m, rows), 8 // m.columns
    while bit:
        amax, bit = m.fmax_nan(amax, m.as_f32(m.shuffle_xor(amax, bit))), bit // 2
    code, values, encodes = block_scales(m, (amax, amax), quantizer, [])
    return code, values[0], encodes[0]


def float_pairs(rows: TokenRows) -> list[list[Pair]]:
    """Returns the pairs of neighbouring columns of rows of float32."""
    return [list(zip(row[::2], row[1::2], strict=True)) for row in rows]


def quantize_2d(m: LaneOps, rows: TokenRows, quantizer: KernelQuantizer, *, packed: bool) -> list[list[Word]]:
    """Quantizes 16 float32 rows with one scale per 16x16 tile, rounded to nearest.

    Returns 16 bf16 rows, or 8 rows of code bytes and one row of scale bytes, which repeats the tile's.
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
    code_pairs = [[m.or_(a, m.shl(b, 4)) for a, b in zip(*pair, strict=True)] for pair in pairs]
    return [*(_bytes(m, row, 0x6420) for row in code_pairs), [m.prmt(code, code, 0x1010)] * (m.columns // 4)]
