"""Verdicts and numbers of a parity whose gaps are known."""

import json

import pytest
from fakes import GAPS, fake_parity, plan_of

from halfbyte.parity.analysis import analyse, verdict_line
from halfbyte.parity.between import between
from halfbyte.parity.report import overhead_text
from halfbyte.parity.runner import run_directory
from halfbyte.parity.verdict import SINGLE, Verdict, Word


def verdicts(data):
    return {arm["name"]: arm["verdict"]["word"] for arm in data["arms"] if "verdict" in arm}


def test_known_gaps_are_judged_right(tmp_path):
    data = analyse(fake_parity(tmp_path), tmp_path)
    assert verdicts(data) == {
        "nvfp4": "PASS", "mxfp4": "FAIL", "bf16-twin": "PASS", "control-fp4_one_scale": "FAIL",
    }  # fmt: skip
    assert data["verdict"].startswith("VERDICT: PASS nvfp4") and "; FAIL mxfp4" in data["verdict"]
    assert not data["passed"] and data["complete"] and data["controls"]["sensitive"]
    assert data["controls"]["noise_floor"] < 0.1
    assert (
        "15,360 tokens" in data["scope"]
        and "emulation" in data["scope"]
        and "nothing about other sizes" in data["scope"]
    )


def test_gaps_by_source_tokens_and_curve(tmp_path):
    data = analyse(fake_parity(tmp_path), tmp_path)
    mxfp4 = next(arm for arm in data["arms"] if arm["name"] == "mxfp4")
    assert set(mxfp4["by_source"]) == {"laws", "<b>news</b>"}
    assert mxfp4["by_source"]["laws"]["mean"] == pytest.approx(100 * GAPS["mxfp4"] / 2.9, rel=0.1)
    assert mxfp4["token_overhead"]["mean"] > 5
    fit = mxfp4["gap_curve"]["fit"]
    assert fit["slope"]["mean"] > 0 and fit["low"][-1] < fit["y"][-1] < fit["high"][-1]
    assert mxfp4["interval"]["count"] == 3 and mxfp4["within_run"] is None


@pytest.mark.parametrize("gap, count, above", [(0.0, 3, 0), (3.0, 0, 3), ("one", 2, 1)])
def test_seeds_without_a_token_overhead_are_counted(gap, count, above, tmp_path):
    """A candidate that ends above the baseline's first validation has none: the baseline was there before it began."""
    plan = fake_parity(tmp_path, gaps=GAPS if gap == "one" else GAPS | {"nvfp4": gap})
    if gap == "one":
        folder = run_directory(tmp_path, next(arm for arm in plan.arms if arm.name == "nvfp4"), 1)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = [{**row, "validation_loss": 9.0} if "validation_loss" in row else row for row in rows]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    found = next(arm for arm in analyse(plan, tmp_path)["arms"] if arm["name"] == "nvfp4")["token_overhead"]
    assert (found["count"], found["seeds"], found["above"]) == (count, 3, above)
    assert (found["mean"] is None) == (count == 0)
    told = f"({count} of 3 seeds; {above} ended above the baseline's whole curve)"
    assert overhead_text(found).endswith(told) == (above > 0)


def test_two_seeds_say_that_there_is_no_interval(tmp_path):
    data = analyse(fake_parity(tmp_path, plan_of(seeds=2)), tmp_path)
    assert set(verdicts(data).values()) == {"CANNOT TELL"}
    assert "single run: no interval over seeds" in data["verdict"]
    assert "--seeds 3" in data["next"][0]
    (first, *_) = next(arm for arm in data["arms"] if arm["name"] == "nvfp4")["within_run"]
    assert "nothing about another seed" in first["is"] and first["low"] <= first["mean"] <= first["high"]


def test_half_of_the_arms_missing_is_said(tmp_path):
    skip = {(name, 2) for name in GAPS}
    data = analyse(fake_parity(tmp_path, skip=skip), tmp_path)
    assert not data["complete"] and data["runs"]["done"] == 10 and len(data["runs"]["missing"]) == 5


def test_a_diverged_candidate_fails_and_a_diverged_baseline_is_no_pair(tmp_path):
    data = analyse(fake_parity(tmp_path / "a", diverged={("nvfp4", 1)}), tmp_path / "a")
    assert "FAIL nvfp4: diverged in 1 of 3 seeds" in data["verdict"] and data["complete"]
    data = analyse(fake_parity(tmp_path / "b", diverged={("bf16", 1), ("nvfp4", 1)}), tmp_path / "b")
    assert "CANNOT TELL nvfp4: single run" in data["verdict"]


def test_a_pass_is_withheld_where_the_broken_recipe_does_not_fail(tmp_path):
    data = analyse(fake_parity(tmp_path, gaps={**GAPS, "control-fp4_one_scale": 0.001}), tmp_path)
    assert data["controls"]["sensitive"] is False
    assert "CANNOT TELL nvfp4" in data["verdict"] and "this comparison is blind" in data["verdict"]


def test_a_pass_is_withheld_where_the_broken_recipe_cannot_be_told(tmp_path):
    gaps = {**GAPS, "control-fp4_one_scale": 0.0125}  # 0.47%: more seeds would tell it from the margin, three do not
    data = analyse(fake_parity(tmp_path, gaps=gaps, noise=0.0015), tmp_path)
    control = data["controls"]["broken"]
    assert control["word"] == "CANNOT TELL" and control["seeds"] > 3 and data["controls"]["sensitive"] is False
    assert "CANNOT TELL nvfp4" in data["verdict"] and "this comparison is blind" in data["verdict"]


def test_a_gap_across_the_margin_says_how_many_seeds_would_decide(tmp_path):
    data = analyse(fake_parity(tmp_path, gaps={**GAPS, "nvfp4": 0.011}, noise=0.003), tmp_path)
    assert verdicts(data)["nvfp4"] == "CANNOT TELL"
    assert "seeds would probably decide" in data["next"][0] or "more than 64 seeds" in data["next"][0]


def test_candidates_are_told_apart_or_said_not_to_be():
    gaps = {"a": {0: 0.10, 1: 0.20, 2: 0.15}, "b": {0: 0.60, 1: 0.71, 2: 0.64}, "c": {0: 0.3, 1: -0.2, 2: 0.4}}
    apart, alike = between(["a", "b", "c"], gaps, "%")
    assert apart.startswith("b minus a: +0.500%") and apart.endswith(": told apart")
    assert alike.startswith("c minus a: +0.017%") and alike.endswith("these runs cannot tell them apart")
    (few,) = between(["a", "d"], {**gaps, "d": {0: 0.1}}, "nats")
    assert few == "d minus a: +0.0000 nats over 1; too few seeds to tell them apart"
    assert between(["a", "d"], {**gaps, "d": {}}, "%") == []


def test_many_candidates_are_named_by_verdict_in_one_line():
    words = [Word.PASS, Word.CANNOT_TELL, Word.FAIL, Word.PASS, Word.CANNOT_TELL]
    reasons = ["", f"{SINGLE} (+0.1% over 1)", "", "", "across"]
    found = [Verdict(*row, None) for row in zip("abcde", words, reasons, strict=True)]
    assert verdict_line(found) == f"VERDICT: PASS a, d; FAIL c; CANNOT TELL b, e ({SINGLE})"
    assert verdict_line(found[2:]) == "VERDICT: FAIL c: ; PASS d: ; CANNOT TELL e: across"
