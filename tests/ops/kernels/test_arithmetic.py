"""Kernel bodies on the NumPy machine against the oracle beside this file: every bit, denormals included."""

import functools

import kernel_expected as oracle
import ml_dtypes
import numpy as np
import oracle_table as table
import pytest
from kernel_programs import RULES

from halfbyte.kernels import nvfp4_arithmetic, swiglu_quantize
from halfbyte.kernels.block_scales import KernelQuantizer
from halfbyte.kernels.lane_memory import NumpyLaneMemoryOps
from halfbyte.kernels.numpy_lanes import NumpyLaneOps
from halfbyte.kernels.tensor_scale_kernel import quantizer_entries

T, N = 64, 256
KEY = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
FAR = np.float32(np.inf)
KINDS = ["normal", "wide", "zero_scales", "ties", "negative_zero", "subnormal", "zeros", "huge"]


@functools.cache
def data(kind: str) -> np.ndarray:
    rng = np.random.default_rng(KINDS.index(kind))
    x = rng.standard_normal((T, N)).astype(np.float32)
    if kind == "wide":
        x *= np.exp2(rng.integers(-24, 12, (T, N))).astype(np.float32)
    if kind == "zero_scales":
        x *= np.float32(1e-6)
        x[5, 7] = 50.0
        x[3, :16] = 0
    if kind == "ties":
        x = rng.integers(-24, 25, (T, N)).astype(np.float32) * np.float32(0.25)
        x[:, ::16] = 6
    if kind == "negative_zero":
        x[::2] = -0.0
        x[32:48, :16] = -0.0 * table.FIXED_SIGNS[:, None]  # a sum of zeros that are all -0 is +0
    if kind == "subnormal":
        x *= np.float32(1e-39)
    if kind == "zeros":
        x[:] = 0
    if kind == "huge":
        x *= np.float32(3e37)
    return x.astype(ml_dtypes.bfloat16)


def e2m1_codes(a, byte, rounding):
    a, byte = np.broadcast_arrays(a, byte)
    return table.round_magnitude(a, "E2M1", rounding, byte)


def words(x, columns, tokens):
    """[token row][word of a lane], each [programs, blocks, lanes]."""
    view = np.ascontiguousarray(x).view(np.uint32).reshape(T // tokens, tokens, N // 16, 16 // columns, columns // 2)
    return [[view[:, r, :, :, k] for k in range(columns // 2)] for r in range(tokens)]


def array(rows, dtype):
    """The [tokens, columns] array whose words are given."""
    stacked = np.stack([np.stack(r, -1) for r in rows], 1)  # [programs, rows, blocks, lanes, words]
    return np.ascontiguousarray(stacked).view(dtype).reshape(-1, N)


def counters(columns, tokens):
    column = np.arange(0, N, columns, dtype=np.uint32).reshape(1, N // 16, -1)
    return np.arange(T // tokens, dtype=np.uint32).reshape(-1, 1, 1) * np.uint32(tokens // 4 * N) + column


def noise_words(m, tokens):
    shape = (T // tokens, N // 16, 16 // m.columns)
    k0, k1 = (np.full(shape, k, np.uint32) for k in KEY)
    return nvfp4_arithmetic.random_words(m, [k0, k1, counters(m.columns, tokens)], tokens=tokens, stride=N)


def how(amax, rule="plain", rounding="stochastic"):
    vector = oracle.scale_vector(amax, oracle.TOPS[rule])
    return KernelQuantizer(RULES[rule], rounding, *(vector[i] for i in quantizer_entries(RULES[rule])))


def same_bits(got, want):
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "tokens"), [(8, 8), (4, 16), (2, 16)])
@pytest.mark.parametrize("stochastic", [False, True])
def test_rows(kind, columns, tokens, stochastic):
    x, m = data(kind), NumpyLaneOps(columns)
    amax = np.abs(x.astype(np.float32)).max()
    random = noise_words(m, tokens) if stochastic else None
    got = nvfp4_arithmetic.quantize_rows_to_bf16(m, words(x, columns, tokens), how(amax), random)
    noise = oracle.random_bytes(T, N, KEY) if stochastic else None
    same_bits(array(got, ml_dtypes.bfloat16), oracle.quantize(x, amax, axis=1, noise=noise)[2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("stochastic", [False, True])
def test_columns(kind, hadamard, stochastic):
    x, m = data(kind), NumpyLaneOps(4)
    source = oracle.hadamard_tokens(x) if hadamard else x.astype(np.float32)
    amax = np.abs(source).max()
    random = noise_words(m, 16) if stochastic else None
    noise = oracle.random_bytes(T, N, KEY) if stochastic else None
    codes, scale_bytes, carrier = oracle.quantize(source, amax, axis=0, noise=noise)
    rows = words(x, 4, 16)
    got = nvfp4_arithmetic.quantize_columns_to_bf16(m, rows, how(amax), random, hadamard=hadamard, packed=False)
    same_bits(array(got, ml_dtypes.bfloat16), carrier)
    packed = nvfp4_arithmetic.quantize_columns_to_bf16(m, rows, how(amax), random, hadamard=hadamard, packed=True)
    np.testing.assert_array_equal(array(packed[:8], np.uint8), oracle.pack_tokens(codes))
    np.testing.assert_array_equal(array(packed[8:], np.uint8), scale_bytes)
    again = nvfp4_arithmetic.unpack_columns(m, packed[:8], packed[8])
    same_bits(array(again, ml_dtypes.bfloat16), carrier)


CHOOSING = ["1716", "squared", "absolute", "expected"]
FAST = ["True-1716-wide", "False-squared-ties", "True-absolute-normal", "True-expected-normal"]


@functools.cache
def chosen_data(kind: str) -> np.ndarray:
    """`data`, and blocks whose two errors are equal: on grids of both scales, single numbers, and repeated ones."""
    x = data(kind).copy()
    if kind == "ties":
        x[:, 16:32] = 0
        x[:, 16] = np.float32(3)
        x[:, 32:48] = np.float32(1.5)
        x[16:32] = np.float32(-0.75)
    return x


@pytest.mark.slow(fast_cases=FAST)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", CHOOSING)
@pytest.mark.parametrize("stochastic", [False, True])
def test_rows_and_columns_of_any_rule_equal_table(kind, rule, stochastic):
    """Scales, and which of two a block takes, in both layouts of lanes; random bytes at midpoints."""
    x, m = chosen_data(kind), NumpyLaneOps(4)
    amax = np.abs(x.astype(np.float32)).max()
    noise = oracle.random_bytes(T, N, KEY) if stochastic else None
    more = {"noise": noise, "rule": rule, "rounding": "midpoint"}
    want = oracle.quantize(x, amax, axis=1, **more)[2]
    for columns, tokens in ((8, 8), (4, 16), (2, 16)):
        lane = NumpyLaneOps(columns)
        random = noise_words(lane, tokens) if stochastic else None
        got = nvfp4_arithmetic.quantize_rows_to_bf16(
            lane, words(x, columns, tokens), how(amax, rule, "midpoint"), random
        )
        same_bits(array(got, ml_dtypes.bfloat16), want)
    source = oracle.hadamard_tokens(x)
    amax = np.abs(source).max()
    codes, scale_bytes, carrier = oracle.quantize(source, amax, axis=0, **more)
    random = noise_words(m, 16) if stochastic else None
    for packed in (False, True):
        flags = {"hadamard": True, "packed": packed}
        got = nvfp4_arithmetic.quantize_columns_to_bf16(
            m, words(x, 4, 16), how(amax, rule, "midpoint"), random, **flags
        )
        if not packed:
            same_bits(array(got, ml_dtypes.bfloat16), carrier)
            continue
        np.testing.assert_array_equal(array(got[:8], np.uint8), oracle.pack_tokens(codes))
        np.testing.assert_array_equal(array(got[8:], np.uint8), scale_bytes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["plain", *CHOOSING])
def test_float32_blocks_of_any_rule_equal_table(kind, rule):
    """Of a weight, along either axis."""
    rng = np.random.default_rng(5)
    w = chosen_data(kind).astype(np.float32) * (1 + rng.random((T, N), np.float32) * np.float32(1e-3))
    m, amax = NumpyLaneOps(4), np.abs(w).max()
    view = w.reshape(T // 16, 16, N // 16, 4, 4)
    rows = nvfp4_arithmetic.float_pairs([[view[:, r, :, :, k] for k in range(4)] for r in range(16)])
    got = nvfp4_arithmetic.quantize_rows_to_bf16(m, rows, how(amax, rule))
    same_bits(array(got, ml_dtypes.bfloat16), oracle.quantize(w, amax, axis=1, rule=rule)[2])
    got = nvfp4_arithmetic.quantize_columns_to_bf16(m, rows, how(amax, rule), hadamard=False, packed=False)
    same_bits(array(got, ml_dtypes.bfloat16), oracle.quantize(w, amax, axis=0, rule=rule)[2])


@pytest.mark.slow
def test_midpoint_codes_of_every_byte_equal_table():
    """Magnitudes a few units from each multiple of 1/512 up to 8, and the smallest and largest."""
    marks = np.arange(8 * 512 + 1, dtype=np.float32) / np.float32(512)
    near = [marks.view(np.uint32) + np.uint32(d % 2**32) for d in (-2, -1, 0, 1, 2)]
    extreme = np.array([0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000], np.uint32)
    y = np.concatenate([*near, extreme]).view(np.float32)
    y = y[y >= 0]
    byte = np.arange(256, dtype=np.uint32)[:, None]
    one = np.full((256, len(y)), 0xBF803F80, np.uint32)
    got = nvfp4_arithmetic.round_stochastic_pair(
        NumpyLaneOps(4), one, (y, y), byte | (byte << np.uint32(16)), "midpoint"
    )
    for half in (0, 16):
        np.testing.assert_array_equal((got >> np.uint32(9 + half)) & np.uint32(7), e2m1_codes(y, byte, "midpoint"))


@pytest.mark.parametrize("number", [6, 1536])
def test_division_in_three_instructions_is_exact(number):
    """Oracle: NumPy's division. The steps that a GPU is given, in float64, where the remainder is exact, and so is what
    is left of it after the float32 grid is taken out; every bf16, and a binade of float32.
    """
    everything = (np.arange(1, 0x7F80, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    binade = np.arange(0x3F800000, 0x40000000, 7, dtype=np.uint32).view(np.float32)
    a = np.concatenate([everything, binade, binade * np.float32(2.0**100), binade * np.float32(2.0**-115)])
    inverse = np.float32(1 / number)
    guess = a * inverse
    rest = (a.astype(np.float64) - guess.astype(np.float64) * number) * inverse
    here, below, above = guess.astype(np.float64), np.nextafter(guess, np.float32(0)), np.nextafter(guess, FAR)
    up, down = above.astype(np.float64) - here, here - below.astype(np.float64)
    assert not (np.isclose(rest, up / 2, rtol=1e-9, atol=0) | np.isclose(-rest, down / 2, rtol=1e-9, atol=0)).any()
    got = np.where(rest > up / 2, above, np.where(-rest > down / 2, below, guess))
    np.testing.assert_array_equal(got.astype(np.float32), a / np.float32(number))


@pytest.mark.slow
def test_stochastic_codes_of_every_byte_equal_table():
    """Every byte for magnitudes a few units from each multiple of 1/512 up to 8, and for the smallest and largest."""
    marks = np.arange(8 * 512 + 1, dtype=np.float32) / np.float32(512)
    near = [marks.view(np.uint32) + np.uint32(d % 2**32) for d in (-40, -3, -2, -1, 0, 1, 2, 9)]
    just = [(marks[:257] - np.float32(2.0**-26) * np.float32(j)).view(np.uint32) for j in (0.25, 0.5, 1, 1.5, 2)]
    extreme = np.array([0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000], np.uint32)
    y = np.concatenate([*near, *just, extreme]).view(np.float32)
    y = y[y >= 0]
    byte = np.arange(256, dtype=np.uint32)[:, None]
    one, m = np.full((256, len(y)), 0xBF803F80, np.uint32), NumpyLaneOps(4)  # 1 and -1: the magnitude is the scale
    got = nvfp4_arithmetic.round_stochastic_pair(
        m, one, (y, y[::-1]), byte | (byte[::-1] << np.uint32(16)), "stochastic"
    )
    assert not (got & np.uint32(0xF000F000)).any()
    np.testing.assert_array_equal((got >> np.uint32(9)) & np.uint32(7), e2m1_codes(y, byte, "stochastic"))
    np.testing.assert_array_equal((got >> np.uint32(25)) & np.uint32(7), e2m1_codes(y[::-1], byte[::-1], "stochastic"))


def test_constant_division_equals_integer_division():
    """Numbers of programs and tokens, up to 2**31."""
    rng = np.random.default_rng(0)
    m = NumpyLaneMemoryOps(4, [], 1, 1)
    for k in (1, 2, 3, 7, 11, 64, 112, 1376, 8192, 2**30 + 1, 2**31 - 1):
        a = np.concatenate([rng.integers(0, 2**31, 2000), np.arange(100), 2**31 - 1 - np.arange(100)])
        a = np.concatenate([a, a // k * k, np.maximum(a // k * k, 1) - 1]).astype(np.uint32)
        np.testing.assert_array_equal(m.u32_div_const(a, k), a // np.uint32(k))
        np.testing.assert_array_equal(m.u32_mod_const(a, k), a % np.uint32(k))


@pytest.mark.parametrize("kind", KINDS)
def test_hadamard_amax(kind):
    x, m = data(kind), NumpyLaneOps(4)
    tops = [nvfp4_arithmetic.hadamard_amax(m, [row[k] for row in words(x, 4, 16)]) for k in range(2)]
    got = np.max(tops).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert got == np.abs(oracle.hadamard_tokens(x)).max()


@pytest.mark.parametrize("kind", KINDS)
def test_square(kind):
    rng = np.random.default_rng(5)
    w = data(kind).astype(np.float32) * (1 + rng.random((T, N), np.float32) * np.float32(1e-3))
    m = NumpyLaneOps(4)
    view = w.reshape(T // 16, 16, N // 16, 4, 4)
    rows = [[view[:, r, :, :, k] for k in range(4)] for r in range(16)]
    amax = np.abs(w).max()
    assert np.max(nvfp4_arithmetic.amax_f32(m, rows)) == amax
    got = nvfp4_arithmetic.quantize_2d(m, rows, how(amax), packed=False)
    same_bits(array(got, ml_dtypes.bfloat16), oracle.quantize(w, amax, axis=1, block2d=True)[2])


def cut(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def test_swiglu_words():
    """The stated roundings, with NumPy's float32 exp in both: every bit."""
    rng, m = np.random.default_rng(9), NumpyLaneOps(4)
    g, u, d = ((rng.standard_normal((T, N)) * s).astype(ml_dtypes.bfloat16) for s in (3.0, 1.0, 1e-3))
    rows = [words(x, 4, 16) for x in (g, u, d)]
    made = [swiglu_quantize.swiglu_backward_row(m, *(r[t] for r in rows)) for t in range(16)]
    h = [swiglu_quantize.swiglu_forward_row(m, rows[0][t], rows[1][t]) for t in range(16)]
    g, u, d = (x.astype(np.float32) for x in (g, u, d))
    s = np.float32(1) / (np.float32(1) + np.exp(-g))
    a = cut(g * s)
    wanted = [cut(cut(d * u) * (s * (1 + g * (1 - s)))), cut(d * a), cut(a * u)]
    for i, want in enumerate(wanted):
        same_bits(array([row[i] for row in made], ml_dtypes.bfloat16), want.astype(ml_dtypes.bfloat16))
    same_bits(array(h, ml_dtypes.bfloat16), wanted[2].astype(ml_dtypes.bfloat16))
