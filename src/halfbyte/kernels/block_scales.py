"""The scales of blocks, under the scale rules of `formats` that the kernels serve: `TwoLevel`, `DividedFirst`, and
`ByDivision`, under which the *encode scale* of a block is what its numbers are divided by.

A body handles two blocks at a time, of which a *pair* has a number each: a word of two bf16, or two float32. Under a
rule with several candidates (`formats.choices`: four over six) a lane needs every number of a block, in order, because
float32 sums depend on it. The 16 tokens of a column block are a lane's own. Of row blocks each lane is handed its share
of the rows, whole.

An error in the input's domain is |v - x| with v = ((q s) A) / top, every operation rounded. q has one bit of mantissa,
so that v is a power of two times one of two numbers of the block, those of q = 1 and q = 1.5: no element is divided.
x and A are both times `lift`, a power of two, where squares of theirs would leave float32's range. `ByDivision` has
v = q (s d) and no lift: an error that leaves the range is the largest number.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from halfbyte.formats import E2M1, E4M3, ByDivision, DividedFirst, TwoLevel
from halfbyte.kernels.machine import Divisor, Machine, TokenRows, Where, Word, Words
from halfbyte.kernels.ptx import FLT_MAX

Pair: TypeAlias = Any  # a Word of two bf16, or a tuple of two
PairRows: TypeAlias = Sequence[Sequence[Pair]]
BlockScales: TypeAlias = tuple[Word, tuple[Word, Word], tuple[Word, Word]]  # codes, values, encode scales of two blocks
MAGNITUDE = 0x7FFF7FFF  # both halves of a word without their signs
EXPONENT, HALF = 0x7F800000, 0x00400000  # of a float32: its exponent, and the bit that q = 1.5 has and q = 1 has not
ONE = 0x3F800000


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """How the numbers of a tensor become codes: a scale rule, how elements are rounded where random bits are given, and
    those entries of the tensor's scale vector that the rule reads (`scale.entries`).
    """

    rule: TwoLevel
    rounding: str
    encode: Word
    decode: Word
    amax: Word = 0.0
    lift: Word = 1.0


def both(m: Machine, pair: Pair) -> tuple[Word, Word]:
    """The two float32 numbers of a pair."""
    return pair if isinstance(pair, tuple) else (m.low(pair), m.high(pair))


def signs(m: Machine, pair: Pair) -> Word:
    """A word with the signs of a pair."""
    return m.pack_exact(*pair) if isinstance(pair, tuple) else pair


def largest(m: Machine, pairs: Sequence[Pair]) -> Pair:
    """The absolute maximum of each side over the pairs; a NaN becomes another NaN."""
    if not isinstance(pairs[0], tuple):
        return m.and_(functools.reduce(m.max_abs_bf16x2, pairs), MAGNITUDE)
    low, high = ([m.fabs(x) for x in side] for side in zip(*pairs, strict=True))
    return functools.reduce(m.fmax_nan, low), functools.reduce(m.fmax_nan, high)


def block_scales(m: Machine, amax: Pair, how: Quantizer, numbers: Sequence[Words]) -> BlockScales:
    """E4M3 codes, values and encode scales of two blocks with these maxima; `numbers` are theirs, float32, read where
    the rule chooses.
    """
    found = [_scales(m, amax, how, candidate) for candidate in how.rule.candidates(E2M1)]
    taken = found[0]
    if len(found) == 1:
        return taken
    least = [_error(m, numbers[i], taken[1][i], taken[2][i], how) for i in range(2)]
    for other in found[1:]:
        errors = [_error(m, numbers[i], other[1][i], other[2][i], how) for i in range(2)]
        better = [m.fless(error, old) for error, old in zip(errors, least, strict=True)]
        codes = [m.choose(p, other[0], taken[0]) for p in better]
        values, encodes = (_chosen(m, better, *sides) for sides in zip(other[1:], taken[1:], strict=True))
        taken = m.merge(codes[0], codes[1], 0x00FF), values, encodes
        least = [m.fmin(error, old) for error, old in zip(errors, least, strict=True)]
    return taken


def _chosen(m: Machine, better: Sequence[Where], new: Words, old: Words) -> tuple[Word, Word]:
    """Of two blocks' numbers the new ones where they are better."""
    low, high = (m.real(m.choose(p, a, b)) for p, a, b in zip(better, new, old, strict=True))
    return low, high


def _scales(m: Machine, amax: Pair, how: Quantizer, candidate: float) -> BlockScales:
    """Of two blocks whose maxima are to become `candidate`."""
    codes = m.e4m3_encode(*(_unrounded(m, top, how, candidate) for top in both(m, amax)))
    low, high = m.e4m3_decode(codes)
    if how.rule.floor:
        codes, (low, high) = floored(m, (low, high), how.rule.floor)
    return codes, (low, high), (encode_scale(m, low, how), encode_scale(m, high, how))


def floored(m: Machine, values: tuple[Word, Word], floor: float) -> tuple[Word, tuple[Word, Word]]:
    """(E4M3 codes, values) of two scales, with `floor` in the place of zero."""
    bits = int(np.float32(floor).view(np.uint32))
    low, high = (m.real(m.choose(m.fless(0.0, value), value, bits)) for value in values)
    return m.e4m3_encode(low, high), (low, high)


def _unrounded(m: Machine, top: Word, how: Quantizer, candidate: float) -> Word:
    """A block's scale before it is rounded: the definition's `unrounded`."""
    if isinstance(how.rule, DividedFirst):
        scaled = m.fmul(m.quotient(top, E2M1.max), how.encode)
        return scaled if candidate == E2M1.max else m.fmul(scaled, E2M1.max / candidate)
    if isinstance(how.rule, ByDivision):
        part = m.fdiv(top, how.rule.reach(E2M1))
        part = part if candidate == E2M1.max else m.fmul(part, E2M1.max / candidate)
        return m.fmin(m.fdiv(part, how.encode), E4M3.max)  # also where it is NaN
    return m.fmul(top, m.fmul(how.encode, how.rule.headroom / candidate))


def encode_scale(m: Machine, value: Word, how: Quantizer) -> Word:
    step = m.fmul(value, how.decode)
    return step if how.rule.by_step else m.fmin(m.reciprocal(step), FLT_MAX)


def ready(m: Machine, encode: Word, how: Quantizer) -> Word | Divisor:
    """A block's encode scale as `scaled` takes it."""
    return m.divisor(encode) if how.rule.by_step else encode


def scaled(m: Machine, x: Word, encode: Divisor, how: Quantizer) -> Word:
    """x as it is rounded onto the grid, under the `ready` encode scale of its block."""
    return m.over(x, encode) if how.rule.by_step else m.fmul(x, encode)


def _error(m: Machine, numbers: Words, scale: Word, encode: Word, how: Quantizer) -> Word:
    """Of a block under a scale, by the rule's measure: the sum over its numbers in order."""
    if how.rule.measure == "expected":
        each = [_expected(m, m.fmul(m.fabs(x), encode)) for x in numbers]
        return m.fmul(m.fmul(scale, scale), functools.reduce(m.fadd, each))
    if how.rule.by_step:
        return _error_by_step(m, numbers, encode, how)
    amax, top = m.fmul(how.amax, how.lift), how.rule.top(E2M1)
    one, one_and_half = (m.quotient(m.fmul(m.fmul(scale, q), amax), top) for q in (1.0, 1.5))
    down = m.fmul(how.lift, -1.0)
    off = []
    for x in numbers:
        magnitude = m.fabs(x)
        q = nearest(m, m.fmin(m.fmul(magnitude, encode), E2M1.max))
        of_mantissa = m.real(m.choose(m.less(0, m.and_(q, HALF)), one_and_half, one))
        off.append(m.ffma(m.real(m.and_(q, EXPONENT)), of_mantissa, m.fmul(magnitude, down)))
    squared = how.rule.measure == "squared"
    return functools.reduce(m.fadd, [m.fmul(x, x) if squared else m.fabs(x) for x in off])


def _error_by_step(m: Machine, numbers: Words, step: Word, how: Quantizer) -> Word:
    by, each = m.divisor(step), []
    for x in numbers:
        magnitude = m.fabs(x)
        q = nearest(m, m.fmin(m.over(magnitude, by), E2M1.max), how.rounding)
        off = m.fsub(m.fmin(m.fmul(q, step), FLT_MAX), magnitude)
        each.append(m.fmin(m.fmul(off, off) if how.rule.measure == "squared" else m.fabs(off), FLT_MAX))
    return functools.reduce(m.fadd, each)


def nearest(m: Machine, y: Word, rounding: str = "rne") -> Word:
    """y on the E2M1 grid without its end, ties to even; for y >= 0 also `away` from zero."""
    return _away(m, y) if rounding == "away" else m.round_grid(y, _binade(m, y))


def _away(m: Machine, y: Word) -> Word:
    """Half a step more, cut off to one bit of mantissa. Below 1, where steps are those of the binade above, 1 is added
    in a sum that is cut off too, and taken away again.
    """
    one = m.real(m.choose(m.fless(y, 1.0), ONE, 0))
    cut = m.and_(m.iadd(m.ffma_cut(y, 1.0, one), HALF >> 1), EXPONENT | HALF)
    return m.fsub(m.real(cut), one)


def _binade(m: Machine, y: Word) -> Word:
    """Two steps of the grid at y."""
    return m.fmax(m.real(m.and_(y, EXPONENT)), 1.0)


def _expected(m: Machine, z: Word) -> Word:
    """(z - lo)(hi - z) for the grid's neighbours of z >= 0; (z - 6)^2 above 6, where both are 6."""
    inside = m.fmin(z, E2M1.max)
    binade = _binade(m, inside)
    below = m.floor_grid(inside, binade)
    above = m.fmin(m.ffma(binade, 0.5, below), E2M1.max)
    return m.fabs(m.fmul(m.fsub(z, below), m.fsub(above, z)))


def own_row_scales(m: Machine, rows: PairRows, how: Quantizer) -> list[BlockScales]:
    """`block_scales` of this lane's share of the rows, two rows each: lane i of a block has the i-th share."""
    lanes = 16 // m.columns
    maxima, whole = own_row_maxima(m, rows, lanes), share_rows(m, rows, lanes) if how.rule.chooses else []
    return [block_scales(m, top, how, whole[2 * i : 2 * i + 2]) for i, top in enumerate(maxima)]


def own_row_maxima(m: Machine, rows: PairRows, lanes: int) -> list[Pair]:
    """The absolute maxima of the lane's share of the rows over its block's lanes, as pairs of two rows."""
    if isinstance(rows[0][0], tuple):
        of_rows = [m.fmax_nan(*both(m, largest(m, row))) for row in rows]
        shared = share_maxima(m, of_rows, lanes, lambda a, b: m.fmax_nan(m.real(a), m.real(b)))
        return list(zip(shared[::2], shared[1::2], strict=True))
    tops = [functools.reduce(m.max_abs_bf16x2, words) for words in rows]
    pairs = []
    for a, b in zip(tops[::2], tops[1::2], strict=True):  # halves become rows
        pairs.append(m.max_abs_bf16x2(m.prmt(a, b, 0x5410), m.prmt(a, b, 0x7632)))
    return [m.and_(word, MAGNITUDE) for word in share_maxima(m, pairs, lanes, m.max_abs_bf16x2)]


def share_maxima(m: Machine, words: Words, lanes: int, larger: Callable[[Word, Word], Word]) -> list[Word]:
    """The maxima over the lanes of a block; lane i keeps the i-th share of the words."""
    words, bit = list(words), lanes // 2
    while bit:
        here, half = m.lane_bit(bit), len(words) // 2
        keep = [m.select(here, words[half + i], words[i]) for i in range(half)]
        give = [m.select(here, words[i], words[half + i]) for i in range(half)]
        words = [larger(k, m.swap(g, bit)) for k, g in zip(keep, give, strict=True)]
        bit //= 2
    return words


def share_rows(m: Machine, rows: PairRows, lanes: int) -> list[list[Word]]:
    """The 16 numbers of each row of the lane's share, float32, in the order of their columns."""
    flat = [[w for pair in row for w in (pair if isinstance(pair, tuple) else (pair,))] for row in rows]
    parts, bit = [[row] for row in flat], lanes // 2  # of each row, what lanes have, in their order
    while bit:
        here, half = m.lane_bit(bit), len(parts) // 2
        pairs = zip(parts[:half], parts[half:], strict=True)
        parts, bit = [_exchange(m, a, b, here, bit) for a, b in pairs], bit // 2
    whole = [[word for part in row for word in part] for row in parts]
    if isinstance(rows[0][0], tuple):
        return [[m.real(word) for word in row] for row in whole]
    return [[x for word in row for x in both(m, word)] for row in whole]


def _exchange(m: Machine, a: TokenRows, b: TokenRows, here: Word, bit: int) -> list[list[Word]]:
    """A lane without `bit` keeps row a, its neighbour row b, each with the other's parts beside its own."""
    made = []
    for mine in zip(a, b, strict=True):
        pairs = list(zip(*mine, strict=True))
        got = [m.swap(m.select(here, x, y), bit) for x, y in pairs]
        made.append([m.select(here, g, x) for g, (x, _) in zip(got, pairs, strict=True)])
        made.append([m.select(here, y, g) for g, (_, y) in zip(got, pairs, strict=True)])
    return made
