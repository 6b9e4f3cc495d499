"""Block scales under the scale rules of `formats` that the kernels support: `TwoLevelScale`, `FourOverSixScale`, and
`QuartetScale`, under which the elements of a block are divided by its *encode scale*.

A body handles two blocks at a time. A *pair* has one element of each: a word of two bf16, or two float32. Under a rule
with several candidates (`formats.scale_candidates`: four over six) a lane needs every element of a block, in order,
because float32 sums depend on the order. A column block of 16 tokens is in one lane. Of row blocks, each lane of the
block is sent its share of the rows, whole.

An error in the input's domain is |v - x| with v = ((q s) A) / top, every operation rounded. q has one mantissa bit, so
v is a power of two times one of two values per block, those of q = 1 and q = 1.5: no element is divided. x and A are
both multiplied by `lift`, a power of two, where their squares would leave the range of float32. `QuartetScale` has
v = q (s d) and no lift: an error that leaves the range is the largest float32.
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
MAGNITUDE = 0x7FFF7FFF  # both halves of a word without their sign bits
EXPONENT, HALF = (
    0x7F800000,
    0x00400000,
)  # of float32: the exponent field; the mantissa bit that is set in q = 1.5, not in q = 1
ONE_F32_BITS = 0x3F800000


@dataclasses.dataclass(frozen=True)
class KernelQuantizer:
    """Quantization of a tensor: a scale rule, the rounding of elements where there are random bits, and the entries of
    the tensor's scale vector that the rule reads (`tensor_scale_kernel.quantizer_entries`).
    """

    rule: TwoLevelScale
    rounding: str
    encode: Word
    decode: Word
    amax: Word = 0.0
    lift: Word = 1.0


def unpack_pair_f32(m: LaneOps, pair: Pair) -> tuple[Word, Word]:
    """Returns the two float32 values of a pair."""
    return pair if isinstance(pair, tuple) else (m.low_bf16(pair), m.high_bf16(pair))


def pair_signs(m: LaneOps, pair: Pair) -> Word:
    """Returns a word whose halves have the signs of a pair."""
    return m.pack_exact(*pair) if isinstance(pair, tuple) else pair


def pair_amax(m: LaneOps, pairs: Sequence[Pair]) -> Pair:
    """Returns the amax of each side over the pairs; a NaN stays a NaN, with other bits."""
    if not isinstance(pairs[0], tuple):
        return m.and_(functools.reduce(m.max_abs_bf16x2, pairs), MAGNITUDE)
    low, high = ([m.fabs(x) for x in side] for side in zip(*pairs, strict=True))
    return functools.reduce(m.fmax_nan, low), functools.reduce(m.fmax_nan, high)


def block_scales(m: LaneOps, amax: Pair, quantizer: KernelQuantizer, numbers: Sequence[Words]) -> BlockScaleWords:
    """Returns E4M3 codes, values and encode scales of two blocks with these amaxes.

    `numbers` are the elements of each block, float32, read only if the rule has several candidates.
    """
    candidates = [_scales(m, amax, quantizer, candidate) for candidate in quantizer.rule.candidates(E2M1)]
    best = candidates[0]
    if len(candidates) == 1:
        return best
    best_errors = [_error(m, numbers[i], best[1][i], best[2][i], quantizer) for i in range(2)]
    for scales in candidates[1:]:
        errors = [_error(m, numbers[i], scales[1][i], scales[2][i], quantizer) for i in range(2)]
        is_better = [m.fless(error, best_error) for error, best_error in zip(errors, best_errors, strict=True)]
        codes = [m.select_if(p, scales[0], best[0]) for p in is_better]
        values, encodes = (_select_better(m, is_better, *sides) for sides in zip(scales[1:], best[1:], strict=True))
        best = m.bit_select(codes[0], codes[1], 0x00FF), values, encodes
        best_errors = [m.fmin(error, best_error) for error, best_error in zip(errors, best_errors, strict=True)]
    return best


def _select_better(m: LaneOps, is_better: Sequence[LaneMask], new: Words, old: Words) -> tuple[Word, Word]:
    """Returns, for each of two blocks, the new value if it is better, else the old one."""
    low, high = (m.as_f32(m.select_if(p, a, b)) for p, a, b in zip(is_better, new, old, strict=True))
    return low, high


def _scales(m: LaneOps, amax: Pair, quantizer: KernelQuantizer, candidate: float) -> BlockScaleWords:
    """Returns the scales of two blocks whose amaxes are mapped to `candidate`."""
    codes = m.e4m3_encode(*(_unrounded(m, block_amax, quantizer, candidate) for block_amax in unpack_pair_f32(m, amax)))
    low, high = m.e4m3_decode(codes)
    if quantizer.rule.floor:
        codes, (low, high) = apply_scale_floor(m, (low, high), quantizer.rule.floor)
    return codes, (low, high), (encode_scale(m, low, quantizer), encode_scale(m, high, quantizer))


def apply_scale_floor(m: LaneOps, values: tuple[Word, Word], floor: float) -> tuple[Word, tuple[Word, Word]]:
    """Returns (E4M3 codes, values) of two scales; `floor` replaces zero."""
    bits = int(np.float32(floor).view(np.uint32))
    low, high = (m.as_f32(m.select_if(m.fless(0.0, value), value, bits)) for value in values)
    return m.e4m3_encode(low, high), (low, high)


def _unrounded(m: LaneOps, amax: Word, quantizer: KernelQuantizer, candidate: float) -> Word:
    """Returns a block's scale before rounding, as `unrounded_block_scale` of the rule."""
    if isinstance(quantizer.rule, FourOverSixScale):
        scaled = m.fmul(m.div_by_pow2_multiple(amax, E2M1.max), quantizer.encode)
        return scaled if candidate == E2M1.max else m.fmul(scaled, E2M1.max / candidate)
    if isinstance(quantizer.rule, QuartetScale):
        unscaled = m.fdiv(amax, quantizer.rule.scaled_amax_target(E2M1))
        unscaled = unscaled if candidate == E2M1.max else m.fmul(unscaled, E2M1.max / candidate)
        return m.fmin(m.fdiv(unscaled, quantizer.encode), E4M3.max)  # 448 for NaN as well
    return m.fmul(amax, m.fmul(quantizer.encode, quantizer.rule.headroom / candidate))


def encode_scale(m: LaneOps, value: Word, quantizer: KernelQuantizer) -> Word:
    step = m.fmul(value, quantizer.decode)
    return step if quantizer.rule.uses_effective_step else m.fmin(m.reciprocal(step), FLT_MAX)


def prepare_encode_scale(m: LaneOps, encode: Word, quantizer: KernelQuantizer) -> Word | PreparedDivisor:
    """Returns a block's encode scale as `apply_encode_scale` takes it."""
    return m.prepare_divisor(encode) if quantizer.rule.uses_effective_step else encode


def apply_encode_scale(m: LaneOps, x: Word, encode: PreparedDivisor, quantizer: KernelQuantizer) -> Word:
    """Returns x in units of the E2M1 grid, for the prepared encode scale of its block."""
    return m.div_prepared(x, encode) if quantizer.rule.uses_effective_step else m.fmul(x, encode)


def _error(m: LaneOps, numbers: Words, scale: Word, encode: Word, quantizer: KernelQuantizer) -> Word:
    """Returns the error of a block under a scale, by the rule's metric: a sum over its elements in order."""
    if quantizer.rule.error_metric == "expected":
        errors = [_expected(m, m.fmul(m.fabs(x), encode)) for x in numbers]
        return m.fmul(m.fmul(scale, scale), functools.reduce(m.fadd, errors))
    if quantizer.rule.uses_effective_step:
        return _scaled_block_error(m, numbers, encode, quantizer)
    amax, target = m.fmul(quantizer.amax, quantizer.lift), quantizer.rule.tensor_amax_target(E2M1)
    value_of_1, value_of_1_5 = (m.div_by_pow2_multiple(m.fmul(m.fmul(scale, q), amax), target) for q in (1.0, 1.5))
    negative_lift = m.fmul(quantizer.lift, -1.0)
    deviations = []
    for x in numbers:
        magnitude = m.fabs(x)
        q = round_nearest_e2m1(m, m.fmin(m.fmul(magnitude, encode), E2M1.max))
        mantissa_value = m.as_f32(m.select_if(m.less(0, m.and_(q, HALF)), value_of_1_5, value_of_1))
        deviations.append(m.ffma(m.as_f32(m.and_(q, EXPONENT)), mantissa_value, m.fmul(magnitude, negative_lift)))
    squared = quantizer.rule.error_metric == "squared"
    return functools.reduce(m.fadd, [m.fmul(x, x) if squared else m.fabs(x) for x in deviations])


def _scaled_block_error(m: LaneOps, numbers: Words, step: Word, quantizer: KernelQuantizer) -> Word:
    divisor, errors = m.prepare_divisor(step), []
    for x in numbers:
        magnitude = m.fabs(x)
        q = round_nearest_e2m1(m, m.fmin(m.div_prepared(magnitude, divisor), E2M1.max), quantizer.rounding)
        diff = m.fsub(m.fmin(m.fmul(q, step), FLT_MAX), magnitude)
        errors.append(m.fmin(m.fmul(diff, diff) if quantizer.rule.error_metric == "squared" else m.fabs(diff), FLT_MAX))
    return functools.reduce(m.fadd, errors)


def round_nearest_e2m1(m: LaneOps, y: Word, rounding: str = "rne") -> Word:
    """Rounds y to the E2M1 grid without saturation, ties to even; for y >= 0 also ties `away` from zero."""
    return _round_half_away(m, y) if rounding == "away" else m.round_grid(y, _binade(m, y))


def _round_half_away(m: LaneOps, y: Word) -> Word:
    """Adds half a step and truncates to one mantissa bit. Below 1, where the step is that of the binade above, 1 is
    added first, in a sum that is truncated too, and subtracted at the end.
    """
    one = m.as_f32(m.select_if(m.fless(y, 1.0), ONE_F32_BITS, 0))
    truncated = m.and_(m.iadd(m.ffma_rz(y, 1.0, one), HALF >> 1), EXPONENT | HALF)
    return m.fsub(m.as_f32(truncated), one)


def _binade(m: LaneOps, y: Word) -> Word:
    """Returns two steps of the E2M1 grid at y: max(1, 2**floor(log2 y))."""
    return m.fmax(m.as_f32(m.and_(y, EXPONENT)), 1.0)


def _expected(m: LaneOps, z: Word) -> Word:
    """Returns (z - lo)(hi - z) for the grid neighbours of z >= 0; (z - 6)^2 above 6, where both are 6."""
    clipped = m.fmin(z, E2M1.max)
    binade = _binade(m, clipped)
    below = m.floor_grid(clipped, binade)
    above = m.fmin(m.ffma(binade, 0.5, below), E2M1.max)
    return m.fabs(m.fmul(m.fsub(z, below), m.fsub(above, z)))


def lane_row_scales(m: LaneOps, rows: PairRows, quantizer: KernelQuantizer) -> list[BlockScaleWords]:
    """Returns `block_scales` of this lane's share of the rows, two rows each: lane i of a block has the i-th share."""
    lanes = 16 // m.columns
    amaxes, whole_rows = (
        lane_row_amax(m, rows, lanes),
        lane_rows_f32(m, rows, lanes) if quantizer.rule.has_candidates else [],
    )
    return [block_scales(m, amax, quantizer, whole_rows[2 * i : 2 * i + 2]) for i, amax in enumerate(amaxes)]


def lane_row_amax(m: LaneOps, rows: PairRows, lanes: int) -> list[Pair]:
    """Returns the amaxes of the lane's share of the rows, reduced over the lanes of its block, as pairs of two rows."""
    if isinstance(rows[0][0], tuple):
        row_amaxes = [m.fmax_nan(*unpack_pair_f32(m, pair_amax(m, row))) for row in rows]
        shared = reduce_amax_across_lanes(m, row_amaxes, lanes, lambda a, b: m.fmax_nan(m.as_f32(a), m.as_f32(b)))
        return list(zip(shared[::2], shared[1::2], strict=True))
    lane_amaxes = [functools.reduce(m.max_abs_bf16x2, words) for words in rows]
    pairs = []
    for a, b in zip(lane_amaxes[::2], lane_amaxes[1::2], strict=True):  # halves: columns -> rows
        pairs.append(m.max_abs_bf16x2(m.prmt(a, b, 0x5410), m.prmt(a, b, 0x7632)))
    return [m.and_(word, MAGNITUDE) for word in reduce_amax_across_lanes(m, pairs, lanes, m.max_abs_bf16x2)]


def reduce_amax_across_lanes(m: LaneOps, words: Words, lanes: int, larger: Callable[[Word, Word], Word]) -> list[Word]:
    """Reduces words over the lanes of a block by `larger`; lane i returns the i-th share of the words."""
    words, bit = list(words), lanes // 2
    while bit:
        has_bit, half = m.lane_bit(bit), len(words) // 2
        keep = [m.select(has_bit, words[half + i], words[i]) for i in range(half)]
        send = [m.select(has_bit, words[i], words[half + i]) for i in range(half)]
        words = [larger(k, m.shuffle_xor(sent, bit)) for k, sent in zip(keep, send, strict=True)]
        bit //= 2
    return words


def lane_rows_f32(m: LaneOps, rows: PairRows, lanes: int) -> list[list[Word]]:
    """Returns the 16 elements of each row of the lane's share, float32, in the order of their columns."""
    flat = [[w for pair in row for w in (pair if isinstance(pair, tuple) else (pair,))] for row in rows]
    row_parts, bit = [[row] for row in flat], lanes // 2  # per row: the parts gathered so far, in lane order
    while bit:
        has_bit, half = m.lane_bit(bit), len(row_parts) // 2
        pairs = zip(row_parts[:half], row_parts[half:], strict=True)
        row_parts, bit = [_exchange(m, a, b, has_bit, bit) for a, b in pairs], bit // 2
    whole_rows = [[word for part in row for word in part] for row in row_parts]
    if isinstance(rows[0][0], tuple):
        return [[m.as_f32(word) for word in row] for row in whole_rows]
    return [[x for word in row for x in unpack_pair_f32(m, word)] for row in whole_rows]


def _exchange(m: LaneOps, a: TokenRows, b: TokenRows, has_bit: Word, bit: int) -> list[list[Word]]:
    """Exchanges rows between two lanes: the lane without `bit` gets both parts of row a, the other both of row b."""
    parts = []
    for part_pair in zip(a, b, strict=True):
        pairs = list(zip(*part_pair, strict=True))
        received = [m.shuffle_xor(m.select(has_bit, x, y), bit) for x, y in pairs]
        parts.append([m.select(has_bit, other, x) for other, (x, _) in zip(received, pairs, strict=True)])
        parts.append([m.select(has_bit, y, other) for other, (_, y) in zip(received, pairs, strict=True)])
    return parts
