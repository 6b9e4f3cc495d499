"""Verdicts and numbers of a parity whose gaps are known."""

import dataclasses
import json
import math

import pytest
from fakes import GAPS, fake_parity, fake_run, plan_of

from halfbyte import models
from halfbyte.study.analysis import analyse_study, non_embedding_params, size_text, study_verdict_line
from halfbyte.study.control_arms import pairwise_comparison
from halfbyte.study.equivalence_test import (
    FAIL_SHARE,
    SINGLE_RUN_REASON,
    Verdict,
    VerdictKind,
    detectable_excess,
    paired_t_interval,
)
from halfbyte.study.study_plan import load_plan, write_or_check_plan
from halfbyte.study.study_report import overhead_text
from halfbyte.study.study_runs import cell_directory, radar_section
from halfbyte.train.run_identity import load_identity, save_identity


def verdicts(data):
    return {arm["name"]: arm["verdict"]["word"] for arm in data["arms"] if "verdict" in arm}


def test_known_gaps_are_judged_right(tmp_path):
    data = analyse_study(fake_parity(tmp_path), tmp_path)
    assert verdicts(data) == {
        "nvfp4": "PASS", "mxfp4": "FAIL", "bf16-twin": "PASS", "control-fp4_one_scale": "FAIL",
    }  # fmt: skip
    assert data["verdict"].startswith("VERDICT: PASS nvfp4") and "; FAIL mxfp4" in data["verdict"]
    assert not data["passed"] and data["complete"] and data["controls"]["sensitive"]
    assert data["controls"]["noise_floor"] < 0.1
    assert (
        "15,360 tokens" in data["scope"]
        and "emulated" in data["scope"]
        and "nothing about other sizes" in data["scope"]
    )


@pytest.mark.slow
def test_gaps_by_source_tokens_and_curve(tmp_path):
    data = analyse_study(fake_parity(tmp_path), tmp_path)
    mxfp4 = next(arm for arm in data["arms"] if arm["name"] == "mxfp4")
    assert set(mxfp4["by_source"]) == {"laws", "<b>news</b>"}
    assert mxfp4["by_source"]["laws"]["mean"] == pytest.approx(100 * GAPS["mxfp4"] / 2.9, rel=0.1)
    assert mxfp4["token_overhead"]["mean"] > 5
    fit = mxfp4["gap_curve"]["fit"]
    assert fit["slope"]["mean"] > 0 and fit["low"][-1] < fit["y"][-1] < fit["high"][-1]
    rise = (fit["y"][-1] - fit["y"][0]) / math.log(fit["x"][-1] / fit["x"][0])
    assert fit["slope"]["mean"] == pytest.approx(rise)
    assert mxfp4["interval"]["count"] == 3 and mxfp4["within_run"] is None


@pytest.mark.slow
@pytest.mark.parametrize("gap, count, above", [(0.0, 3, 0), (3.0, 0, 3), ("one", 2, 1)])
def test_seeds_without_a_token_overhead_are_counted(gap, count, above, tmp_path):
    """A candidate that ends above the baseline's first validation has none: the baseline was there before it began."""
    plan = fake_parity(tmp_path, gaps=GAPS if gap == "one" else GAPS | {"nvfp4": gap})
    if gap == "one":
        folder = cell_directory(tmp_path, next(arm for arm in plan.arms if arm.name == "nvfp4"), 1)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = [{**row, "validation_loss": 9.0} if "validation_loss" in row else row for row in rows]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    found = next(arm for arm in analyse_study(plan, tmp_path)["arms"] if arm["name"] == "nvfp4")["token_overhead"]
    assert (found["count"], found["seeds"], found["above"]) == (count, 3, above)
    assert (found["mean"] is None) == (count == 0)
    told = f"({count} of 3 seeds; {above} ended above the baseline's whole curve)"
    assert overhead_text(found).endswith(told) == (above > 0)


@pytest.mark.slow
def test_a_candidate_that_began_below_the_baselines_end_is_not_said_to_be_above(tmp_path):
    plan = fake_parity(tmp_path)
    arm = next(arm for arm in plan.arms if arm.name == "nvfp4")
    for seed in plan.seeds:
        path = cell_directory(tmp_path, arm, seed) / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        lines = [{**row, "validation_loss": 0.5} if "validation_loss" in row else row for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    found = next(arm for arm in analyse_study(plan, tmp_path)["arms"] if arm["name"] == "nvfp4")
    assert found["interval"]["mean"] < 0 and found["token_overhead"] is None


@pytest.mark.slow
def test_two_seeds_say_that_there_is_no_interval(tmp_path):
    data = analyse_study(fake_parity(tmp_path, plan_of(seeds=2)), tmp_path)
    assert set(verdicts(data).values()) == {"CANNOT TELL"}
    assert "2 seeds: no interval over fewer than 3" in data["verdict"] and "single run" not in data["verdict"]
    assert "--seeds 3" in data["next"][0]
    (first, *_) = next(arm for arm in data["arms"] if arm["name"] == "nvfp4")["within_run"]
    assert "nothing about another seed" in first["is"] and first["low"] <= first["mean"] <= first["high"]


@pytest.mark.slow
def test_a_look_that_the_plan_has_after_three_seeds_is_said_so_in_a_study_of_two(tmp_path):
    data = analyse_study(fake_parity(tmp_path, plan_of(seeds=2), skip={(name, 1) for name in GAPS}), tmp_path)
    assert "1 of the 3 seeds of the first look are there" in data["verdict"]
    assert data["next"] == ["some runs are not there: the same command goes on; the next look is after 3 seeds"]


@pytest.mark.slow
def test_half_of_the_arms_missing_is_said(tmp_path):
    skip = {(name, 2) for name in GAPS}
    data = analyse_study(fake_parity(tmp_path, skip=skip), tmp_path)
    assert not data["complete"] and data["runs"]["done"] == 10 and len(data["runs"]["missing"]) == 5


def test_a_diverged_candidate_fails_and_a_diverged_baseline_is_no_pair(tmp_path):
    data = analyse_study(fake_parity(tmp_path / "a", diverged={("nvfp4", 1)}), tmp_path / "a")
    assert "FAIL nvfp4: diverged in 1 of 3 seeds" in data["verdict"] and data["complete"]
    data = analyse_study(fake_parity(tmp_path / "b", diverged={("bf16", 1), ("nvfp4", 1)}), tmp_path / "b")
    assert "CANNOT TELL nvfp4: 2 seeds: no interval" in data["verdict"]


def test_a_pass_is_withheld_where_the_broken_recipe_does_not_fail(tmp_path):
    data = analyse_study(fake_parity(tmp_path, gaps={**GAPS, "control-fp4_one_scale": 0.001}), tmp_path)
    assert data["controls"]["sensitive"] is False
    assert "CANNOT TELL nvfp4" in data["verdict"] and "this comparison is blind" in data["verdict"]


@pytest.mark.slow
def test_a_broken_recipe_that_is_better_is_not_seen_to_fail(tmp_path):
    data = analyse_study(fake_parity(tmp_path, gaps={**GAPS, "control-fp4_one_scale": -0.4}), tmp_path)
    assert data["controls"]["broken"]["word"] == "FAIL" and data["controls"]["sensitive"] is False
    assert verdicts(data)["nvfp4"] == "CANNOT TELL"


@pytest.mark.slow
def test_runs_of_earlier_versions_are_said_to_be_such(tmp_path):
    plan = fake_parity(tmp_path)
    assert analyse_study(plan, tmp_path)["notes"] == []
    reidentify(cell_directory(tmp_path, plan.arms[1], 0), made_with={})
    (cell_directory(tmp_path, plan.arms[1], 1) / "run.json").unlink()
    data, code = analyse_study(plan, tmp_path)["notes"]
    assert data.startswith("1 of 15 runs") and "same data" in data
    assert code.startswith("2 of 15 runs") and "same code" in code


@pytest.mark.slow
def test_an_alarm_of_an_earlier_probe_is_shown(tmp_path):
    plan = fake_parity(tmp_path)
    file = cell_directory(tmp_path, plan.arms[1], 1) / "radar.jsonl"
    probe = json.loads(file.read_text())
    rows = [probe | {"step": 10, "alarms": ["wgrad: gain 0.5"]}, probe | {"step": 20}, probe]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = analyse_study(plan, tmp_path)["arms"][1]
    assert [(p["seed"], p["step"]) for p in found["radar"]] == [(0, 30), (1, 30), (1, 10), (2, 30)]
    assert "seed 1 step 10: wgrad: gain 0.5" in radar_section([found])


@pytest.mark.slow
def test_a_pass_is_withheld_where_the_broken_recipe_cannot_be_told(tmp_path):
    gaps = {**GAPS, "control-fp4_one_scale": 0.0125}  # 0.47%: more seeds would tell it from the margin, three do not
    data = analyse_study(fake_parity(tmp_path, gaps=gaps, noise=0.0015), tmp_path)
    control = data["controls"]["broken"]
    assert control["word"] == "CANNOT TELL" and data["controls"]["sensitive"] is False
    assert "CANNOT TELL nvfp4" in data["verdict"] and "this comparison is blind" in data["verdict"]


@pytest.mark.parametrize(
    "skip, word",
    [
        ((), "PASS"),
        ([("control-fp4_one_scale", 2)], "CANNOT TELL"),
        ([("bf16-twin", 2)], "CANNOT TELL"),
        ("all", "CANNOT TELL"),
    ],
)
def test_a_pass_needs_controls_that_were_judged(tmp_path, skip, word):
    plan = plan_of(candidates=("nvfp4",))
    if skip == "all":  # without controls
        plan, skip = dataclasses.replace(plan, arms=plan.arms[:2]), ()
    data = analyse_study(fake_parity(tmp_path, plan, skip=skip), tmp_path)
    assert verdicts(data)["nvfp4"] == word and data["passed"] == (word == "PASS")


@pytest.mark.slow
def test_a_pass_needs_twins_that_could_show_twice_the_margin(tmp_path):
    """The control near the margin: equal runs that differ as much as these would hide a gap of 1%."""
    plan = fake_parity(tmp_path, plan_of(candidates=("nvfp4",)))
    assert analyse_study(plan, tmp_path)["controls"]["near_seen"] is True
    for seed, gap in enumerate((0.9, -0.9, 0.1)):
        folder = cell_directory(tmp_path, plan.of_kind("twin")[0], seed)
        base = analyse_study(plan, tmp_path)["arms"][0]["final"][str(seed)]
        change_last_row(folder, validation_loss=base * (1 + gap / 100))
    data = analyse_study(plan, tmp_path)
    assert data["controls"]["near_seen"] is False and verdicts(data)["nvfp4"] == "CANNOT TELL"


def change_last_row(folder, **fields):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[-1] |= fields
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
@pytest.mark.parametrize("end", [float("nan"), "inf"])
def test_a_run_that_ends_without_a_finite_loss_has_diverged(tmp_path, end):
    plan = fake_parity(tmp_path)
    change_last_row(cell_directory(tmp_path, plan.arms[1], 1), validation_loss=end)
    assert "FAIL nvfp4: diverged in 1 of 3 seeds" in analyse_study(plan, tmp_path)["verdict"]


@pytest.mark.slow
def test_the_loss_of_another_step_is_no_outcome(tmp_path):
    plan = fake_parity(tmp_path)
    file = cell_directory(tmp_path, plan.arms[1], 1) / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    data = analyse_study(plan, tmp_path)
    assert [row["arm"] for row in data["runs"]["missing"]] == ["nvfp4"] and not data["complete"]
    assert "1" not in data["arms"][1]["final"]


def reidentify(folder, **fields):
    known = load_identity(folder)
    save_identity(folder, dataclasses.replace(known, **fields))


@pytest.mark.slow
def test_runs_on_other_data_or_with_another_tokenizer_are_refused_by_name(tmp_path):
    plan = fake_parity(tmp_path)
    folders = [cell_directory(tmp_path, arm, 0) for arm in plan.arms]
    for number, folder in enumerate(folders):
        (folder / "tokenizer.json").write_text("{}" if number else "{ }")
    with pytest.raises(ValueError, match="^tokenizer: .*nvfp4/seed-0"):
        analyse_study(plan, tmp_path)
    (folders[0] / "tokenizer.json").write_text("{}")
    assert analyse_study(plan, tmp_path)["complete"]
    reidentify(cell_directory(tmp_path, plan.arms[2], 2), data="prepared again")
    with pytest.raises(ValueError, match="^data: .*mxfp4/seed-2.*prepared again"):
        analyse_study(plan, tmp_path)


def test_arm_folders_that_were_exchanged_are_refused(tmp_path):
    plan = fake_parity(tmp_path)
    arms = tmp_path / "arms"
    for old, new in (("bf16", "x"), ("mxfp4", "bf16"), ("x", "mxfp4")):
        (arms / old).rename(arms / new)
    with pytest.raises(ValueError, match="^recipe: .*bf16.*'mxfp4'"):
        analyse_study(plan, tmp_path)
    for old, new in (("bf16", "x"), ("mxfp4", "bf16"), ("x", "mxfp4")):
        (arms / old).rename(arms / new)
    for old, new in (("seed-0", "x"), ("seed-1", "seed-0"), ("x", "seed-1")):
        (arms / "nvfp4" / old).rename(arms / "nvfp4" / new)
    with pytest.raises(ValueError, match="^seed: "):
        analyse_study(plan, tmp_path)


def test_metrics_that_nobody_owns_and_a_damaged_divergence_are_refused(tmp_path):
    plan = fake_parity(tmp_path)
    folder = cell_directory(tmp_path, plan.arms[1], 0)
    (folder / "diverged.json").write_text("{}")
    with pytest.raises(ValueError, match="diverged.json is damaged"):
        analyse_study(plan, tmp_path)
    (folder / "diverged.json").unlink()
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="seed-0 holds metrics and no config.json"):
        analyse_study(plan, tmp_path)


def test_seeds_beyond_the_plan_are_shown_and_not_judged(tmp_path):
    """Three seeds that cannot tell stay so, however clear ten are."""
    plan = fake_parity(tmp_path, gaps={**GAPS, "nvfp4": 0.011}, noise=0.003)
    before = analyse_study(plan, tmp_path)
    grown = write_or_check_plan(tmp_path, plan_of(seeds=10))
    for arm, seed in grown.jobs():
        if seed > 2:
            folder = cell_directory(tmp_path, arm, seed)
            fake_run(folder, grown, arm, seed, gap=GAPS[arm.name], noise=1e-5, diverged=False)
    data = analyse_study(grown, tmp_path)
    assert verdicts(data) == verdicts(before) and verdicts(data)["nvfp4"] == "CANNOT TELL"
    assert data["arms"][1]["interval"]["count"] == 10 and data["notes"][0].startswith("EXPLORATORY: 7 of 10 seeds")


@pytest.mark.slow
def test_what_a_study_sees_is_that_of_all_its_seeds_also_where_the_first_look_decides(tmp_path):
    plan = plan_of(seeds=5, looks=(3, 5), candidates=("nvfp4",))
    late = {(arm.name, seed) for arm in plan.arms for seed in (3, 4)}
    data = analyse_study(fake_parity(tmp_path, plan, skip=late), tmp_path)
    interval = next(arm for arm in data["arms"] if arm["name"] == "nvfp4")["verdict"]["interval"]
    alpha = FAIL_SHARE * 0.05 * (1 - 0.6**2)
    gap = plan.margin.value + detectable_excess(interval["sd"], 5, alpha=alpha, freedom=2)
    assert data["passed"] and interval["count"] == 3
    assert f"a gap of {plan.margin.format_gap(gap)} would" in data["sees"][0]


@pytest.mark.slow
def test_a_grid_that_was_planned_with_fewer_seeds_of_some_arms_is_complete(tmp_path):
    plan = plan_of()
    arms = tuple(dataclasses.replace(arm, seeds=1) if arm.name == "mxfp4" else arm for arm in plan.arms)
    plan = dataclasses.replace(plan, arms=arms)
    data = analyse_study(fake_parity(tmp_path, plan, skip={("mxfp4", 1), ("mxfp4", 2)}), tmp_path)
    assert data["complete"] and data["runs"]["planned"] == 13
    assert load_plan(tmp_path).jobs() == plan.jobs()


@pytest.mark.slow
@pytest.mark.parametrize("gap", [-0.03, 0.03])
def test_a_token_overhead_has_a_sign(tmp_path, gap):
    """A candidate that is ahead saves about what one that is behind costs; clipped at 0, twins would have a cost."""
    data = analyse_study(fake_parity(tmp_path, gaps=GAPS | {"nvfp4": gap}), tmp_path)
    found = next(arm for arm in data["arms"] if arm["name"] == "nvfp4")["token_overhead"]
    assert 2 < abs(found["mean"]) < 60 and (found["mean"] > 0) == (gap > 0)


@pytest.mark.slow
def test_tokens_a_parameter_mean_one_thing(tmp_path):
    plan = fake_parity(tmp_path)
    data = analyse_study(plan, tmp_path)
    per = 60 * 256 / non_embedding_params(plan.base.model)
    assert f"({per:.2f} a parameter)" in data["scope"]
    assert data["arms"][1]["gap_curve"]["points"][-1]["x"] == pytest.approx(per)


def test_a_model_of_experts_says_what_a_token_passes():
    """By hand: of moe-demo's 8 experts, 3 x 128 x 128 numbers each in 4 layers, a token passes 2."""
    model = models.preset("moe-demo")
    passed_over = 4 * 6 * 3 * 128 * 128
    assert size_text(model) == f"1,774,976 parameters without embeddings ({1_774_976 - passed_over:,} a token)"
    assert size_text(models.preset("demo")).endswith("without embeddings")


@pytest.mark.slow
def test_a_gap_across_the_margin_ends_the_plan_and_says_what_a_larger_study_would_take(tmp_path):
    data = analyse_study(fake_parity(tmp_path, gaps={**GAPS, "nvfp4": 0.011}, noise=0.003), tmp_path)
    assert verdicts(data)["nvfp4"] == "CANNOT TELL"
    assert "seeds" not in data["next"][0] and "the plan is at its end" in data["next"][0]  # nothing to add seeds by
    assert "would be called FAIL in 80%" in data["sees"][0] and "planned with" in data["sees"][0]


def test_candidates_are_told_apart_or_said_not_to_be():
    gaps = {"a": {0: 0.10, 1: 0.20, 2: 0.15}, "b": {0: 0.60, 1: 0.71, 2: 0.64}, "c": {0: 0.3, 1: -0.2, 2: 0.4}}
    apart, alike = pairwise_comparison(["a", "b", "c"], gaps, "%")
    assert apart.startswith("b minus a: +0.500%") and apart.endswith(": told apart")
    assert alike.startswith("c minus a: +0.017%") and alike.endswith("these runs cannot tell them apart")
    (few,) = pairwise_comparison(["a", "d"], {**gaps, "d": {0: 0.1}}, "nats")
    assert few == "d minus a: +0.0000 nats over 1; too few seeds to tell them apart"
    assert pairwise_comparison(["a", "d"], {**gaps, "d": {}}, "%") == []


def test_many_candidates_are_named_by_verdict_in_one_line():
    words = [VerdictKind.PASS, VerdictKind.CANNOT_TELL, VerdictKind.FAIL, VerdictKind.PASS, VerdictKind.CANNOT_TELL]
    reasons, intervals = ["", "a few", "", "", "across"], [None, paired_t_interval([0.1]), None, None, None]
    found = [Verdict(*row) for row in zip("abcde", words, reasons, intervals, strict=True)]
    assert study_verdict_line(found) == f"VERDICT: PASS a, d; FAIL c; CANNOT TELL b, e ({SINGLE_RUN_REASON})"
    two = [dataclasses.replace(found[1], interval=paired_t_interval([0.1, 0.2]))]
    assert study_verdict_line([*found[2:], *two * 2]).endswith("e, b, b (2 seeds: no interval over fewer than 3)")
    assert study_verdict_line(found[2:]) == "VERDICT: FAIL c: ; PASS d: ; CANNOT TELL e: across"


def edit_last(folder, **changes):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[-1] = json.dumps(json.loads(lines[-1]) | changes)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_numbers_that_are_none_are_left_out(tmp_path):
    plan = fake_parity(tmp_path)
    arms = {arm.name: cell_directory(tmp_path, arm, 0) for arm in plan.arms}
    edit_last(arms["nvfp4"], **{"validation_loss/laws": "nan", "step_time_s": {}, "grad_norm": []})
    edit_last(arms["mxfp4"], **{"validation_loss/laws": {}})
    edit_last(arms["bf16"], validation_loss=0.0)  # no loss that others could be a percentage of
    found = {arm["name"]: arm for arm in analyse_study(plan, tmp_path)["arms"]}
    assert found["nvfp4"]["by_source"]["laws"]["count"] == found["mxfp4"]["by_source"]["laws"]["count"] == 2
    assert found["nvfp4"]["interval"]["count"] == 2
