"""Margins as typed."""

import pytest

from halfbyte.study.equivalence_test import (
    EquivalenceMargin,
    VerdictKind,
    alpha_spending,
    judge_arm,
    paired_t_interval,
    parse_margin,
    tost_p_value,
)


def test_units():
    assert parse_margin("0.5%") == EquivalenceMargin(0.5, relative=True)
    assert parse_margin("0.02nats") == parse_margin("2e-2 nat") == EquivalenceMargin(0.02, relative=False)
    assert str(parse_margin("0.5 %")) == "0.5%"
    assert EquivalenceMargin(0.5, relative=True).measure(3.03, 3.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "text, message",
    [
        ("0", "with its unit"),
        ("0%", "larger than 0"),
        ("0nats", "larger than 0"),
        ("-1%", "larger than 0"),
        ("nan%", "with its unit"),
        ("1e999%", "larger than 0"),
        ("1.2.3%", "with its unit"),
        ("five%", "with its unit"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_margin(text)


def test_candidate_that_is_better_by_less_than_the_margin_cannot_be_told():
    """The interval is below zero and across the margin: neither equal nor beyond it."""
    verdict = judge_arm("nvfp4", {0: -0.3, 1: -0.4, 2: -0.6}, EquivalenceMargin(0.5, relative=True))
    assert verdict.interval.low < -0.5 and verdict.interval.high < 0
    assert verdict.word is VerdictKind.CANNOT_TELL


def test_equal_gaps_at_the_margin_have_p_1():
    at_margin = paired_t_interval([0.5, 0.5, 0.5])
    assert at_margin.sd == 0
    assert (tost_p_value(at_margin, 0.5), tost_p_value(at_margin, 0.51)) == (1.0, 0.0)


def test_alpha_of_looks_grows_with_the_square_of_seeds():
    """Levels of looks after 3, 6 and 12 of 12 seeds: 1/16, 3/16 and 12/16 of 5%."""
    assert alpha_spending((3, 6, 12)) == pytest.approx((0.05 / 16, 3 * 0.05 / 16, 12 * 0.05 / 16))
