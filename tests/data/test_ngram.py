"""Baselines. Oracle: the formulas of the module, written again with dictionaries, one target at a time."""

import collections
import math

import numpy as np
import pytest

from halfbyte.data import Mixture, demo_corpus, ngram_baselines, open_dataset, prepare
from halfbyte.data.encode import rows_to_batch


def pairs(rows) -> list[tuple[int, int]]:
    batch = rows_to_batch(rows)
    scored = batch["targets"] != -1
    return list(zip(batch["tokens"][scored].tolist(), batch["targets"][scored].tolist(), strict=True))


def by_hand(train: list[tuple[int, int]], held: list[tuple[int, int]], vocab: int) -> dict[str, float]:
    words = collections.Counter(w for _, w in train)
    bigrams = collections.Counter(train)
    follows, totals = collections.defaultdict(set), collections.Counter()
    for v, w in train:
        follows[v].add(w)
        totals[v] += 1
    once, twice = (sum(c == n for c in bigrams.values()) for n in (1, 2))
    discount = once / (once + 2 * twice) if once else 0.5

    def unigram(w: int) -> float:
        return (words[w] + 1) / (len(train) + vocab)

    def bigram(v: int, w: int) -> float:
        if not totals[v]:
            return unigram(w)
        backed_off = discount * len(follows[v]) / totals[v]
        return max(bigrams[v, w] - discount, 0) / totals[v] + backed_off * unigram(w)

    for v in (held[0][0], next(iter(set(range(vocab)) - set(totals)), 0)):  # both are distributions
        assert math.fsum(bigram(v, w) for w in range(vocab)) == pytest.approx(1.0)
    return {
        "unigram": -sum(math.log(unigram(w)) for _, w in held) / len(held),
        "bigram": -sum(math.log(bigram(v, w)) for v, w in held) / len(held),
    }


def test_both_equal_the_formulas(dataset):
    expected = by_hand(pairs(dataset.read_rows("train")), pairs(dataset.read_rows("validation")), 320)
    assert ngram_baselines(dataset) == pytest.approx(expected)
    assert expected["bigram"] < expected["unigram"] < math.log(320)


def test_mixture_counts_all_of_its_rows(dataset):
    twice = Mixture((dataset, dataset), (0.5, 0.5))
    train = pairs(np.concatenate([dataset.read_rows("train")] * 2))
    held = pairs(np.concatenate([dataset.read_rows("validation")] * 2))
    assert ngram_baselines(twice) == pytest.approx(by_hand(train, held, 320))


def test_plenty_of_text_is_counted_at_even_distances(dataset, monkeypatch):
    monkeypatch.setattr(demo_corpus, "MAX_COUNTED_TOKENS", dataset.manifest.tokens("train") // 3 + 1)
    train, held = dataset.read_rows("train")[::3], dataset.read_rows("validation")
    assert ngram_baselines(dataset) == pytest.approx(by_hand(pairs(train), pairs(held), 320))


def test_no_validation_is_refused(corpus, tmp_path):
    out = prepare(corpus, tokenizer="bytes", out=tmp_path / "set", seq_len=32, val_fraction=0.0).directory
    with pytest.raises(ValueError, match="no validation targets"):
        ngram_baselines(open_dataset(out))
