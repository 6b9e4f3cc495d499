"""qdot against the oracle of float64 NumPy, against golden vectors, and what its results are in each dtype.

Oracles: `oracle` (independent, dequantized operands and exact products) and `gemm_*` (made outside, by the quantizer
that the Blackwell kernels are tested with). Tolerance 1e-5 of the sum of magnitudes: float32 sums of at most 288
products; measured errors are a hundred times smaller.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import TOLERANCE, check_linear, linear, matrix, relative_error, tensors
from instruments import quick, watched
from shapes import BLOCKS_OF_16, BLOCKS_OF_32

import halfbyte as hb
from halfbyte.formats import random_bytes
from halfbyte.ops.quantize_passes import operand_spec
from halfbyte.recipes import ROLES, layer_key, site_key, step_key

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"

# Every preset; the published recipe at every odd width. `test_backends` runs it in the other dtype.
CASES = [
    ("nvfp4", BLOCKS_OF_16[0], "bfloat16"),
    ("nvfp4", BLOCKS_OF_16[1], "float32"),
    ("nvfp4", BLOCKS_OF_16[2], "bfloat16"),
    ("nvfp4_no_rht", BLOCKS_OF_16[2], "float32"),
    ("nvfp4_no_sr", BLOCKS_OF_16[3], "bfloat16"),
    ("nvfp4_no_2d", BLOCKS_OF_16[1], "bfloat16"),
    ("nvfp4_rht_everywhere", BLOCKS_OF_16[1], "float32"),
    ("nvfp4_sr_everywhere", BLOCKS_OF_16[0], "bfloat16"),
    ("mxfp4", BLOCKS_OF_32[0], "bfloat16"),
    ("mxfp8", BLOCKS_OF_32[1], "float32"),
    *((name, shape, dtype) for name in ("fp8", "bf16") for shape, dtype in zip(BLOCKS_OF_16, ("bfloat16", "float32"))),
]


@pytest.mark.slow(fast_cases=["nvfp4-2x48.48.80-float32", "bf16-2x48.48.80-float32"])
@pytest.mark.parametrize("name, shape, dtype", CASES, ids=lambda p: str(p))
def test_reference_gemms_equal_oracle(name, shape, dtype):
    check_linear(hb.recipe(name), *tensors(shape, dtype), backend="reference", compiler_options=quick)


@pytest.mark.slow(fast_cases=["gemm_64x64x64"])
@pytest.mark.parametrize("name", ["gemm_64x64x64", "gemm_128x32x256"])
def test_golden_gemms(name):
    """Round to nearest, weights stored [outputs, inputs] in the vectors."""
    vectors = np.load(GOLDEN / f"{name}.npz")
    x, dy = (jnp.asarray(vectors[n], jnp.bfloat16) for n in ("x", "dy"))
    with watched("emulated") as seen:
        run = jax.jit(linear(hb.recipe("nvfp4_no_sr"), backend="emulated"), compiler_options=quick)
        jax.block_until_ready(run(x, jnp.asarray(vectors["w"].T), dy))
    for gemm, want in (("fprop", vectors["y_f32"]), ("dgrad", vectors["dx_f32"]), ("wgrad", vectors["dw_f32"].T)):
        assert relative_error(seen[gemm].result, want) < TOLERANCE, gemm


@functools.cache
def compiled(name):
    """One program for each of the tests below: (x [2, 64, 64], w [64, 32], dy, key) -> (y, dx, dw)."""
    return jax.jit(linear(hb.recipe(name)), compiler_options=quick)


def finite(results):
    return [bool(jnp.isfinite(r).all()) for r in results], [bool(jnp.isnan(r).all()) for r in results]


@pytest.mark.slow(fast_cases=["fp8-nan"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8", "halfbyte"])
def test_qdot_non_finite_operand_gives_nan(name, bad):
    """One bad number makes NaN of every result of a GEMM that reads its tensor, and of no other."""
    x, w, dy = tensors(BLOCKS_OF_16[4], "bfloat16")
    run = compiled(name)
    for tensors_, poisoned in (
        ((x.at[1, 3, 5].set(bad), w, dy), [True, False, True]),
        ((x, w.at[7, 9].set(bad), dy), [True, True, False]),
        ((x, w, dy.at[0, 63, 31].set(bad)), [False, True, True]),
    ):
        finite_ones, nans = finite(run(*tensors_))
        assert nans == poisoned and finite_ones == [not p for p in poisoned]


@pytest.mark.slow
def test_qdot_random_bits_follow_key():
    x, w, dy = tensors(BLOCKS_OF_16[4], "bfloat16")
    run = compiled("nvfp4")
    step = step_key(0, 1)
    first = run(x, w, dy, site_key(layer_key(step, 0), "gate"))
    again = run(x, w, dy, site_key(layer_key(step_key(0, 1), 0), "gate"))
    assert all((a == b).all() for a, b in zip(first, again))
    others = {
        "step": site_key(layer_key(step_key(0, 2), 0), "gate"),
        "layer": site_key(layer_key(step, 1), "gate"),
        "site": site_key(layer_key(step, 0), "up"),
    }
    for what, key in others.items():
        y, dx, dw = run(x, w, dy, key)
        assert (y == first[0]).all(), f"another {what}: fprop rounds to nearest"
        assert (dx != first[1]).mean() > 0.5, f"another {what}: dgrad"
        assert (dw != first[2]).mean() > 0.5, f"another {what}: wgrad"


@pytest.mark.slow
def test_no_two_operands_share_random_bits():
    """Steps, layers, sites and roles: the bytes of any two streams agree as often as chance has it, 1 in 256."""
    recipe = hb.recipe("nvfp4_sr_everywhere")
    streams = [
        random_bytes(operand_spec(recipe, role, site_key(layer_key(step_key(7, step), layer), site)).key, (64, 64))
        for step in (0, 1) for layer in (0, 1) for site in ("gate", "up") for role in ROLES
    ]  # fmt: skip
    streams = np.stack(streams).reshape(len(streams), -1)
    agreement = (streams[:, None] == streams[None]).mean(-1)[np.triu_indices(len(streams), 1)]
    # 4096 bytes: 16 agreements expected, standard deviation 4; the largest of 1128 pairs stays under 6 deviations.
    assert agreement.max() < 40 / 4096, agreement.max()


@functools.cache
def transformed():
    """(x, w, dy) -> results with the Hadamard transform on all six operands and no quantization."""
    bf16 = hb.recipe("bf16")
    recipe = dataclasses.replace(bf16, name="transformed", **bf16.with_operands(hadamard=True))
    return jax.jit(linear(recipe), compiler_options=quick)


@pytest.mark.slow
def test_hadamard_operands_of_small_integers_cancel():
    """Multiples of 4 up to 8: the transform is exact in bfloat16, so is every sum."""
    rng = np.random.default_rng(3)
    x, w, dy = (4 * rng.integers(-2, 3, size=s) for s in ((2, 64, 64), (64, 32), (2, 64, 32)))
    y, dx, dw = transformed()(jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), jnp.asarray(dy, jnp.float32))
    np.testing.assert_array_equal(y, x @ w)
    np.testing.assert_array_equal(dx, dy @ w.T)
    np.testing.assert_array_equal(dw, np.einsum("btk,btn->kn", x, dy))


@pytest.mark.slow
def test_hadamard_operands_cancel_to_rounding():
    """Each transformed operand is rounded to bfloat16 once: 2^-8 of a number, so 2^-7 of the norms for a product."""
    x, w, dy = (t.astype(jnp.float32) for t in tensors(BLOCKS_OF_16[4], "bfloat16"))
    w = w.astype(jnp.bfloat16).astype(jnp.float32)
    _, _, dw = transformed()(x, w, dy)
    x, dy = matrix(x), matrix(dy)
    bound = np.linalg.norm(x, axis=0)[:, None] * np.linalg.norm(dy, axis=0)
    assert (np.abs(np.asarray(dw) - x.T @ dy) <= 2.0**-7 * bound).all()


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_qdot_of_vector_equals_one_token():
    """Forward alone asks nothing of the number of tokens."""
    x, w, _ = tensors(BLOCKS_OF_16[4], "bfloat16")
    run = jax.jit(functools.partial(hb.qdot, recipe=hb.recipe("nvfp4")), compiler_options=quick)
    np.testing.assert_array_equal(run(x[0, :1], w)[0], run(x[0, 0], w))


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_qdot_out_dtype_is_unrounded_result():
    x, w, _ = tensors(BLOCKS_OF_16[4], "bfloat16")
    run = functools.partial(hb.qdot, recipe=hb.recipe("fp8"))
    wide = jax.jit(functools.partial(run, out_dtype=jnp.float32))(x, w)
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide.astype(jnp.bfloat16), jax.jit(run)(x, w))
