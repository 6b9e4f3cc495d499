"""Table-based oracle: quantization, random bytes, Hadamard transform and packing in NumPy.

Every rounding is a search in the sorted values of the element, in float64, where the middles of two neighbours are
exact; scales are IEEE float32, one operation at a time, in the order of docs/numerics.md and docs/league.md. No code
of the package runs here. `oracle_bits` is the second implementation; `test_oracle` holds both equal.
"""

import dataclasses
import functools
from typing import NamedTuple

import ml_dtypes
import numpy as np

F = np.float32
FLT_MAX = np.finfo(F).max
FIXED_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], F)
POWERS = 2.0 ** np.arange(-127, 128)  # E8M0 codes 0..254
# Element -> bits of the exponent, bits of the mantissa, largest value.
ELEMENTS = {
    "E2M1": (2, 1, 6.0), "E2M3": (2, 3, 7.5), "E3M2": (3, 2, 28.0), "E4M3": (4, 3, 448.0), "E5M2": (5, 2, 57344.0),
    "UE5M3": (5, 3, 61440.0),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Format:
    """`scale` is the element of block scales or the rule of E8M0; `top` is what the amax is mapped to; `divides` names
    the rule whose order of operations divides: "46", "quartet", "eden" or "tetra"."""

    element: str = "E2M1"
    block: int | None = 16
    scale: str = "E4M3"
    top: float = 2688.0
    candidates: tuple[float, ...] = (6.0,)
    metric: str = "squared"
    headroom: float = 1.0
    floor: float = 0.0
    outer: str = "tensor"
    divides: str = ""


FORMATS = {
    "nvfp4": Format(),
    "mxfp4": Format(block=32, scale="up"),
    "mxfp6": Format("E3M2", 32, "up"),
    "mxfp8": Format("E4M3", 32, "up"),
    "mxfp8_e5m2": Format("E5M2", 32, "up"),
    **{f"{name}_floor": Format(element, 32, "floor") for name, element in
       (("mxfp4", "E2M1"), ("mxfp6", "E3M2"), ("mxfp8", "E4M3"), ("mxfp8_e5m2", "E5M2"))},
    "fp8": Format("E4M3", None, "", 448.0),
    "fp8_e5m2": Format("E5M2", None, "", 57344.0),
    "nvfp4_46_mse": Format(top=1536.0, candidates=(6.0, 4.0), divides="46"),
    "nvfp4_46_mae": Format(top=1536.0, candidates=(6.0, 4.0), metric="absolute", divides="46"),
    "nvfp4_46_sr": Format(top=1536.0, candidates=(6.0, 4.0), metric="expected", headroom=17 / 16),
    "nvfp4_1716": Format(headroom=17 / 16),
    "nvfp4_row": Format(outer="row"),
    "nvfp4_ue5m3": Format(scale="UE5M3", floor=1.0),
    "nvfp4_quartet": Format(top=256.0, candidates=(6.0, 4.0), floor=1.0, divides="quartet"),
    "nvfp4_eden": Format(top=255.99, headroom=17 / 16 * 0.93, floor=1.0, divides="eden"),
    "nvfp4_tetra": Format(top=448.0, outer="128", divides="tetra"),
    "nvfp4_tetra_sr": Format(top=448.0, floor=2.0**-9, outer="128", divides="tetra"),
}  # fmt: skip


@functools.cache
def grid(element: str) -> np.ndarray:
    """Finite non-negative values, float64, ascending; the position of a value is its code."""
    exponent_bits, mantissa_bits, largest = ELEMENTS[element]
    bias = 2 ** (exponent_bits - 1) - 1
    codes = np.arange(2 ** (exponent_bits + mantissa_bits))
    exponent, fraction = codes >> mantissa_bits, (codes % 2**mantissa_bits) / 2**mantissa_bits
    values = np.where(exponent == 0, 2.0 ** (1 - bias) * fraction, 2.0 ** (exponent - bias) * (1 + fraction))
    return values[values <= largest]


def sign_bit(element: str) -> int:
    return 2 ** sum(ELEMENTS[element][:2])


def decode(codes: np.ndarray, element: str) -> np.ndarray:
    """float32 values of codes; beyond the largest value infinity where the mantissa is 0 and NaN elsewhere."""
    exponent_bits, mantissa_bits, _ = ELEMENTS[element]
    table = np.full(sign_bit(element), np.nan)
    if len(grid(element)) <= (2**exponent_bits - 1) << mantissa_bits:
        table[(2**exponent_bits - 1) << mantissa_bits] = np.inf
    table[: len(grid(element))] = grid(element)
    codes = np.asarray(codes, int)
    magnitude = table[codes & (sign_bit(element) - 1)]
    return np.where(codes & sign_bit(element), -magnitude, magnitude).astype(F)


def round_magnitude(a: np.ndarray, element: str, rounding: str = "rne", noise: np.ndarray | None = None) -> np.ndarray:
    """Codes without a sign of float32 magnitudes; saturates, and NaN has the largest code.

    `rounding` is rne, away (ties away from zero), midpoint (up where the way from the lower neighbour, in steps, and
    (noise + 1/2) / 256 are 1 together) or stochastic (a + noise / 256 of a step in float32, cut at its own step).
    """
    table = grid(element)
    nan, a = np.isnan(a), np.minimum(np.nan_to_num(a, nan=table[-1], posinf=table[-1]), F(table[-1]))
    if rounding == "stochastic":
        a = a + noise.astype(F) / F(256) * np.where(a < 2, F(0.5), np.where(a < 4, F(1), F(2)))
        assert a.dtype == F
    a = a.astype(np.float64)
    below = np.searchsorted(table, a, side="right") - 1
    above = np.minimum(below + 1, len(table) - 1)
    middle = (table[below] + table[above]) / 2
    if rounding == "rne":
        up = (a > middle) | ((a == middle) & (above % 2 == 0))
    elif rounding == "away":
        up = a >= middle
    elif rounding == "midpoint":
        step = np.where(above > below, table[above] - table[below], np.inf)
        up = (a - table[below]) / step + (noise + 0.5) / 256 >= 1
    else:
        up = np.zeros(a.shape, bool)
    return np.where(nan, sign_bit(element) - 1, np.where(up, above, below)).astype(np.uint16)


def encode(x: np.ndarray, element: str, rounding: str = "rne", noise: np.ndarray | None = None) -> np.ndarray:
    """uint8 codes of float32 x, with its sign, that of zero and of NaN too."""
    return (round_magnitude(np.abs(x), element, rounding, noise) | np.signbit(x) * sign_bit(element)).astype(np.uint8)


def edges(element: str) -> np.ndarray:
    """float32 that tell roundings apart: every bfloat16; every value, every middle of two, and their neighbours;
    numbers beyond the largest, subnormal ones, and the ends of the range."""
    table = grid(element).astype(F)
    points = np.concatenate([table, (table[1:] + table[:-1]) / 2, table[-1] * F([1.01, 2]), F([448, 2688])])
    ends = np.array([1, 2, 0x7F_FFFF, 0x80_0000, 0x80_0001, 0x7F7F_FFFF, 0x7FC0_0001], np.uint32).view(F)
    x = np.concatenate([points, *(np.nextafter(points, F(limit)) for limit in (-1, np.inf)), ends])
    return np.concatenate([(np.arange(2**16, dtype=np.uint32) << 16).view(F), x, -x])


def power_codes(amax: np.ndarray, element: str, rule: str) -> np.ndarray:
    """E8M0 codes of blocks. "up": the least power of two that float32(amax * float32(1 / largest)) does not exceed,
    254 for infinity; "floor": the largest that amax is not below, over that of the largest element, NaN for infinity.
    """
    top = grid(element)[-1]
    with np.errstate(under="ignore", invalid="ignore"):  # a signalling NaN
        if rule == "up":
            code = np.searchsorted(POWERS, (amax * (F(1) / F(top))).astype(np.float64))
        else:
            code = np.searchsorted(2.0 ** np.arange(-149, 128), amax.astype(np.float64), side="right") - 23
            code = code - (np.searchsorted(POWERS, top, side="right") - 128)
            code = np.where(np.isinf(amax), 255, np.clip(code, 0, 254))
    return np.where(np.isnan(amax), 255, np.where((rule == "up") & (code > 254), 254, code)).astype(np.uint8)


class Quantized(NamedTuple):
    """`codes` uint8 in x's shape, `scales` codes of blocks, `block_values` float32 element times block scale, `outer`
    what they are still to be multiplied by, `values` float32 of both."""

    codes: np.ndarray
    scales: np.ndarray | None
    amax: np.ndarray
    outer: np.ndarray
    block_values: np.ndarray
    values: np.ndarray

    @property
    def carrier(self) -> np.ndarray:
        """`block_values` as kernels store them."""
        return self.block_values.astype(ml_dtypes.bfloat16)


def quantize(
    x: np.ndarray, name: str, *, axis: int = 1, square: bool = False, rounding: str = "rne",
    noise: np.ndarray | None = None, amax: np.ndarray | None = None,
) -> Quantized:  # fmt: skip
    """Matrix x in blocks along `axis`, or in square ones; `noise` are bytes of x's shape."""
    fmt, x = FORMATS[name], np.asarray(x).astype(F)
    if axis == 0 and not square:
        made = quantize(x.T, name, rounding=rounding, noise=None if noise is None else noise.T, amax=amax)
        return Quantized(*(a.T if np.ndim(a) == 2 else a for a in made))
    rows, columns = x.shape
    wide = fmt.block or columns
    tall = (wide if square else 1) if fmt.block else rows

    def tiles(a):
        return a.reshape(rows // tall, tall, columns // wide, wide).swapaxes(1, 2)  # [.., .., tall, wide]

    def flat(a):
        return np.ascontiguousarray(np.broadcast_to(a, tiles(x).shape)).swapaxes(1, 2).reshape(x.shape)

    with np.errstate(all="ignore"):
        blocks = tiles(np.abs(x))
        amax = F(np.abs(x).max()) if amax is None else F(amax)
        noise = None if noise is None else tiles(noise)
        scales, value, z, outer = _scaled(blocks, amax, fmt, rounding)
        codes = round_magnitude(z, fmt.element, rounding, noise)
        if fmt.divides == "eden":
            scales, value = _corrected(value, z, decode(codes, "E2M1"), noise)
        signed = flat(codes) | np.signbit(x) * sign_bit(fmt.element)
        block_values = decode(signed, fmt.element) * flat(value)
        numbers = block_values * flat(outer)
        if fmt.divides in ("quartet", "eden", "tetra"):
            numbers = decode(signed, fmt.element) * flat(value * outer)
    spread = (np.shape(outer) or None) and outer[..., 0, 0]
    outer = F(outer) if spread is None else spread[:, :1] if fmt.outer == "row" else spread
    scales = None if scales is None else scales[..., 0, 0].astype(np.uint8)
    return Quantized(signed.astype(np.uint8), scales, amax, outer, block_values, numbers)


def tensor_scale(amax: np.ndarray, top: float) -> np.ndarray:
    """S: 1 where the amax is zero or not finite."""
    with np.errstate(all="ignore"):
        usable = (amax > 0) & np.isfinite(amax)
        return np.where(usable, np.minimum(F(top) / np.where(usable, amax, F(1)), FLT_MAX), F(1)).astype(F)[()]


def _scaled(blocks, amax, fmt, rounding):
    """(scale codes, their values, blocks on the element's grid before rounding, outer decode scale)."""
    b = blocks.max((2, 3), keepdims=True)
    if fmt.block is None:
        s = tensor_scale(amax, fmt.top)
        return None, F(1), blocks * s, F(1) / s
    if fmt.scale in ("up", "floor"):
        codes = power_codes(b, fmt.element, fmt.scale)
        value = np.where(codes == 255, np.nan, POWERS[np.minimum(codes, 254)])
        return codes, value.astype(F), (blocks / POWERS[np.minimum(codes, 254)]).astype(F), F(1)
    if fmt.outer == "row":
        amax = b.max(1, keepdims=True)
    if fmt.outer == "128":
        amax = np.repeat(b.reshape(len(b), -1, 8, 1, 1).max(2), 8, 1)
    tried = [_candidate(blocks, b, amax, fmt, k) for k in fmt.candidates]
    if len(tried) == 1:
        return tried[0]
    errors = [_error(blocks, amax, fmt, rounding, *each[1:]) for each in tried]
    second = errors[1] < errors[0]
    return *(np.where(second, *pair) for pair in list(zip(tried[1], tried[0]))[:3]), tried[0][3]


def _candidate(blocks, b, amax, fmt, k):
    """One scale of each block, that maps its amax to k."""
    table, more = grid(fmt.scale), F(6 / k)
    if fmt.divides in ("", "46"):
        s = tensor_scale(amax, fmt.top)
        outer = F(1) / s
        unrounded = (b / F(6)) * s * more if fmt.divides else b * (s * F(fmt.headroom / k))
    else:
        usable, six = (amax > 0) & np.isfinite(amax), F(6 / fmt.headroom)
        outer = np.where(usable, amax / F(fmt.top) / six, F(1)).astype(F)[()]
        unrounded = (b / outer) / six if fmt.divides == "tetra" else _over(b / six * more, outer)
    codes = round_magnitude(np.where(unrounded <= table[-1], unrounded, F(table[-1])), fmt.scale)
    codes = np.where(codes == 0, np.searchsorted(table, fmt.floor), codes)
    value = table[codes].astype(F)
    if fmt.divides in ("", "46"):
        return codes, value, blocks * np.minimum(F(1) / (value * outer), FLT_MAX), outer
    return codes, value, _over(blocks, value * outer), outer


def _over(a, b):
    """a / b, 0 for b = 0."""
    return np.where(b == 0, F(0), a / np.where(b == 0, F(1), b))


def _in_order(values):
    """Sums of blocks: elements one after the other in float32, rows of a tile as a tree of halves."""
    total = functools.reduce(np.add, np.moveaxis(np.minimum(values, FLT_MAX), -1, 0))
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., None]


def _error(blocks, amax, fmt, rounding, value, z, outer):
    """Of each block. Numbers are measured times 2^64 below an amax of 2^-60 and times 2^-64 from 2^60 on."""
    table = grid("E2M1")
    if fmt.metric == "expected":
        lower = np.searchsorted(table, np.minimum(z, F(6)).astype(np.float64), side="right") - 1
        above = table[np.minimum(lower + 1, 7)]
        inside = ((z.astype(np.float64) - table[lower]) * (above - z.astype(np.float64))).astype(F)
        return value * value * _in_order(np.where(z > 6, (z - F(6)) * (z - F(6)), inside))
    q = table[np.minimum(round_magnitude(z, "E2M1", "away" if rounding == "away" else "rne"), 7)].astype(F)
    if fmt.divides == "quartet":
        off = np.abs(np.minimum(q * (value * outer), FLT_MAX) - blocks)
    else:
        lift = np.where(amax < 2.0**-60, F(2.0**64), np.where(amax >= 2.0**60, F(2.0**-64), F(1))).astype(F)
        off = np.abs(np.minimum((q * value * (amax * lift)) / F(fmt.top), FLT_MAX) - blocks * lift)
    return _in_order(off * off if fmt.metric == "squared" else off)


def _corrected(value, z, q, noise):
    """MS-EDEN: scale times sum z^2 / sum z q of 128 neighbours, rounded stochastically by a block's first three bytes.

    (scale codes, values)."""
    sums = [_in_order(t)[..., 0].reshape(len(z), -1, 8) for t in (z * z, z * q)]
    square, cross = (np.repeat(functools.reduce(np.add, np.moveaxis(t, -1, 0)), 8, -1)[..., None, None] for t in sums)
    wanted = np.minimum(value * np.where(cross == 0, F(1), _over(square, cross)), F(448))
    table = grid("E4M3")
    below = np.searchsorted(table, wanted.astype(np.float64), side="right") - 1
    step = np.append(np.diff(table), 0.0)[below]
    uniform = noise[..., :1, :3].astype(np.float64) @ np.array([2.0**-8, 2.0**-16, 2.0**-24])
    codes = below + (uniform[..., None] * step < wanted - table[below])
    return codes, table[codes].astype(F)


def hash_words(counter: np.ndarray, k0: int, k1: int) -> np.ndarray:
    """The counter hash, in 64-bit integers cut to 32."""
    h = (np.asarray(counter).astype(np.uint64) * 0x9E37_79B9 + int(k0)) % 2**32
    h ^= h >> 16
    h = (h * 0x7FEB_352D + int(k1)) % 2**32
    h ^= h >> 15
    h = h * 0x846C_A68B % 2**32
    return (h ^ (h >> 16)).astype(np.uint32)


def key_words(k0: int, k1: int) -> tuple[int, int]:
    """The words of a key as the hash takes them: four Feistel rounds, with the first digits of pi."""
    for constant in (0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344):
        k0, k1 = int(k1), int(k0) ^ int(hash_words(np.array([k1]), constant, constant)[0])
    return k0, k1


def random_bytes(shape: tuple[int, ...], words: tuple[int, int]) -> np.ndarray:
    """Byte t % 4 of word (t // 4) * N + n for element (t, n) of the tensor as [tokens, features]."""
    token, feature = np.divmod(np.arange(np.prod(shape)), shape[-1])
    drawn = hash_words(token // 4 * shape[-1] + feature, *words)
    return (drawn >> (token % 4 * 8).astype(np.uint32)).astype(np.uint8).reshape(shape)


def hadamard(x: np.ndarray, signs: np.ndarray = FIXED_SIGNS) -> np.ndarray:
    """float32 runs along the last axis: signs and the power of two, butterflies of growing distance, then sqrt(1/2) if
    their number is odd. Of 16: bfloat16 in, one rounding to bfloat16 out, a zero is +0.
    """
    size, steps = len(signs), len(signs).bit_length() - 1
    v = np.asarray(x).astype(ml_dtypes.bfloat16 if size == 16 else F).astype(F).reshape(-1, size)
    with np.errstate(all="ignore"):
        v = v * (np.asarray(signs, F) * F(0.5 ** (steps // 2)))
        for step in range(steps):
            pairs = v.reshape(len(v), -1, 2, 2**step)
            a, b = pairs[:, :, 0], pairs[:, :, 1]
            v = np.stack([a + b, a - b], 2).reshape(len(v), size)
        v = v * F(0.5**0.5) if steps % 2 else v
        v = np.where(v == 0, F(0), v).astype(ml_dtypes.bfloat16).astype(F) if size == 16 else v
    return v.reshape(np.shape(x))


def pack(codes: np.ndarray, axis: int = -1) -> np.ndarray:
    """Two codes a byte, the even one in the low nibble."""
    codes = np.moveaxis(codes, axis, -1)
    return np.moveaxis(codes[..., ::2] | codes[..., 1::2] << 4, -1, axis)


def swizzle(scales: np.ndarray) -> np.ndarray:
    """Scale (r, c) at (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4 of the tile (r // 128, c // 4), the rest zero."""
    rows, columns = scales.shape
    across = -(-columns // 4)
    tiled = np.zeros(-(-rows // 128) * across * 512, scales.dtype)
    r, c = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    tiled[(r // 128 * across + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales
    return tiled
