"""Recipes and policies of the user's own: a file outside the package, a value, a package's entry point."""

import dataclasses
import functools
import importlib.metadata
import json

import pytest

import halfbyte as hb
from halfbyte.models import preset
from halfbyte.recipes import policy, policy_to_text, recipe, recipe_to_text, user_recipes
from halfbyte.train.train_config import TrainConfig

MINE = """
import dataclasses
import halfbyte as hb

base = hb.recipe("nvfp4")
half = dataclasses.replace(base, name="half", wgrad_x=hb.OperandPolicy(), wgrad_dy=hb.OperandPolicy())
ends = hb.Policy("ends", (hb.Rule("layers/mlp/*", base, (1, -1)),))

def all_but_down(recipe):
    return hb.Policy("all but down", (hb.Rule("layers/mlp/down", None), hb.Rule("layers/*", recipe)))
"""


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def config(**changes):
    return TrainConfig(name="own", model=preset("demo"), **changes)


def test_a_recipe_of_a_file_is_pinned_by_its_hash(mine):
    made = config(recipe=f"{mine}:half")
    assert made.recipe.startswith(f"{mine}:half@") and len(made.recipe.rpartition("@")[2]) == 16
    found = recipe(made.recipe)
    assert found.name == made.recipe and not found.wgrad_x.format.quantized and found.fprop_x.format == hb.NVFP4
    assert recipe(made.recipe) == found  # the same object as before, for JAX's caches
    mine.write_text(MINE + "\n")
    with pytest.raises(ValueError, match="the file has changed since"):
        recipe(made.recipe)
    assert config(recipe=f"{mine}:half").recipe != made.recipe  # what a resumed run compares


def test_what_was_hashed_is_what_runs(mine, monkeypatch):
    """A file that is replaced behind the hash: what lies there by then is not imported."""
    source = (MINE + "# hashed").encode()
    mine.write_text("raise RuntimeError('another file')")
    monkeypatch.setattr("halfbyte.io.trusted_programs._source", lambda path: source)
    assert recipe(f"{mine}:half").fprop_x.format == hb.NVFP4


def test_a_policy_of_a_file_is_a_value_or_a_function_of_the_recipe(mine):
    ends = policy(config(policy=f"{mine}:ends").policy, "bf16")
    assert ends.rules[0].recipe == recipe("nvfp4")
    sites = ["layers/mlp/up", "layers/mlp/down"]
    resolved = policy(f"{mine}:all_but_down", "fp8").resolve(sites, 4)
    assert (
        resolved.recipe_at("layers/mlp/up", 0).name == "fp8" and resolved.recipe_at("layers/mlp/down", 0).name == "bf16"
    )


def test_values_are_spelled_out_and_read_back():
    made = dataclasses.replace(hb.recipe("nvfp4"), name="mine", fprop_x=hb.OperandPolicy())
    assert recipe(recipe_to_text(made)) == made
    rules = hb.Policy("p", (hb.Rule("layers/mlp/*", made, (1, -0.25)), hb.Rule("*", None)))
    assert policy(policy_to_text(rules), "bf16") == rules
    held = config(recipe=made, policy=rules)
    assert recipe(held.recipe) == made and policy(held.policy, "bf16") == rules
    odd = dataclasses.replace(hb.NVFP4, name="odd")
    with pytest.raises(ValueError, match="'odd' is none of halfbyte.formats.*FILE.py:NAME"):
        recipe_to_text(dataclasses.replace(made, fprop_x=hb.OperandPolicy(odd)))


def test_errors_name_the_way_out(mine):
    with pytest.raises(ValueError, match=r"there is no file gone.py; .* PATH/FILE.py:NAME"):
        config(recipe="gone.py:half")
    with pytest.raises(ValueError, match="the file defines no 'quarter'"):
        config(recipe=f"{mine}:quarter")
    with pytest.raises(ValueError, match="must be a halfbyte.Recipe"):
        config(recipe=f"{mine}:ends")
    with pytest.raises(ValueError, match="must be a halfbyte.Policy, or a function"):
        config(policy=f"{mine}:half")


def test_packages_offer_recipes_and_policies_by_entry_points(monkeypatch, mine):
    points = [
        importlib.metadata.EntryPoint("theirs", "halfbyte.recipes:bf16_like", "halfbyte.recipes"),
        importlib.metadata.EntryPoint("their_layers", "halfbyte.recipes:Policy", "halfbyte.policies"),
    ]
    made = dataclasses.replace(hb.recipe("nvfp4"), dgrad_dy=hb.OperandPolicy())  # with the preset's name
    values = {"theirs": made, "their_layers": hb.Policy("their layers", (hb.Rule("*", made),))}
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: values[self.name])
    asked = []
    find = lambda: asked.append(1) or importlib.metadata.EntryPoints(points)  # noqa: E731
    monkeypatch.setattr(user_recipes, "entry_points", find)
    monkeypatch.setattr(user_recipes, "_entry_points", functools.cache(user_recipes._entry_points.__wrapped__))
    assert recipe("theirs") == dataclasses.replace(made, name="theirs") != recipe("nvfp4")
    assert recipe(recipe("theirs").name) == recipe("theirs")
    assert policy("their_layers", "nvfp4") == values["their_layers"]
    assert policy("mlp", "nvfp4").name == "mlp" and len(asked) == 1  # not once for each config that is made


def test_what_earlier_versions_had_is_one_sentence():
    with pytest.raises(ValueError, match="recipe averis was removed; nvfp4_no_rht is the nearest"):
        recipe("averis")
    values = json.loads(recipe_to_text(dataclasses.replace(recipe("nvfp4"), name="mine")))
    assert recipe(json.dumps(values | {"mean": False})).name == "mine"
    with pytest.raises(ValueError, match="recipe mine: mean=true was removed"):
        recipe(json.dumps(values | {"mean": True}))
