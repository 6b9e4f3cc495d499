"""Oracle: each request alone, through `models.apply` and a float64 log-softmax."""

import dataclasses

import jax
import numpy as np
import pytest

from halfbyte import models
from halfbyte.distributed import make_mesh
from halfbyte.evaluation import SCORING_RULES, Scorer, ScoreRequest, scoring
from halfbyte.recipes import policy, recipe

RANDOM = np.random.default_rng(0)


def request(length, scored):
    return ScoreRequest(tuple(RANDOM.integers(0, 257, length).tolist()), scored)


REQUESTS = [request(*shape) for shape in ((2, 1), (33, 4), (9, 8), (65, 10), (34, 33), (65, 64), (50, 1), (5, 2))]


@pytest.fixture(scope="module")
def logits_alone(model):
    """Function of a row of tokens: float64 logits at every position but the last."""
    run = jax.jit(lambda params, tokens: models.apply(model.config, params, {"tokens": tokens}, model.context))

    def logits(tokens):
        row = np.zeros((1, 96), np.int32)  # one length, one program
        row[0, : len(tokens)] = tokens
        return np.asarray(run(model.params, row), np.float64)[0, : len(tokens) - 1]

    return logits


def judged(logits, request):
    """(summed nll, all greedy) of one request."""
    top = logits.max(axis=-1, keepdims=True)
    logp = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    places = np.arange(len(logits))[-request.num_scored :]
    targets = np.asarray(request.tokens)[1:][-request.num_scored :]
    return -logp[places, targets].sum(), bool(np.all(logp[places].argmax(axis=-1) == targets))


@pytest.fixture(scope="module")
def scorer(model):
    return Scorer(model, batch_tokens=128)


@pytest.fixture(scope="module")
def scores(scorer):
    return scorer.score(REQUESTS)


@pytest.mark.slow
def test_scores_are_those_of_each_request_alone(logits_alone, scores):
    for made, found in zip(REQUESTS, scores, strict=True):
        nll, _ = judged(logits_alone(made.tokens), made)
        assert found.nll == pytest.approx(nll, rel=2e-6)  # float32 sums
        assert found.tokens == made.num_scored


def test_greedy_is_that_of_the_argmax(model, logits_alone, scorer, monkeypatch):
    """A continuation that follows the likeliest tokens, and the same with its first token changed."""
    ids = list(REQUESTS[1].tokens)
    for _ in range(3):
        ids.append(int(logits_alone([*ids, 0])[-1].argmax()))
    follows, misses = ScoreRequest(tuple(ids), 3), ScoreRequest((*ids[:-3], (ids[-3] + 1) % 257, *ids[-2:]), 3)
    assert judged(logits_alone(follows.tokens), follows)[1] and not judged(logits_alone(misses.tokens), misses)[1]
    assert [score.greedy for score in scorer.score([follows, misses])] == [True, False]
    best, other = ids[-3], (ids[-3] + 1) % 257  # a logit that is a hundred-thousandth lower
    head = model.params["head"].at[:, other].set(model.params["head"][:, best] * (1 - 1e-5))
    monkeypatch.setattr(scorer, "model", dataclasses.replace(model, params={**model.params, "head": head}))
    near, likeliest = (ScoreRequest((*ids[:-3], token), 1) for token in (other, best))
    assert [score.greedy for score in scorer.score([near, likeliest])] == [False, True]


def test_few_programs_for_all_lengths(scorer, scores):
    assert scoring.padded_lengths(64) == [32, 64]
    assert scorer.compiled == {(4, 32), (2, 64)}
    assert scoring.padded_lengths(2048) == [128, 256, 512, 1024, 2048]
    assert scoring.padded_lengths(100) == [32, 64, 100]
    assert scoring.padded_lengths(20) == [20]


def test_too_long_request_loses_its_beginning(scorer):
    long = request(90, 5)
    cut = ScoreRequest(long.tokens[-65:], 5)
    assert long.truncate_to(64) == cut
    a, b = scorer.score([long, cut])
    assert a == b
    assert scorer.score([request(90, 80)])[0].tokens == 64


def test_progress_counts_every_request(scorer):
    seen = []
    scorer.score(REQUESTS, watch=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (len(REQUESTS), len(REQUESTS)) and len(seen) > 2


def test_logits_in_slices_are_the_same(model, scores, monkeypatch):
    monkeypatch.setattr(scoring, "LOGIT_BYTES", 4 * 288 * 4 * 8)  # 8 positions of 4 rows
    sliced = Scorer(model, batch_tokens=128).score(REQUESTS)
    np.testing.assert_allclose([s.nll for s in sliced], [s.nll for s in scores], rtol=1e-6)
    assert [s.greedy for s in sliced] == [s.greedy for s in scores]


@pytest.mark.slow
def test_mesh_gives_the_same(model, scores):
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices("cpu")[:4])
    placed = jax.device_put(model.params, models.param_shardings(model.config, mesh))
    context = dataclasses.replace(model.context, mesh=mesh, rules=SCORING_RULES)
    spread = dataclasses.replace(model, params=placed, context=context)
    found = Scorer(spread, batch_tokens=128).score(REQUESTS)
    np.testing.assert_allclose([s.nll for s in found], [s.nll for s in scores], rtol=1e-5)


def test_impossible_requests_are_refused(model):
    for tokens, scored in (((1,), 1), ((1, 2), 0), ((1, 2), 2)):
        with pytest.raises(ValueError, match="tokens to score"):
            ScoreRequest(tokens, scored)
    with pytest.raises(ValueError, match="between 1 and the model's max_seq 128"):
        Scorer(model, window=129)


def packed(rows, seq=64):
    """A packed batch without segments of its own; the last row is padding."""
    tokens = RANDOM.integers(0, 257, (rows, seq)).astype(np.int32)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1), "segments": np.ones_like(tokens)}
    batch["targets"][:, -1] = -1
    batch["targets"][-1] = -1
    return {**batch, "positions": np.broadcast_to(np.arange(seq, dtype=np.int32), tokens.shape)}


@pytest.mark.slow
def test_packed_windows_are_scored_one_by_one(model, logits_alone):
    """However they are put into batches; rows of padding are no windows."""
    batch = packed(5)
    parts = [{name: value[start : start + 1] for name, value in batch.items()} for start in range(5)]
    together = list(Scorer(model).score_packed([batch]))
    alone = list(Scorer(model, scales="window").score_packed(parts))
    assert [score.tokens for score in together] == [63] * 4
    np.testing.assert_allclose([s.nll for s in together], [s.nll for s in alone], rtol=1e-6)
    nll, _ = judged(logits_alone(batch["tokens"][0]), ScoreRequest(tuple(batch["tokens"][0].tolist()), 63))
    assert together[0].nll == pytest.approx(nll, rel=2e-6)  # float32 sums


@pytest.mark.slow
def test_scales_of_a_window_are_its_own(model):
    """Under nvfp4 a score moves with its neighbours, unless each window is a batch."""
    resolved = policy("mlp/down", recipe("nvfp4")).resolve(models.linear_sites(model.config), model.config.layers)
    quantized = dataclasses.replace(model, context=dataclasses.replace(model.context, policy=resolved))
    requests = [request(65, 64) for _ in range(2)]
    moved, kept = (Scorer(quantized, batch_tokens=128, scales=scales) for scales in ("batch", "window"))
    assert moved.score(requests)[0] != moved.score(requests[:1])[0]
    assert kept.score(requests)[0] == kept.score(requests[:1])[0]
    assert kept.compiled == {(1, 64)}


def test_scales_of_a_window_on_a_mesh_that_cuts_batches(model):
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices("cpu")[:4])
    spread = dataclasses.replace(model, context=dataclasses.replace(model.context, mesh=mesh, rules=SCORING_RULES))
    with pytest.raises(ValueError, match="this mesh cuts a batch into 2; use a mesh of tensor alone"):
        Scorer(spread, scales="window")
    with pytest.raises(ValueError, match="scales must be one of batch, window, got 'row'"):
        Scorer(model, scales="row")
