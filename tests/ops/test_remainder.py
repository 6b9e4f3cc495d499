"""x in two pieces: y = Q(x) Q(W) + Q(r) Q(W), r = x - Q(x), against the oracle of both; all else as without.

Oracle: `oracle.linear` of x and of r, and r from NumPy. Tolerances as in `test_qdot`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_linear as oracle
import pytest
from checks import KEY, assert_rounded, linear, matrix, relative_error, rounded, tensors
from instruments import quick
from shapes import BLOCKS_OF_16

import halfbyte as hb
from halfbyte.evaluation import gemm_accuracy
from halfbyte.evaluation.step_replay import LinearCapture
from halfbyte.formats import NVFP4
from halfbyte.ops import quantize_passes
from halfbyte.recipes import FORWARD_ROLE_OF, OperandPolicy, recipe_diff, recipe_to_text, site_key

ONE, TWO = hb.recipe("nvfp4"), hb.recipe("nvfp4_remainder")


@functools.cache
def results(recipe, backend, dtype):
    """y, dx and dw of one linear."""
    return jax.jit(linear(recipe, backend=backend), compiler_options=quick)(*tensors(BLOCKS_OF_16[1], dtype))


@pytest.mark.slow
@pytest.mark.parametrize("backend, dtype", [("reference", "float32"), ("auto", "bfloat16")])
def test_two_term_y_is_sum_of_both_products(backend, dtype):
    x, w, dy = tensors(BLOCKS_OF_16[1], dtype)
    one, two = (results(r, backend, dtype) for r in (ONE, TWO))
    first = oracle.linear(matrix(x), matrix(w), matrix(dy), ONE, KEY)["fprop"]
    rest = oracle.remainder(matrix(x), matrix(w), ONE, KEY, dtype=x.dtype)
    assert_rounded(
        two[0], dataclasses.replace(first, result=first.result + rest.result, bound=first.bound + rest.bound)
    )
    for got, want in zip(two[1:], one[1:], strict=True):
        np.testing.assert_array_equal(got, want)
    # With weights as they are, what is left of the error of 4 bits is their error once more.
    narrow = [dataclasses.replace(r, fprop_w=OperandPolicy(), dgrad_w=OperandPolicy()) for r in (ONE, TWO)]
    exact = matrix(x).astype(np.float64) @ rounded(matrix(w), jnp.bfloat16)
    errors = []
    for recipe in narrow:
        forward = jax.jit(functools.partial(hb.qdot, recipe=recipe, key=KEY, backend=backend), compiler_options=quick)
        errors.append(relative_error(forward(x, w).astype(jnp.float32), exact))
    assert errors[1] < errors[0] / 8


@pytest.mark.slow
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


def judgement(recipe, gemms):
    """GEMM -> (wrong, error), at each call; the rest of what the radar tells is not compiled."""
    x, w, dy = tensors(BLOCKS_OF_16[1], "bfloat16")
    dw = results(recipe, "auto", "bfloat16")[2] if "dw" in gemms else jnp.zeros_like(w)

    @functools.partial(jax.jit, compiler_options=quick)
    def judge(x, w, dy, dw):
        given = LinearCapture("mlp/up", recipe, x=x, w=w, dy=dy, weight=w, key=KEY, bits=KEY, amax=None, dw=dw)
        found = gemm_accuracy.judge_linear(given, backend="auto")
        return {gemm: (found[gemm]["wrong"], found[gemm]["error"]) for gemm in gemms}

    return lambda: {gemm: tuple(map(float, told)) for gemm, told in judge(x, w, dy, dw).items()}


@pytest.mark.slow
def test_the_radar_knows_the_second_piece_and_sees_a_wrong_one(monkeypatch):
    """A program asks at every call whether its second piece is wrong, and is compiled once. It is a piece of fprop
    alone: of four over six in two pieces, that one GEMM is judged."""
    factor, right = np.float32(1), quantize_passes.quantization_error

    def planted(x, operand):
        made, now = right(x, operand), jax.pure_callback(lambda: factor, jax.ShapeDtypeStruct((), jnp.float32))
        return made * now.astype(made.dtype)

    monkeypatch.setattr(quantize_passes, "quantization_error", planted)
    for recipe, gemms in ((hb.recipe("halfbyte"), ("fprop",)), (TWO, ("fprop", "dgrad", "wgrad", "dw"))):
        judged, factor = judgement(recipe, gemms), np.float32(1)
        assert all(wrong == 0 and error < 1 for wrong, error in judged().values())
        factor = np.float32(2)
        assert judged()["fprop"][0] == 1
    assert judged()["wgrad"][0] == 0


@pytest.mark.slow
def test_radar_judges_requantized_operands_right():
    """As `halfbyte` makes dgrad's W and wgrad's x; gradients stay in bf16, which compiles sooner."""
    once = dict.fromkeys(FORWARD_ROLE_OF.values(), OperandPolicy(NVFP4))
    again = dict.fromkeys(FORWARD_ROLE_OF, OperandPolicy(NVFP4, source="requantize_forward"))
    recipe = dataclasses.replace(hb.recipe("bf16"), name="again", **once, **again)
    assert all(wrong == 0 and error < 1 for wrong, error in judgement(recipe, ("dgrad", "wgrad"))().values())


def test_remainder_recipe_text_diff_and_refusals():
    assert hb.recipe(recipe_to_text(TWO)) == TWO
    assert recipe_diff(ONE, TWO) == [("fprop_x", "remainder", False, True)]
    for name, has in (("nvfp4_remainder+bf16_forward", False), ("bf16+nvfp4_remainder_forward", True)):
        assert hb.recipe(name).remainder is has
    for changed in ({"format": OperandPolicy().format}, {"rounding": "stochastic"}):
        with pytest.raises(ValueError, match="remainder"):
            dataclasses.replace(TWO, **TWO.with_operands(("fprop_x",), **changed))
    with pytest.raises(ValueError, match="remainder"):
        dataclasses.replace(hb.recipe("nvfp4_rht_everywhere"), remainder=True)
