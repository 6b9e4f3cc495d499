"""Packed operands of a block-scaled GEMM in interpret mode, against the oracle: every byte, edges and tiles included.

The host runs the same addresses, masks and exchanges as the GPU does; outputs begin as 0xAB, so that a byte that no
lane writes is seen.
"""

import functools

import jax
import jax.numpy as jnp
import kernel_expected as oracle
import ml_dtypes
import numpy as np
import oracle_table as table
import pytest
from instruments import activation
from kernel_programs import RULES

from halfbyte import kernels as K
from halfbyte.formats import random_bytes
from halfbyte.formats.random_bits import key_words
from halfbyte.kernels import ScaleLayout
from halfbyte.kernels import nvfp4_untiled as kernel_codes
from halfbyte.kernels.lane_memory import PtxLaneMemoryOps
from halfbyte.kernels.mosaic_launch import launch_on_host
from halfbyte.kernels.numpy_lanes import NumpyLaneOps

pytestmark = pytest.mark.usefixtures("interpreted", "quick_code")

KEYS = np.array([0x12345678, 0x9ABCDEF0], np.uint32), np.array([7, 11], np.uint32)


def data(shape, kind="normal"):
    rng = np.random.default_rng(shape[0] + shape[1])
    x = rng.standard_normal(shape).astype(np.float32)
    if kind == "wide":
        x *= np.exp2(rng.integers(-24, 12, shape)).astype(np.float32)
    if kind == "zero_scales":
        x *= np.float32(1e-6)
        x[5, 7], x[3, :16], x[:16:2, 2] = 50.0, 0, -0.0
    return x.astype(ml_dtypes.bfloat16)


def top(x):
    return np.abs(x.astype(np.float32)).max()


def scale(amax):
    return K.compute_tensor_scale(K.amax_to_bits(jnp.float32(amax)))


def padded(x, multiple=16):
    return np.pad(x, ((0, 0), (0, -x.shape[1] % multiple)))


def in_order(scales, order):
    return scales if order is ScaleLayout.PLAIN else table.swizzle(scales)


def rows_of(x, order, noise=None):
    codes, scales, _ = oracle.quantize(padded(x), top(x), axis=1, noise=None if noise is None else padded(noise))
    return oracle.pack_tokens(codes.T).T, in_order(scales, order)


def columns_of(x, order, noise=None, hadamard=True):
    source = oracle.hadamard_tokens(x) if hadamard else x.astype(np.float32)
    codes, scales, _ = oracle.quantize(source, top(source), axis=0, noise=noise)
    return oracle.pack_tokens(codes).T, in_order(scales.T, order)


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.uint8
        np.testing.assert_array_equal(np.asarray(a), b)


def test_codes_of_rows_and_columns_equal_table():
    shape, order = (48, 144), ScaleLayout.PLAIN
    x = data(shape, "zero_scales")
    turned = oracle.hadamard_tokens(x)
    got = K.quantize_tiled(
        jnp.asarray(x),
        rows=K.RowwiseOperand(scale(top(x)), code_scale_layout=order),
        columns=K.ColumnwiseOperand(scale(top(turned)), code_scale_layout=order),
    )
    same(got, [*rows_of(x, order), *columns_of(x, order)])


def test_codes_stochastic_tiled_scales_equal_table():
    shape, order = (48, 43), ScaleLayout.TILED
    x = data(shape, "wide")
    noise = [oracle.random_bytes(*shape, key) for key in KEYS]
    got = K.quantize_tiled(
        jnp.asarray(x),
        rows=K.RowwiseOperand(scale(top(x)), jnp.asarray(KEYS[0]), code_scale_layout=order),
        columns=K.ColumnwiseOperand(scale(top(x)), jnp.asarray(KEYS[1]), hadamard=False, code_scale_layout=order),
    )
    same(got, [*rows_of(x, order, noise[0]), *columns_of(x, order, noise[1], hadamard=False)])


def test_codes_of_window_take_random_bytes_of_their_elements():
    """Of an array whose words have indices of more than 32 bits."""
    (whole, offset), shape, key = ((64, 2**18, 2**12), (62, 2**17 + 32, 640)), (2, 32, 128), jax.random.key(3)
    x = data((64, 128), "wide")
    noise = random_bytes(key, shape, offset=offset, global_shape=whole, aligned=True)
    words, window = jnp.stack(key_words(key)), K.GlobalWindow.from_offset(shape, offset, whole)
    got = K.quantize_tiled(
        jnp.asarray(x),
        rows=K.RowwiseOperand(scale(top(x)), words, window, code_scale_layout=ScaleLayout.PLAIN),
        columns=K.ColumnwiseOperand(scale(top(x)), words, window, hadamard=False, code_scale_layout=ScaleLayout.PLAIN),
    )
    noise = np.asarray(noise).reshape(64, 128)
    same(got, [*rows_of(x, ScaleLayout.PLAIN, noise), *columns_of(x, ScaleLayout.PLAIN, noise, hadamard=False)])


def test_codes_of_swiglu_equal_table():
    rng, order, shape = np.random.default_rng(8), ScaleLayout.PLAIN, (48, 72)
    g, u, d = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for _ in range(3))
    dg, du, h = (np.asarray(a) for a in activation(*map(jnp.asarray, (g, u, d))))
    key, more = jnp.asarray(KEYS[0]), {"code_scale_layout": order}
    tops = {name: (top(a), top(oracle.hadamard_tokens(a))) for name, a in (("dg", dg), ("du", du), ("h", h))}
    got = K.swiglu_quantize_backward(
        *map(jnp.asarray, (g, u, d)),
        dg=(
            K.RowwiseOperand(scale(tops["dg"][0]), key, **more),
            K.ColumnwiseOperand(scale(tops["dg"][1]), key, **more),
        ),
        du=(
            K.RowwiseOperand(scale(tops["du"][0]), key, **more),
            K.ColumnwiseOperand(scale(tops["du"][1]), key, **more),
        ),
        h=K.ColumnwiseOperand(scale(tops["h"][1]), **more),
    )
    noise = oracle.random_bytes(*shape, KEYS[0])
    want = [a for x in (dg, du) for make in (rows_of, columns_of) for a in make(x, order, noise)]
    same(got, [*want, *columns_of(h, order)])
    wide = [jnp.asarray(padded(a, 128)) for a in (g, u, d)]
    for a, b in zip((dg, du, h), activation(*wide), strict=True):
        np.testing.assert_array_equal(bits(a), bits(np.ascontiguousarray(b[:, : shape[1]])))
    forward = K.swiglu_quantize_forward(
        jnp.asarray(g),
        jnp.asarray(u),
        rows=K.RowwiseOperand(scale(tops["h"][0]), **more),
        columns=K.ColumnwiseOperand(scale(tops["h"][1]), **more),
    )
    same(forward, [*rows_of(h, order), *columns_of(h, order)])


def host_launch(body, arrays, outputs, *, name, **sizes):
    return launch_on_host(body, arrays, outputs, **sizes)


def test_requantized_subnormal_operand_equals_table(monkeypatch):
    """What it stands for is float32 of every size; outside XLA, as above."""
    monkeypatch.setattr(kernel_codes, "launch_flat", host_launch)
    small = (data((32, 96), "normal").astype(np.float32) * np.float32(1e-38)).astype(ml_dtypes.bfloat16)
    how, rule = {"axis": 0, "rule": "squared"}, {"rule": RULES["squared"]}
    vector = functools.partial(oracle.scale_vector, top=oracle.TOPS["squared"])
    carrier = oracle.quantize(small, top(small), axis=1, rule="squared")[2]
    owed = vector(top(small))[2:3]
    numbers = carrier.astype(np.float32) * owed
    assert ((numbers != 0) & (np.abs(numbers) < np.finfo(np.float32).tiny)).mean() > 0.3
    turned = oracle.hadamard_tokens(numbers.astype(ml_dtypes.bfloat16))
    with jax.disable_jit():
        column = K.quantize_tiled(
            carrier, columns=K.ColumnwiseOperand(vector(top(turned)), packed=True, deferred_alpha=owed, **rule)
        )
        weight = K.quantize_weight_kernel(
            carrier.astype(np.float32), vector(top(numbers)), axis=-2, deferred_alpha=owed, **rule
        )
    codes, scales, _ = oracle.quantize(turned, top(turned), **how)
    same(column, [oracle.pack_tokens(codes), scales])
    want = oracle.quantize(numbers, top(numbers), **how)[2]
    np.testing.assert_array_equal(bits(weight), bits(want))
    assert (codes & 7 != 0).mean() > 0.5 and (want != 0).mean() > 0.5


def bits(x):
    return np.asarray(x).view(np.uint16)


def test_carriers_of_width_that_no_tile_divides_equal_table():
    shape = (16, 133)
    x = data(shape, "wide")
    turned, key = oracle.hadamard_tokens(x), jnp.asarray(KEYS[0])
    found = [np.asarray(part).max().view(np.float32) for part in K.partial_amax(jnp.asarray(x))]
    assert found == [top(x), top(turned)]
    row, codes, scales = K.quantize_tiled(
        jnp.asarray(x),
        rows=K.RowwiseOperand(scale(top(x)), key),
        columns=K.ColumnwiseOperand(scale(top(turned)), packed=True),
    )
    noise = padded(oracle.random_bytes(*shape, KEYS[0]))
    want = oracle.quantize(padded(x), top(x), axis=1, noise=noise)[2][:, : shape[1]]
    np.testing.assert_array_equal(bits(row), want.view(np.uint16))
    column = oracle.quantize(turned, top(turned), axis=0)
    np.testing.assert_array_equal(codes, oracle.pack_tokens(column[0]))
    np.testing.assert_array_equal(scales, column[1])
    np.testing.assert_array_equal(bits(K.unpack_tiled(codes, scales)), column[2].view(np.uint16))


@pytest.mark.slow
def test_swiglu_carriers_of_odd_width_equal_those_of_tensors():
    """Two columns a lane. Oracle: the carriers of the tensors themselves, four columns a lane."""
    g, u, d = (jnp.asarray(data((32, 67), name)) for name in ("wide", "normal", "normal"))
    factors, key = scale(3.0), jnp.asarray(KEYS[0])
    row, column = K.RowwiseOperand(factors, key), K.ColumnwiseOperand(factors, key)
    got = K.swiglu_quantize_backward(g, u, d, dg=(row, column), du=(row, column), h=column)
    dg, du, h = activation(g, u, d)
    want = [a for x in (dg, du) for a in K.quantize_tiled(x, rows=row, columns=column)]
    want += K.quantize_tiled(h, columns=column)
    for found, right in zip(got, want, strict=True):
        np.testing.assert_array_equal(bits(found), bits(right))


def test_weight_of_width_that_no_tile_divides_equals_table():
    shape = (32, 43)
    w = data(shape, "wide").astype(np.float32) * np.float32(1.001)
    parts = K.weight_partial_amax(jnp.asarray(w))
    assert np.asarray(parts).max().view(np.float32) == top(w)
    codes, scales, carrier = oracle.quantize(padded(w), top(w), axis=1, block2d=True)
    got = K.quantize_weight_kernel(jnp.asarray(w), scale(top(w)))
    np.testing.assert_array_equal(bits(got), np.ascontiguousarray(carrier[:, : shape[1]]).view(np.uint16))
    packed = K.pack_weight_kernel(jnp.asarray(w), scale(top(w)))
    same(packed, [oracle.pack_tokens(codes)[:, : shape[1]], scales])


def test_tiled_layout_index_equals_swizzle():
    rows, scales = 300, 10
    r, c = np.meshgrid(np.arange(rows, dtype=np.uint32), np.arange(scales, dtype=np.uint32), indexing="ij")
    got = ScaleLayout.TILED.index(NumpyLaneOps(4), r, c, scales)
    numbers = np.arange(rows * scales).reshape(rows, scales)
    np.testing.assert_array_equal(table.swizzle(numbers)[got], numbers)


def test_quantize_tiled_mixed_operands_are_refused():
    x, s = jnp.zeros((16, 128), jnp.bfloat16), scale(1.0)
    with pytest.raises(ValueError, match="carriers or codes"):
        K.quantize_tiled(
            x, rows=K.RowwiseOperand(s), columns=K.ColumnwiseOperand(s, code_scale_layout=ScaleLayout.PLAIN)
        )
    with pytest.raises(ValueError, match="multiple of 16 tokens"):
        K.quantize_tiled(
            jnp.zeros((24, 128), jnp.bfloat16), rows=K.RowwiseOperand(s, code_scale_layout=ScaleLayout.PLAIN)
        )


@pytest.mark.parametrize("width", [128, 48])
def test_swiglu_unequal_shapes_are_refused(width):
    """A kernel without tiles would read on behind a smaller array."""
    g, side = jnp.zeros((32, width), jnp.bfloat16), scale(1)
    row, column = K.RowwiseOperand(side), K.ColumnwiseOperand(side)
    backward = functools.partial(K.swiglu_quantize_backward, dg=(row, column), du=(row, column), h=column)
    for passes in (backward, K.swiglu_backward_amax):
        with pytest.raises(ValueError, match=rf"got bfloat16\[32, {width}\], bfloat16\[16, {width}\], "):
            passes(g, g[:16], g)
        with pytest.raises(ValueError, match="one shape and dtype"):
            passes(g, g, g.astype(jnp.float32))
    with pytest.raises(TypeError, match="read bfloat16, got float32"):
        backward(*[g.astype(jnp.float32)] * 3)


def launched(monkeypatch, rule, codes=None):
    """The lanes that SwiGLU's backward pass is launched with, four operands of five by chance."""
    found = []
    monkeypatch.setattr(kernel_codes, "launch_flat", lambda *_, lanes, **__: found.append(lanes) or [])
    how = {"rule": RULES[rule], "code_scale_layout": codes}
    row, column = K.RowwiseOperand(scale(1), KEYS[0], **how), K.ColumnwiseOperand(scale(1), KEYS[0], **how)
    given = [jnp.zeros((64, 128), jnp.bfloat16)] * 3
    K.swiglu_quantize_backward(*given, dg=(row, column), du=(row, column), h=K.ColumnwiseOperand(scale(1), **how))
    return found[0]


@pytest.mark.parametrize("rule, needed", [("plain", 96), ("squared", 160), ("absolute", 160), ("expected", 144)])
def test_swiglu_backward_has_registers_for_its_rule(monkeypatch, rule, needed):
    """What ptxas says that a lane has to have for fewer than 60 spilled bytes; with 96 `squared` spills 1,096."""
    assert 65536 // (128 * launched(monkeypatch, rule).programs_per_sm) >= needed


def test_stack_slice_address_beyond_4_gib():
    """The address of element 7 of layer 3 of a stack, as the instructions that mention it make it."""
    size, registers = 5 * 2**30, {"$1": 1 << 40, "[$2]": 3}
    machine = PtxLaneMemoryOps(2, None, {1: (2, size)})
    machine.address(1, 7, 2)
    for line in machine.kernel_source(1, 1, 1).splitlines():
        code, _, rest = line.rstrip(";").partition(" ")
        to, *given = [part.strip() for part in rest.split(",")]
        if not {"layer1", "[$2]"} & {to, *given} or code == ".reg":
            continue
        a, *more = (registers[x] if x in registers else int(x, 0) for x in given)
        bits = 32 if code.endswith(".b32") or code == "mad.lo.u32" else 64
        registers[to] = (a * more[0] + more[1] if more else a) % 2**bits
    assert registers["d0"] == (1 << 40) + 3 * size + 14
