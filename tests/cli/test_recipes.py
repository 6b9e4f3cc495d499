"""`halfbyte recipes`: what it prints is what halfbyte.recipes says."""

import json

import pytest

from halfbyte.cli.main import main
from halfbyte.recipes import maxtext_aliases, recipe, recipe_diff, recipe_names


def run_json(capfd, *argv):
    code = main([*argv, "--json"])
    return code, json.loads(capfd.readouterr().out)


def test_all_recipes(capfd):
    code, data = run_json(capfd, "recipes")
    assert code == 0
    assert [entry["name"] for entry in data["recipes"]] == recipe_names()
    by_name = {entry["name"]: entry for entry in data["recipes"]}
    assert by_name["nvfp4"]["aliases"] == [alias for alias, name in maxtext_aliases().items() if name == "nvfp4"]
    assert {change["operand"] for change in by_name["nvfp4_no_rht"]["changes"]} == {"wgrad_x", "wgrad_dy"}
    assert by_name["nvfp4_no_rht"]["differs_from"] == "nvfp4"


def test_one_recipe_by_its_maxtext_name(capfd):
    code, data = run_json(capfd, "recipes", "te_nvfp4")
    assert code == 0
    assert data["name"] == "nvfp4"
    assert data["operands"]["wgrad_dy"] == {
        "format": "nvfp4",
        "block": "1d",
        "rounding": "stochastic",
        "hadamard": True,
        "source": "as_is",
        "hadamard_size": 16,
        "signs": "fixed",
    }


def test_two_recipes(capfd):
    code, data = run_json(capfd, "recipes", "nvfp4", "mxfp4")
    assert code == 0
    expected = [(operand, field) for operand, field, _, _ in recipe_diff(recipe("nvfp4"), recipe("mxfp4"))]
    assert [(change["operand"], change["field"]) for change in data["changes"]] == expected


def test_the_table_for_people(capfd):
    assert main(["recipes", "nvfp4", "nvfp4_no_2d"]) == 0
    out = capfd.readouterr().out
    assert "fprop_w" in out and "2d" in out and "1d" in out
    assert main(["recipes", "nvfp4", "nvfp4"]) == 0
    assert "compute the same numbers" in capfd.readouterr().out


@pytest.mark.parametrize(
    "names, hint",
    [
        (["nvfp44"], "did you mean nvfp4"),
        (["zzz"], "'zzz'; `halfbyte recipes` lists"),
        (["nvfp4"] * 3, "or two recipes, got 3"),
    ],
)
def test_bad_names_exit_2(capfd, names, hint):
    assert main(["recipes", *names]) == 2
    assert hint in capfd.readouterr().err


def test_what_is_said_of_the_weights_together_and_of_their_source(capfd):
    _, data = run_json(capfd, "recipes", "nvfp4", "nvfp4_shared_scales")
    assert [item["field"] for item in data["changes"]] == ["shared_scales"]
    _, data = run_json(capfd, "recipes")
    for shown in data["recipes"]:
        sources = {role: operand["source"] for role, operand in shown["operands"].items()}
        assert sources == {role: operand.source for role, operand in recipe(shown["name"]).operands().items()}


BAD = {  # what a file says -> what its reader is told
    "replace(nvfp4, name='x', **nvfp4.with_operands(('wgrad_x',), hadamard=False))": "set both or neither",
    "BlockFormat('x', NVFP4.element, 16, TwoLevelScale(candidate_targets=(4.0,)))": "largest value is 6",
    "BlockFormat('x', E1M2, 16, TwoLevelScale(candidate_targets=(6.0, 4.0)))": "does not serve E1M2",
    "replace(nvfp4, name='x', **nvfp4.with_operands(WEIGHTS, format=NVFP4_ROW))": "cannot apply",
}


@pytest.mark.parametrize("text, said", BAD.items())
def test_a_recipe_that_cannot_be_computed_is_one_paragraph_and_exit_2(tmp_path, capfd, text, said):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\n"
        "from halfbyte.formats import E1M2, NVFP4, NVFP4_ROW, BlockFormat, TwoLevelScale\n"
        "from halfbyte.recipes import WEIGHT_ROLES as WEIGHTS, recipe\n"
        f"nvfp4 = recipe('nvfp4')\nmine = {text}\n"
    )
    assert main(["recipes", f"{tmp_path / 'mine.py'}:mine"]) == 2
    told = " ".join(capfd.readouterr().err.split())
    assert said in told and "Traceback" not in told
