"""A user's recipe and policy from a file outside the package: trained, resumed, in the manifest, refused after a
change. And the same as values."""

import dataclasses
import json

import pytest
from tiny import tiny

import halfbyte as hb
from halfbyte.interchange.opening import read_config
from halfbyte.parity.plan import load_plan
from halfbyte.train import CheckpointConfig
from halfbyte.train.jsonconfig import to_dict

FILE = """
import dataclasses
import halfbyte as hb

half = dataclasses.replace(hb.recipe("nvfp4"), name="half", wgrad_x=hb.OperandPolicy(), wgrad_dy=hb.OperandPolicy())

def last_layer(recipe):
    return hb.Policy("last layer", (hb.Rule("layers/mlp/*", recipe, (-1, None)),))
"""


@pytest.mark.slow
def test_a_recipe_of_a_file_trains_resumes_and_is_refused_after_a_change(tmp_path):
    file, run = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(FILE)
    config = tiny(recipe=f"{file}:half", policy=f"{file}:last_layer", steps=2, mesh="data=8")
    assert hb.train(config, run, until=1).step == 1
    assert hb.train(config, run).step == 2
    stored = json.loads((run / "config.json").read_text())
    manifest = next(path for path in run.glob("*manifest*.json")).read_text()
    for name in ("recipe", "policy"):
        assert stored[name] == getattr(config, name) and stored[name].rpartition("@")[2] in manifest
    file.write_text(FILE + "\n# changed\n")
    with pytest.raises(ValueError, match=r"recipe: .*mine.py:half@"):
        hb.train(tiny(recipe=f"{file}:half", policy=f"{file}:last_layer", steps=2, mesh="data=8"), run)
    with pytest.raises(ValueError, match="the file has changed since"):
        hb.train(dataclasses.replace(config, seed=1), run)


@pytest.mark.parametrize("field", ["recipe", "policy", "precision.switch_to"])
def test_a_run_directory_from_elsewhere_executes_nothing_of_its_own(tmp_path, field):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "theirs.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n" + FILE)
    values = to_dict(tiny())
    group, _, name = field.rpartition(".")
    (values[group] if group else values)[name] = f"{tmp_path}/elsewhere/../run/theirs.py:half"
    (tmp_path / "run" / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"nothing inside a run is executed.*move it out of there"):
        read_config(tmp_path / "run")
    (tmp_path / "run" / "plan.json").write_text(json.dumps({"version": 1, "arms": [{"changes": values}]}))
    with pytest.raises(ValueError, match="nothing inside a run is executed"):
        load_plan(tmp_path / "run")
    assert not (tmp_path / "executed").exists()


def test_values_reach_the_config_of_a_run():
    made = dataclasses.replace(hb.recipe("nvfp4"), name="mine", fprop_x=hb.OperandPolicy())
    config = tiny(recipe=made, policy=hb.Policy("p", (hb.Rule("layers/mlp/*", made),)))
    assert config == dataclasses.replace(config) and json.loads(config.recipe)["name"] == "mine"


@pytest.mark.slow
def test_values_train_without_a_terminal(tmp_path, capfd):
    """One step; the recipe and the policy are values, and the manifest says what ran."""
    made = dataclasses.replace(hb.recipe("nvfp4"), name="mine", fprop_x=hb.OperandPolicy())
    rules = hb.Policy("last", (hb.Rule("layers/mlp/*", made, (-1, None)),))
    config = tiny(recipe=made, policy=rules, steps=1, mesh="data=8", checkpoint=CheckpointConfig(every=0))
    result = hb.train(config, tmp_path / "run")
    assert result.step == 1 and capfd.readouterr().out == ""
    sites = json.loads((tmp_path / "run" / "manifest.json").read_text())["sites"]
    recipes = {(site["path"], *site["layers"]): site["recipe"] for site in sites if "mlp/up" in site["path"]}
    assert recipes == {("layers/mlp/up", 0, 1): "bf16", ("layers/mlp/up", 1, 2): "mine"}
