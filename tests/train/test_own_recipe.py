"""A user's recipe and policy from a file outside the package: trained, resumed, in the manifest, refused after a
change. And the same as values."""

import contextlib
import dataclasses
import hashlib
import json
import shutil

import pytest

import halfbyte as hb
from halfbyte.io.dataclass_json import to_dict
from halfbyte.io.trusted_programs import UntrustedProgramError, trust_only_named_programs
from halfbyte.recipes.user_recipes import check_program_unchanged, is_same_program, pin_to_digest
from halfbyte.study.study_plan import load_plan
from halfbyte.train import phases, resolve_policy
from halfbyte.train.resume import fill_new_fields
from halfbyte.train.run_directory import open_run_directory
from tiny import tiny

pytestmark = pytest.mark.usefixtures("one_device")

FILE = """
import dataclasses
import halfbyte as hb

half = dataclasses.replace(hb.recipe("mxfp8"), name="half", wgrad_x=hb.OperandPolicy(), wgrad_dy=hb.OperandPolicy())

def last_layer(recipe):
    return hb.Policy("last layer", (hb.Rule("layers/mlp/down", recipe, (-1, None)),))
"""


@pytest.mark.slow
def test_recipe_of_a_file_resumes_until_it_changes(tmp_path):
    file, run = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(FILE)
    config = tiny(recipe=f"{file}:half", policy=f"{file}:last_layer", steps=2)
    assert hb.train(config, run, until=1).step == 1
    assert hb.train(config, run).step == 2
    stored = json.loads((run / "config.json").read_text())
    manifest = next(path for path in run.glob("*manifest*.json")).read_text()
    for name in ("recipe", "policy"):
        assert stored[name] == getattr(config, name) and stored[name].rpartition("@")[2] in manifest
    file.write_text(FILE + "\n# changed\n")
    with pytest.raises(ValueError, match=r"recipe: .*mine.py:half@"):
        hb.train(tiny(recipe=f"{file}:half", policy=f"{file}:last_layer", steps=2), run)
    with pytest.raises(ValueError, match="the file has changed since"):
        hb.train(dataclasses.replace(config, seed=1), run)


FORMS = ("{}:half", "{}:half@{hash}", "{}:half+bf16_backward", "mlp; layers[-1:]={}:half", "mlp={}:half@{hash}")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("field", ["recipe", "policy", "precision.switch_to"])
def test_programs_of_a_stored_config_are_not_executed(tmp_path, field, form):
    """Beside the run or far from it, alone, in a blend or in a rule, by config, plan or a checkpoint's record."""
    file = tmp_path / "theirs.py"
    file.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n" + FILE)
    values = to_dict(tiny())
    group, _, name = field.rpartition(".")
    text = form.format(file, hash=hashlib.sha256(file.read_bytes()).hexdigest()[:16])
    (values[group] if group else values)[name] = text
    values["precision"]["switch_at"] = 0.5
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"is a program|no recipe named|cannot read rule|no file"):
        compute_with(tmp_path / "run")
    arms = [{"name": "a", "kind": "baseline", "changes": {}}, {"name": "b", "kind": "candidate", "changes": {}}]
    plan = {"version": 1, "base": to_dict(tiny()), "margin": "0.5%", "seeds": [0], "arms": arms}
    arms[1]["changes"] = {field: text}
    (tmp_path / "run" / "plan.json").write_text(json.dumps(plan))
    with contextlib.suppress(ValueError):
        load_plan(tmp_path / "run")
    fill_new_fields(values)
    assert not (tmp_path / "executed").exists()


def compute_with(run):
    config = open_run_directory(run).config
    resolve_policy(config.model, config.policy, phases(config)[-1].recipe)


def test_program_runs_only_if_named_and_of_the_stored_hash(tmp_path):
    """The file may have moved. Another file under its name is not it."""
    file, moved = tmp_path / "mine.py", tmp_path / "moved" / "mine.py"
    file.write_text(FILE + f"\n# {tmp_path}\n")
    stored = f"{tmp_path}/gone/mine.py:half@{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"
    moved.parent.mkdir()
    shutil.move(file, moved)
    with pytest.raises(UntrustedProgramError):
        hb.recipe(stored)
    with trust_only_named_programs(["train", "--recipe", f"{moved}:half"]):
        assert hb.recipe(stored).name == stored and is_same_program(stored, pin_to_digest(f"{moved}:half"))
    check_program_unchanged(stored, f"{moved}:half")
    moved.write_text(FILE + "\n# changed\n")
    with pytest.raises(ValueError, match="has changed since"):
        check_program_unchanged(stored, f"{moved}:half")
    with trust_only_named_programs(["--policy", f"all_linear; layers[-1:]={moved}:half"]):
        assert hb.recipe(f"{moved}:half").name.startswith(str(moved))


def test_values_reach_the_config_of_a_run():
    made = dataclasses.replace(hb.recipe("nvfp4"), name="mine", fprop_x=hb.OperandPolicy())
    config = tiny(recipe=made, policy=hb.Policy("p", (hb.Rule("layers/mlp/*", made),)))
    assert config == dataclasses.replace(config) and json.loads(config.recipe)["name"] == "mine"
