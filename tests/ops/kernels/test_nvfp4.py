"""The Pallas plumbing in interpret mode: block specs, program numbers, scalars. `test_arithmetic` has the bits."""

import functools

import jax
import jax.numpy as jnp
import kernel_expected as oracle
import ml_dtypes
import numpy as np
import pytest
from instruments import activation, quick
from kernel_programs import again

from halfbyte import kernels
from halfbyte.kernels import mxfp8_quantize
from halfbyte.kernels.mosaic_launch import StackSlice

pytestmark = pytest.mark.usefixtures("interpreted")

T, N = 32, 256
KEY = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
TILING = kernels.PassTiling(4, 1)


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(3).standard_normal((T, N)).astype(ml_dtypes.bfloat16)


def scale(amax):
    return kernels.compute_tensor_scale(kernels.amax_to_bits(jnp.float32(amax)))


def test_tensor_scale_of_every_kind_of_amax_equals_table():
    for amax in (0.0, 3.0, 1e-20, 7e30, np.inf, np.nan):
        np.testing.assert_array_equal(scale(amax), oracle.scale_vector(amax), err_msg=str(amax))


@pytest.mark.slow
def test_stochastic_columns_with_key_in_a_stack_equal_table(x):
    amax, noise = np.abs(x.astype(np.float32)).max(), oracle.random_bytes(T, N, KEY)
    key = StackSlice(jnp.stack([jnp.asarray(key) for key in (KEY + 1, KEY, KEY + 2)]), jnp.int32(1))
    operand = kernels.ColumnwiseOperand(scale(amax), key, hadamard=False)
    run = jax.jit(lambda x: kernels.quantize_tiled(x, columns=operand, tiling=TILING), compiler_options=quick)
    (got,) = run(jnp.asarray(x))
    want = oracle.quantize(x, amax, axis=0, noise=noise)[2]
    same_bits(got, want)


def test_tiled_rows_and_packed_columns_equal_table(x):
    """From one read; amaxes with their transform, which keep a NaN; and codes that are unpacked again."""
    source = oracle.hadamard_tokens(x)

    @functools.partial(jax.jit, compiler_options=quick)
    def run(x):
        amaxes = kernels.partial_amax(x, tiling=TILING)
        scales = [kernels.compute_tensor_scale(amax) for amax in amaxes]
        row, codes, block_scales = kernels.quantize_tiled(
            x,
            rows=kernels.RowwiseOperand(scales[0], jnp.asarray(KEY)),
            columns=kernels.ColumnwiseOperand(scales[1], packed=True),
            tiling=TILING,
        )
        return amaxes, row, codes, block_scales, kernels.unpack_tiled(codes, block_scales, tiling=TILING)

    amaxes, row, codes, scales, unpacked = run(jnp.asarray(x))
    tops = np.abs(x.astype(np.float32)).max(), np.abs(source).max()
    assert [np.asarray(a).max().view(np.float32) for a in amaxes] == list(tops)
    want_codes, want_scales, want = oracle.quantize(source, axis=0)
    same_bits(row, oracle.quantize(x, noise=oracle.random_bytes(T, N, KEY))[2])
    np.testing.assert_array_equal(codes, oracle.pack_tokens(want_codes))
    np.testing.assert_array_equal(scales, want_scales)
    same_bits(unpacked, want)
    broken = x.copy()
    broken[3, 5] = np.nan
    assert all(np.isnan(np.asarray(a).max().view(np.float32)) for a in run(jnp.asarray(broken))[0])


def test_tiled_weight_equals_table(x):
    w = x.astype(np.float32) * np.float32(1.001)
    parts = kernels.weight_partial_amax(jnp.asarray(w), tiling=TILING)
    assert np.asarray(parts).max().view(np.float32) == np.abs(w).max()
    scales = kernels.compute_tensor_scale(parts)
    got = kernels.quantize_weight_kernel(jnp.asarray(w), scales, tiling=TILING)
    same_bits(got, oracle.quantize(w, np.abs(w).max(), axis=1, block2d=True)[2])


@pytest.mark.slow(fast_cases=["96-1e+33"])
@pytest.mark.parametrize("width, size", [(128, 1e-30), (96, 1e33)])  # of tiles, and of none
def test_requantized_operands_equal_table(x, size, width):
    x = (x[:, :width].astype(np.float32) * np.float32(size)).astype(ml_dtypes.bfloat16)
    x[:, 3], x[5, 7] = -0.0, 20000 * x[5, 7]
    w = x.astype(np.float32) * np.float32(1.001)
    run = jax.jit(again, compiler_options=quick)
    for got, want in zip(run(*map(jnp.asarray, (x, w, KEY))), oracle.again(x, w, KEY), strict=True):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.ascontiguousarray(want).view(np.uint8))


@pytest.mark.slow
def test_swiglu_operands_equal_those_of_activation(x):
    rng = np.random.default_rng(8)
    g, u, d = (jnp.asarray(rng.standard_normal((T, N)).astype(ml_dtypes.bfloat16)) for _ in range(3))
    options = {"tiling": TILING}
    key = jnp.asarray(KEY)

    @functools.partial(jax.jit, compiler_options=quick)
    def run(g, u, d):
        h_scales = kernels.compute_tensor_scales(*kernels.swiglu_forward_amax(g, u, **options))
        scales = kernels.compute_tensor_scales(*kernels.swiglu_backward_amax(g, u, d, **options))
        (row,) = kernels.swiglu_quantize_forward(g, u, rows=kernels.RowwiseOperand(h_scales[0]), **options)
        made = kernels.swiglu_quantize_backward(
            g,
            u,
            d,
            dg=(kernels.RowwiseOperand(scales[0], key), kernels.ColumnwiseOperand(scales[1], key)),
            du=(kernels.RowwiseOperand(scales[2], key), kernels.ColumnwiseOperand(scales[3], key)),
            h=kernels.ColumnwiseOperand(h_scales[1]),
        )
        return h_scales, row, made

    h_scales, row, made = run(g, u, d)
    dg, du, h = (np.asarray(a) for a in activation(g, u, d))
    tensors = {"dg": dg, "du": du, "h": h}
    turned = {name: oracle.hadamard_tokens(a) for name, a in tensors.items()}
    assert float(h_scales[1][0]) == np.abs(turned["h"]).max()
    same_bits(row, oracle.quantize(h, np.abs(h.astype(np.float32)).max(), axis=1)[2])
    noise = oracle.random_bytes(T, N, KEY)
    for i, name in enumerate(("dg", "du")):
        plain = tensors[name].astype(np.float32)
        same_bits(made[2 * i], oracle.quantize(plain, np.abs(plain).max(), axis=1, noise=noise)[2])
        top = np.abs(turned[name]).max()
        same_bits(made[2 * i + 1], oracle.quantize(turned[name], top, axis=0, noise=noise)[2])
    same_bits(made[4], oracle.quantize(turned["h"], np.abs(turned["h"]).max(), axis=0)[2])


@pytest.mark.slow
def test_layer_of_stack_is_read_in_place():
    """Oracle: the same kernels on the layer alone. The stack is turned to NaN everywhere else."""
    rng = np.random.default_rng(9)
    g, u, d = (jnp.asarray(rng.standard_normal((T, N)).astype(ml_dtypes.bfloat16)) for _ in range(3))
    stacks = [jnp.full((3, T, N), jnp.nan, jnp.bfloat16).at[2].set(a) for a in (g, u)]

    def run(g, u):
        tops = kernels.swiglu_backward_amax(g, u, d, tensors=3, tiling=TILING)
        scales = kernels.compute_tensor_scales(*tops)
        dg, du = ((kernels.RowwiseOperand(s), kernels.ColumnwiseOperand(t)) for s, t in (scales[:2], scales[2:4]))
        return *tops, *kernels.swiglu_quantize_backward(g, u, d, dg=dg, du=du, h=kernels.ColumnwiseOperand(scales[5]))

    @functools.partial(jax.jit, compiler_options=quick)
    def both(g, u, stacks, layer):
        return run(*(StackSlice(stack, layer) for stack in stacks)), run(g, u)

    for got, want in zip(*both(g, u, stacks, jnp.int32(2)), strict=True):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint16), np.asarray(want).view(np.uint16))


@pytest.mark.slow
def test_pass_writes_layer_of_stack_and_nothing_else():
    """Oracle: the arrays themselves, and amaxes without a stack. Tiles do not divide the width."""
    width = 96
    rng = np.random.default_rng(10)
    g, u, *stacks = (
        jnp.asarray(rng.standard_normal(shape).astype(ml_dtypes.bfloat16))
        for shape in [(T, width)] * 2 + [(3, T, width)] * 2
    )
    options = {"tiling": TILING}

    @functools.partial(jax.jit, compiler_options=quick)
    def both(g, u, stacks, layer):
        into = [StackSlice(stack, layer) for stack in stacks]
        amax = functools.partial(kernels.swiglu_forward_amax, g, u, **options)
        return amax(stack_slices=into), amax()

    (*tops, new_g, new_u), alone = both(g, u, stacks, jnp.int32(1))
    for got, want in zip(tops, alone, strict=True):
        np.testing.assert_array_equal(got, want)
    for new, old, array in zip((new_g, new_u), stacks, (g, u), strict=True):
        same_bits(new, np.asarray(old.at[1].set(array)))


def same_bits(got, want):
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), want.view(np.uint16))


def test_unsupported_tiled_names_the_shape():
    assert "tokens" in kernels.unsupported_tiled(40, 256)
    assert kernels.unsupported_tiled(2**18, 2**14) is None
    assert "32 bits" in kernels.unsupported_tiled(2**18 + 16, 2**14)
    assert "32 bits" in mxfp8_quantize.unsupported_mxfp8(2**18 + 32, 2**14)
    assert "capability" in kernels.unsupported_tiled(32, 256, capability=(8, 0))
    assert kernels.unsupported_tiled(32, 256) is None
    with pytest.raises(ValueError, match="multiple of 16 tokens, got 40"):
        kernels.partial_amax(jnp.zeros((40, 64), jnp.bfloat16))
