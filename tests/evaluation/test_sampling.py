"""Oracle: the definitions of top-k and nucleus sampling, in NumPy, token by token; counts of many draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte.evaluation import Sampling
from halfbyte.evaluation.generation import filter_logits, sample_tokens

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.2], np.float32))


def nucleus(chances, top_p):
    """The smallest set of likeliest tokens with at least `top_p` of the probability."""
    kept, total = set(), 0.0
    for token in np.argsort(-chances, kind="stable"):
        kept.add(int(token))
        total += chances[token]
        if total >= top_p - 1e-6:
            break
    return kept


def kept(sampling, logits=LOGITS):
    found = np.asarray(filter_logits(jnp.asarray(logits)[None], sampling))[0]
    return {int(token) for token in np.flatnonzero(np.isfinite(found))}


@pytest.mark.slow
@pytest.mark.parametrize("top_p", [0.01, 0.39, 0.5, 0.7, 0.9, 0.97])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_top_p_keeps_the_nucleus(top_p, temperature):
    chances = np.exp(LOGITS / temperature)
    assert kept(Sampling(temperature, top_p=top_p)) == nucleus(chances / chances.sum(), top_p)


def test_top_k_and_then_top_p_of_what_it_leaves():
    assert kept(Sampling(1.0, top_k=3)) == {1, 3, 4}
    assert kept(Sampling(1.0, top_k=99)) == set(range(5))
    # of 0.40, 0.25, 0.20 the first is 47%, the first two 76%
    assert kept(Sampling(1.0, top_k=3, top_p=0.45)) == {1}
    assert kept(Sampling(1.0, top_k=3, top_p=0.75)) == {1, 3}


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.5), Sampling(1.0, top_p=0.8), Sampling(2.0, top_k=2)])
def test_draws_follow_the_distribution(sampling):
    many = 20_000
    tokens = sample_tokens(jnp.broadcast_to(jnp.asarray(LOGITS), (many, 5)), jax.random.key(3), sampling)
    weights = np.exp(LOGITS.astype(np.float64) / sampling.temperature)
    weights[[token for token in range(5) if token not in kept(sampling)]] = 0
    expected = many * weights / weights.sum()
    counts = np.bincount(np.asarray(tokens), minlength=5)
    live = expected > 0
    assert np.all(counts[~live] == 0)
    # chi-squared of at most 4 degrees of freedom: 23.5 is passed by chance once in ten thousand
    assert np.sum((counts - expected)[live] ** 2 / expected[live]) < 23.5


def test_greedy_is_the_likeliest_and_needs_no_luck():
    logits = jnp.asarray(np.stack([LOGITS, LOGITS[::-1]]))
    for seed in range(3):
        assert sample_tokens(logits, jax.random.key(seed), Sampling()).tolist() == [1, 3]


@pytest.mark.parametrize(
    "values, message",
    [
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "top_p must be above 0"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"seed": -1}, "seed must be 0 or more"),
    ],
)
def test_impossible_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**values)
