"""A study keeps its 5% over looks and candidates: simulated studies in which every PASS is wrong, under the rules and
through the whole runner. Oracle: the gap that was put in. docs/parity.md has the table of 10,000 studies a row."""

import importlib
import math

import numpy as np
import pytest
from fakes import rate

from halfbyte.study.equivalence_test import VerdictKind, alpha_spending, judge_all_arms, skewed_error_rate

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
    assert sum(alpha_spending(looks)) == pytest.approx(0.05) and min(alpha_spending(looks)) > 0


def test_one_look_at_one_candidate_is_the_plain_interval_and_more_seeds_change_nothing():
    gaps = {0: 0.10, 1: 0.15, 2: 0.12, 3: 2.0, 4: 2.0}
    (found,) = judge_all_arms({"a": gaps}, rate.MARGIN, seeds=range(5), looks=(3,)).values()
    assert found.word is VerdictKind.PASS and found.interval.count == 3 and found.interval.level == pytest.approx(0.9)
    assert found.seeds is None
    assert judge_all_arms({"a": gaps | {4: math.inf}}, rate.MARGIN, seeds=range(5), looks=(3,))["a"] == found
    blind = {seed: math.inf if seed > 2 else 0.1 for seed in range(5)}  # a control is not seen to fail there either
    assert judge_all_arms({"a": blind}, rate.MARGIN, seeds=range(5), looks=(3,))["a"].word is VerdictKind.PASS


def test_a_word_stays_once_a_look_has_given_it_and_a_look_needs_all_of_its_seeds():
    seeds, looks = range(5), (3, 5)
    early = {0: 0.1, 1: 0.1001, 2: 0.0999}
    late = judge_all_arms({"a": {**early, 3: 0.6, 4: -0.3}}, rate.MARGIN, seeds=seeds, looks=looks)["a"]
    assert late.word is VerdictKind.PASS and late.interval.count == 3
    waiting = judge_all_arms({"a": {0: 0.1, 2: 0.1, 3: 0.1, 4: 0.1}}, rate.MARGIN, seeds=seeds, looks=looks)["a"]
    assert waiting.word is VerdictKind.CANNOT_TELL and waiting.seeds == 3
    unclear = judge_all_arms({"a": {0: 0.1, 1: 0.4, 2: -0.2}}, rate.MARGIN, seeds=seeds, looks=looks)["a"]
    assert unclear.word is VerdictKind.CANNOT_TELL and unclear.seeds == 5


def test_each_pass_makes_the_next_easier():
    """Holm: beside one that fails, the middling one needs a narrower interval than beside one that passes."""
    good, middling, bad = {0: 0.0, 1: 0.001, 2: -0.001}, {0: 0.0, 1: 0.3, 2: 0.15}, {0: 9.0, 1: 9.1, 2: 9.2}
    word = lambda *arms: judge_all_arms(dict(enumerate(arms)), rate.MARGIN, seeds=range(3), looks=(3,))[0].word  # noqa: E731
    assert word(middling, bad) is VerdictKind.CANNOT_TELL
    assert word(middling, good) is VerdictKind.PASS
    assert word(middling) is VerdictKind.PASS


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


@pytest.mark.parametrize("looks", [(3,), (3, 5, 8)])
def test_wrong_words_by_noise_shape_are_as_documented(looks):
    """docs/parity.md has 1,000 studies per row. Here 400, within three binomial standard errors of its bounds."""
    found = {kind: rate.word_rates(kind, looks, 400) for kind in rate.SHAPES}
    below = lambda share: share + 3 * np.sqrt(share * (1 - share) / 400)  # noqa: E731
    for kind in ("normal", "t3"):
        assert found[kind]["PASS"] <= below(0.05) and found[kind]["FAIL"] <= below(0.0125)
    assert found["mild left"]["FAIL"] <= below(0.05), "a FAIL at the level of a PASS is wrong in 12% here"
    assert found["skewed left"]["FAIL"] <= below(0.152) and found["skewed"]["PASS"] <= below(0.277)
    assert found["skewed"]["FAIL"] <= below(0.0125) and found["skewed left"]["PASS"] <= below(0.05)


@pytest.mark.parametrize("seeds", [3, 5])
def test_gap_stated_for_80_percent_is_called_fail_that_often(seeds):
    """The spread is estimated by an earlier study of as many seeds. Taken as known, three seeds gave 63%."""
    assert rate.stated_power(seeds, 1500) == pytest.approx(0.8, abs=0.031)  # three standard errors


@pytest.mark.parametrize("count, alpha", [(3, 0.05), (3, 0.0125), (8, 0.05)])
def test_skewed_error_rate_is_that_of_simulated_studies(count, alpha):
    """Oracle: the t test of SciPy on log-normal draws, both tails."""
    ttest_1samp = importlib.import_module("scipy.stats").ttest_1samp  # three seconds, of this test only
    noise = rate.draw(np.random.default_rng(7), "skewed", (20_000, count))
    ends = {"less": noise, "greater": -noise}  # a PASS misses worse seeds, a FAIL better ones
    for side, draws in ends.items():
        wrong = np.mean(ttest_1samp(draws, 0.0, axis=1, alternative=side).pvalue < alpha)
        assert skewed_error_rate(count, alpha) == pytest.approx(wrong, abs=0.012)
