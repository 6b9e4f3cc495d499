"""Laws of the quantizers. Oracle: *property* (hypothesis), and counterexamples where a law ends (docs/numerics.md)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from halfbyte.formats import FP8, MXFP4, MXFP4_FLOOR, MXFP8_FLOOR, NVFP4, quantize

SHAPE = (4, 64)
KEY = np.array([7, 11], np.uint32)
any_finite = arrays(np.float32, SHAPE, elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
moderate = st.floats(2.0**-40, 2.0**40, width=32) | st.floats(-(2.0**40), -(2.0**-40), width=32) | st.just(0.0)


@functools.cache
def compiled(fmt, rounding="rne"):
    """x -> (codes, scales as bytes, amax, 1/S, the dequantized tensor)."""

    def run(x):
        q = quantize(x, fmt, rounding=rounding, key=jax.random.wrap_key_data(KEY))
        scales = jnp.zeros((), jnp.uint8) if q.scales is None else jax.lax.bitcast_convert_type(q.scales, jnp.uint8)
        return q.codes, scales, q.amax, q.decode_scale, q.dequantize()

    return jax.jit(run)


def run(x, fmt, rounding="rne"):
    return [np.asarray(a) for a in compiled(fmt, rounding)(x)]


POLICIES = [(NVFP4, "rne"), (NVFP4, "stochastic"), (MXFP4, "rne"), (FP8, "rne")]
policies = pytest.mark.parametrize("fmt, rounding", POLICIES, ids=[f"{f}-{r}" for f, r in POLICIES])


@pytest.mark.slow
@policies
@given(x=any_finite)
def test_sign_symmetry(fmt, rounding, x):
    """Only the sign bits of -x differ from those of x; zeros have signs too."""
    codes, scales, amax, decode, _ = run(x, fmt, rounding)
    mirrored = run(-x, fmt, rounding)
    np.testing.assert_array_equal(mirrored[0], codes ^ np.uint8(fmt.element.sign_bit))
    np.testing.assert_array_equal(mirrored[1], scales)
    assert mirrored[2] == amax and mirrored[3].view(np.uint32) == decode.view(np.uint32)


@pytest.mark.slow
@policies
@given(x=arrays(np.float32, SHAPE, elements=moderate), k=st.integers(-40, 40))
def test_power_of_two_equivariance(fmt, rounding, x, k):
    """x * 2**k has the codes of x; the power goes into the tensor's scale, or into every E8M0 scale."""
    codes, scales, amax, decode, _ = run(x, fmt, rounding)
    moved = run(np.ldexp(x, k), fmt, rounding)
    np.testing.assert_array_equal(moved[0], codes)
    assert moved[2] == np.ldexp(amax, k)
    if fmt.tensor_scale:
        np.testing.assert_array_equal(moved[1], scales)
        assert moved[3] == (np.ldexp(decode, k) if amax else 1)
    else:
        shift = np.where(np.abs(x).reshape(4, -1, 32).max(-1) == 0, 0, k)
        np.testing.assert_array_equal(moved[1], scales + shift)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [MXFP4_FLOOR, MXFP8_FLOOR], ids=repr)
@given(x=any_finite)
def test_mx_formats_with_scales_rounded_down_are_idempotent(fmt, x):
    """Under the OCP rule the largest element keeps its binade, so codes and scales come back."""
    codes, scales, *_, values = run(x, fmt)
    again = run(values, fmt)
    np.testing.assert_array_equal(again[0], codes)
    np.testing.assert_array_equal(again[1], scales)


@pytest.mark.slow
@given(x=any_finite)
def test_rounded_up_scales_keep_the_values(x):
    """Except next to the end of float32: 1.75 * 2**127 rounds to 4 * 2**126, which is infinity."""
    values = run(x, MXFP4)[-1]
    assume(np.isfinite(values).all())
    np.testing.assert_array_equal(run(values, MXFP4)[-1], values)


def test_rounded_up_scales_do_not_keep_the_codes():
    """3.1 rounds to 3, which a scale half as large holds as 6."""
    x = np.zeros(SHAPE, np.float32)
    x[0, 0] = 3.1
    codes, scales, *_, values = run(x, MXFP4)
    again = run(values, MXFP4)
    assert (codes[0, 0], scales[0, 0], values[0, 0]) == (5, 127, 3)
    assert (again[0][0, 0], again[1][0, 0], again[-1][0, 0]) == (7, 126, 3)


@pytest.mark.slow
@given(
    mantissa=arrays(np.float32, SHAPE, elements=st.floats(-1, 1, width=32)),
    block=arrays(np.int64, (4, 4), elements=st.integers(-6, 0)),
    k=st.integers(-60, 60),
)
def test_nvfp4_is_idempotent_where_scales_are_exact(mantissa, block, k):
    """If S is a power of two and no block scale is an E4M3 subnormal, codes and scales come back."""
    x = mantissa * np.repeat(np.exp2(block), 16, 1).astype(np.float32)
    x[:, ::16] = np.exp2(block)  # every block's amax, down to 1/64 of the tensor's
    x[0, 0] = 1
    x = np.ldexp(x * np.float32(2688), k)
    codes, scales, *_, values = run(x, NVFP4)
    again = run(values, NVFP4)
    np.testing.assert_array_equal(again[0], codes)
    np.testing.assert_array_equal(again[1], scales)


def test_nvfp4_is_not_idempotent_under_a_subnormal_scale():
    """A second pass loses a block: 3.06 steps of 2**-9 become 3, and 3/6 of the smallest scale ties down to 0."""
    x = np.zeros(SHAPE, np.float32)
    x[0, 0], x[1, 0] = 2688, 3.06 * 2.0**-9
    codes, scales, *_, values = run(x, NVFP4)
    assert (codes[1, 0], scales[1, 0], values[1, 0]) == (5, 1, 3 * 2.0**-9)
    again = run(values, NVFP4)
    assert (again[0][1, 0], again[1][1, 0], again[-1][1, 0]) == (7, 0, 0)
    # And what a zero scale made 0 is then the code of 0.
    third = run(again[-1], NVFP4)
    assert (third[0][1, 0], third[1][1, 0]) == (0, 0)


def test_nvfp4_moves_the_tensor_scale_by_a_unit():
    """2688 * (1 / (2688 / amax)) is not always amax: S of the dequantized tensor may differ in its last place."""
    x = np.zeros(SHAPE, np.float32)
    moved = 0
    for amax in np.linspace(1, 2, 33, dtype=np.float32):
        x[0, 0] = amax
        values = run(x, NVFP4)[-1]
        moved += run(values, NVFP4)[3] != run(x, NVFP4)[3]
    assert 0 < moved < 33
