"""Oracle: greedy decoding that reads the whole sequence again for every token, without a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from halfbyte import models
from halfbyte.data.tokenizer import byte_tokenizer
from halfbyte.evaluation import LanguageModel, Sampling, TextGenerator
from halfbyte.evaluation.generation import decode_continuation

PROMPT = "halfbyte"


@pytest.fixture(scope="module")
def expected(model):
    """Twenty greedy tokens after PROMPT, the whole sequence read for each."""
    prompt = model.tokenizer.encode(PROMPT, bos=True)
    size = len(prompt) + 20

    @jax.jit
    def likeliest(params, ids, last):
        return jnp.argmax(models.apply(model.config, params, {"tokens": ids}, model.context)[0, last], axis=-1)

    ids = list(prompt)
    while len(ids) < size:
        padded = jnp.asarray([ids + [0] * (size - len(ids))], jnp.int32)
        ids.append(int(likeliest(model.params, padded, jnp.int32(len(ids) - 1))))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def greedy(model):
    return TextGenerator(model)


@pytest.fixture(scope="module")
def random(model):
    return TextGenerator(model, Sampling(temperature=1.0, top_p=0.95))


@pytest.mark.slow
def test_greedy_with_a_cache_is_greedy_without(model, greedy, expected):
    assert len(set(expected)) > 3  # a model that repeats itself would show nothing
    assert list(greedy.tokens(model.tokenizer.encode(PROMPT, bos=True), max_tokens=20)) == expected


def test_generation_stops_at_end_of_text(model, greedy, expected, monkeypatch):
    tokenizer = byte_tokenizer()
    tokenizer.eos_id = expected[6]
    monkeypatch.setattr(greedy, "model", dataclasses.replace(model, tokenizer=tokenizer))
    made = greedy.generate(PROMPT, max_tokens=20)
    assert made.hit_end_of_text and list(made.tokens) == expected[: expected.index(expected[6])]


@pytest.mark.slow
def test_seeds_decide(random):
    first, again, other = (random.generate("a b", max_tokens=12, seed=seed) for seed in (1, 1, 2))
    assert first.tokens == again.tokens != other.tokens
    assert first.prompt_tokens == 4  # with the begin-of-document token


def test_pieces_shown_make_up_the_text(random):
    pieces = []
    made = random.generate("a b", max_tokens=12, seed=5, show=pieces.append)
    assert "".join(pieces) == made.text and len(pieces) > 1
    assert len(made.tokens) == 12 and not made.hit_end_of_text
    assert made.tokens_per_s > 0


def test_half_a_character_is_not_shown(model):
    """Bytes of é arrive one by one: nothing whole, then the character."""
    ids = model.tokenizer.encode("é")
    assert [decode_continuation(model.tokenizer, [65], ids[:count]) for count in (1, 2)] == ["\ufffd", "é"]


def test_impossible_lengths_are_refused(greedy):
    with pytest.raises(ValueError, match="more than the model's max_seq 128; .* at most 125 tokens"):
        list(greedy.tokens([1, 2, 3], max_tokens=126))
    with pytest.raises(ValueError, match="both must be 1 or more"):
        list(greedy.tokens([], max_tokens=4))


def test_tokenizer_of_another_model_is_refused(model):
    small = dataclasses.replace(model.config, vocab_size=256)
    with pytest.raises(ValueError, match="the tokenizer has 257 ids, but model tiny knows only 256"):
        LanguageModel(small, model.params, model.tokenizer, model.context, 64)
