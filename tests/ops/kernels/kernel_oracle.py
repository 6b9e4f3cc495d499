"""The definition in NumPy, float32 arithmetic, written for these tests alone: no code is shared with the kernels."""

import ml_dtypes
import numpy as np

SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FLT_MAX = np.finfo(np.float32).max
F = np.float32


def tensor_scales(amax, top=2688):
    """S and 1/S."""
    with np.errstate(all="ignore"):
        amax = F(amax)
        s = F(1) if amax == 0 else np.minimum(F(top) / amax, FLT_MAX)
        s = F(1) if s == 0 else s
        return F(s), F(1) / F(s)


def lift(amax):
    """What the errors of four over six are measured times."""
    return F(2.0**64) if amax < 2.0**-60 else F(2.0**-64) if amax >= 2.0**60 else F(1)


def scale_vector(amax, top=2688):
    """As kernels read it."""
    s, dec = tensor_scales(amax if np.isfinite(amax) else np.inf, top)
    gemm = dec if np.isfinite(amax) else F(np.nan)
    return np.array([amax, s, dec, lift(amax), gemm, 0, 0, 0], np.float32)


def round_nearest(a):
    """Codes of the nearest grid values of a >= 0, ties to even, by comparing with the middles."""
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    up = np.array([False, True, False, True, False, True, False])  # where the upper neighbour is the even one
    codes = np.zeros(a.shape, np.uint8)
    for middle, even_above in zip(middles, up):
        codes += ((a >= middle) if even_above else (a > middle)).astype(np.uint8)
    return codes


def round_stochastic(a, byte):
    a = np.minimum(a, F(1e30))
    step = np.where(a < 2, F(0.5), np.where(a < 4, F(1), F(2)))
    t = (a + byte.astype(np.float32) / F(256) * step).astype(np.float32)
    step = np.where(t < 2, F(0.5), np.where(t < 4, F(1), F(2)))
    value = np.minimum(np.floor(t / step) * step, F(6))
    return np.searchsorted(GRID, value).astype(np.uint8)


def random_bytes(tokens, columns, key):
    """[tokens, columns] bytes of the counter hash."""
    with np.errstate(over="ignore"):
        i = (np.arange(tokens, dtype=np.uint32)[:, None] // 4) * np.uint32(columns) + np.arange(
            columns, dtype=np.uint32
        )
        h = i * np.uint32(0x9E3779B9) + np.uint32(key[0])
        h ^= h >> np.uint32(16)
        h *= np.uint32(0x7FEB352D)
        h += np.uint32(key[1])
        h ^= h >> np.uint32(15)
        h *= np.uint32(0x846CA68B)
        h ^= h >> np.uint32(16)
    shift = (np.arange(tokens, dtype=np.uint32) % 4 * 8)[:, None]
    return (h >> shift) & np.uint32(0xFF)


def hadamard_tokens(x):
    """bf16 result of the transform along tokens, as float32; butterflies of distance 1, 2, 4, 8 in float32."""
    v = x.astype(np.float32).reshape(-1, 16, x.shape[1]) * (F(0.25) * SIGNS[:, None])
    for d in (1, 2, 4, 8):
        w = v.copy()
        for i in range(16):
            if not i & d:
                w[:, i], w[:, i | d] = v[:, i] + v[:, i | d], v[:, i] - v[:, i | d]
        v = w
    v = np.where(v == 0, F(0), v)  # a sum that cancels is +0
    return v.astype(ml_dtypes.bfloat16).astype(np.float32).reshape(x.shape)


def round_midpoint(a, byte):
    """Codes of a neighbour, the upper one if the way to it, in steps, and (byte + 1/2) / 256 are 1 together."""
    a = np.minimum(a, F(6)).astype(np.float64)
    code = np.searchsorted(GRID, a, side="right") - 1
    way = (a - GRID[code]) / np.append(np.diff(GRID), 1)[code]
    return np.minimum(code + (way + (byte + 0.5) / 256 >= 1), 7).astype(np.uint8)


def in_order(values):
    """[blocks, 16] -> [blocks], one after the other in float32."""
    total = values[:, 0]
    for i in range(1, 16):
        total = total + values[:, i]
    return total


def options(top, amax, rule):
    """The block scales that a rule tries: NVFP4's one, four over six's two."""
    s, _ = tensor_scales(amax, TOPS[rule])
    if rule in ("squared", "absolute"):
        t = (top / F(6)) * s
        return [t, t * F(1.5)]
    return [top * (s * F(h)) for h in {"plain": (1 / 6,), "1716": (17 / 96,), "expected": (17 / 96, 17 / 64)}[rule]]


TOPS = {"plain": 2688, "1716": 2688, "squared": 1536, "absolute": 1536, "expected": 1536}


def error(blocks, value, enc, amax, rule):
    """Of blocks [n, 16] of magnitudes under scales [n]."""
    z = blocks * enc[:, None]
    if rule == "expected":
        a = np.minimum(z, F(6)).astype(np.float64)
        code = np.searchsorted(GRID, a, side="right") - 1
        upper = GRID[np.minimum(code + 1, 7)]
        inside = (z.astype(np.float64) - GRID[code]) * (upper - z.astype(np.float64))  # exact
        each = np.where(z > 6, (z - F(6)) * (z - F(6)), inside.astype(F))
        return value * value * in_order(each)
    p = lift(amax)
    near = ((GRID[round_nearest(z)] * value[:, None]) * (F(amax) * p)) / F(1536)
    off = np.abs(near - blocks * p)
    return in_order(off * off if rule == "squared" else off)


def quantize(x, amax, *, axis, noise=None, block2d=False, rule="plain", rounding="stochastic"):
    """(codes with signs, scale bytes, carrier) of float32 x with blocks of 16 along `axis` (or 16x16 tiles)."""
    x = np.asarray(x, np.float32)
    _, dec = tensor_scales(amax, TOPS[rule])
    magnitude = np.abs(x)
    t, n = x.shape
    down, across = (16, 16) if block2d else (1, 16) if axis == 1 else (16, 1)
    top = magnitude.reshape(t // down, down, n // across, across).max((1, 3))

    def spread(z):
        return np.repeat(np.repeat(z, down, 0), across, 1)

    with np.errstate(all="ignore"):
        tried = [np.minimum(z, F(448)).astype(ml_dtypes.float8_e4m3fn) for z in options(top, amax, rule)]
        s8 = tried[0]
        if len(tried) > 1:
            blocks = (
                magnitude.reshape(t, n // 16, 16) if axis == 1 else magnitude.reshape(t // 16, 16, n).swapaxes(1, 2)
            )
            values = [z.astype(np.float32).reshape(-1) for z in tried]
            encodes = [np.minimum(F(1) / (v * dec), FLT_MAX) for v in values]
            errors = [error(blocks.reshape(-1, 16), v, e, amax, rule) for v, e in zip(values, encodes)]
            s8 = np.where((errors[1] < errors[0]).reshape(top.shape), tried[1], tried[0])
        value = s8.astype(np.float32)
        enc = np.minimum(F(1) / (value * dec), FLT_MAX)
        y = magnitude * spread(enc)
    if noise is None:
        codes = round_nearest(y)
    else:
        codes = (round_midpoint if rounding == "midpoint" else round_stochastic)(y, noise)
    signed = codes | (np.signbit(x).astype(np.uint8) << 3)
    carrier = np.copysign(GRID[codes] * spread(value), x).astype(ml_dtypes.bfloat16)
    return signed, s8.view(np.uint8), carrier


def again(x, w, key):
    """What `kernel_programs.again` makes."""

    def stands_for(carrier, amax):
        return carrier.astype(np.float32) * tensor_scales(amax, TOPS["squared"])[1]

    def column(numbers, **how):
        return quantize(numbers, np.abs(numbers).max(), axis=0, rule="squared", **how)

    with np.errstate(all="ignore"):
        x_amax, w_amax = (np.abs(a.astype(np.float32)).max() for a in (x, w))
        x_row = quantize(x, x_amax, axis=1, rule="squared")[2]
        turned = hadamard_tokens(stands_for(x_row, x_amax).astype(ml_dtypes.bfloat16))
        codes, scales, _ = column(turned)
        drawn = column(turned, noise=random_bytes(*x.shape, key), rounding="midpoint")[2]
        w_column = quantize(w, w_amax, axis=0, rule="squared")[2]
        numbers = stands_for(w_column, w_amax)
        w_row = quantize(numbers, np.abs(numbers).max(), axis=1, rule="squared")[2]
    return x_row, pack_tokens(codes), scales, drawn, w_column, w_row


V = F(6 / (17 / 16 * 0.93))  # what a block's amax becomes under MS-EDEN


def e4m3(x):
    """The nearest scales, 1 in the place of 0."""
    s = np.minimum(np.nan_to_num(x, nan=448, posinf=448), F(448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return np.where(s == 0, F(1), s)


def over(a, b):
    """a / b, 0 for b = 0."""
    return np.where(b == 0, F(0), a / np.where(b == 0, F(1), b))


def by_division(x, divisors, rule):
    """(signed codes, scales, grid values, d) of blocks of 16 along the last axis, ties away: `rule` finds the scales of
    blocks [.., 16] from their maxima and d.
    """
    amax = np.abs(x).max()
    d = amax / F(divisors[0]) / F(divisors[1]) if 0 < amax < np.inf else F(1)
    blocks = np.abs(x).reshape(*x.shape[:-1], -1, 16)
    s = rule(blocks, blocks.max(-1), F(d))
    codes = away(over(blocks, (s * d)[..., None]))
    signed = codes | (np.signbit(x).astype(np.uint8) << 3).reshape(codes.shape)
    return signed, s, over(blocks, (s * d)[..., None]), F(d)


def away(z):
    """Codes of the nearest grid values, ties away from zero; the largest for NaN."""
    return np.searchsorted((GRID[1:] + GRID[:-1]) / 2, np.nan_to_num(z, nan=6, posinf=6), side="right").astype(np.uint8)


def _six_or_four(blocks, top, d):
    tried = [e4m3(over(top / F(6), d)), e4m3(over(top / F(6) * F(1.5), d))]
    errors = []
    for s in tried:
        step = (s * d)[..., None]
        off = np.minimum(GRID[away(over(blocks, step))] * step, FLT_MAX) - blocks
        errors.append(in_order(np.minimum(off * off, FLT_MAX).reshape(-1, 16)).reshape(s.shape))
    return np.where(errors[1] < errors[0], tried[1], tried[0])


def laid_out(signed, s, shape):
    """(codes, scale bytes, carrier) as the tensor lies."""
    value = np.where(signed & 8, -GRID[signed & 7], GRID[signed & 7])
    carrier = (value * s[..., None]).astype(ml_dtypes.bfloat16)
    return signed.reshape(shape), s.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), carrier.reshape(shape)


def turn(x, axis):
    return x if axis == 1 else x.T


def quartet(x, *, axis):
    """(codes, scale bytes, carrier, the numbers that they stand for) of Quartet II's forward operand."""
    x = turn(np.asarray(x, np.float32), axis)
    with np.errstate(all="ignore"):
        signed, s, _, d = by_division(x, (256, 6), _six_or_four)
        step = (s * d if np.isfinite(x).all() else np.full_like(s, np.nan))[..., None]
        numbers = (np.where(signed & 8, -GRID[signed & 7], GRID[signed & 7]) * step).reshape(x.shape)
    return *(turn(a, axis) for a in laid_out(signed, s, x.shape)), turn(numbers, axis)


def hadamard128(x, signs, *, axis):
    """float32, butterflies of growing distance."""
    v = turn(np.asarray(x, np.float32), axis).reshape(-1, 128) * (signs * F(0.125))
    for step in range(7):
        pairs = v.reshape(len(v), 64 >> step, 2, 1 << step)
        v = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).reshape(-1, 128)
    return turn((v * F(0.5**0.5)).reshape(turn(x, axis).shape), axis)


def eden(y, noise, *, axis):
    """(codes, scale bytes, carrier) of MS-EDEN of y."""
    y, noise = turn(y, axis), turn(noise, axis)
    with np.errstate(all="ignore"):
        signed, s, z, _ = by_division(y, (255.99, V), lambda _, top, d: e4m3(over(top / V, d)))
        sums = []
        for each in (z * z, z * GRID[signed & 7]):
            total = in_order(each.reshape(-1, 16)).reshape(-1, 8)
            run = total[:, 0]
            for i in range(1, 8):
                run = run + total[:, i]
            sums.append(np.repeat(run, 8).reshape(s.shape))
        wanted = s * np.where(sums[1] == 0, F(1), over(*sums))
        inside = np.minimum(wanted, F(448))
        gap = np.exp2(np.floor(np.log2(np.maximum(inside, F(2.0**-6))))).astype(np.float32) / F(8)
        below = np.floor(inside / gap) * gap
        three = noise.reshape(*s.shape, 16)[..., :3].astype(np.float64) @ [2.0**-8, 2.0**-16, 2.0**-24]
        s = e4m3(below + np.where(three * gap < wanted - below, gap, F(0)))
    return tuple(turn(a, axis) for a in laid_out(signed, s, y.shape))


def quartet2(x, w, key, signs):
    """What `kernel_programs.quartet2` makes."""
    noise = random_bytes(*x.shape, key)

    def runs(numbers, axis):
        with np.errstate(all="ignore"):
            return eden(hadamard128(numbers, signs, axis=axis), noise, axis=axis)

    *_, row, of_row = quartet(x, axis=1)
    *_, column, of_column = quartet(w, axis=0)
    codes, scales, _ = runs(of_row, 0)
    return row, pack_tokens(codes), scales, runs(x, 1)[2], runs(x, 0)[2], column, runs(of_column, 1)[2]


def pack_tokens(codes):
    """Two tokens a byte, the even one in the low nibble."""
    return codes[::2] | (codes[1::2] << 4)
