"""Metrics by hand from given scores, windows by their definition, and whole tasks against each text scored alone."""

import math

import numpy as np
import pytest

from halfbyte.data.tokenizer import train_bpe
from halfbyte.evaluation import Scorer, SequenceScore, eval_tasks, run_task, truncate_to_windows

CHOICES = {"query": "q", "choices": ["aa", "bbbb"], "gold": 1}


def scored(*nll, greedy=False):
    return [SequenceScore(value, 2, greedy) for value in nll]


def measured(kind, *pairs):
    return eval_tasks.METRICS_OF_KIND.get(kind, eval_tasks.choice_metrics)(pairs)


def test_choice_metrics_by_hand():
    # plain: 3 < 4 is wrong, then 5 > 4 is right; by length: 3/2 > 4/4 right, 5/2 > 4/4 right
    found = measured("choice", (CHOICES, scored(3.0, 4.0)), (CHOICES, scored(5.0, 4.0)))
    assert found["acc"].value == 0.5 and found["acc_norm"].value == 1.0
    assert found["acc"].error == pytest.approx(0.5)  # sqrt(0.25 * 2 / 1) / sqrt(2)
    assert found["acc_norm"].error == 0.0


def test_schema_metrics_by_hand():
    record = {"context_options": ["a x", "a y"], "continuation": "z", "gold": 0}
    found = measured("schema", (record, scored(1.0, 2.0)), (record, scored(2.0, 1.0)))
    assert {name: metric.value for name, metric in found.items()} == {"acc": 0.5}


@pytest.mark.parametrize("nll", [2.0, math.nan])
def test_equal_scores_of_a_pair_win_none(nll):
    pair = {"sentence_good": "x", "sentence_bad": "y"}
    found = measured("pair", (pair, scored(nll, nll)))
    assert found["acc"].value == found["acc_norm"].value == 0.0


def test_word_metrics_by_hand():
    word = {"context": "c", "continuation": " w"}
    found = measured("word", (word, scored(1.0, greedy=True)), (word, scored(3.0)), (word, scored(2.0)))
    assert found["acc"].value == pytest.approx(1 / 3)
    assert found["ppl"].value == pytest.approx(math.exp(2.0))
    assert found["ppl"].error == pytest.approx(math.exp(2.0) / math.sqrt(3))  # the deviation of 1, 2, 3 is 1


def test_text_metrics_by_hand():
    text = {"text": "naïve text"}  # 11 bytes, 2 words
    windows = [SequenceScore(6.0, 4, False), SequenceScore(9.0, 4, False), SequenceScore(3.0, 2, False)]
    found = eval_tasks.text_metrics([(text, windows)])
    assert found["nats_per_token"].value == pytest.approx(1.8)
    assert found["bits_per_byte"].value == pytest.approx(18 / math.log(2) / 11)
    assert found["ppl"].value == pytest.approx(math.exp(1.8))
    assert found["word_ppl"].value == pytest.approx(math.exp(9))
    spread = np.array([6 - 7.2, 9 - 7.2, 3 - 3.6])
    assert found["nats_per_token"].error == pytest.approx(math.sqrt((spread**2).sum() * 3 / 2) / 10)


def test_error_of_a_ratio_covers_the_truth():
    """Two standard errors of 200 simulated texts hold the true mean about 95 times in 100."""
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        counts = random.integers(1, 20, 60)
        found = eval_tasks.ratio_with_error((random.normal(2.0, 0.5, 60) * counts).tolist(), counts.tolist())
        hits += abs(found.value - 2.0) < 2 * found.error
    assert 180 <= hits <= 199


def test_one_example_has_no_standard_error():
    assert eval_tasks.mean_with_error([0.5]).error is None
    assert eval_tasks.exp_metric(eval_tasks.MetricEstimate(1e4, 1.0)).value == math.inf


def test_pairs_are_encoded_as_the_model_would_see_them():
    tokenizer = train_bpe(["the answer is here the answer is there"] * 20, 300)
    made = eval_tasks.tokenize_pair(tokenizer, "the answer", " is here")
    assert list(made.tokens) == tokenizer.encode("the answer is here", bos=True)
    assert tokenizer.decode(made.tokens[-made.num_scored :]) == " is here"
    # a token that spans the border is scored: the model never sees the context end there
    spanning = eval_tasks.tokenize_pair(tokenizer, "the ans", "wer")
    assert list(spanning.tokens) == tokenizer.encode("the answer", bos=True)
    assert tokenizer.decode(spanning.tokens[-spanning.num_scored :]) == " answer"
    assert eval_tasks.tokenize_pair(tokenizer, "", "the").num_scored == len(tokenizer.encode("the"))


@pytest.mark.parametrize("length, stride", [(1, 8), (7, 3), (8, 8), (9, 8), (9, 1), (16, 8), (30, 3), (30, 1)])
def test_windows_score_every_token_once(model, length, stride):
    text = "".join(chr(97 + number % 26) for number in range(length))
    ids = model.tokenizer.encode(text, bos=True)
    done = 1
    for made in eval_tasks.text_requests(model.tokenizer, text, 8, stride):
        stop = done + made.num_scored
        assert list(made.tokens) == ids[stop - len(made.tokens) : stop]
        assert len(made.tokens) <= 9
        before = len(made.tokens) - made.num_scored  # tokens read before the first scored one
        assert before >= min(done, 8 - stride + 1)
        done = stop
    assert done == len(ids)


def test_impossible_strides_are_refused(model):
    with pytest.raises(ValueError, match="stride 9: it lies between 1 and the window of 8"):
        eval_tasks.text_requests(model.tokenizer, "text", 8, 9)


def test_beginning_of_a_text(model):
    text = "abcdefghij"
    assert truncate_to_windows(model.tokenizer, text, 2, 3) == "abcdef"
    assert truncate_to_windows(model.tokenizer, text, 0, 3) == truncate_to_windows(model.tokenizer, text, 9, 3) == text


def test_whole_tasks(model):
    """Against the same scorer, text by text: requests of many examples keep their order, groups their members."""
    scorer = Scorer(model, batch_tokens=128)
    items = [
        {"sentence_good": f"Who {verb} it?", "sentence_bad": f"{verb} who it?", "source": source}
        for verb, source in [("saw", "a"), ("had", "b"), ("did", "b")]
    ]
    found = run_task("pairs", "pair", items, scorer)

    def nll_of(text):
        return scorer.score([eval_tasks.tokenize_pair(model.tokenizer, "", text)])[0].nll

    nll = [(nll_of(item["sentence_good"]), nll_of(item["sentence_bad"])) for item in items]
    right = [good < bad for good, bad in nll]
    assert found.metrics["acc"].value == pytest.approx(np.mean(right))
    assert found.groups["b"]["acc"].value == pytest.approx(np.mean(right[1:]))
    assert (found.examples, found.chance, found.truncated) == (3, 0.5, 0)

    text = run_task("t", "text", [{"text": "abc" * 40}], scorer)
    assert text.tokens == 120 and text.truncated == 0 and text.chance is None
    long = run_task("long", "word", [{"context": "x" * 100, "continuation": " y"}], scorer)
    assert long.truncated == 1 and long.tokens == 2
    with pytest.raises(ValueError, match="empty: there is no example"):
        run_task("empty", "word", [], scorer)
