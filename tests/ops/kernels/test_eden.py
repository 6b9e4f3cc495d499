"""Quartet II's operands on the host against the oracle, bit for bit; test_fused compares with the definition."""

import jax
import kernel_expected as oracle
import ml_dtypes
import numpy as np
import pytest
import test_arithmetic as arrays
from kernel_programs import quartet2

from halfbyte import formats, kernels
from halfbyte.formats.random_bits import key_words
from halfbyte.kernels import GlobalWindow, amax_target, ms_eden, nvfp4_arithmetic, nvfp4_weight
from halfbyte.kernels import nvfp4_untiled as kernel_codes
from halfbyte.kernels.block_scales import KernelQuantizer
from halfbyte.kernels.mosaic_launch import launch_on_host
from halfbyte.kernels.numpy_lanes import NumpyLaneOps
from halfbyte.kernels.ptx_lanes import PtxLaneOps
from halfbyte.kernels.tensor_scale_kernel import quantizer_entries

KEY = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
QUARTET, EDEN = formats.NVFP4_QUARTET.scale, formats.NVFP4_EDEN.scale
SHAPES = {-2: [(256, 144)], -1: [(80, 384)]}
KINDS = ["normal", "wide", "runs_of_zeros", "ties", "zeros", "tiny", "huge"]


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    """Outside XLA, whose threads flush subnormal numbers."""

    def launch(body, arrays, outputs, *, programs, lanes, name):
        return launch_on_host(body, [np.asarray(a) for a in arrays], outputs, programs=programs, lanes=lanes)

    for module in (ms_eden, kernel_codes):
        monkeypatch.setattr(module, "launch_flat", launch)
    with jax.disable_jit(), np.errstate(all="ignore"):
        yield


def data(shape, kind):
    rng = np.random.default_rng(shape[0] + shape[1] + KINDS.index(kind))
    x = rng.standard_normal(shape).astype(np.float32)
    if kind == "wide":
        x *= np.exp2(rng.integers(-24, 12, shape)).astype(np.float32)
    if kind == "runs_of_zeros":
        x[: shape[0] // 2, : shape[1] // 2], x[0, 0] = 0, -0.0
        x[:, 5] *= 1e-7
    if kind == "ties":
        x = rng.integers(-24, 25, shape).astype(np.float32) * np.float32(0.25)
    sizes = {"zeros": 0, "tiny": 1e-39, "huge": 3e37}
    return (x * np.float32(sizes.get(kind, 1))).astype(ml_dtypes.bfloat16)


def vector(amax, rule):
    """The scale vector, from the oracle's own divisions."""
    finite = amax <= np.finfo(np.float32).max
    a, b = (np.float32(t) for t in amax_target(rule))
    d = np.float32(1) if amax == 0 or not finite else np.float32(amax) / a / b
    return np.array([amax, d if d else np.inf, d, 1, d if finite else np.nan, 0, 0, 0], np.float32)


def signs(seed):
    return np.where(np.random.default_rng(seed).random(128) < 0.5, -1, 1).astype(np.float32)


def same(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))


def made(x, numbers, axis, forward=None, noise=None, packed=False, **more):
    """(what the kernels make of x, what the oracle makes of `numbers`)."""
    turned = oracle.hadamard128(numbers, signs(1), axis=axis % 2)
    (top,) = [
        np.asarray(t).max().view(np.float32)
        for t in [ms_eden.eden_partial_amax(x, signs(1), axis=axis, forward=forward)]
    ]
    assert top == np.abs(turned).max()
    drawn = ms_eden.EdenQuantization(vector(top, EDEN), **{"rule": EDEN, "key": KEY} | more)
    got = ms_eden.eden_quantize(x, signs(1), drawn, axis=axis, forward=forward, packed=packed)
    noise = oracle.random_bytes(*x.shape, KEY) if noise is None else noise
    want = oracle.eden(turned, noise, axis=axis % 2)
    return got, (want.codes, want.scales, want.carrier)


class Fused(NumpyLaneOps):
    """The divisions of the GPU's machine, with an exact reciprocal, and its NaN; its product and sum is rounded once,
    by way of float64: no sum here that is not exact there comes as near to the middle of two float32 as float64 rounds.
    """

    divisor, over = PtxLaneOps.prepare_divisor, PtxLaneOps.div_prepared

    def ffma(self, a, b, c):
        wide = [self.as_f32(x).astype(np.float64) for x in (a, b, c)]
        return one_nan((wide[0] * wide[1] + wide[2]).astype(np.float32))

    def fmul(self, a, b):
        return one_nan(super().fmul(a, b))

    def ffma_cut(self, a, b, c):
        return one_nan(super().ffma_rz(a, b, c))


def one_nan(made):
    return np.where(np.isnan(made), np.uint32(0x7FFFFFFF).view(np.float32), made)


def test_prepared_division_equals_ieee_division():
    """Quotients of every size that matters, by numbers of every size, subnormal ones and those next to 1 and 2."""
    rng, m = np.random.default_rng(0), Fused(4)
    b = np.exp2(rng.uniform(-149, 126, 10**6)).astype(np.float32)
    edge = rng.integers(-8, 9, b.size).astype(np.uint32)
    b = np.where(rng.random(b.size) < 0.5, ((b.view(np.uint32) & 0x7F800000) + edge).view(np.float32), b)
    a = (b * np.exp2(rng.uniform(-20, 4, b.size))).astype(np.float32)
    a = np.where(rng.random(b.size) < 0.5, (a.view(np.uint32) & 0xFFFF0000).view(np.float32), a)
    good = np.isfinite(a) & (b.view(np.uint32) <= 0x7E800000)
    a, b = a[good], b[good]
    np.testing.assert_array_equal(m.div_prepared(a, m.prepare_divisor(b)), np.where(b == 0, np.float32(0), a / b))
    assert good.mean() > 0.9 and (b < np.finfo(np.float32).tiny).mean() > 0.05


@pytest.mark.slow(fast_cases=["ties"])
@pytest.mark.parametrize("kind", ["normal", "wide", "ties", "subnormal", "huge", "inf", "nan"])
def test_quartet_operand_in_every_layout_equals_table(kind):
    """Along rows in every layout of lanes and down columns, of bf16; of float32 down columns."""
    x = arrays.data("normal" if kind in ("inf", "nan") else kind).copy()
    if kind in ("inf", "nan"):
        x[3, 5], x[20, 7] = float(kind), -float(kind)
    scale = vector(np.abs(x.astype(np.float32)).max(), QUARTET)
    how = KernelQuantizer(QUARTET, "away", *(scale[i] for i in quantizer_entries(QUARTET)))
    for columns, tokens in ((8, 8), (4, 16), (2, 16)):
        for machine in (NumpyLaneOps, Fused):
            got = nvfp4_arithmetic.quantize_rows_to_bf16(machine(columns), arrays.words(x, columns, tokens), how)
            arrays.same_bits(arrays.array(got, ml_dtypes.bfloat16), oracle.quartet(x, axis=1).carrier)
    m, rows = NumpyLaneOps(4), arrays.words(x, 4, 16)
    want = oracle.quartet(x, axis=0)
    codes, scales, carrier = want.codes, want.scales, want.carrier
    for packed in (False, True):
        got = nvfp4_arithmetic.quantize_columns_to_bf16(m, rows, how, hadamard=False, packed=packed)
        if packed:
            same(
                [arrays.array(got[:8], np.uint8), arrays.array(got[8:], np.uint8)], [oracle.pack_tokens(codes), scales]
            )
        else:
            arrays.same_bits(arrays.array(got, ml_dtypes.bfloat16), carrier)
    w = x.astype(np.float32) * np.float32(1.001)
    scale = vector(np.abs(w).max(), QUARTET)
    got = kernel_codes.quantize_weight_rows(
        w, [scale], [(16, ml_dtypes.bfloat16)], nvfp4_weight._TRANSFORM_OF_AXIS[-2], QUARTET, name="", rounding="away"
    )
    same(got, [oracle.quartet(w, axis=0).carrier])


@pytest.mark.slow(fast_cases=["-1-huge", "-2-runs_of_zeros"])
@pytest.mark.parametrize("kind", ["wide", "runs_of_zeros", "ties", "tiny", "huge"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_eden_gradient_equals_table(kind, axis):
    for shape in SHAPES[axis]:
        x = data(shape, kind)
        got, (codes, scales, carrier) = made(x, x, axis)
        same(got, [carrier])
        if axis == -2:
            same(made(x, x, axis, packed=True)[0], [oracle.pack_tokens(codes), scales])


@pytest.mark.slow(fast_cases=["-1-wide", "-2-tiny"])
@pytest.mark.parametrize("axis, kind", [(-1, "wide"), (-2, "tiny"), (-1, "runs_of_zeros"), (-2, "huge")])
def test_eden_of_requantized_operand_equals_table(kind, axis):
    """x down its columns, packed, from blocks along rows; W, float32, along its rows from blocks down columns."""
    for shape in SHAPES[axis]:
        x = data(shape, kind)
        x = x.astype(np.float32) * np.float32(1.001) if axis == -1 else x
        numbers = oracle.quartet(x, axis=axis % 2 ^ 1).values
        forward = ms_eden.ForwardOperand(vector(np.abs(x.astype(np.float32)).max(), QUARTET), QUARTET, "away")
        got, (codes, scales, carrier) = made(x, numbers, axis, forward, packed=axis == -2)
        same(got, [carrier] if axis == -1 else [oracle.pack_tokens(codes), scales])


@pytest.mark.slow
def test_eden_window_takes_random_bytes_of_its_elements():
    whole = (2, 2**20, 2**16)  # words with indices of more than 32 bits
    key, offset, shape = jax.random.key(3), (1, 128, 256), (1, 128, 128)
    noise = np.asarray(formats.random_bytes(key, shape, offset=offset, global_shape=whole, aligned=True))[0]
    words, window = np.stack(key_words(key)), GlobalWindow.from_offset(shape, offset, whole)
    x = data(shape[1:], "normal")
    for axis in (-1, -2):
        got, (_, _, carrier) = made(x, x, axis, noise=noise, key=words, window=window)
        same(got, [carrier])


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiles")
def test_quartet2_program_equals_table():
    """The program that a GPU runs in test_on_gpu, by tiles where it has them; XLA flushes subnormal numbers."""
    x = data((128, 128), "huge")
    given = x, x.astype(np.float32) * np.float32(1.001), KEY, signs(3)
    with kernels.interpret_kernels():
        same(quartet2(*given), oracle.quartet2(*given))


def test_eden_amax_sees_inf_and_nan():
    x = data((128, 128), "normal")
    for bad in (np.nan, np.inf):
        x[3, 5] = bad
        for axis in (-1, -2):
            assert not np.isfinite(np.asarray(ms_eden.eden_partial_amax(x, signs(1), axis=axis)).view(np.float32)).all()
            forward = ms_eden.ForwardOperand(vector(np.abs(x.astype(np.float32)).max(), QUARTET), QUARTET, "away")
            assert np.isnan(
                np.asarray(ms_eden.eden_partial_amax(x, signs(1), axis=axis, forward=forward)).view(np.float32)
            ).all()
