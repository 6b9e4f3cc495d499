"""Margins as typed."""

import pytest

from halfbyte.parity.margin import Margin, parse_margin


def test_units():
    assert parse_margin("0.5%") == Margin(0.5, relative=True)
    assert parse_margin("0.02nats") == parse_margin("2e-2 nat") == Margin(0.02, relative=False)
    assert str(parse_margin("0.5 %")) == "0.5%"
    assert Margin(0.5, relative=True).measure(3.03, 3.0) == pytest.approx(1.0)


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
