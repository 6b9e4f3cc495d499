"""The side path: a mean over tokens taken out of x and added back to y.

Oracle: `averis_oracle`, written from the formulas; of a mesh, one device. Tolerances as in `test_qdot`; dx in bfloat16
is rounded twice, dR and the sum: by half a unit each, and by the mean of what dR was rounded by.
"""

import dataclasses
import functools
import json

import averis_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import KEY, TOLERANCE, assert_rounded, linear, matrix, tensors
from instruments import quick, watched
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from shapes import BLOCKS_OF_16
from test_mlp import assert_same_bits, composed, gradients, inputs

import halfbyte as hb
from halfbyte import devices, ops
from halfbyte.ops.backends import choose, passed_over
from halfbyte.ops.grouped_linear import check_tiles
from halfbyte.ops.side import split
from halfbyte.recipe import OperandPolicy, blend, difference, policy, recipe
from halfbyte.recipe.own import read_recipe, spell_recipe

AVERIS, PLAIN = hb.recipe("averis"), hb.recipe("nvfp4_no_rht")


def shifted(dtype, seed=0):
    """x, w and dy whose tokens have much in common."""
    x, w, dy = tensors(BLOCKS_OF_16[1], dtype, seed)
    rng = np.random.default_rng(seed + 1)
    return (
        (x + 8 * jnp.broadcast_to(jnp.asarray(rng.normal(size=x.shape[-1]), x.dtype), x.shape)).astype(x.dtype),
        w,
        dy,
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend, dtype", [("reference", "float32"), ("carrier", "bfloat16")])
def test_a_linear_is_what_the_formulas_say(backend, dtype):
    x, w, dy = shifted(dtype)
    run = jax.jit(linear(AVERIS, backend=backend), compiler_options=quick)
    with watched(backend) as seen:
        y, dx, dw = jax.block_until_ready(run(x, w, dy))
    given = matrix(x), matrix(w), matrix(dy), AVERIS, KEY
    want_y, want_dx, want_dw, dr = averis_oracle.linear(*given, dtype=x.dtype)
    assert_rounded(y, want_y)
    assert_rounded(dw, want_dw)
    half = 0 if dtype == "float32" else 2.0**-8
    rounding = half * (np.abs(dr) + np.abs(dr).mean(0) + np.abs(want_dx.result))
    assert (np.abs(matrix(dx).astype(np.float64) - want_dx.result) <= TOLERANCE * want_dx.bound + rounding).all()
    for gemm, want in {"fprop": want_y, "dgrad": want_dx, "wgrad": want_dw}.items():
        for side in ("left", "right"):
            carrier = getattr(want, side).carrier
            np.testing.assert_array_equal(getattr(seen[gemm], side).reshape(carrier.shape), carrier, err_msg=gemm)


def test_the_mean_of_dx_is_that_of_no_quantized_dy():
    x, w, dy = shifted("float32")
    dx = jax.jit(linear(AVERIS, backend="reference"), compiler_options=quick)(x, w, dy)[1]
    np.testing.assert_allclose(matrix(dx).sum(0), (matrix(dy).astype(np.float64) @ matrix(w).T).sum(0), atol=1e-6)


@pytest.mark.slow
def test_what_tokens_share_is_not_rounded_any_more():
    """The error of y, of an x that is mostly its mean."""
    x, w, _ = shifted("float32")
    exact = matrix(x).astype(np.float64) @ matrix(w)
    errors = []
    for made in (PLAIN, AVERIS):
        y = jax.jit(functools.partial(hb.qdot, recipe=made, key=KEY), compiler_options=quick)(x, w)
        errors.append(np.linalg.norm(matrix(y) - exact))
    assert errors[1] < errors[0] / 2


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_an_mlp_is_three_linears_bit_for_bit():
    """But for dx, where gate and up have one mean, and one rounding with it."""
    given = inputs()
    runs = functools.partial(hb.mlp, recipe=AVERIS, key=KEY), composed(AVERIS)
    (y, (dx, *dw)), (y_apart, (dx_apart, *dw_apart)) = (
        jax.jit(gradients(run), compiler_options=quick)(*given) for run in runs
    )
    assert_same_bits((y, dw), (y_apart, dw_apart))
    dx, dx_apart = (np.asarray(t, np.float32) for t in (dx, dx_apart))
    np.testing.assert_allclose(dx, dx_apart, atol=2.0**-7 * np.abs(dx).max())


@pytest.mark.slow
def test_a_quantized_weight_is_the_same_weight():
    x, w, dy = shifted("float32")

    def run(x, w):
        made = ops.quantize_weight(w, recipe=AVERIS)
        y, pullback = jax.vjp(lambda x, w: hb.qdot(x, w, recipe=AVERIS, key=KEY), x, made)
        dx, dw = pullback(dy)
        return y, dx, dw.anchor

    found = jax.jit(run, compiler_options=quick)(x, w)
    for one, other in zip(found, jax.jit(linear(AVERIS), compiler_options=quick)(x, w, dy), strict=True):
        # A compiler may fuse a GEMM's factor with the sum that follows, in one program and not in another.
        np.testing.assert_allclose(one, other, atol=1e-6 * float(jnp.max(jnp.abs(other))), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 1), (2, 2)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_the_residual_does_not_know_the_mesh(shape):
    """m and R to the bit; the order of the sums of products may differ where a contraction is cut."""
    grid = Mesh(np.array(jax.devices("cpu")[:4]).reshape(shape), ("fsdp", "tensor"))
    specs = P("fsdp"), P("fsdp", "tensor"), P("fsdp", None, "tensor")
    x, w, dy = tensors(BLOCKS_OF_16[4]._replace(lead=(4, 32)), "bfloat16")
    placed = jax.device_put((x, w, dy), tuple(NamedSharding(grid, spec) for spec in specs))
    for one, other in zip(*(jax.jit(lambda x: split((), x))(t) for t in (x, placed[0])), strict=True):
        np.testing.assert_array_equal(one, other)
    alone = jax.jit(linear(AVERIS), compiler_options=quick)(x, w, dy)
    spread = jax.jit(linear(AVERIS, placement=ops.Placement(grid, *specs)), compiler_options=quick)(*placed)
    for one, other in zip(spread, alone, strict=True):
        one, other = (np.asarray(t, np.float32) for t in (one, other))
        np.testing.assert_allclose(one, other, atol=2.0**-7 * np.abs(other).max())


@pytest.mark.slow
def test_tokens_along_an_axis_of_a_shard_map_around_count_too():
    grid = Mesh(np.array(jax.devices("cpu")[:4]), ("data",))
    x, _, _ = tensors(BLOCKS_OF_16[4]._replace(lead=(4, 32)), "bfloat16")
    run = functools.partial(jax.shard_map, mesh=grid, in_specs=P("data"), out_specs=(P("data"), P()), check_vma=False)
    for one, other in zip(jax.jit(run(lambda x: split(("data",), x)))(x), split((), x), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_what_is_not_finite_makes_the_result_nan():
    x, w, _ = shifted("float32")
    run = jax.jit(functools.partial(hb.qdot, recipe=AVERIS, key=KEY), compiler_options=quick)
    assert np.isnan(run(x.at[0, 0, 0].set(jnp.inf), w)).all()


def test_kernels_pass_it_over_and_say_why():
    for device, chosen in (("h200", "carrier"), ("gb200", "carrier")):
        problem = ops.Problem(AVERIS, 256, 256, 512, devices.device(device))
        found = passed_over(problem, chosen)
        assert choose("auto", problem).name == chosen and "no mean of tokens" in found["fused"]
        assert "the mean of tokens beside a GEMM" in found["native"]
        assert all("mean" in reason for reason in found.values()), found


def test_it_is_a_value_like_others():
    assert difference(PLAIN, AVERIS) == [("x", "mean", False, True)]
    mine = dataclasses.replace(AVERIS, name="mine")
    assert read_recipe(json.loads(spell_recipe(mine))) == mine and recipe("averis").mean


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: dataclasses.replace(AVERIS, fprop_x=OperandPolicy()), "out of what is quantized of x"),
        (lambda: dataclasses.replace(hb.recipe("fp8_delayed"), mean=True), "mean or shared_scales"),
        (lambda: blend(AVERIS, hb.recipe("bf16"), "backward"), "both parts of one recipe"),
        (lambda: check_tiles([AVERIS]), "an expert sees some"),
        (lambda: hb.apply_recipe(jnp.dot, AVERIS), "which dims are tokens"),
        (lambda: hb.dot_general(AVERIS, key=KEY), "which dims are tokens"),
        (lambda: policy("mlp", AVERIS).resolve(["layers/mlp/up"], 2).refuse_means("radar"), "beside the GEMMs"),
    ],
)
def test_what_knows_no_tokens_is_refused_with_a_way_out(make, said):
    with pytest.raises(ValueError, match=said):
        make()
