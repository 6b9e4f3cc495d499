"""x in two pieces: y = Q(x) Q(W) + Q(r) Q(W), r = x - Q(x), against the oracle of both; all else as without.

Oracle: `oracle.linear` of x and of r, and r from NumPy. Tolerances as in `test_qdot`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from checks import KEY, assert_rounded, linear, matrix, relative_error, rounded, tensors
from instruments import quick
from shapes import BLOCKS_OF_16

import halfbyte as hb
from halfbyte.diagnosis import truth
from halfbyte.diagnosis.replay import Linear
from halfbyte.ops import passes
from halfbyte.recipe import OperandPolicy, difference, site_key, spell_recipe

ONE, TWO = hb.recipe("nvfp4"), hb.recipe("nvfp4_remainder")


def left_over(x, first, dtype):
    decoded = rounded((first.carrier * np.float32(first.decode)).astype(np.float32), jnp.bfloat16)
    return rounded(matrix(x).astype(np.float64) - decoded, dtype).astype(np.float32)


@pytest.mark.parametrize("backend, dtype", [("reference", "float32"), ("auto", "bfloat16")])
def test_y_is_the_sum_of_both_products_and_gradients_are_as_without(backend, dtype):
    x, w, dy = tensors(BLOCKS_OF_16[1], dtype)
    one, two = (jax.jit(linear(r, backend=backend), compiler_options=quick)(x, w, dy) for r in (ONE, TWO))
    first = oracle.linear(matrix(x), matrix(w), matrix(dy), ONE, KEY)["fprop"]
    rest = oracle.linear(left_over(x, first.left, dtype), matrix(w), matrix(dy), ONE, KEY)["fprop"]
    assert_rounded(
        two[0], dataclasses.replace(first, result=first.result + rest.result, bound=first.bound + rest.bound)
    )
    for got, want in zip(two[1:], one[1:], strict=True):
        np.testing.assert_array_equal(got, want)
    # With weights as they are, what is left of the error of 4 bits is their error once more.
    narrow = [dataclasses.replace(r, fprop_w=OperandPolicy(), dgrad_w=OperandPolicy()) for r in (ONE, TWO)]
    exact = matrix(x).astype(np.float64) @ rounded(matrix(w), jnp.bfloat16)
    errors = [relative_error(linear(r, backend=backend)(x, w, dy)[0].astype(jnp.float32), exact) for r in narrow]
    assert errors[1] < errors[0] / 8


def test_an_mlp_is_three_linears_bit_for_bit():
    x, gate, _ = tensors(BLOCKS_OF_16[1], "float32")
    up, down = jnp.flip(gate, 0), gate.T

    def apart(x, gate, up, down):
        g, u = (hb.qdot(x, w, recipe=TWO, key=site_key(KEY, s)) for w, s in ((gate, "gate"), (up, "up")))
        return hb.qdot(jax.nn.silu(g) * u, down, recipe=TWO, key=site_key(KEY, "down"))

    def together(*given):
        return hb.mlp(*given, recipe=TWO, key=KEY)

    results = [jax.jit(f, compiler_options=quick)(x, gate, up, down) for f in (apart, together)]
    np.testing.assert_array_equal(*results)


def judged(recipe):
    x, w, dy = tensors(BLOCKS_OF_16[1], "bfloat16")
    dw = linear(recipe)(x, w, dy)[2]

    def judge(x, w, dy, dw):
        given = Linear("mlp/up", recipe, x=x, w=w, dy=dy, weight=w, key=KEY, bits=KEY, amax=None, dw=dw)
        return truth.judge(given, backend="auto")

    return jax.jit(judge, compiler_options=quick)(x, w, dy, dw)


def test_the_radar_knows_the_second_piece_and_sees_a_wrong_one(monkeypatch):
    for healthy in (judged(TWO), judged(hb.recipe("halfbyte"))):
        assert all(float(found["wrong"]) == 0 and float(found["error"]) < 1 for found in healthy.values())
    right = passes.left_over
    monkeypatch.setattr(passes, "left_over", lambda x, operand: right(x, operand) * 2)
    faulty = judged(TWO)
    assert float(faulty["fprop"]["wrong"]) == 1 and float(faulty["wgrad"]["wrong"]) == 0


def test_it_is_spelled_out_told_apart_and_refused_where_nothing_is_left_over():
    assert hb.recipe(spell_recipe(TWO)) == TWO
    assert difference(ONE, TWO) == [("fprop_x", "remainder", False, True)]
    for name, has in (("nvfp4_remainder+bf16_forward", False), ("bf16+nvfp4_remainder_forward", True)):
        assert hb.recipe(name).remainder is has
    for changed in ({"format": OperandPolicy().format}, {"rounding": "stochastic"}):
        with pytest.raises(ValueError, match="remainder"):
            dataclasses.replace(TWO, **TWO.with_operands(("fprop_x",), **changed))
    with pytest.raises(ValueError, match="remainder"):
        dataclasses.replace(hb.recipe("nvfp4_rht_everywhere"), remainder=True)
