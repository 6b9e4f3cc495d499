"""The statistics on simulated runs whose gaps are known: coverage and error rates over 2,000 draws. Oracle: the truth
that was put in, and scipy's own t test for single numbers.

A simulated run is a loss curve with autocorrelated noise (AR(1), 0.95 from one evaluation to the next) that both arms
share in part, around a gap that itself varies from seed to seed.
"""

import importlib

import numpy as np
import pytest

from halfbyte.study import equivalence_test
from halfbyte.study.equivalence_test import (
    EquivalenceMargin,
    VerdictKind,
    block_bootstrap,
    judge_arm,
    moving_block_bootstrap,
    paired_t_interval,
    percentile_interval,
    seeds_needed,
    tost_p_value,
)

DRAWS = 2000
POINTS = 32


def ar1(random, shape, *, memory=0.95, sd=1.0):
    """Stationary autocorrelated noise [..., points]."""
    steps = random.normal(0, sd * np.sqrt(1 - memory**2), shape)
    steps[..., 0] = random.normal(0, sd, shape[:-1])
    for at in range(1, shape[-1]):
        steps[..., at] += memory * steps[..., at - 1]
    return steps


def simulate(gap, seeds, *, random, between=0.004, within=0.003):
    """Differences of the ends of paired runs, [draws, seeds, points]: a gap of the seed, and noise along the run."""
    of_seed = random.normal(gap, between, (DRAWS, seeds, 1))
    return of_seed + ar1(random, (DRAWS, seeds, POINTS), sd=within)


def ends(curves):
    return curves[..., -8:].mean(-1)


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_the_interval_over_seeds_covers_the_gap_as_often_as_it_says(seeds):
    """88 to 92%: three binomial standard errors of 2,000 draws around 90%."""
    gaps = ends(simulate(0.01, seeds, random=np.random.default_rng(seeds)))
    found = [paired_t_interval(d) for d in gaps]
    covered = np.mean([f.low <= 0.01 <= f.high for f in found])
    assert 0.88 <= covered <= 0.92


def test_an_interval_within_one_run_does_not_cover_the_gap_over_seeds():
    """Why it is labelled as what it is: of one run's bootstrap intervals far fewer than 90% hold the gap."""
    curves = simulate(0.01, 1, random=np.random.default_rng(0))[:300, 0]
    intervals = [moving_block_bootstrap(curve, draws=200) for curve in curves]
    assert np.mean([low <= 0.01 <= high for low, high in intervals]) < 0.5


def verdicts(gap, *, margin=0.02, seeds=4, rng=0):
    curves = ends(simulate(gap, seeds, random=np.random.default_rng(rng)))
    words = [judge_arm("x", dict(enumerate(d)), EquivalenceMargin(margin, relative=False)).word for d in curves]
    return {word: words.count(word) / DRAWS for word in VerdictKind}


def test_error_rates_at_the_margin():
    """A gap of exactly the margin passes in 5% of draws and fails in a quarter of that (FAIL_SHARE), within three
    binomial standard errors."""
    rates = verdicts(0.02)
    assert 0.035 <= rates[VerdictKind.PASS] <= 0.065
    assert 0.005 <= rates[VerdictKind.FAIL] <= 0.020


def test_gap_beyond_at_90_percent_is_no_fail_yet():
    """Student's interval of 90% is beyond the margin, that of 97.5% is not: the reason shows the latter."""
    gaps = {0: 0.7, 1: 0.9, 2: 1.1}
    found = judge_arm("nvfp4", gaps, EquivalenceMargin(0.5, relative=True))
    assert paired_t_interval(list(gaps.values())).low > 0.5
    assert found.word is VerdictKind.CANNOT_TELL and found.interval.low < 0.5
    assert "97.5% interval" in found.reason and "across" in found.reason


@pytest.mark.slow
def test_beyond_the_margin_passes_less_and_inside_fails_less():
    assert verdicts(0.025)[VerdictKind.PASS] <= 0.05
    assert verdicts(0.015)[VerdictKind.FAIL] <= 0.05


@pytest.mark.slow
def test_a_twin_fails_at_most_at_the_stated_rate():
    """No gap at all; even with a margin a tenth of the noise, at most 5% a side."""
    assert verdicts(0.0)[VerdictKind.FAIL] <= 0.001
    assert verdicts(0.0, margin=0.0004)[VerdictKind.FAIL] <= 0.115


def test_power_is_what_the_number_of_seeds_promises():
    """With as many seeds as `seeds_needed` says, the verdict decides in 80% of draws, and in more where the spread is
    what three seeds estimated."""
    known = paired_t_interval([0.005, 0.010, 0.015])
    count = seeds_needed(known, 0.02)
    rates = verdicts(0.01, seeds=count, rng=7)
    assert count == pytest.approx(5, abs=1)
    assert rates[VerdictKind.PASS] > 0.8


def test_single_numbers_against_scipy():
    stats = importlib.import_module("scipy.stats")  # three seconds, of these tests and not of every worker
    d = [0.011, 0.013, 0.008, 0.02]
    found = paired_t_interval(d)
    low, high = stats.t.interval(0.9, 3, loc=np.mean(d), scale=stats.sem(d))
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12)
    upper = stats.ttest_1samp(d, 0.02, alternative="less").pvalue
    lower = stats.ttest_1samp(d, -0.02, alternative="greater").pvalue
    assert tost_p_value(found, 0.02) == pytest.approx(max(upper, lower), rel=1e-9)


def test_fewer_than_three_seeds_have_no_interval_and_the_verdict_says_so():
    said = ("single run: no interval over seeds", "2 seeds: no interval over fewer than 3")
    for gaps, why in zip(({0: 0.001}, {0: 0.001, 1: 0.0012}), said, strict=True):
        found = judge_arm("nvfp4", gaps, EquivalenceMargin(0.5, relative=True))
        assert found.word is VerdictKind.CANNOT_TELL
        assert why in found.line()
        assert found.interval.low is None


def test_divergence_fails_and_is_counted():
    found = judge_arm("mxfp4", {0: 0.1, 1: 0.1, 2: 0.1}, EquivalenceMargin(0.5, relative=True), diverged=1)
    assert found.word is VerdictKind.FAIL and "diverged in 1 of 4 seeds" in found.reason


def test_a_better_candidate_is_not_an_equal_one():
    found = judge_arm("fp8", {0: -1.0, 1: -1.01, 2: -0.99}, EquivalenceMargin(0.5, relative=True))
    assert found.word is VerdictKind.FAIL and "better than the baseline" in found.reason


def test_a_gap_at_the_margin_cannot_be_decided_by_more_seeds():
    assert seeds_needed(paired_t_interval([0.019, 0.02, 0.021]), 0.02) is None


def test_differences_must_be_finite():
    with pytest.raises(ValueError, match="finite differences"):
        paired_t_interval([0.1, float("nan")])


def test_a_bootstrap_of_a_long_run_is_drawn_in_parts_and_says_the_same(monkeypatch):
    values = np.random.default_rng(0).normal(size=50)
    whole = block_bootstrap(values, of=np.median)
    monkeypatch.setattr(equivalence_test, "MAX_BOOTSTRAP_ELEMENTS", 120)
    assert percentile_interval(block_bootstrap(values, of=np.median)) == percentile_interval(whole)
