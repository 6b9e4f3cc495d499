"""Lane ops on NumPy arrays: the reference of `ptx_lanes.py`, by which kernel bodies run, and are tested, without a GPU.

NumPy and not jnp: nothing is compiled, so that no compiler fuses or reorders a rounding, and subnormals are kept on
every platform.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np


def numpy_u32_op(operation: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Returns a method of `NumpyLaneOps` that is one NumPy operation on words."""
    return lambda self, *args: operation(*(self.as_u32(x) for x in args))


def numpy_f32_op(operation: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Returns a method of `NumpyLaneOps` that is one NumPy operation on float32."""
    return lambda self, *args: operation(*(self.as_f32(x) for x in args))


class NumpyLaneOps:
    """Evaluates the operations of `LaneOps` on uint32 and float32 arrays whose last axis is the lanes of one block."""

    def __init__(self, columns: int):
        self.columns = columns

    def as_u32(self, x):
        return np.uint32(x & 0xFFFFFFFF) if isinstance(x, int) else x.view(np.uint32)

    def as_f32(self, x):
        return np.float32(x) if isinstance(x, float) else x.view(np.float32)

    and_ = numpy_u32_op(np.bitwise_and)
    or_ = numpy_u32_op(np.bitwise_or)
    xor = numpy_u32_op(np.bitwise_xor)
    iadd = numpy_u32_op(np.add)
    less = numpy_u32_op(np.less)

    def shl(self, a, k):
        return self.as_u32(a) << np.uint32(k)

    def shr(self, a, k):
        return self.as_u32(a) >> np.uint32(k)

    def imad(self, a, b, c):
        return self.as_u32(a) * self.as_u32(b) + self.as_u32(c)

    def select_if(self, p, a, b):
        return np.where(p, self.as_u32(a), self.as_u32(b))

    def prmt(self, a, b, selector):
        bytes_ = []
        for i in range(4):
            k = (selector >> (4 * i)) & 7
            byte = (self.as_u32(a if k < 4 else b) >> np.uint32(8 * (k % 4))) & np.uint32(0xFF)
            bytes_.append(byte << np.uint32(8 * i))
        return bytes_[0] | bytes_[1] | bytes_[2] | bytes_[3]

    def _halves(self, w):
        return self.as_u32(w) & np.uint32(0xFFFF), self.as_u32(w) >> np.uint32(16)

    def max_u16x2(self, a, b):
        (a0, a1), (b0, b1) = self._halves(a), self._halves(b)
        return np.maximum(a0, b0) | (np.maximum(a1, b1) << np.uint32(16))

    def min_u16x2(self, a, b):
        (a0, a1), (b0, b1) = self._halves(a), self._halves(b)
        return np.minimum(a0, b0) | (np.minimum(a1, b1) << np.uint32(16))

    def max_abs_bf16x2(self, a, b):
        mask = np.uint32(0x7FFF7FFF)
        return self.max_u16x2(self.as_u32(a) & mask, self.as_u32(b) & mask) | np.uint32(0x80000000)

    def bit_select(self, a, b, mask):
        return (self.as_u32(a) & np.uint32(mask)) | (self.as_u32(b) & ~np.uint32(mask))

    fmul = numpy_f32_op(np.multiply)
    fadd = numpy_f32_op(np.add)
    fsub = numpy_f32_op(np.subtract)
    fdiv = numpy_f32_op(np.divide)
    fless = numpy_f32_op(np.less)
    fabs = numpy_f32_op(np.abs)
    fmin = numpy_f32_op(np.fmin)
    fmax = fmax_nan = numpy_f32_op(np.maximum)
    sqrt = numpy_f32_op(np.sqrt)

    def with_sign(self, magnitude, sign):
        return self.bit_select(magnitude, sign, 0x7FFF7FFF)

    def ffma(self, a, b, c):
        return self.as_f32(a) * self.as_f32(b) + self.as_f32(c)

    def ffma_rz(self, a, b, c):
        # Where float64 rounds the sum, it rounds to the larger term, to which float32 truncates the sum as well.
        exact = self.as_f32(a).astype(np.float64) * b + c
        nearest = exact.astype(np.float32)
        return (nearest.view(np.uint32) - (nearest > exact)).view(np.float32)

    def div_by_pow2_multiple(self, a, number):
        return self.as_f32(a) / np.float32(number)

    def prepare_divisor(self, b):
        return self.as_f32(b)

    def div_prepared(self, a, divisor):
        return np.where(divisor == 0, np.float32(0), self.as_f32(a) / divisor)

    def u32_to_f32(self, a):
        return self.as_u32(a).astype(np.float32)

    def reciprocal(self, a):
        return np.float32(1) / self.as_f32(a)

    def sigmoid(self, a):
        return np.float32(1) / (np.float32(1) + np.exp(-self.as_f32(a)))

    def round_grid(self, y, e):
        magic = e * np.float32(6291456)
        return (y + magic) - magic

    def floor_grid(self, y, e):
        return np.floor(y / (e * np.float32(0.5))) * (e * np.float32(0.5))

    def low_bf16(self, w):
        return self.as_f32(self.shl(w, 16))

    def high_bf16(self, w):
        return self.as_f32(self.and_(w, 0xFFFF0000))

    def pack_exact(self, lo, hi):
        return self.prmt(lo, hi, 0x7632)

    def pack_round(self, lo, hi):
        return self.pack_exact(
            self._round_bf16(self.as_u32(self.as_f32(lo))), self._round_bf16(self.as_u32(self.as_f32(hi)))
        )

    def pack_f16_rz(self, lo, hi):
        lo, hi = (self._truncate_f16(self.as_f32(x)).astype(np.uint32) for x in (lo, hi))
        return lo | (hi << np.uint32(16))

    def _truncate_f16(self, x):
        nearest = x.astype(np.float16)
        return nearest.view(np.uint16) - (nearest.astype(np.float32) > x)

    def _round_bf16(self, bits):
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return np.where(nan, bits | np.uint32(0x00400000), rounded)

    def mul_bf16x2(self, a, b):
        pairs = [self.fmul(self.low_bf16(a), self.low_bf16(b)), self.fmul(self.high_bf16(a), self.high_bf16(b))]
        return self.pack_round(*pairs)

    def clamp_e2m1_max(self, p):
        lo, hi = self._halves(self.as_u32(p) & np.uint32(0x7FFF7FFF))
        six = np.uint32(0x40C0)
        return self.with_sign(np.minimum(lo, six) | (np.minimum(hi, six) << np.uint32(16)), p)

    def grid_codes(self, p):
        def code(magnitude):
            normal = (magnitude >> np.uint32(6)) - np.uint32(252)
            small = (magnitude > np.uint32(0)).astype(np.uint32)
            return np.where(magnitude >= np.uint32(0x3F80), normal, small)

        lo, hi = self._halves(self.as_u32(p) & np.uint32(0x7FFF7FFF))
        return code(lo) | (code(hi) << np.uint32(16))

    def grid_nibbles(self, p):
        return self.grid_codes(p) << np.uint32(12)

    def grid_values(self, codes, bit=0):
        def value(code):
            normal = (code << np.uint32(6)) + np.uint32(252 << 6)
            return np.where(code >= np.uint32(2), normal, code * np.uint32(0x3F00))

        lo, hi = self._halves((self.as_u32(codes) >> np.uint32(bit)) & np.uint32(0x00070007))
        return value(lo) | (value(hi) << np.uint32(16))

    def e4m3_encode(self, lo, hi):
        return self._e4m3_code(self.as_f32(lo)) | (self._e4m3_code(self.as_f32(hi)) << np.uint32(8))

    def _e4m3_code(self, a):
        """Returns the nearest E4M3 code, by arithmetic: a compiler may remove a cast there and back."""
        a = np.minimum(a, np.float32(448))
        e = np.maximum(self.as_f32(self.and_(a, 0x7F800000)), np.float32(2.0**-6))
        magic = e * np.float32(1.5 * 2.0**20)
        rounded = (a + magic) - magic
        normal = (self.as_u32(rounded) >> np.uint32(20)) - np.uint32(960)
        small = (rounded * np.float32(512)).astype(np.int32).astype(np.uint32)
        return np.where(rounded < np.float32(2.0**-6), small, normal)

    def f8_word(self, values, element: str):
        dtype, max_value = (ml_dtypes.float8_e4m3fn, 448.0) if element == "e4m3" else (ml_dtypes.float8_e5m2, 57344.0)
        clipped = [np.clip(self.as_f32(v), np.float32(-max_value), np.float32(max_value)).astype(dtype) for v in values]
        codes = [c.view(np.uint8).astype(np.uint32) for c in clipped]
        return codes[0] | (codes[1] << np.uint32(8)) | (codes[2] << np.uint32(16)) | (codes[3] << np.uint32(24))

    def e4m3_decode(self, codes):
        return self._e4m3_value(self.and_(codes, 0xFF)), self._e4m3_value(self.and_(self.shr(codes, 8), 0xFF))

    def _e4m3_value(self, code):
        small = code.astype(np.int32).astype(np.float32) * np.float32(2.0**-9)
        return np.where(code < np.uint32(8), small, self.as_f32((code << np.uint32(20)) + np.uint32(960 << 20)))

    def lane_bit(self, bit):
        return bit

    def _lanes(self, x):
        return [x[..., i : i + 1] for i in range(x.shape[-1])]

    def select(self, predicate, a, b):
        pairs = zip(self._lanes(self.as_u32(a)), self._lanes(self.as_u32(b)), strict=True)
        return np.concatenate([p[0] if i & predicate else p[1] for i, p in enumerate(pairs)], -1)

    def shuffle_xor(self, x, bit):
        lanes = self._lanes(self.as_u32(x))
        return np.concatenate([lanes[i ^ bit] for i in range(len(lanes))], -1)

    def shuffle_index(self, x, lane):
        return np.broadcast_to(self._lanes(self.as_u32(x))[lane], x.shape)
