"""Block scales under the scale rules of `formats` that the kernels support: `TwoLevelScale`, `FourOverSixScale`, and
`QuartetScale`, under which the numbers of a block are divided by its *encode scale*.

A body handles two blocks at a time, of which a *pair* has a number each: a word of two bf16, or two float32. Under a
rule with several candidates (`formats.scale_candidates`: four over six) a lane needs every number of a block, in order,
because float32 sums depend on it. The 16 tokens of a column block are a lane's own. Of row blocks each lane is handed
its share of the rows, whole.

An error in the input's domain is |v - x| with v = ((q s) A) / top, every operation rounded. q has one bit of mantissa,
so that v is a power of two times one of two numbers of the block, those of q = 1 and q = 1.5: no element is divided.
x and A are both times `lift`, a power of two, where squares of theirs would leave float32's range. `QuartetScale` has
v = q (s d) and no lift: an error that leaves the range is the largest number.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from halfbyte.formats import E2M1, E4M3, FourOverSixScale, QuartetScale, TwoLevelScale
from halfbyte.kernels.lane_ops import LaneMask, LaneOps, PreparedDivisor, TokenRows, Word, Words
from halfbyte.kernels.ptx_lanes import FLT_MAX

Pair: TypeAlias = Any  # a Word of two bf16, or a tuple of two
PairRows: TypeAlias = Sequence[Sequence[Pair]]
BlockScaleWords: TypeAlias = tuple[
    Word, tuple[Word, Word], tuple[Word, Word]
]  # codes, values, encode scales of two blocks
MAGNITUDE = 0x7FFF7FFF  # both halves of a word without their signs
EXPONENT, HALF = 0x7F800000, 0x00400000  # of a float32: its exponent, and the bit that q = 1.5 has and q = 1 has not
ONE_F32_BITS = 0x3F800000


@dataclasses.dataclass(frozen=True)
class KernelQuantizer:
    """Quantization of a tensor: a scale rule, the rounding of elements where there are random bits, and those entries
    of the tensor's scale vector that the rule reads (`tensor_scale_kernel.quantizer_entries`).
    """

    rule: TwoLevelScale
    rounding: str
    encode: Word
    decode: Word
    amax: Word = 0.0
    lift: Word = 1.0


def unpack_pair_f32(m: LaneOps, pair: Pair) -> tuple[Word, Word]:
    """The two float32 numbers of a pair."""
    return pair if isinstance(pair, tuple) else (m.low_bf16(pair), m.high_bf16(pair))


def pair_signs(m: LaneOps, pair: Pair) -> Word:
    """A word with the signs of a pair."""
    return m.pack_exact(*pair) if isinstance(pair, tuple) else pair


def pair_amax(m: LaneOps, pairs: Sequence[Pair]) -> Pair:
    """The absolute maximum of each side over the pairs; a NaN becomes another NaN."""
    if not isinstance(pairs[0], tuple):
        return m.and_(functools.reduce(m.max_abs_bf16x2, pairs), MAGNITUDE)
    low, high = ([m.fabs(x) for x in side] for side in zip(*pairs, strict=True))
    return functools.reduce(m.fmax_nan, low), functools.reduce(m.fmax_nan, high)


def block_scales(m: LaneOps, amax: Pair, quantizer: KernelQuantizer, numbers: Sequence[Words]) -> BlockScaleWords:
    """E4M3 codes, values and encode scales of two blocks with these maxima; `numbers` are theirs, float32, read where
    the rule chooses.
    """
    found = [_scales(m, amax, quantizer, candidate) for candidate in quantizer.rule.candidates(E2M1)]
    taken = found[0]
    if len(found) == 1:
        return taken
    least = [_error(m, numbers[i], taken[1][i], taken[2][i], quantizer) for i in range(2)]
    for other in found[1:]:
        errors = [_error(m, numbers[i], other[1][i], other[2][i], quantizer) for i in range(2)]
        better = [m.fless(error, old) for error, old in zip(errors, least, strict=True)]
        codes = [m.select_if(p, other[0], taken[0]) for p in better]
        values, encodes = (_select_better(m, better, *sides) for sides in zip(other[1:], taken[1:], strict=True))
        taken = m.bit_select(codes[0], codes[1], 0x00FF), values, encodes
        least = [m.fmin(error, old) for error, old in zip(errors, least, strict=True)]
    return taken


def _select_better(m: LaneOps, better: Sequence[LaneMask], new: Words, old: Words) -> tuple[Word, Word]:
    """Of two blocks' numbers the new ones where they are better."""
    low, high = (m.as_f32(m.select_if(p, a, b)) for p, a, b in zip(better, new, old, strict=True))
    return low, high


def _scales(m: LaneOps, amax: Pair, quantizer: KernelQuantizer, candidate: float) -> BlockScaleWords:
    """Of two blocks whose maxima are to become `candidate`."""
    codes = m.e4m3_encode(*(_unrounded(m, top, quantizer, candidate) for top in unpack_pair_f32(m, amax)))
    low, high = m.e4m3_decode(codes)
    if quantizer.rule.floor:
        codes, (low, high) = apply_scale_floor(m, (low, high), quantizer.rule.floor)
    return codes, (low, high), (encode_scale(m, low, quantizer), encode_scale(m, high, quantizer))


def apply_scale_floor(m: LaneOps, values: tuple[Word, Word], floor: float) -> tuple[Word, tuple[Word, Word]]:
    """(E4M3 codes, values) of two scales, with `floor` in the place of zero."""
    bits = int(np.float32(floor).view(np.uint32))
    low, high = (m.as_f32(m.select_if(m.fless(0.0, value), value, bits)) for value in values)
    return m.e4m3_encode(low, high), (low, high)


def _unrounded(m: LaneOps, top: Word, quantizer: KernelQuantizer, candidate: float) -> Word:
    """Returns a block's scale before rounding, as `unrounded_block_scale` of the rule."""
    if isinstance(quantizer.rule, FourOverSixScale):
        scaled = m.fmul(m.div_by_pow2_multiple(top, E2M1.max), quantizer.encode)
        return scaled if candidate == E2M1.max else m.fmul(scaled, E2M1.max / candidate)
    if isinstance(quantizer.rule, QuartetScale):
        part = m.fdiv(top, quantizer.rule.scaled_amax_target(E2M1))
        part = part if candidate == E2M1.max else m.fmul(part, E2M1.max / candidate)
        return m.fmin(m.fdiv(part, quantizer.encode), E4M3.max)  # also where it is NaN
    return m.fmul(top, m.fmul(quantizer.encode, quantizer.rule.headroom / candidate))


def encode_scale(m: LaneOps, value: Word, quantizer: KernelQuantizer) -> Word:
    step = m.fmul(value, quantizer.decode)
    return step if quantizer.rule.uses_effective_step else m.fmin(m.reciprocal(step), FLT_MAX)


def prepare_encode_scale(m: LaneOps, encode: Word, quantizer: KernelQuantizer) -> Word | PreparedDivisor:
    """Returns a block's encode scale as `apply_encode_scale` takes it."""
    return m.prepare_divisor(encode) if quantizer.rule.uses_effective_step else encode


def apply_encode_scale(m: LaneOps, x: Word, encode: PreparedDivisor, quantizer: KernelQuantizer) -> Word:
    """Returns x in units of the grid, for the prepared encode scale of its block."""
    return m.div_prepared(x, encode) if quantizer.rule.uses_effective_step else m.fmul(x, encode)


def _error(m: LaneOps, numbers: Words, scale: Word, encode: Word, quantizer: KernelQuantizer) -> Word:
    """Of a block under a scale, by the rule's measure: the sum over its numbers in order."""
    if quantizer.rule.error_metric == "expected":
        each = [_expected(m, m.fmul(m.fabs(x), encode)) for x in numbers]
        return m.fmul(m.fmul(scale, scale), functools.reduce(m.fadd, each))
    if quantizer.rule.uses_effective_step:
        return _scaled_block_error(m, numbers, encode, quantizer)
    amax, top = m.fmul(quantizer.amax, quantizer.lift), quantizer.rule.tensor_amax_target(E2M1)
    one, one_and_half = (m.div_by_pow2_multiple(m.fmul(m.fmul(scale, q), amax), top) for q in (1.0, 1.5))
    down = m.fmul(quantizer.lift, -1.0)
    off = []
    for x in numbers:
        magnitude = m.fabs(x)
        q = round_nearest_e2m1(m, m.fmin(m.fmul(magnitude, encode), E2M1.max))
        of_mantissa = m.as_f32(m.select_if(m.less(0, m.and_(q, HALF)), one_and_half, one))
        off.append(m.ffma(m.as_f32(m.and_(q, EXPONENT)), of_mantissa, m.fmul(magnitude, down)))
    squared = quantizer.rule.error_metric == "squared"
    return functools.reduce(m.fadd, [m.fmul(x, x) if squared else m.fabs(x) for x in off])


def _scaled_block_error(m: LaneOps, numbers: Words, step: Word, quantizer: KernelQuantizer) -> Word:
    by, each = m.prepare_divisor(step), []
    for x in numbers:
        magnitude = m.fabs(x)
        q = round_nearest_e2m1(m, m.fmin(m.div_prepared(magnitude, by), E2M1.max), quantizer.rounding)
        off = m.fsub(m.fmin(m.fmul(q, step), FLT_MAX), magnitude)
        each.append(m.fmin(m.fmul(off, off) if quantizer.rule.error_metric == "squared" else m.fabs(off), FLT_MAX))
    return functools.reduce(m.fadd, each)


def round_nearest_e2m1(m: LaneOps, y: Word, rounding: str = "rne") -> Word:
    """y on the E2M1 grid without its end, ties to even; for y >= 0 also `away` from zero."""
    return _round_half_away(m, y) if rounding == "away" else m.round_grid(y, _binade(m, y))


def _round_half_away(m: LaneOps, y: Word) -> Word:
    """Half a step more, cut off to one bit of mantissa. Below 1, where steps are those of the binade above, 1 is added
    in a sum that is cut off too, and taken away again.
    """
    one = m.as_f32(m.select_if(m.fless(y, 1.0), ONE_F32_BITS, 0))
    cut = m.and_(m.iadd(m.ffma_rz(y, 1.0, one), HALF >> 1), EXPONENT | HALF)
    return m.fsub(m.as_f32(cut), one)


def _binade(m: LaneOps, y: Word) -> Word:
    """Two steps of the grid at y."""
    return m.fmax(m.as_f32(m.and_(y, EXPONENT)), 1.0)


def _expected(m: LaneOps, z: Word) -> Word:
    """(z - lo)(hi - z) for the grid's neighbours of z >= 0; (z - 6)^2 above 6, where both are 6."""
    inside = m.fmin(z, E2M1.max)
    binade = _binade(m, inside)
    below = m.floor_grid(inside, binade)
    above = m.fmin(m.ffma(binade, 0.5, below), E2M1.max)
    return m.fabs(m.fmul(m.fsub(z, below), m.fsub(above, z)))


def lane_row_scales(m: LaneOps, rows: PairRows, quantizer: KernelQuantizer) -> list[BlockScaleWords]:
    """`block_scales` of this lane's share of the rows, two rows each: lane i of a block has the i-th share."""
    lanes = 16 // m.columns
    maxima, whole = (
        lane_row_amax(m, rows, lanes),
        lane_rows_f32(m, rows, lanes) if quantizer.rule.has_candidates else [],
    )
    return [block_scales(m, top, quantizer, whole[2 * i : 2 * i + 2]) for i, top in enumerate(maxima)]


def lane_row_amax(m: LaneOps, rows: PairRows, lanes: int) -> list[Pair]:
    """The absolute maxima of the lane's share of the rows over its block's lanes, as pairs of two rows."""
    if isinstance(rows[0][0], tuple):
        of_rows = [m.fmax_nan(*unpack_pair_f32(m, pair_amax(m, row))) for row in rows]
        shared = reduce_amax_across_lanes(m, of_rows, lanes, lambda a, b: m.fmax_nan(m.as_f32(a), m.as_f32(b)))
        return list(zip(shared[::2], shared[1::2], strict=True))
    tops = [functools.reduce(m.max_abs_bf16x2, words) for words in rows]
    pairs = []
    for a, b in zip(tops[::2], tops[1::2], strict=True):  # halves become rows
        pairs.append(m.max_abs_bf16x2(m.prmt(a, b, 0x5410), m.prmt(a, b, 0x7632)))
    return [m.and_(word, MAGNITUDE) for word in reduce_amax_across_lanes(m, pairs, lanes, m.max_abs_bf16x2)]


def reduce_amax_across_lanes(m: LaneOps, words: Words, lanes: int, larger: Callable[[Word, Word], Word]) -> list[Word]:
    """The maxima over the lanes of a block; lane i keeps the i-th share of the words."""
    words, bit = list(words), lanes // 2
    while bit:
        here, half = m.lane_bit(bit), len(words) // 2
        keep = [m.select(here, words[half + i], words[i]) for i in range(half)]
        give = [m.select(here, words[i], words[half + i]) for i in range(half)]
        words = [larger(k, m.shuffle_xor(g, bit)) for k, g in zip(keep, give, strict=True)]
        bit //= 2
    return words


def lane_rows_f32(m: LaneOps, rows: PairRows, lanes: int) -> list[list[Word]]:
    """The 16 numbers of each row of the lane's share, float32, in the order of their columns."""
    flat = [[w for pair in row for w in (pair if isinstance(pair, tuple) else (pair,))] for row in rows]
    parts, bit = [[row] for row in flat], lanes // 2  # of each row, what lanes have, in their order
    while bit:
        here, half = m.lane_bit(bit), len(parts) // 2
        pairs = zip(parts[:half], parts[half:], strict=True)
        parts, bit = [_exchange(m, a, b, here, bit) for a, b in pairs], bit // 2
    whole = [[word for part in row for word in part] for row in parts]
    if isinstance(rows[0][0], tuple):
        return [[m.as_f32(word) for word in row] for row in whole]
    return [[x for word in row for x in unpack_pair_f32(m, word)] for row in whole]


def _exchange(m: LaneOps, a: TokenRows, b: TokenRows, here: Word, bit: int) -> list[list[Word]]:
    """A lane without `bit` keeps row a, its neighbour row b, each with the other's parts next to its own."""
    made = []
    for mine in zip(a, b, strict=True):
        pairs = list(zip(*mine, strict=True))
        got = [m.shuffle_xor(m.select(here, x, y), bit) for x, y in pairs]
        made.append([m.select(here, g, x) for g, (x, _) in zip(got, pairs, strict=True)])
        made.append([m.select(here, y, g) for g, (_, y) in zip(got, pairs, strict=True)])
    return made
