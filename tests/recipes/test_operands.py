"""Recipes and presets. Oracle: the published table of the recipe, written out here by hand."""

import dataclasses
import itertools

import pytest

from halfbyte.formats import BF16, FP8, FP8_E5M2, MXFP4, MXFP8, NVFP4
from halfbyte.recipes import (
    GEMM_ROLES,
    GRADIENT_ROLES,
    ROLES,
    WEIGHT_ROLES,
    OperandPolicy,
    Recipe,
    base_recipe,
    maxtext_aliases,
    recipe,
    recipe_diff,
    recipe_names,
)

# (format, block, rounding, hadamard) of the six operands, as published.
PUBLISHED = {
    "fprop_x": (NVFP4, "1d", "rne", False),
    "fprop_w": (NVFP4, "2d", "rne", False),
    "dgrad_dy": (NVFP4, "1d", "stochastic", False),
    "dgrad_w": (NVFP4, "2d", "rne", False),
    "wgrad_x": (NVFP4, "1d", "rne", True),
    "wgrad_dy": (NVFP4, "1d", "stochastic", True),
}


def test_nvfp4_is_the_published_table():
    operands = recipe("nvfp4").operands()
    assert tuple(operands) == ROLES
    assert {role: dataclasses.astuple(op)[1:4] for role, op in operands.items()} == {
        r: v[1:] for r, v in PUBLISHED.items()
    }
    assert {op.format for op in operands.values()} == {NVFP4}


@pytest.mark.parametrize(
    ("name", "base", "changed"),
    [
        ("nvfp4_no_rht", "nvfp4", {("wgrad_x", "hadamard"), ("wgrad_dy", "hadamard")}),
        ("nvfp4_no_sr", "nvfp4", {("dgrad_dy", "rounding"), ("wgrad_dy", "rounding")}),
        ("nvfp4_no_2d", "nvfp4", {("fprop_w", "block"), ("dgrad_w", "block")}),
        ("nvfp4_bf16_weights", "nvfp4", {("fprop_w", "source"), ("dgrad_w", "source")}),
        ("nvfp4_rht_everywhere", "nvfp4", {(role, "hadamard") for role in ROLES[:4]}),
        ("nvfp4_sr_everywhere", "nvfp4", {(role, "rounding") for role in ROLES if role not in GRADIENT_ROLES}),
        ("mxfp4", "nvfp4_no_2d", {(role, "format") for role in ROLES}),
        ("fp8", "bf16", {(role, "format") for role in ROLES}),
        ("mxfp8", "fp8", {(role, "format") for role in ROLES}),
    ],
)
def test_a_preset_changes_in_its_neighbour_exactly_what_its_name_says(name, base, changed):
    found = recipe_diff(recipe(base), recipe(name))
    assert {(role, field) for role, field, _, _ in found} == changed
    assert base_recipe(name) == recipe(base)


def test_eight_bit_presets():
    assert {role: op.format for role, op in recipe("fp8").operands().items()} == {
        role: FP8_E5M2 if role in GRADIENT_ROLES else FP8 for role in ROLES
    }
    assert {op.format for op in recipe("mxfp8").operands().values()} == {MXFP8}
    assert {op.format for op in recipe("mxfp4").operands().values()} == {MXFP4}
    assert not recipe("fp8").stochastic and recipe("mxfp4").stochastic


def test_bf16_quantizes_nothing_and_every_other_preset_something():
    assert not recipe("bf16").quantized and base_recipe("bf16") is None
    assert all(recipe(name).quantized for name in recipe_names() if name != "bf16")
    assert all(recipe(name).description for name in recipe_names())


def test_difference_gives_both_values():
    assert ("dgrad_dy", "rounding", "stochastic", "rne") in recipe_diff(recipe("nvfp4"), recipe("nvfp4_no_sr"))
    assert recipe_diff(recipe("nvfp4"), recipe("nvfp4")) == []


@pytest.mark.parametrize(("alias", "name"), sorted(maxtext_aliases().items()))
def test_maxtext_names_are_accepted(alias, name):
    assert recipe(alias) is recipe(name)


def test_all_maxtext_names_are_there():
    scaled = {"te_fp8_currentscaling", "te_fp8_delayedscaling", "te_mxfp8"}
    assert set(maxtext_aliases()) == {"te_nvfp4", "te_nvfp4_no_rht", "te_no_quant"} | scaled


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match=r"no recipe named 'nvfp4_norht'; did you mean nvfp4_no_rht"):
        recipe("nvfp4_norht")


@pytest.mark.parametrize("gemm", GEMM_ROLES)
@pytest.mark.parametrize("side", [0, 1])
def test_a_hadamard_on_one_operand_is_refused_with_both_named(gemm, side):
    base = recipe("nvfp4_no_rht")
    role, other = GEMM_ROLES[gemm][side], GEMM_ROLES[gemm][1 - side]
    with pytest.raises(
        ValueError, match=rf"{gemm} cancels only if both.*{role}.hadamard=True|{other}.hadamard=False"
    ) as caught:
        dataclasses.replace(base, name="half", **base.with_operands((role,), hadamard=True))
    assert role in str(caught.value) and other in str(caught.value)


@pytest.mark.parametrize("role", [role for role in ROLES if role not in WEIGHT_ROLES])
def test_2d_blocks_are_for_weights(role):
    base = recipe("nvfp4")
    with pytest.raises(ValueError, match=rf"{role}.block='2d'.*use block='1d'"):
        dataclasses.replace(base, name="tiles", **base.with_operands((role,), block="2d"))


@pytest.mark.parametrize("fmt", [FP8, FP8_E5M2, MXFP8, BF16])
def test_stochastic_rounding_is_for_e2m1(fmt):
    with pytest.raises(ValueError, match=rf"E2M1 elements only, got format {fmt.name}; use rounding='rne'"):
        OperandPolicy(fmt, rounding="stochastic")


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8, FP8, BF16])
def test_2d_blocks_are_for_nvfp4(fmt):
    with pytest.raises(ValueError, match=rf"got format {fmt.name}; use block='1d'"):
        OperandPolicy(fmt, block="2d")


def test_other_bad_values_name_the_field_and_the_choices():
    with pytest.raises(ValueError, match=r"block must be one of 1d, 2d, got '3d'"):
        OperandPolicy(NVFP4, block="3d")
    with pytest.raises(ValueError, match=r"rounding must be one of rne, stochastic, away, midpoint, got 'up'"):
        OperandPolicy(NVFP4, rounding="up")
    with pytest.raises(TypeError, match=r"format must be a BlockFormat, got 'nvfp4'; take one from halfbyte.formats"):
        OperandPolicy("nvfp4")
    with pytest.raises(TypeError, match=r"fprop_x must be an OperandPolicy"):
        Recipe("odd", fprop_x=NVFP4)


def test_a_hadamard_without_quantization_is_legal():
    on = OperandPolicy(BF16, hadamard=True)
    assert not Recipe("plain_hadamard", wgrad_x=on, wgrad_dy=on).quantized


def test_recipes_are_hashable_and_print_short():
    assert len({recipe(name) for name in recipe_names()}) == len(recipe_names())
    assert str(recipe("nvfp4").wgrad_dy) == "nvfp4 1d stochastic hadamard"
    assert str(recipe("bf16").fprop_x) == "bf16"


def test_two_recipes_without_a_difference_are_one_but_for_their_names():
    every = [dataclasses.replace(recipe(name), name="", description="") for name in recipe_names()]
    for a, b in itertools.product(every, every):
        assert (recipe_diff(a, b) == []) == (a == b)


def test_halfbyte_requantizes_both_backward_operands_from_the_forward_pass():
    halfbyte = recipe("halfbyte")
    sources = {role: operand.source for role, operand in halfbyte.operands().items()}
    assert sources == dict.fromkeys(ROLES, "as_is") | dict.fromkeys(("dgrad_w", "wgrad_x"), "requantize_forward")


def test_hadamard_signs_of_one_operand_alone_are_refused():
    nvfp4 = recipe("nvfp4")
    fresh = dataclasses.replace(nvfp4.wgrad_dy, signs="fresh")
    with pytest.raises(ValueError, match="both operands take the same"):
        dataclasses.replace(nvfp4, wgrad_dy=fresh)
