"""The two oracles agree. Oracles: each the other, `ml_dtypes` for codes, NumPy's float32 for integer arithmetic.

All 8-bit codes and all 65,536 bfloat16 values, and float32 at every edge: subnormal numbers, ties of each grid and
their neighbours, infinity, NaN, block scales that overflow or underflow, blocks of zeros.
"""

import dataclasses

import ml_dtypes
import numpy as np
import oracle_bits as bits
import oracle_table as table
import pytest

STORED = {
    "E2M1": ml_dtypes.float4_e2m1fn, "E2M3": ml_dtypes.float6_e2m3fn, "E3M2": ml_dtypes.float6_e3m2fn,
    "E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
BFLOAT16 = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)


def as_words(x):
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def one_nan(words):
    return np.where(words & 0x7FFF_FFFF > 0x7F80_0000, 0x7FC0_0000, words)


def same_floats(words, x):
    np.testing.assert_array_equal(one_nan(words), one_nan(as_words(x)))


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def test_integer_arithmetic_equals_ieee_float32():
    rng = np.random.default_rng(0)
    special = np.array([0, 1, 2, 0x7F_FFFF, 0x80_0000, 0x3F80_0000, 0x3FFF_FFFF, 0x7F7F_FFFF, 0x7F80_0000, 0x7FC0_0000])
    random = np.concatenate([rng.integers(0, 2**32, 40_000), rng.integers(0, 0x100_0000, 10_000)])
    near = random + rng.integers(-3, 4, random.size)  # cancellation
    a, b = (part.ravel() for part in np.meshgrid(*[np.concatenate([special, special | 1 << 31])] * 2))
    a = np.concatenate([a, random, random]).astype(np.uint32)
    b = np.concatenate([b, rng.permutation(random), near]).astype(np.uint32)
    x, y = a.view(np.float32), b.view(np.float32)
    for made, expected in ((bits.add, x + y), (bits.sub, x - y), (bits.mul, x * y), (bits.div, x / y)):
        same_floats(made(a, b), expected)


@pytest.mark.parametrize("element", table.ELEMENTS)
def test_decode_every_code_agrees(element):
    codes = np.arange(min(2 * table.sign_bit(element), 256))
    values = table.decode(codes, element)
    same_floats(bits.decode(codes, element), values)
    if element in STORED:
        same_floats(as_words(values), codes.astype(np.uint8).view(STORED[element]).astype(np.float32))


@pytest.mark.parametrize("element", STORED)
def test_encode_every_bfloat16_and_edge_agrees(element):
    x = table.edges(element)
    codes = table.encode(x, element)
    np.testing.assert_array_equal(bits.encode(as_words(x), element), codes)
    finite = ~np.isnan(x)
    top = table.grid(element)[-1]
    stored = np.clip(x[finite], -top, top).astype(STORED[element]).view(np.uint8)
    np.testing.assert_array_equal(codes[finite], stored)
    np.testing.assert_array_equal(codes[~finite] & (table.sign_bit(element) - 1), table.sign_bit(element) - 1)


@pytest.mark.parametrize("rounding", ["stochastic", "midpoint", "away"])
def test_encode_e2m1_with_every_byte_agrees(rounding):
    x, noise = table.edges("E2M1")[:, None], np.arange(256, dtype=np.uint8)
    x = np.concatenate([x[:: 1 if rounding == "away" else 61], x[2**16 :]])  # of the bfloat16 a part for all bytes
    x, noise = np.broadcast_arrays(x, noise[:1] if rounding == "away" else noise)
    expected = table.encode(x, "E2M1", rounding, noise)
    np.testing.assert_array_equal(bits.encode(as_words(x), "E2M1", rounding, noise), expected)


@pytest.mark.parametrize("rule", ["up", "floor"])
@pytest.mark.parametrize("element", STORED)
def test_power_codes_of_every_amax_agree(element, rule):
    near = int(as_words(table.grid(element)[-1:])[0]) & 0x7F_FFFF
    around = (np.arange(255)[:, None] << 23) + np.arange(near - 3, near + 4)
    amax = np.concatenate([np.abs(table.edges(element)), around.astype(np.uint32).ravel().view(np.float32)])
    codes = table.power_codes(amax, element, rule)
    np.testing.assert_array_equal(bits.power_codes(as_words(amax), element, rule), codes)


def tensors():
    """[16, 128]: every size, ties, blocks of zeros, scales that overflow and underflow, infinities and a NaN."""
    rng = np.random.default_rng(2)
    normal = rng.standard_normal((16, 128)).astype(np.float32)
    ties = (rng.integers(-24, 25, normal.shape) * 0.25).astype(np.float32)
    ties[:, ::16], ties[3, :48] = 6, 0
    far = normal * np.exp2(np.repeat(rng.integers(-140, 100, (16, 8)), 16, 1)).astype(np.float32)
    tiny = normal * np.float32(1e-6)
    tiny[5, 7], tiny[2, :32] = 50, -0.0
    yield from (normal, ties, far, tiny, normal * np.float32(1e-39), normal * np.float32(3e37), 0 * normal)
    for bad in (np.inf, -np.inf, np.nan):
        yield np.where(np.arange(128) == 40, np.float32(bad), normal)


@pytest.mark.parametrize("name", table.FORMATS)
def test_quantize_every_format_agrees(name):
    fmt = table.FORMATS[name]
    noise = np.random.default_rng(3).integers(0, 256, (16, 128), np.uint8)
    roundings = ("rne", "stochastic", "midpoint", "away") if fmt.element == "E2M1" else ("rne",)
    square = fmt.block == 16 and fmt.outer == "tensor" and fmt.divides != "eden"
    for number, x in enumerate(tensors()):
        hows = [{"rounding": r, "noise": noise} for r in (roundings if number % 4 == 1 else roundings[:1])]
        for how in hows + [{"square": True}] * bool(square and number in (1, 3, 9)):
            expected = table.quantize(x, name, **how)
            codes, scales, outer = bits.quantize(as_words(x), dataclasses.asdict(fmt), **how)
            np.testing.assert_array_equal(codes, expected.codes)
            if scales is not None:
                np.testing.assert_array_equal(scales, expected.scales)
            same_floats(np.ravel(outer), np.ravel(expected.outer))


def test_quantize_given_amax_agrees():
    x = np.float32([[1, 2, 448, 449, 900, -1000, 0.5, 0]])
    expected = table.quantize(x, "fp8", amax=448)
    codes, *_ = bits.quantize(as_words(x), dataclasses.asdict(table.FORMATS["fp8"]), amax=as_words(448.0))
    np.testing.assert_array_equal(codes, expected.codes)
    np.testing.assert_array_equal(expected.values[0], [1, 2, 448, 448, 448, -448, 0.5, 0])


def test_random_bytes_agree():
    for key in ((0, 0), (0xDEAD_BEEF, 0x0BAD_CAFE), (2**32 - 1, 1)):
        assert bits.key_words(*key) == table.key_words(*key)
        counters = np.array([0, 1, 7, 2**31, 2**32 - 1])
        np.testing.assert_array_equal(bits.hash_words(counters, *key), table.hash_words(counters, *key))
        for shape in ((8, 16), (6, 5), (1, 16), (2, 3, 8)):
            np.testing.assert_array_equal(bits.random_bytes(shape, key), table.random_bytes(shape, key))


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_hadamard_agrees(size):
    signs = table.FIXED_SIGNS if size == 16 else np.random.default_rng(size).choice([-1, 1], size).astype(np.float32)
    for x in (*tensors(), BFLOAT16.reshape(-1, 128)) if size == 16 else list(tensors())[2:5]:
        same_floats(bits.hadamard(as_words(x), signs), table.hadamard(x, signs))
    sylvester = np.array([[(-1) ** bin(i & j).count("1") for j in range(size)] for i in range(size)])
    exact = np.diag(signs) @ sylvester / np.sqrt(size)
    np.testing.assert_allclose(table.hadamard(np.eye(size), signs), exact, rtol=1e-6 if size > 16 else 0)


def test_pack_and_swizzle_agree():
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16) & 15
    codes[1::2] = codes[1::2, ::-1]
    for axis in (0, 1):
        np.testing.assert_array_equal(bits.pack(codes, axis), table.pack(codes, axis))
    np.testing.assert_array_equal(table.pack(np.array([[3, 12]], np.uint8)), [[0xC3]])
    for shape in ((128, 4), (130, 6), (1, 1)):
        scales = (np.arange(np.prod(shape)) % 255 + 1).astype(np.uint8).reshape(shape)
        np.testing.assert_array_equal(bits.swizzle(scales), table.swizzle(scales))
