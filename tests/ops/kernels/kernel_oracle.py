"""The definition in NumPy, float32 arithmetic, written for these tests alone: no code is shared with the kernels."""

import ml_dtypes
import numpy as np

SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FLT_MAX = np.finfo(np.float32).max
F = np.float32


def tensor_scales(amax):
    """S, 1/S and S * f32(1/6)."""
    with np.errstate(all="ignore"):
        amax = F(amax)
        s = F(1) if amax == 0 else np.minimum(F(2688) / amax, FLT_MAX)
        s = F(1) if s == 0 else s
        return F(s), F(1) / F(s), F(s) * F(1 / 6)


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


def quantize(x, amax, *, axis, noise=None, block2d=False):
    """(codes with signs, scale bytes, carrier) of float32 x with blocks of 16 along `axis` (or 16x16 tiles)."""
    x = np.asarray(x, np.float32)
    _, dec, mult = tensor_scales(amax)
    magnitude = np.abs(x)
    t, n = x.shape
    down, across = (16, 16) if block2d else (1, 16) if axis == 1 else (16, 1)
    top = magnitude.reshape(t // down, down, n // across, across).max((1, 3))

    def spread(z):
        return np.repeat(np.repeat(z, down, 0), across, 1)

    with np.errstate(all="ignore"):
        s8 = np.minimum(top * mult, F(448)).astype(ml_dtypes.float8_e4m3fn)
        value = s8.astype(np.float32)
        enc = np.minimum(F(1) / (value * dec), FLT_MAX)
        y = magnitude * spread(enc)
    codes = round_nearest(y) if noise is None else round_stochastic(y, noise)
    signed = codes | (np.signbit(x).astype(np.uint8) << 3)
    carrier = np.copysign(GRID[codes] * spread(value), x).astype(ml_dtypes.bfloat16)
    return signed, s8.view(np.uint8), carrier


def pack_tokens(codes):
    """Two tokens a byte, the even one in the low nibble."""
    return codes[::2] | (codes[1::2] << 4)
