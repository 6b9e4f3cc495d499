"""The validation split. Property: every byte goes to exactly one side, both sides are used, order plays no part."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.data.encode import TRAIN, VALIDATION, SourceSummary, SplitRule, document_key, merge_summaries

texts = st.lists(st.text(min_size=1).map(str.encode), min_size=1, max_size=20)


def rule_for(documents: list[bytes], fraction: float) -> SplitRule:
    parts = [{"s": SourceSummary.from_document(document_key(d), len(d))} for d in documents]
    return SplitRule(fraction, merge_summaries(parts))


def divide(rule: SplitRule, document: bytes) -> list[tuple[str, bytes, bool]]:
    return rule.divide("s", document_key(document), start=0, data=document)


@pytest.mark.slow
@given(texts, st.floats(0.01, 0.9), st.randoms())
def test_order_plays_no_part(documents, fraction, rng):
    shuffled = random.Random(rng.random()).sample(documents, len(documents))
    a, b = rule_for(documents, fraction), rule_for(shuffled, fraction)
    assert [divide(a, d) for d in documents] == [divide(b, d) for d in documents]


@given(st.sets(st.text(min_size=12).map(str.encode), min_size=1, max_size=20), st.floats(0.1, 0.9))
def test_both_sides_are_used(documents, fraction):
    rule = rule_for(list(documents), fraction)
    used = {split for d in documents for split, _, _ in divide(rule, d)}
    assert used == {TRAIN, VALIDATION}


def test_share_is_about_the_fraction():
    documents = [f"document {i}".encode() for i in range(4000)]
    rule = rule_for(documents, 0.1)
    held = sum(divide(rule, d)[0][0] == VALIDATION for d in documents)
    assert 320 < held < 480  # 4 standard deviations of a binomial around 400


def test_single_document_gives_its_tail_after_a_line():
    document = b"".join(b"line %d\n" % i for i in range(1000))
    (first, train, _), (second, held, _) = divide(rule_for([document], 0.1), document)
    assert (first, second) == (TRAIN, VALIDATION)
    assert train.endswith(b"\n") and len(held) == pytest.approx(0.1 * len(document), rel=0.2)


def test_tail_is_found_in_pieces_too():
    document = b"".join(b"line %d\n" % i for i in range(1000))
    rule, key = rule_for([document], 0.3), document_key(document)
    parts = []
    for start in range(0, len(document), 700):
        parts += rule.divide("s", key, start=start, data=document[start : start + 700])
    assert b"".join(data for _, data, _ in parts) == document
    assert [split for split, _, _ in parts] == sorted(split for split, _, _ in parts)  # all train, then all validation
    assert [begins for split, _, begins in parts if split == VALIDATION].count(True) == 1
    assert [begins for split, _, begins in parts if split == TRAIN].count(True) == 1
    cut = rule._tail("s", key)
    for start in (cut, cut + 1):  # a piece that begins where the tail does, and one within it
        (part,) = rule.divide("s", key, start=start, data=document[start:])
        assert part == (VALIDATION, document[start:], start == cut)


def test_copies_of_a_document_stay_together():
    documents = [b"a", b"b", b"a", b"c"] * 5
    rule = rule_for(documents, 0.4)
    for d in documents:
        assert divide(rule, d) == divide(rule, bytes(d))
