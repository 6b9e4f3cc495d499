"""A study keeps its 5% over looks and candidates: simulated studies in which every PASS is wrong, under the rules and
through the whole runner. Oracle: the gap that was put in. docs/parity.md has the table of 10,000 studies a row."""

import math

import numpy as np
import pytest
from fakes import rate

from halfbyte.parity.statistics import spending
from halfbyte.parity.verdict import Word, judge_study

STUDIES = 800
MOST = 0.05 + 3 * np.sqrt(0.05 * 0.95 / STUDIES)  # three binomial standard errors: 7.3%


@pytest.mark.slow(fast_cases=["looks0-1"])
@pytest.mark.parametrize("looks, candidates", [((3, 4, 5, 6, 7, 8), 1), ((3,), 8)])
def test_a_candidate_at_the_margin_passes_in_5_percent_of_studies_at_most(looks, candidates):
    random = np.random.default_rng(1)
    studies = rate.gaps(random, "normal", studies=STUDIES, candidates=candidates, seeds=looks[-1])
    assert np.mean([rate.passes(study, looks) for study in studies]) <= MOST


@pytest.mark.slow
def test_a_look_that_is_asked_for_after_two_seeds_is_not_given():
    """docs/parity.md has what it would do to 10,000 studies."""
    assert rate.granted((8,)) == rate.granted((3, 8)) == (3,)


def test_looks_and_candidates_that_nobody_planned_would_not_keep_it():
    """Why there is a plan: the same studies judged at 5% each time."""
    random = np.random.default_rng(1)
    studies = rate.gaps(random, "normal", studies=300, candidates=1, seeds=8)
    assert np.mean([rate.passed_before(study, (3, 4, 5, 6, 7, 8)) for study in studies]) > 0.1
    many = rate.gaps(random, "normal", studies=100, candidates=8, seeds=3)
    assert np.mean([rate.passed_before(study, (3,)) for study in many]) > 0.2


@pytest.mark.parametrize("looks", [(3,), (3, 5, 8), (3, 4, 5, 6, 7, 8), (4, 16)])
def test_what_the_looks_spend_sums_to_five_percent(looks):
    assert sum(spending(looks)) == pytest.approx(0.05) and min(spending(looks)) > 0


def test_one_look_at_one_candidate_is_the_plain_interval_and_more_seeds_change_nothing():
    gaps = {0: 0.10, 1: 0.15, 2: 0.12, 3: 2.0, 4: 2.0}
    (found,) = judge_study({"a": gaps}, rate.MARGIN, seeds=range(5), looks=(3,)).values()
    assert found.word is Word.PASS and found.interval.count == 3 and found.interval.level == pytest.approx(0.9)
    assert found.seeds is None
    assert judge_study({"a": gaps | {4: math.inf}}, rate.MARGIN, seeds=range(5), looks=(3,))["a"] == found
    blind = {seed: math.inf if seed > 2 else 0.1 for seed in range(5)}  # a control is not seen to fail there either
    assert judge_study({"a": blind}, rate.MARGIN, seeds=range(5), looks=(3,))["a"].word is Word.PASS


def test_a_word_stays_once_a_look_has_given_it_and_a_look_needs_all_of_its_seeds():
    seeds, looks = range(5), (3, 5)
    early = {0: 0.1, 1: 0.1001, 2: 0.0999}
    late = judge_study({"a": {**early, 3: 0.6, 4: -0.3}}, rate.MARGIN, seeds=seeds, looks=looks)["a"]
    assert late.word is Word.PASS and late.interval.count == 3
    waiting = judge_study({"a": {0: 0.1, 2: 0.1, 3: 0.1, 4: 0.1}}, rate.MARGIN, seeds=seeds, looks=looks)["a"]
    assert waiting.word is Word.CANNOT_TELL and waiting.seeds == 3
    unclear = judge_study({"a": {0: 0.1, 1: 0.4, 2: -0.2}}, rate.MARGIN, seeds=seeds, looks=looks)["a"]
    assert unclear.word is Word.CANNOT_TELL and unclear.seeds == 5


def test_each_pass_makes_the_next_easier():
    """Holm: beside one that fails, the middling one needs a narrower interval than beside one that passes."""
    good, middling, bad = {0: 0.0, 1: 0.001, 2: -0.001}, {0: 0.0, 1: 0.3, 2: 0.15}, {0: 9.0, 1: 9.1, 2: 9.2}
    word = lambda *arms: judge_study(dict(enumerate(arms)), rate.MARGIN, seeds=range(3), looks=(3,))[0].word  # noqa: E731
    assert word(middling, bad) is Word.CANNOT_TELL
    assert word(middling, good) is Word.PASS
    assert word(middling) is Word.PASS


@pytest.mark.slow
def test_a_study_through_the_whole_runner_is_judged_as_planned(tmp_path):
    """Command, plan, runner, report and its advice, with losses in place of training."""
    random = np.random.default_rng(0)
    at_margin = rate.gaps(random, "normal", studies=1, candidates=1, seeds=5)[0]
    found = rate.one_study(tmp_path / "a", at_margin, (3, 5), random)
    assert found["plan"]["looks"] == [3, 5] and sum(found["plan"]["levels"]) == pytest.approx(0.05)
    assert found["arms"][1]["verdict"]["word"] == "CANNOT TELL" and found["complete"]
    assert not any("--seeds" in line or "same command" in line for line in found["next"])
    begun = rate.one_study(tmp_path / "c", at_margin, (2,), random)  # its report says how it goes on
    assert begun["plan"]["looks"] == [3] and len(begun["plan"]["seeds"]) == 3 and begun["complete"]
    clear = rate.one_study(tmp_path / "b", at_margin - rate.MARGIN.value, (3, 5), random)
    assert clear["passed"] and clear["complete"] and clear["runs"]["planned"] == 4 * 3  # decided at the first look
