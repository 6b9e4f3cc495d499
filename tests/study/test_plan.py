"""Plans: what is refused before the first step, and what may change afterwards."""

import dataclasses
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes import BASE, plan_of

from halfbyte.cli import parity
from halfbyte.cli.main import parse_flags
from halfbyte.io import dataclass_json
from halfbyte.recipes import recipe
from halfbyte.study import study_plan
from halfbyte.study.arms import CANDIDATE, Arm, ablation_arms, config_mismatches, parse_arm, read_arms, standard_arms
from halfbyte.study.study_plan import StudyPlan, host_share, load_plan, write_or_check_plan


def test_arms_share_everything_but_precision():
    plan = plan_of(seeds=2)
    base = dataclass_json.to_dict(plan.baseline.configure(BASE, 7))
    for arm in plan.arms:
        config = arm.configure(BASE, 7)
        assert config.seed == 7
        assert config_mismatches(base, dataclass_json.to_dict(config)) == []


@pytest.mark.parametrize(
    "field", ["batch", "optimizer.learning_rate", "data", "model.layers", "precision.compute_dtype"]
)
def test_an_arm_that_changes_more_than_precision_is_refused(field):
    with pytest.raises(ValueError, match=f"changes {field}: arms may differ in precision alone"):
        Arm("a", CANDIDATE, {"recipe": "nvfp4", field: 4})


def test_a_margin_is_not_changed_once_it_is_written(tmp_path):
    write_or_check_plan(tmp_path / "p", plan_of(margin="0.5%"))
    assert json.loads((tmp_path / "p" / "plan.json").read_text())["margin"] == "0.5%"
    with pytest.raises(ValueError, match="was planned with margin 0.5%.*got 1%"):
        write_or_check_plan(tmp_path / "p", plan_of(margin="1%"))


def test_other_arms_or_another_base_are_refused_and_more_seeds_are_not(tmp_path):
    first = write_or_check_plan(tmp_path, plan_of())
    with pytest.raises(ValueError, match="was planned with the arms"):
        write_or_check_plan(tmp_path, plan_of(candidates=("nvfp4",)))
    with pytest.raises(ValueError, match=r"another base run:\n  steps: 60 -> 61"):
        write_or_check_plan(tmp_path, plan_of(base=dataclasses.replace(BASE, steps=61)))
    grown = write_or_check_plan(tmp_path, plan_of(seeds=5))
    assert grown.seeds == (0, 1, 2, 3, 4) and grown.written == first.written
    assert load_plan(tmp_path) == grown
    assert write_or_check_plan(tmp_path, plan_of(seeds=2)).seeds == (0, 1, 2, 3, 4)


@pytest.mark.slow
def test_looks_are_part_of_the_plan_and_seeds_that_are_added_are_beyond_it(tmp_path):
    first = write_or_check_plan(tmp_path / "a", plan_of(seeds=5, looks=(3, 5)))
    assert load_plan(tmp_path / "a").looks == (3, 5)
    with pytest.raises(ValueError, match="looked at after 3, 5 seeds.*got 4, 5"):
        write_or_check_plan(tmp_path / "a", plan_of(seeds=5, looks=(4, 5)))
    assert write_or_check_plan(tmp_path / "a", plan_of(seeds=9)).looks == first.looks
    for bad in ((2, 3), (3, 3), (3, 9), (5, 3), (0,), (-1,)):
        with pytest.raises(ValueError, match="looks must be rising"):
            plan_of(seeds=5, looks=bad)


@pytest.mark.parametrize("begun", [1, 2])
def test_a_study_of_one_or_two_seeds_has_its_look_before_it_has_seen_one(tmp_path, begun):
    """Whoever chose looks after two seeds passed a candidate at the margin in 6.7% of studies."""
    write_or_check_plan(tmp_path, plan_of(seeds=begun))
    with pytest.raises(ValueError, match="looked at after 3 seeds.*got 3, 8"):
        write_or_check_plan(tmp_path, plan_of(seeds=8, looks=(3, 8)))
    assert write_or_check_plan(tmp_path, plan_of(seeds=8)).looks == (3,)


@pytest.mark.slow
def test_of_hosts_that_begin_at_once_one_writes_the_plan_and_the_others_must_agree(tmp_path, monkeypatch):
    written, begin = [], threading.Barrier(4)

    def slow(directory, found, write=study_plan._write):
        written.append(str(found.margin))
        time.sleep(0.2)
        return write(directory, found)

    def host(margin):
        begin.wait()
        try:
            return str(write_or_check_plan(tmp_path / "p", plan_of(margin=margin)).margin)
        except ValueError as error:
            return "was planned with margin" in str(error)

    monkeypatch.setattr(study_plan, "_write", slow)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(host, ("0.5%", "0.5%", "1%", "1%")))
    assert len(written) == 1 and found.count(written[0]) == 2 and found.count(True) == 2


def test_a_plan_of_an_earlier_version_is_read_and_its_later_seeds_are_not_judged(tmp_path):
    """It let seeds be added until it was clear, and nothing says how often."""
    write_or_check_plan(tmp_path, plan_of(seeds=5))
    old = json.loads((tmp_path / "plan.json").read_text())
    stored = {k: v for k, v in old.items() if k not in ("looks", "levels", "candidates", "seal")} | {"version": 1}
    for arm in stored["arms"]:
        del arm["seeds"]
    (tmp_path / "plan.json").write_text(json.dumps(stored))
    found = load_plan(tmp_path)
    assert found.looks == (3,) and found.seeds == (0, 1, 2, 3, 4) and found.arms == plan_of().arms


@pytest.mark.slow(fast_cases=["edit8", "edit3", "edit6"])
@pytest.mark.parametrize("edit", [
    {"margin": "5%"}, {"seeds": [0, 1, 2]}, {"looks": [3]}, {"levels": [0.5, 0.5]}, {"written": "2020-01-01"},
    {"outcome": "luck"}, {"version": 2}, {"more": 1}, {"seal": None}, {"seal": "0" * 64},
])  # fmt: skip
def test_a_plan_that_was_edited_is_refused(tmp_path, edit):
    write_or_check_plan(tmp_path, plan_of(seeds=5, looks=(3, 5)))
    file = tmp_path / "plan.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(dict(reversed(stored.items()))))  # as an editor might leave it, and nothing else
    assert load_plan(tmp_path) == write_or_check_plan(tmp_path, plan_of(seeds=5, looks=(3, 5)))
    file.write_text(json.dumps({name: value for name, value in (stored | edit).items() if value is not None}))
    for read in (load_plan, lambda folder: write_or_check_plan(folder, plan_of(seeds=5, looks=(3, 5)))):
        with pytest.raises(ValueError, match="was changed after it was written.*begin anew with another --out"):
            read(tmp_path)


@pytest.mark.slow
def test_a_plan_that_has_no_seal_gets_none_with_more_seeds(tmp_path):
    """Nobody knows whether it is as it was written, then and later."""
    write_or_check_plan(tmp_path, dataclasses.replace(plan_of(), sealed=False))
    stored = json.loads((tmp_path / "plan.json").read_text())
    assert stored["version"] == 2 and "seal" not in stored
    assert not write_or_check_plan(tmp_path, plan_of(seeds=5)).sealed and load_plan(tmp_path).seeds == (0, 1, 2, 3, 4)


def test_a_directory_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds no plan.json"):
        write_or_check_plan(tmp_path, plan_of())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seeds": ()}, "at least one"),
        ({"seeds": (1, 1)}, "different numbers"),
        ({"arms": ()}, "exactly one baseline"),
        ({"arms": tuple(standard_arms("bf16", []))}, "no candidate"),
        ({"arms": tuple(standard_arms("bf16", ["nvfp4", "nvfp4"]))}, "two arms are called 'nvfp4'"),
        ({"arms": tuple(standard_arms("bf16", ["nvfp4", "te_nvfp4"]))}, "are the same run"),
        ({"arms": tuple(standard_arms("bf16", ["nvfp4", f"nvfp4@{BASE.policy}"]))}, "are the same run"),
        ({"arms": tuple(standard_arms("nvfp4", [f"nvfp4@{BASE.policy}"]))}, "are the same run"),
    ],
)
def test_plans_that_cannot_be_judged(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(plan_of(), **changes)


def test_a_damaged_plan_is_said_to_be_one(tmp_path):
    (tmp_path / "plan.json").write_text('{"version": 1, "arms": [{"name": "x"}]}')
    with pytest.raises(ValueError, match="is damaged"):
        load_plan(tmp_path)


@pytest.mark.slow
def test_the_ablation_has_every_ingredient_off_and_misused():
    arms = {arm.name: arm for arm in ablation_arms()}
    assert next(iter(arms)) == "nvfp4" and len(arms) == 12
    for arm in arms.values():
        arm.configure(BASE, 0)
    assert arms["late_switch"].configure(BASE, 0).precision.switch_at == 0.82
    assert arms["forward_only"].configure(BASE, 0).recipe == "nvfp4+bf16_backward"
    StudyPlan(BASE, (*standard_arms("bf16", [])[:1], *ablation_arms()), (0,), plan_of().margin)


@pytest.mark.parametrize("policy, names", [("mlp", 12), ("all_linear", 11)])
def test_an_ablation_of_a_run_in_all_linears_has_the_full_recipe_once(policy, names):
    args = parse_flags("parity", parity, ["demo", "--arms", "ablation", "--policy", policy])
    found, _ = parity.make_study_plan(args)
    runs = {arm.configure(found.base, 0) for arm in found.of_kind(CANDIDATE)}
    assert len(runs) == len(found.of_kind(CANDIDATE)) == names


def test_arms_as_typed_and_from_a_file(tmp_path):
    assert parse_arm("nvfp4@all_linear", CANDIDATE).changes == {"recipe": "nvfp4", "policy": "all_linear"}
    assert parse_arm("nvfp4@mlp/*; layers[-1]=bf16", CANDIDATE).name == "nvfp4@mlp-layers-1-bf16"
    with pytest.raises(ValueError, match="RECIPE or RECIPE@POLICY, got '@mlp'"):
        parse_arm("@mlp", CANDIDATE)
    (tmp_path / "arms.json").write_text('{"a": {"recipe": "nvfp4", "policy": "all_linear"}}')
    assert read_arms(tmp_path / "arms.json")[0].name == "a"
    (tmp_path / "arms.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold one object"):
        read_arms(tmp_path / "arms.json")


def test_jobs_go_seed_by_seed_and_are_shared_by_hosts():
    plan = plan_of(seeds=2)
    jobs = plan.jobs()
    assert [seed for _, seed in jobs] == [0] * 5 + [1] * 5
    parts = [host_share(jobs, f"{host}/3") for host in range(3)]
    assert sorted(str(job) for part in parts for job in part) == sorted(map(str, jobs))
    for bad in ("3/3", "1", "-1/2", "a/b"):
        with pytest.raises(ValueError, match="INDEX/HOSTS"):
            host_share(jobs, bad)


OWN = """
import dataclasses, halfbyte as hb
half = dataclasses.replace(hb.recipe("nvfp4"), wgrad_x=hb.OperandPolicy(), wgrad_dy=hb.OperandPolicy())
"""


def test_a_recipe_of_ones_own_is_an_arm(tmp_path):
    """The file's, not the preset whose name it has kept."""
    (tmp_path / "mine.py").write_text(OWN)
    text = f"{tmp_path}/mine.py:half"
    alone, with_policy, pinned = (
        parse_arm(typed, CANDIDATE)
        for typed in (text, f"{text}@all_linear", parse_arm(text, CANDIDATE).changes["recipe"])
    )
    assert (alone.name, with_policy.name) == ("mine-py-half", "mine-py-half@all-linear")
    assert alone.changes == pinned.changes and with_policy.changes == {**alone.changes, "policy": "all_linear"}
    made = recipe(alone.configure(BASE, 0).recipe)
    assert made.wgrad_x == recipe("bf16").wgrad_x and made.fprop_x == recipe("nvfp4").fprop_x
    StudyPlan(BASE, tuple(standard_arms("bf16", ["nvfp4", text])), (0,), plan_of().margin)
