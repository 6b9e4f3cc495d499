"""The sentence, from planted records. Oracle: what was planted."""

import copy
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import planted

from halfbyte.study import CANNOT_TELL, DO_NOT, SWITCH, evidence_rows, make_decision, write_playbook_report


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return planted.study(tmp_path_factory.mktemp("healthy"))


def shown(records, folder):
    """The decision and the page's text."""
    decision, html = write_playbook_report(records, folder)
    return decision, html.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_healthy_recipe_is_switched_to_with_its_error_rate(healthy, tmp_path):
    decision, page = shown(planted.records(tmp_path, found=healthy), tmp_path)
    assert decision.word == SWITCH and "nvfp4" in decision.sentence and "5%" in decision.sentence
    before, _, after = decision.sentence.partition(
        ": "
    )  # 15,360 tokens: that is said before anything else, not in green
    assert "tokens a parameter" in before and "far too few" in before and "Of 2 that pass" in after
    assert decision.small and 'class="verdict "' in page
    assert "1.40x (1.00x in training)" in decision.speed
    assert page.index("SWITCH to nvfp4") < page.index("Point by point") < page.index("why a result is missing")


def test_a_broken_recipe_is_not_and_the_radar_is_named(healthy, tmp_path):
    """The loss of the study is healthy: the alarm alone decides."""
    found = copy.deepcopy(healthy)
    for arm in found["arms"]:
        if arm["kind"] == "candidate":
            arm["radar"][0]["alarms"] = ["wgrad: mean gain 0.8800, where nvfp4 gives 0.9990: layer 1 mlp/down"]
    decision, page = shown(planted.records(tmp_path, found=found), tmp_path)
    assert decision.word == DO_NOT and "radar" in decision.sentence and "layer 1 mlp/down" in decision.sentence
    assert "RADAR ALARM" in page
    verdicts = {point.what: point.verdict for point in evidence_rows(planted.records(tmp_path / "again", found=found))}
    assert verdicts["radar: alarms"] == "FAIL"


def test_losses_beyond_the_margin_are_not_switched_to(tmp_path):
    gaps = {**planted.HEALTHY, "nvfp4": 0.1, "nvfp4_no_rht": 0.12}
    decision = make_decision(planted.records(tmp_path, found=planted.study(tmp_path / "study", gaps=gaps)))
    assert decision.word == DO_NOT and "stay with fp8" in decision.sentence and "5%" in decision.sentence


@pytest.mark.slow
def test_one_good_candidate_is_enough(tmp_path):
    gaps = {**planted.HEALTHY, "nvfp4_no_rht": 0.12}
    decision = make_decision(planted.records(tmp_path, found=planted.study(tmp_path / "study", gaps=gaps)))
    assert decision.sentence.startswith("SWITCH to nvfp4,") and "that pass" not in decision.sentence


@pytest.mark.slow
def test_runs_of_a_real_length_are_switched_to_without_reserve(healthy, tmp_path):
    found = copy.deepcopy(healthy)
    for arm in found["arms"]:
        for curve in arm["curves"]:
            curve["tokens"] = [1_000_000 * count for count in curve["tokens"]]
    decision, page = shown(planted.records(tmp_path, found=found), tmp_path)
    assert decision.sentence.startswith("SWITCH to nvfp4:") and "far too few" not in decision.sentence
    assert not decision.small and 'class="verdict good"' in page


@pytest.mark.parametrize("seeds", [0, 1])
def test_too_little_budget_cannot_tell_and_says_what_it_would_take(tmp_path, seeds):
    found = planted.study(tmp_path / "study", seeds=seeds) if seeds else None
    decision, page = shown(planted.records(tmp_path, found=found), tmp_path)
    assert decision.word == CANNOT_TELL and decision.takes in decision.sentence
    steps = 60 if seeds else 30
    where = "in a new directory: --budget (\\d+)m --seeds 3" if seeds else "the same command with --budget (\\d+)m"
    minutes = re.fullmatch(f"about 3 seeds of {steps} steps:? {where}", decision.takes)[1]
    assert int(minutes) * 60 * 0.92 >= 100 + 60 + 3 * (10 + steps)
    assert "It would take" in page


@pytest.mark.slow(fast_cases=["0"])
@pytest.mark.parametrize("done", [0, 1, 2, 7, 12])
def test_a_study_that_the_clock_ended_says_so_and_what_the_whole_would_take(tmp_path, done):
    found = planted.study(tmp_path / "study", done=done)
    made = planted.records(tmp_path, found=found, seconds=500.0)
    decision, page = shown(made, tmp_path)
    assert decision.word == CANNOT_TELL and f"{done} of 15 runs" in decision.sentence and f"{done} of 15 runs" in page
    assert (made.directory.parent / "playbook.html").read_text() == page
    minutes = re.search(r"the same command with --budget (\d+)m", decision.takes)[1]
    assert int(minutes) * 60 * 0.92 >= 100 + 500 * 15 / max(1, done)  # as it went, not as it was planned


@pytest.mark.slow
def test_an_alarm_needs_no_whole_study(tmp_path):
    found = planted.study(tmp_path / "study", done=7)
    for arm in found["arms"]:
        for probe in arm["radar"]:
            probe["alarms"] = ["wgrad: gain 0.88"]
    assert make_decision(planted.records(tmp_path, found=found)).word == DO_NOT


@pytest.mark.slow
def test_an_interval_across_the_margin_takes_more_seeds(tmp_path):
    found = planted.study(tmp_path / "study", noise=0.01)
    decision = make_decision(planted.records(tmp_path, found=found))
    assert decision.word == CANNOT_TELL
    told = re.search(r"--seeds (\d+)|more than 64 seeds", decision.takes)
    assert told and (told[1] is None or int(told[1]) > 3)


@pytest.mark.slow
def test_a_stalling_input_is_not_the_recipes_speed(healthy, tmp_path):
    """Neither is a slow recipe then a reason not to switch."""
    decision, page = shown(planted.records(tmp_path, found=healthy, wait=0.4, rates=(100.0, 90.0, 90.0)), tmp_path)
    assert decision.word == SWITCH and "not the recipe's" in decision.speed and "40%" in decision.speed
    assert "not the recipe&#x27;s" in page
    verdicts = {point.what: point.verdict for point in evidence_rows(planted.records(tmp_path / "again", wait=0.4))}
    assert verdicts["input wait, of a step"] == "FAIL"


def test_what_is_as_good_and_no_faster_on_its_own_units_is_no_reason_to_switch(healthy, tmp_path):
    decision = make_decision(planted.records(tmp_path, found=healthy, rates=(100.0, 99.0, 98.0)))
    assert decision.word == DO_NOT and "no faster" in decision.sentence
    emulated = planted.records(tmp_path / "e", found=healthy, rates=(100.0, 99.0, 98.0), execution="emulated")
    assert make_decision(emulated).word == SWITCH and "says nothing" in make_decision(emulated).speed


@pytest.mark.slow
def test_of_those_that_are_as_good_a_faster_one_is_switched_to(healthy, tmp_path):
    """Not the one whose interval ends lowest, which is no faster."""
    decision = make_decision(planted.records(tmp_path, found=healthy, rates=(100.0, 99.0, 130.0)))
    assert decision.sentence.startswith("SWITCH to nvfp4_no_rht,") and "that pass" not in decision.sentence
    assert decision.sentence.endswith("As good, and no faster here: nvfp4 0.99x.")


def test_a_loss_that_is_lower_by_more_than_the_margin_is_a_reason_to_switch(tmp_path):
    """It is not equal, so parity calls it FAIL."""
    found = planted.study(tmp_path / "study", gaps={**planted.HEALTHY, "nvfp4": -0.1, "nvfp4_no_rht": 0.12})
    slower = planted.records(tmp_path, found=found, rates=(100.0, 90.0, 90.0))
    decision = make_decision(slower)
    assert (
        decision.sentence.startswith("SWITCH to nvfp4,")
        and "lower than fp8's by more than 0.5%: -3." in decision.sentence
    )
    assert "95% interval over 3 seeds" in decision.sentence
    verdicts = {point.what: point.verdict for point in evidence_rows(slower)}
    assert verdicts["gap to the baseline, % [90% over seeds]"] == "nvfp4 BETTER, nvfp4_no_rht FAIL"
    found["controls"]["sensitive"] = None  # nothing shows that this study sees a broken one
    assert make_decision(planted.records(tmp_path / "blind", found=found)).word == CANNOT_TELL


@pytest.mark.slow
def test_a_loss_beyond_the_margin_keeps_its_error_rate_beside_an_alarm(tmp_path):
    found = planted.study(tmp_path / "study", gaps={**planted.HEALTHY, "nvfp4": 0.1})
    next(arm for arm in found["arms"] if arm["name"] == "nvfp4_no_rht")["radar"][0]["alarms"] = ["wgrad: gain 0.88"]
    decision = make_decision(planted.records(tmp_path, found=found))
    assert decision.word == DO_NOT and "at most 5%" in decision.sentence and "no matter of chance" in decision.sentence


def test_a_machine_that_fails_its_self_test_decides_nothing(healthy, tmp_path):
    assert make_decision(planted.records(tmp_path, found=healthy, passed=False)).word == CANNOT_TELL


def test_every_section_is_there_or_said_to_be_missing(tmp_path):
    _, page = shown(planted.records(tmp_path), tmp_path)
    for stage in ("trace", "inspect", "parity", "eval", "cluster"):
        assert f"no room for {stage}" in page
    assert "halfbyte bench tiny" in page and not re.search(r"(src|href)=[\"'](?!data:)", page) and "<script" not in page
