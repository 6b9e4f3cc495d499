"""The statistics on simulated runs whose gaps are known: coverage and error rates over 2,000 draws. Oracle: the truth
that was put in, and scipy's own t test for single numbers.

A simulated run is a loss curve with autocorrelated noise (AR(1), 0.95 from one evaluation to the next) that both arms
share in part, around a gap that itself varies from seed to seed.
"""

import importlib

import numpy as np
import pytest

from halfbyte.parity import statistics
from halfbyte.parity.margin import Margin
from halfbyte.parity.statistics import (
    block_draws,
    equivalence_p,
    middle,
    moving_block_bootstrap,
    over_seeds,
    seeds_needed,
)
from halfbyte.parity.verdict import Word, judge

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
    found = [over_seeds(d) for d in gaps]
    covered = np.mean([f.low <= 0.01 <= f.high for f in found])
    assert 0.88 <= covered <= 0.92


def test_an_interval_within_one_run_does_not_cover_the_gap_over_seeds():
    """Why it is labelled as what it is: of one run's bootstrap intervals far fewer than 90% hold the gap."""
    curves = simulate(0.01, 1, random=np.random.default_rng(0))[:300, 0]
    intervals = [moving_block_bootstrap(curve, draws=200) for curve in curves]
    assert np.mean([low <= 0.01 <= high for low, high in intervals]) < 0.5


def verdicts(gap, *, margin=0.02, seeds=4, rng=0):
    curves = ends(simulate(gap, seeds, random=np.random.default_rng(rng)))
    words = [judge("x", dict(enumerate(d)), Margin(margin, relative=False)).word for d in curves]
    return {word: words.count(word) / DRAWS for word in Word}


def test_error_rates_at_the_margin():
    """A gap of exactly the margin passes in 5% of draws and fails in 5%, within three binomial standard errors."""
    rates = verdicts(0.02)
    assert 0.035 <= rates[Word.PASS] <= 0.065
    assert 0.035 <= rates[Word.FAIL] <= 0.065


@pytest.mark.slow
def test_beyond_the_margin_passes_less_and_inside_fails_less():
    assert verdicts(0.025)[Word.PASS] <= 0.05
    assert verdicts(0.015)[Word.FAIL] <= 0.05


@pytest.mark.slow
def test_a_twin_fails_at_most_at_the_stated_rate():
    """No gap at all; even with a margin a tenth of the noise, at most 5% a side."""
    assert verdicts(0.0)[Word.FAIL] <= 0.001
    assert verdicts(0.0, margin=0.0004)[Word.FAIL] <= 0.115


def test_power_is_what_the_number_of_seeds_promises():
    """With as many seeds as `seeds_needed` says, the verdict decides in about 80% of draws."""
    known = over_seeds([0.005, 0.010, 0.015])
    count = seeds_needed(known, 0.02)
    rates = verdicts(0.01, seeds=count, rng=7)
    assert count == pytest.approx(4, abs=1)
    assert rates[Word.PASS] > 0.75


def test_single_numbers_against_scipy():
    stats = importlib.import_module("scipy.stats")  # three seconds, of these tests and not of every worker
    d = [0.011, 0.013, 0.008, 0.02]
    found = over_seeds(d)
    low, high = stats.t.interval(0.9, 3, loc=np.mean(d), scale=stats.sem(d))
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12)
    upper = stats.ttest_1samp(d, 0.02, alternative="less").pvalue
    lower = stats.ttest_1samp(d, -0.02, alternative="greater").pvalue
    assert equivalence_p(found, 0.02) == pytest.approx(max(upper, lower), rel=1e-9)


def test_fewer_than_three_seeds_have_no_interval_and_the_verdict_says_so():
    said = ("single run: no interval over seeds", "2 seeds: no interval over fewer than 3")
    for gaps, why in zip(({0: 0.001}, {0: 0.001, 1: 0.0012}), said, strict=True):
        found = judge("nvfp4", gaps, Margin(0.5, relative=True))
        assert found.word is Word.CANNOT_TELL
        assert why in found.line()
        assert found.interval.low is None


def test_divergence_fails_and_is_counted():
    found = judge("mxfp4", {0: 0.1, 1: 0.1, 2: 0.1}, Margin(0.5, relative=True), diverged=1)
    assert found.word is Word.FAIL and "diverged in 1 of 4 seeds" in found.reason


def test_a_better_candidate_is_not_an_equal_one():
    found = judge("fp8", {0: -1.0, 1: -1.01, 2: -0.99}, Margin(0.5, relative=True))
    assert found.word is Word.FAIL and "better than the baseline" in found.reason


def test_a_gap_at_the_margin_cannot_be_decided_by_more_seeds():
    assert seeds_needed(over_seeds([0.019, 0.02, 0.021]), 0.02) is None


def test_differences_must_be_finite():
    with pytest.raises(ValueError, match="finite differences"):
        over_seeds([0.1, float("nan")])


def test_a_bootstrap_of_a_long_run_is_drawn_in_parts_and_says_the_same(monkeypatch):
    values = np.random.default_rng(0).normal(size=50)
    whole = block_draws(values, of=np.median)
    monkeypatch.setattr(statistics, "MOST_AT_ONCE", 120)
    assert middle(block_draws(values, of=np.median)) == middle(whole)
