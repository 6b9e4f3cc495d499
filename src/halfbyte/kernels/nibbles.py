"""E2M1 codes as a GEMM reads them: two in a byte along the contraction, the even index in the low nibble.

A *nibble pair* is a word whose halves carry a signed code in their top four bits. Along a row the halves are
neighbours: one multiplication by 1 + 2**12 puts both codes into the top byte. Along a column two tokens' words make the
bytes, and byte permutations sort eight tokens of each column into one word.
"""

from halfbyte.kernels import arithmetic as q
from halfbyte.kernels.blocks import Quantizer, own_row_scales, ready
from halfbyte.kernels.machine import Machine, Noise, TokenRows, Word, Words

SIDE_BY_SIDE = 1 + 2**12
UPPER = 0xF0F0F0F0  # the upper nibble of each byte


def coded_pair(m: Machine, word: Word, encode: tuple[Word, Word], noise: Word | None, how: Quantizer) -> Word:
    """The nibble pair of `word` times its encode scales, with its signs; with noise, bits below the codes are not
    zero.
    """
    if noise is None:
        return m.with_sign(m.grid_nibbles(q.round_pair(m, word, encode, how)), word)
    return m.with_sign(m.shl(q.draw_pair(m, word, encode, noise, how.rounding), 3), word)


def row_bytes(m: Machine, pairs: Words) -> Word:
    """The packed bytes of a lane's columns of one row, in the low bytes of a word; from nibble pairs of zeros below."""
    tops = [m.imad(pair, SIDE_BY_SIDE, 0) for pair in pairs]
    return m.shr(tops[0], 24) if len(tops) == 1 else m.prmt(tops[0], tops[1], 0x0073)


def drawn_row_bytes(m: Machine, rows: TokenRows) -> list[Word]:
    """`row_bytes` of each row, from nibble pairs with anything below: four pairs make a word, of as many rows."""
    pairs, wide = [pair for row in rows for pair in row], len(rows[0])
    made = []
    for first in range(0, len(pairs), 4):
        halves = [m.prmt(pairs[i], pairs[i + 1], 0x7351) for i in (first, first + 2)]  # even columns, then odd ones
        even, odd = m.prmt(halves[0], halves[1], 0x5410), m.prmt(halves[0], halves[1], 0x7632)
        word = m.merge(odd, m.shr(even, 4), UPPER)
        made += [m.shr(word, 8 * i) if i else word for i in range(0, 4, wide)]
    return made


def column_words(m: Machine, pairs: Words) -> list[list[Word]]:
    """For each of two columns the words of its packed tokens, eight a word, from a nibble pair a token."""
    halves = [m.merge(b, m.shr(a, 4), UPPER) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    sorted_two = [m.prmt(a, b, 0x7351) for a, b in zip(halves[::2], halves[1::2], strict=True)]
    fours = list(zip(sorted_two[::2], sorted_two[1::2], strict=True))
    return [[m.prmt(a, b, selector) for a, b in fours] for selector in (0x5410, 0x7632)]


def quantize_rows(m: Machine, rows: TokenRows, how: Quantizer, random: Noise = None) -> tuple[list[Word], list[Word]]:
    """(packed bytes of each row, E4M3 codes of this lane's share of the rows, two rows a word)."""
    own = own_row_scales(m, rows, how)
    made = []
    for t, words in enumerate(rows):
        lane, i = divmod(t // 2, len(own))
        encode = ready(m, m.real(m.from_lane(own[i][2][t % 2], lane)), how)
        noises = [q.pair_noise(m, random, k, t) for k in range(len(words))]
        made.append([coded_pair(m, w, (encode, encode), n, how) for w, n in zip(words, noises, strict=True)])
    packed = [row_bytes(m, row) for row in made] if random is None else drawn_row_bytes(m, made)
    return packed, [codes for codes, _, _ in own]


def quantize_columns(
    m: Machine, rows: TokenRows, how: Quantizer, random: Noise = None, *, hadamard: bool
) -> tuple[list[list[Word]], Word]:
    """(words of each column's packed tokens, the E4M3 codes of the columns in the bytes of a word)."""
    columns, codes = [], []
    for k in range(len(rows[0])):
        words = q.column_pairs(m, rows, k, hadamard=hadamard)
        code, _, encode = q.column_scales(m, words, how)
        noises = [q.pair_noise(m, random, k, t) for t in range(len(words))]
        pairs = [coded_pair(m, w, encode, n, how) for w, n in zip(words, noises, strict=True)]
        columns += column_words(m, pairs)
        codes.append(code)
    return columns, codes[0] if len(codes) == 1 else m.prmt(codes[0], codes[1], 0x5410)
