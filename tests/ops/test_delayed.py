"""Delayed scaling of a linear: six steps with a history of three, so that entries leave it, against the oracle.

Oracle: `oracle_linear.DelayedLinear`, written from the rule. Tolerances as in `test_qdot`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_linear
import pytest
from checks import F8_SUMS, KEY, TOLERANCE, assert_rounded, matrix, tensors
from instruments import quick
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from shapes import BLOCKS_OF_16
from test_mlp import assert_same_bits, composed, gradients, inputs

import halfbyte as hb
from halfbyte import ops
from halfbyte.ops.grouped_linear import check_grouped_support
from halfbyte.ops.quantized_weight import DelayedScalingWeight
from halfbyte.recipes import mix_recipes
from halfbyte.train.dynamic_scaling import update_amax_history

SHORT = dataclasses.replace(hb.recipe("fp8_delayed"), name="short", amax_history_len=3)
# What x, W and dy are multiplied with, step by step: larger than anything seen, smaller, all zero, back again.
SIZES = ((1, 1, 1), (30, 2, 1000), (1, 0.5, 1e-6), (0, 0, 0), (5, 1, 1e-3), (1, 3, 1e-5))


def linear(x, w, dy, amaxes, **options):
    """y, dx, dw and what was seen."""
    run = lambda x, w, amaxes: hb.qdot(x, DelayedScalingWeight(w, amaxes), recipe=SHORT, **options)  # noqa: E731
    y, pullback = jax.vjp(run, x, w, amaxes)
    return y, *pullback(dy)


def steps(dtype):
    """x, W and dy of each step."""
    for number, sizes in enumerate(SIZES):
        made = tensors(BLOCKS_OF_16[1], dtype, seed=number)
        yield [(t * size).astype(t.dtype) for t, size in zip(made, sizes, strict=True)]


def fresh():
    return {"amaxes": jnp.zeros(3), "history": jnp.zeros((SHORT.amax_history_len, 3))}


@pytest.mark.slow
@pytest.mark.parametrize("backend, dtype", [("reference", "float32"), ("emulated", "bfloat16")])
def test_delayed_scaling_six_steps_equal_oracle(backend, dtype):
    theirs, ours = oracle_linear.DelayedLinear(SHORT.amax_history_len), fresh()
    run = jax.jit(lambda *given: linear(*given, backend=backend), compiler_options=quick)
    saturated = 0
    tolerance = F8_SUMS if backend == "emulated" and jax.default_backend() == "gpu" else TOLERANCE
    for x, w, dy in steps(dtype):
        scales = [np.float32(tensor.scale) for tensor in theirs.tensors]
        expected = theirs.step(matrix(x), matrix(w), matrix(dy))
        *results, seen = run(x, w, dy, ours["amaxes"])
        for result, want in zip(results, expected.values(), strict=True):
            assert_rounded(result, want, tolerance)
        tops = np.float32([448, 448, 57344])
        with np.errstate(divide="ignore"):
            mine = np.where(ours["amaxes"] > 0, tops / np.asarray(ours["amaxes"]), np.float32(1))
        np.testing.assert_array_equal(mine, scales)
        np.testing.assert_array_equal(seen, [np.abs(matrix(t)).max() for t in (x, w, dy)])
        saturated += (np.abs(expected["fprop"].left.carrier) == 448).sum() > 1
        ours = update_amax_history(ours, seen)
    assert saturated  # numbers beyond what was seen before


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["operands", "input"])
@pytest.mark.usefixtures("on_cpu")
def test_an_mlp_is_three_linears_bit_for_bit(mode):
    """Gradients, and what is seen of each linear's x, W and dy."""
    x, *weights = inputs()
    amaxes = jnp.asarray([[2.0, 0.5, 0.1], [3.0, 0.25, 0.1], [1.0, 0.5, 1.0]])
    given = x, *(DelayedScalingWeight(w, before) for w, before in zip(weights, amaxes, strict=True))
    runs = functools.partial(hb.mlp, recipe=SHORT, residuals=mode), composed(SHORT)
    together, apart = (jax.jit(gradients(run), compiler_options=quick)(*given) for run in runs)
    assert_same_bits(together, apart)
    seen = [np.asarray(weight.amaxes) for weight in together[1][1:]]
    assert (seen[0][:2] == [jnp.max(jnp.abs(x)), jnp.max(jnp.abs(weights[0]))]).all() and np.min(seen) > 0


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 4)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.usefixtures("on_cpu")
def test_what_is_seen_and_its_codes_do_not_know_the_mesh(shape):
    """The largest numbers lie in one corner; the order of sums may differ where the contraction is cut."""
    grid = Mesh(np.array(jax.devices("cpu")[:4]).reshape(shape), ("fsdp", "tensor"))
    specs = P("fsdp"), P("fsdp", "tensor"), P("fsdp", None, "tensor")
    x, w, dy = tensors(BLOCKS_OF_16[4]._replace(lead=(4, 32)), "float32")
    x, w, dy = (t.at[(0,) * t.ndim].set(60) for t in (x, w, dy))
    amaxes = jnp.asarray([2.0, 0.5, 1e-2])
    alone = jax.jit(linear, compiler_options=quick)(x, w, dy, amaxes)
    placed = jax.device_put((x, w, dy), tuple(NamedSharding(grid, spec) for spec in specs))
    spread = jax.jit(lambda *t: linear(*t, placement=ops.Placement(grid, *specs)), compiler_options=quick)
    *found, seen = spread(*placed, amaxes)
    np.testing.assert_array_equal(seen, [60, 60, 60])
    np.testing.assert_array_equal(seen, alone[-1])
    for one, other in zip(found, alone, strict=False):
        np.testing.assert_allclose(one, other, atol=1e-6 * float(jnp.max(jnp.abs(other))))


@pytest.mark.slow
def test_what_is_not_finite_is_not_hidden_by_a_scale_of_before():
    x, w, dy = tensors(BLOCKS_OF_16[1], "float32")
    y, dx, dw, seen = jax.jit(linear, compiler_options=quick)(x.at[0, 0, 0].set(jnp.inf), w, dy, jnp.ones(3))
    assert jnp.isnan(y).all() and jnp.isnan(dw).all() and jnp.isfinite(dx).all() and jnp.isinf(seen[0])
    before = {"amaxes": jnp.full(3, 2.0), "history": jnp.full((3, 3), 2.0)}
    np.testing.assert_array_equal(update_amax_history(before, seen)["amaxes"][0], 2)


@pytest.mark.slow
def test_without_a_history_it_is_fp8():
    @functools.partial(jax.jit, static_argnums=0, compiler_options=quick)
    def run(recipe, x, w, dy):
        y, pullback = jax.vjp(lambda x, w: hb.qdot(x, w, recipe=recipe, key=KEY), x, w)
        return y, *pullback(dy)

    given = tensors(BLOCKS_OF_16[1], "float32")
    for one, other in zip(run("fp8_delayed", *given), run("fp8", *given), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: dataclasses.replace(hb.recipe("nvfp4"), amax_history_len=4), "one scale a tensor"),
        (lambda: dataclasses.replace(hb.recipe("bf16"), amax_history_len=4), "one scale a tensor"),
        (lambda: dataclasses.replace(SHORT, amax_history_len=-1), "a number of steps"),
        (lambda: dataclasses.replace(SHORT, wgrad_x=SHORT.wgrad_dy), "both of a tensor alike"),
        (lambda: dataclasses.replace(SHORT, remainder=True), "remainder"),
        (lambda: mix_recipes(SHORT, hb.recipe("bf16"), "backward"), "all three tensors"),
        (lambda: check_grouped_support([SHORT]), "dense linears alone"),
        (lambda: hb.apply_recipe(lambda w: w, "fp8_delayed"), "use fp8"),
        (lambda: hb.dot_general("fp8_delayed"), "use fp8"),
    ],
)
def test_what_has_no_history_is_refused_with_a_way_out(make, said):
    with pytest.raises(ValueError, match=said):
        make()
