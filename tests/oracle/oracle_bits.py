"""Bit-based oracle: the same quantities as `oracle_table`, from integers alone.

A float32 is a uint32 here. Sums, products and quotients are integer arithmetic on significands and exponents, rounded
by shifting; no floating-point operation and no table of values is used. No code of the package runs here.
"""

import functools

import numpy as np

INF, NAN, FLT_MAX, ONE = 0x7F80_0000, 0x7FC0_0000, 0x7F7F_FFFF, 0x3F80_0000
# Element -> bits of the mantissa, exponent of the smallest step, code of the largest value, bits without the sign.
ELEMENTS = {
    "E2M1": (1, -1, 0b11_1, 3), "E2M3": (3, -3, 0b11_111, 5), "E3M2": (2, -4, 0b111_11, 5),
    "E4M3": (3, -9, 0b1111_110, 7), "E5M2": (2, -16, 0b11110_11, 7), "UE5M3": (3, -17, 0b11110_111, 8),
}  # fmt: skip
FLOAT32, BFLOAT16 = (23, -149), (7, -133)


def word(x: float) -> int:
    """Bits of a constant."""
    return int(np.float32(x).view(np.uint32))


def _length(m):
    """Bits of positive integers below 2^62."""
    length = np.zeros_like(m)
    for step in (32, 16, 8, 4, 2, 1):
        more = m >> (length + step) > 0
        length = np.where(more, length + step, length)
    return length + (m > 0)


def _onto(m, e, mantissa, least, mode="rne", noise=None):
    """Codes of m 2^e on the grid with `mantissa` bits whose smallest step is 2^least: steps below the binade, plus
    2^mantissa for each binade. `mode` rne, away, down, or midpoint (up where the part of the step that is left, and
    (noise + 1/2) / 256, are 1 together)."""
    m, e = np.broadcast_arrays(np.asarray(m, np.int64), np.asarray(e, np.int64))
    drop = np.maximum(_length(m) - (mantissa + 1), least - e)
    right = np.clip(drop, 0, 61)
    kept = np.where(drop < 0, m << np.clip(-drop, 0, 40), m >> right)
    rest, half = m & ((np.int64(1) << right) - 1), (np.int64(1) << right) >> 1
    if mode == "rne":
        up = (rest > half) | ((rest == half) & (kept & 1 == 1))
    elif mode == "away":
        up = rest >= half
    elif mode == "midpoint":  # rest < 2^24, so that beyond 40 places nothing is near
        near = np.clip(drop, 0, 40)
        up = rest * 512 >= (511 - 2 * noise.astype(np.int64)) << near
    else:
        up = np.zeros(m.shape, bool)
    code = ((e + drop - least) << mantissa) + kept + (up & (drop > 0))
    return np.where(m == 0, 0, code)


def _split(a):
    """(significand, exponent) of the magnitudes of finite words."""
    magnitude = np.asarray(a, np.int64) & 0x7FFF_FFFF
    exponent = magnitude >> 23
    return np.where(exponent == 0, magnitude, (magnitude & 0x7F_FFFF) | 0x80_0000), np.maximum(exponent, 1) - 150


def _join(sign, m, e):
    bits = np.minimum(_onto(m, e, *FLOAT32), INF)
    return (bits | sign << 31).astype(np.uint32)


def _signs(a, b):
    return (np.asarray(a, np.int64) ^ np.asarray(b, np.int64)) >> 31


def _is_nan(a):
    return np.asarray(a, np.int64) & 0x7FFF_FFFF > INF


def _is_inf(a):
    return np.asarray(a, np.int64) & 0x7FFF_FFFF == INF


def _is_zero(a):
    return np.asarray(a, np.int64) & 0x7FFF_FFFF == 0


def mul(a, b):
    """float32 product."""
    (ma, ea), (mb, eb), sign = _split(a), _split(b), _signs(a, b)
    bad = _is_nan(a) | _is_nan(b) | (_is_inf(a) & _is_zero(b)) | (_is_zero(a) & _is_inf(b))
    made = np.where(_is_inf(a) | _is_inf(b), INF | sign << 31, _join(sign, ma * mb, ea + eb))
    return np.where(bad, NAN, made).astype(np.uint32)


def div(a, b):
    """float32 quotient."""
    (ma, ea), (mb, eb), sign = _split(a), _split(b), _signs(a, b)
    la, lb = 24 - _length(ma), 24 - _length(np.maximum(mb, 1))
    ma, mb = ma << la, np.maximum(mb, 1) << lb
    quotient = (ma << 26) // mb << 1 | (((ma << 26) % mb) != 0)
    made = _join(sign, quotient, ea - la - eb + lb - 27)
    made = np.where(_is_zero(b) | _is_inf(a), INF | sign << 31, np.where(_is_inf(b), sign << 31, made))
    bad = _is_nan(a) | _is_nan(b) | (_is_inf(a) & _is_inf(b)) | (_is_zero(a) & _is_zero(b))
    return np.where(bad, NAN, made).astype(np.uint32)


def add(a, b):
    """float32 sum."""
    a, b = np.broadcast_arrays(np.asarray(a, np.uint32), np.asarray(b, np.uint32))
    swap = (b & 0x7FFF_FFFF) > (a & 0x7FFF_FFFF)
    a, b = np.where(swap, b, a), np.where(swap, a, b)
    (ma, ea), (mb, eb) = _split(a), _split(b)
    ma, mb, d = ma << 36, mb << 36, np.clip(ea - eb, 0, 61)
    mb = mb >> d | (mb & ((np.int64(1) << d) - 1) != 0)
    differ, sign = _signs(a, b), a.astype(np.int64) >> 31
    total = np.where(differ == 1, ma - mb, ma + mb)
    made = _join(np.where((total == 0) & (differ == 1), 0, sign), total, ea - 36)
    bad = _is_nan(a) | _is_nan(b) | (_is_inf(a) & _is_inf(b) & (differ == 1))
    return np.where(bad, NAN, np.where(_is_inf(a), a, made)).astype(np.uint32)


def sub(a, b):
    return add(a, np.asarray(b, np.uint32) ^ np.uint32(0x8000_0000))


def below(a, b):
    """a < b of magnitudes, false for NaN."""
    return (np.asarray(a, np.int64) < np.asarray(b, np.int64)) & ~_is_nan(a) & ~_is_nan(b)


def least_of(a, limit):
    """np.minimum of magnitudes: NaN stays."""
    return np.where(below(limit, a), np.uint32(limit), a).astype(np.uint32)


def decode(codes, element):
    """Words of codes."""
    mantissa, least, largest, bits = ELEMENTS[element]
    codes = np.asarray(codes, np.int64)
    magnitude, sign = codes & ((1 << bits) - 1), codes >> bits & 1
    binade = magnitude >> mantissa
    m = np.where(binade > 0, (magnitude & ((1 << mantissa) - 1)) | 1 << mantissa, magnitude)
    made = _join(sign, m, np.maximum(binade, 1) - 1 + least)
    infinite = (magnitude == (1 << bits) - (1 << mantissa)) & (magnitude > largest)
    made = np.where(infinite, INF | sign << 31, np.where(magnitude > largest, NAN | sign << 31, made))
    return made.astype(np.uint32)


def round_magnitude(a, element, rounding="rne", noise=None):
    """Codes without a sign of words without a sign."""
    mantissa, least, largest, bits = ELEMENTS[element]
    nan, a = _is_nan(a), least_of(a, int(decode(largest, element)))
    if rounding == "stochastic":  # a + noise / 256 of a step, then cut
        step = (np.clip(np.asarray(a, np.int64) >> 23, 127, 129) - 1) << 23
        share = _join(np.int64(0), noise.astype(np.int64), np.int64(-8))
        a = add(a, mul(share, step))
    mode = {"stochastic": "down"}.get(rounding, rounding)
    code = np.minimum(_onto(*_split(a), mantissa, least, mode, noise), largest)
    return np.where(nan, (1 << bits) - 1, code)


def encode(x, element, rounding="rne", noise=None):
    """uint8 codes of words."""
    x = np.asarray(x, np.uint32)
    code = round_magnitude(x & np.uint32(0x7FFF_FFFF), element, rounding, noise)
    return (code | (x.astype(np.int64) >> 31) << ELEMENTS[element][3]).astype(np.uint8)


def power_codes(amax, element, rule):
    """E8M0 codes: the exponent of the amax over that of the largest element, and one more where its fraction is larger
    ("up"; at the smallest scale, which is subnormal, a tie of the last place is not larger)."""
    largest = int(decode(ELEMENTS[element][2], element))
    amax = np.asarray(amax, np.int64)
    code = (amax >> 23) - ((largest >> 23) - 127)
    if rule == "up":
        code = code + ((amax & 0x7F_FFFF) > (largest & 0x7F_FFFF) + (code == 0))
    code = np.where(amax == INF, 254 if rule == "up" else 255, np.clip(code, 0, 254))
    return np.where(_is_nan(amax), 255, code).astype(np.uint8)


def _power(code):
    """Words of 2^(code - 127)."""
    return np.where(code == 255, NAN, _join(np.int64(0), np.ones_like(code, np.int64), code.astype(np.int64) - 127))


def quantize(x, rule, *, rounding="rne", noise=None, amax=None, square=False):
    """(codes, scale codes, outer scale) of words x [rows, columns] in blocks along rows, or in square ones.

    `rule` is a dict of `element`, `block`, and of a recipe with two levels `scale`, `top`, `candidates`, `metric`,
    `headroom`, `floor`, `outer`, `divides` (the fields of `oracle_table.Format`)."""
    magnitude = np.asarray(x, np.uint32) & np.uint32(0x7FFF_FFFF)
    rows, columns = magnitude.shape
    wide = rule["block"] or columns
    tall = 1 if rule["block"] else rows
    tall = wide if square else tall

    def tiles(a):
        return a.reshape(rows // tall, tall, columns // wide, wide).transpose(0, 2, 1, 3)

    blocks = tiles(magnitude)
    amax = magnitude.max() if amax is None else amax
    noise = None if noise is None else tiles(noise)
    codes, scales, outer = _blocks(blocks, np.uint32(amax), rule, rounding, noise)
    signed = codes.transpose(0, 2, 1, 3).reshape(rows, columns)
    signed = signed | (np.asarray(x, np.int64) >> 31) << ELEMENTS[rule["element"]][3]
    return signed.astype(np.uint8), None if scales is None else scales[..., 0, 0].astype(np.uint8), outer


def _scale(amax, top):
    """S."""
    amax = np.asarray(amax, np.uint32)
    return np.where((amax == 0) | (amax >= INF), ONE, least_of(div(word(top), amax), FLT_MAX)).astype(np.uint32)


def _blocks(blocks, amax, rule, rounding, noise):
    b, element = blocks.max((2, 3), keepdims=True), rule["element"]
    if rule["block"] is None:
        s = _scale(amax, rule["top"])
        return round_magnitude(mul(blocks, s), element, rounding, noise), None, div(ONE, s)
    if rule["scale"] in ("up", "floor"):
        codes = power_codes(b, element, rule["scale"])
        inverse = _power(254 - np.minimum(codes, 254))
        return round_magnitude(mul(blocks, inverse), element, rounding, noise), codes, np.uint32(ONE)
    if rule["outer"] == "row":
        amax = b.max(1, keepdims=True)
    elif rule["outer"] == "128":
        amax = np.stack([b[:, i // 8 * 8 : i // 8 * 8 + 8].max(1) for i in range(b.shape[1])], 1)
    tried = [_try(blocks, b, amax, rule, k) for k in rule["candidates"]]
    codes, outer, z = tried[0]
    if len(tried) == 2:
        errors = [_error(blocks, amax, rule, rounding, *each) for each in tried]
        second = below(errors[1], errors[0])
        codes, z = np.where(second, tried[1][0], codes), np.where(second, tried[1][2], z)
    grid = round_magnitude(z, element, rounding, noise)
    return grid, _eden(codes, z, grid, noise) if rule["divides"] == "eden" else codes, outer


def _try(blocks, b, amax, rule, k):
    """(scale codes, outer scale, blocks before rounding) where a block's amax becomes k."""
    mantissa, least, largest, _ = ELEMENTS[rule["scale"]]
    divides, headroom, more = rule["divides"], np.float32(6 / rule["headroom"]), word(6 / k)
    unusable = (np.asarray(amax) == 0) | (np.asarray(amax) >= INF)
    if divides in ("", "46"):
        s = _scale(amax, rule["top"])
        outer = div(ONE, s)
        wanted = mul(mul(div(b, word(6)), s), more) if divides else mul(b, mul(s, word(rule["headroom"] / k)))
    else:
        outer = np.where(unusable, ONE, div(div(amax, word(rule["top"])), word(headroom)))
        tetra = divides == "tetra"
        wanted = div(div(b, outer), word(headroom)) if tetra else _over(mul(div(b, word(headroom)), more), outer)
    limit = decode(largest, rule["scale"])
    wanted = np.where(_is_nan(wanted) | below(limit, wanted), limit, wanted)
    codes = _onto(*_split(wanted), mantissa, least)
    codes = np.where(codes == 0, _onto(*_split(word(rule["floor"])), mantissa, least), codes)
    step = mul(decode(codes, rule["scale"]), outer)
    return (
        codes,
        outer,
        mul(blocks, least_of(div(ONE, step), FLT_MAX)) if divides in ("", "46") else _over(blocks, step),
    )


def _over(a, b):
    return np.where(_is_zero(b), 0, div(a, b)).astype(np.uint32)


def _sum(values):
    values = least_of(values, FLT_MAX)
    total = functools.reduce(add, [values[..., i] for i in range(values.shape[-1])])
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = add(total[..., :half], total[..., half:])
    return total[..., None]


def _error(blocks, amax, rule, rounding, codes, outer, z):
    value, absolute = decode(codes, rule["scale"]), np.uint32(0x7FFF_FFFF)
    if rule["metric"] == "expected":
        lower = np.minimum(_onto(*_split(least_of(z, word(6))), 1, -1, "down"), 7)
        lo, hi = decode(lower, "E2M1"), decode(np.minimum(lower + 1, 7), "E2M1")
        beyond = sub(z, word(6))
        inside = mul(sub(z, lo), sub(hi, z))
        return mul(mul(value, value), _sum(np.where(below(word(6), z), mul(beyond, beyond), inside)))
    q = decode(np.minimum(round_magnitude(z, "E2M1", "away" if rounding == "away" else "rne"), 7), "E2M1")
    if rule["divides"] == "quartet":
        off = sub(least_of(mul(q, mul(value, outer)), FLT_MAX), blocks) & absolute
    else:
        lift = np.where(amax < word(2.0**-60), word(2.0**64), np.where(amax >= word(2.0**60), word(2.0**-64), ONE))
        near = least_of(div(mul(mul(q, value), mul(amax, lift)), word(rule["top"])), FLT_MAX)
        off = sub(near, mul(blocks, lift)) & absolute
    return _sum(mul(off, off) if rule["metric"] == "squared" else off)


def _eden(codes, z, grid, noise):
    """Scale codes after the correction of MS-EDEN."""
    q = decode(grid, "E2M1")
    square, cross = (_sum(t)[..., 0].reshape(len(z), -1, 8) for t in (mul(z, z), mul(z, q)))
    square, cross = (functools.reduce(add, [t[..., i] for i in range(8)]) for t in (square, cross))
    ratio = np.where(_is_zero(cross), ONE, div(square, np.where(_is_zero(cross), ONE, cross)))
    ratio = np.stack([ratio] * 8, -1).reshape(len(z), -1)[..., None, None]
    wanted = least_of(mul(decode(codes, "E4M3"), ratio), word(448))
    first = np.minimum(_onto(*_split(wanted), 3, -9, "down"), 126)
    step = np.maximum(first >> 3, 1) - 10
    bytes_ = noise[..., :1, :3].astype(np.int64)
    uniform = (bytes_[..., 0] << 16 | bytes_[..., 1] << 8 | bytes_[..., 2])[..., None]
    limit = _fixed(decode(first, "E4M3"))[0] + (uniform << (step + 24))
    whole, rest = _fixed(wanted)
    return first + (((limit < whole) | ((limit == whole) & rest)) & (first < 126))


def _fixed(a):
    """(integer part in units of 2^-48, whether anything is left) of words below 2^10."""
    m, e = _split(a)
    right = np.clip(-48 - e, 0, 61)
    return np.where(e >= -48, m << np.clip(e + 48, 0, 38), m >> right), m & ((np.int64(1) << right) - 1) != 0


def hash_words(counter, k0, k1):
    """The counter hash, in uint32 that wraps; k0 and k1 are scalars or arrays."""
    with np.errstate(over="ignore"):
        h = np.asarray(counter).astype(np.uint32) * np.uint32(2654435769) + np.asarray(k0, np.uint32)
        h = (h ^ h >> np.uint32(16)) * np.uint32(2146121005) + np.asarray(k1, np.uint32)
        h = (h ^ h >> np.uint32(15)) * np.uint32(2221713035)
        return h ^ h >> np.uint32(16)


def key_words(k0, k1):
    a, b = np.uint32(k0), np.uint32(k1)
    digits = (608135816, 2242054355, 320440878, 57701188)
    for i, c in enumerate(digits):
        a, b = (a, b ^ hash_words(a, c, c)) if i % 2 else (a ^ hash_words(b, c, c), b)
    return int(a), int(b)


def random_bytes(shape, words):
    """Four tokens a word, the bytes of little-endian words one below the other."""
    features = shape[-1]
    rows = -(-int(np.prod(shape)) // features // 4) if len(shape) > 1 else 1
    drawn = hash_words(np.arange(rows * features), *words).astype("<u4").reshape(rows, features, 1).view(np.uint8)
    return drawn.transpose(0, 2, 1).reshape(-1, features)[: int(np.prod(shape)) // features].reshape(shape)


def hadamard(x, signs):
    """Words of runs along the last axis: halves recursively, of 16 bfloat16 in and out."""
    size, steps = len(signs), len(signs).bit_length() - 1
    v = np.asarray(x, np.uint32).reshape(-1, size)
    v = to_bfloat16(v) if size == 16 else v
    factor = np.array([word(s * 0.5 ** (steps // 2)) for s in signs], np.uint32)
    v = _walsh(mul(v, factor))
    v = mul(v, word(0.5**0.5)) if steps % 2 else v
    v = to_bfloat16(np.where(_is_zero(v), 0, v)) if size == 16 else v
    return v.reshape(np.shape(x)).astype(np.uint32)


def _walsh(v):
    """The transform of the halves first, then their sum and difference."""
    if v.shape[-1] == 1:
        return v
    a, b = (_walsh(half) for half in np.split(v, 2, axis=-1))
    return np.concatenate([add(a, b), sub(a, b)], -1)


def to_bfloat16(x):
    """Words rounded to nearest even at 16 bits less."""
    x = np.asarray(x, np.int64)
    rounded = (x + 0x7FFF + (x >> 16 & 1)) >> 16 << 16
    return np.where(_is_nan(x), x | 0x40_0000, rounded).astype(np.uint32)


def pack(codes, axis=-1):
    """Bytes with one bit a place, low bits first."""
    codes = np.moveaxis(np.asarray(codes, np.uint8), axis, -1)
    bits = np.unpackbits(codes[..., None], axis=-1, bitorder="little", count=4)
    return np.moveaxis(np.packbits(bits.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little"), -1, axis)


def swizzle(scales):
    """128x4 tiles, rows 32 apart next to each other."""
    rows, columns = scales.shape
    padded = np.pad(scales, ((0, -rows % 128), (0, -columns % 4)))
    tiles = padded.reshape(-(-rows // 128), 4, 32, -(-columns // 4), 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-1)
