"""The formats once more, in NumPy: float32 arithmetic one operation a line, and tables of values instead of bit tricks.

Nothing is shared with the package. Element values come from ml_dtypes' decoding; rounding is a search in the sorted
table, so that it trusts neither a cast nor an addition.
"""

import ml_dtypes
import numpy as np

DTYPES = {
    "E2M1": ml_dtypes.float4_e2m1fn, "E2M3": ml_dtypes.float6_e2m3fn, "E3M2": ml_dtypes.float6_e3m2fn,
    "E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
TOP = {"E2M1": 6.0, "E2M3": 7.5, "E3M2": 28.0, "E4M3": 448.0, "E5M2": 57344.0}
EMAX = {"E2M1": 2, "E2M3": 2, "E3M2": 4, "E4M3": 8, "E5M2": 15}
BITS = {"E2M1": 4, "E2M3": 6, "E3M2": 6, "E4M3": 8, "E5M2": 8}
MAX = np.finfo(np.float32).max


def grid(element):
    """Finite non-negative values, ascending; the position of a value is its code."""
    values = np.arange(2 ** (BITS[element] - 1), dtype=np.uint8).view(DTYPES[element]).astype(np.float64)
    return values[np.isfinite(values) & (values <= TOP[element])]


def code_of(x, element):
    """uint8 codes nearest to float32 x, ties to even, saturating; NaN gets the largest code of its sign."""
    table = grid(element)
    magnitude = np.minimum(np.abs(x).astype(np.float64), TOP[element])
    below = np.clip(np.searchsorted(table, magnitude, side="right") - 1, 0, table.size - 1)
    above = np.minimum(below + 1, table.size - 1)
    middle = (table[below] + table[above]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    code = np.where(np.isnan(x), 2 ** (BITS[element] - 1) - 1, np.where(up, above, below))
    return (code + np.signbit(x) * 2 ** (BITS[element] - 1)).astype(np.uint8)


def value_of(codes, element):
    return codes.view(DTYPES[element]).astype(np.float32)


def stochastic_code(x, noise):
    """E2M1 codes: t = |x| + u * step(|x|) in float32, cut down at the step of t, saturated at 6, the sign copied."""

    def step(a):
        return np.where(a < 2, np.float32(0.5), np.where(a < 4, np.float32(1), np.float32(2)))

    a = np.minimum(np.abs(x), np.float32(6))
    t = a + noise.astype(np.float32) / np.float32(256) * step(a)
    cut = np.minimum(np.floor(t / step(t)) * step(t), np.float32(6))
    return code_of(np.copysign(cut, x), "E2M1")


def blocks_of(x, size, square):
    """x [..., M, N] as [..., blocks of rows, blocks of columns, elements of a block]."""
    *lead, rows, columns = x.shape
    tall = size if square else 1
    tiles = x.reshape(*lead, rows // tall, tall, columns // size, size)
    return np.moveaxis(tiles, -3, -2).reshape(*lead, rows // tall, columns // size, tall * size)


def unblock(tiles, shape, size, square):
    *lead, rows, columns = shape
    tall = size if square else 1
    split = tiles.reshape(*lead, rows // tall, columns // size, tall, size)
    return np.moveaxis(split, -2, -3).reshape(shape)


def nvfp4(x, *, square=False, noise=None):
    """(codes, E4M3 scale codes, amax, S) of float32 x [..., M, N]."""
    x = x.astype(np.float32)
    one = np.float32(1)
    with np.errstate(all="ignore"):
        amax = np.abs(x).max()
        usable = np.isfinite(amax) and amax > 0
        encode = np.minimum(np.float32(2688) / amax, MAX) if usable else one
        decode = one / encode
        mult = encode * np.float32(1 / 6)
        tiles = blocks_of(x, 16, square)
        block_amax = np.abs(tiles).max(-1)
        scales = code_of(np.where(np.isnan(block_amax), MAX, np.minimum(block_amax * mult, MAX)), "E4M3")
        encode_block = np.minimum(one / (value_of(scales, "E4M3") * decode), MAX)
        scaled = tiles * encode_block[..., None]
        if noise is None:
            codes = code_of(scaled, "E2M1")
        else:
            codes = stochastic_code(scaled, blocks_of(noise, 16, square))
    return unblock(codes, x.shape, 16, square), scales, amax, encode


def up_scales(amax, element):
    """E8M0 codes as Transformer Engine's kernels make them: amax times float32(1 / largest), up to a power of two."""
    with np.errstate(under="ignore", invalid="ignore"):  # a signalling NaN
        value = amax.astype(np.float32) * (np.float32(1) / np.float32(TOP[element]))
    exponent, fraction = value.view(np.uint32) >> 23, value.view(np.uint32) & 0x7F_FFFF
    least = (exponent == 0) & (fraction <= 0x40_0000)  # 2**-127 and what lies below it
    code = exponent + ((fraction > 0) & (exponent != 254) & ~least)
    return np.where(np.isnan(value), 255, np.where(np.isinf(value), 254, code)).astype(np.uint8)


def floor_scales(amax, element):
    """E8M0 codes of the OCP text, floor(log2(amax)) - emax; NaN for what is not finite."""
    finite = np.isfinite(amax)
    exponent = np.floor(np.log2(np.where(finite & (amax > 0), amax, 1.0))) - EMAX[element]
    code = np.where(amax == 0, 0, np.clip(exponent + 127, 0, 254))
    return np.where(finite, code, 255).astype(np.uint8)


def mx(x, element, *, square=False, scales=up_scales):
    """(codes, E8M0 scale codes) of finite float32 x [..., M, N]."""
    tiles = blocks_of(x.astype(np.float32), 32, square).astype(np.float64)
    code = scales(np.abs(tiles).max(-1), element)
    codes = code_of(np.ldexp(tiles, (127 - code.astype(int))[..., None]), element)  # exact in float64
    return unblock(codes, x.shape, 32, square), code


def fp8(x, element):
    """(codes, amax, S) of float32 x under one scale."""
    x = x.astype(np.float32)
    with np.errstate(all="ignore"):
        amax = np.abs(x).max()
        usable = np.isfinite(amax) and amax > 0
        encode = np.minimum(np.float32(TOP[element]) / amax, MAX) if usable else np.float32(1)
        return code_of(x * encode, element), amax, encode


def random_bytes(words, shape):
    """Byte t % 4 of word (t // 4) * N + n for element (t, n) of the tensor as [tokens, features]."""
    features = shape[-1]
    tokens = int(np.prod(shape[:-1]))
    t, n = np.arange(tokens)[:, None], np.arange(features)
    return (words((t // 4) * features + n) >> (8 * (t % 4)).astype(np.uint32)).astype(np.uint8).reshape(shape)


def hash_words(number, k0, k1):
    """The counter hash, in 64-bit integers cut to 32."""

    def cut(value):
        return value & np.uint64(0xFFFF_FFFF)

    h = cut(cut(number.astype(np.uint64)) * np.uint64(0x9E37_79B9) + np.uint64(k0))
    h ^= h >> np.uint64(16)
    h = cut(h * np.uint64(0x7FEB_352D) + np.uint64(k1))
    h ^= h >> np.uint64(15)
    h = cut(h * np.uint64(0x846C_A68B))
    return (h ^ (h >> np.uint64(16))).astype(np.uint32)


def key_words(k0, k1):
    """The words of a key as the hash takes them: four Feistel rounds, with the first digits of pi."""
    for constant in (0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344):
        k0, k1 = k1, k0 ^ hash_words(np.array(k1), constant, constant)
    return k0, k1
