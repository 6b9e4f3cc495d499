"""Generate text from a trained model with a key-value cache.

`LanguageModel` holds weights, tokenizer and the precision of the forward pass; scoring uses it too. `sample_tokens`
draws the next token from its logits. The next step is dispatched before the last token is read, so that the device
does not wait for the host. Random bits are a function of (seed, position): the same prompt and seed give the same
text.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from halfbyte import models
from halfbyte.data import Tokenizer
from halfbyte.distributed import DEFAULT_RULES
from halfbyte.io import check_float, check_int
from halfbyte.models import LlamaConfig, ModelContext, Params

# On a mesh, weights rest as in training. Scored rows are split over data and fsdp, never along positions, whose number
# is not the mesh's to choose; a text that is written is one row, on all devices.
SCORING_RULES = DEFAULT_RULES.replace(seq=(), residual_seq=())
GENERATION_RULES = SCORING_RULES.replace(batch=())
REPLACEMENT = "\ufffd"  # what a tokenizer writes for bytes that are not yet a whole character


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The defaults are greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_float("temperature", self.temperature, holds=self.temperature >= 0, wanted="0 (greedy) or more")
        check_float("top_p", self.top_p, holds=0 < self.top_p <= 1, wanted="above 0 and at most 1 (all tokens)")
        check_int("top_k", self.top_k, zero="all tokens")
        check_int("seed", self.seed)


GREEDY = Sampling()


@dataclass(frozen=True)
class LanguageModel:
    """What is generated from and scored. `seq` is the length it was trained on: the default window of scoring.

    Under a quantized recipe the scale of a tensor comes from all of its tokens, padding included, so a score moves in
    its last digits with the shape of the batch; under bf16 it does not.
    """

    config: LlamaConfig
    params: Params
    tokenizer: Tokenizer
    context: ModelContext
    seq: int

    def __post_init__(self) -> None:
        if self.tokenizer.vocab_size > self.config.vocab_size:
            raise ValueError(
                f"the tokenizer has {self.tokenizer.vocab_size} ids, but model {self.config.name} knows only "
                f"{self.config.vocab_size}; use the tokenizer that the model was trained with"
            )


@dataclass(frozen=True)
class GeneratedText:
    """A finished text. `hit_end_of_text`: the model generated its end-of-text token, which is not part of `text`."""

    prompt: str
    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    hit_end_of_text: bool
    seconds: float
    """From the first decoded token to the last; reading the prompt and compiling are not in it."""

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding speed; None for fewer than two tokens."""
        steps = len(self.tokens) + self.hit_end_of_text - 1
        return steps / self.seconds if steps > 0 and self.seconds > 0 else None


class TextGenerator:
    """Generates from one model; programs are compiled once for each prompt length and kept."""

    def __init__(self, model: LanguageModel, sampling: Sampling = GREEDY):
        self.model, self.sampling = model, sampling
        self._params = self._quantized(model.params)
        self._prefill = jax.jit(self._first, static_argnames="size")
        self._decode = jax.jit(self._decode_step, donate_argnums=1)

    def _quantized(self, params: Any) -> Any:
        context = self.model.context
        if context.policy is None:
            return params
        return models.quantize_weights(self.model.config, params, context.policy, context.mesh, context.rules)

    def _first(self, params: Any, ids: jax.Array, key: jax.Array, *, size: int) -> tuple[jax.Array, models.KVCache]:
        logits, cache = models.prefill(self.model.config, params, ids, None, self.model.context, size=size)
        return sample_tokens(logits, jax.random.fold_in(key, 0), self.sampling), cache

    def _decode_step(
        self, params: Any, cache: models.KVCache, token: jax.Array, key: jax.Array, index: jax.Array
    ) -> Any:
        logits, cache = models.decode_step(self.model.config, params, cache, token, self.model.context)
        return sample_tokens(logits, jax.random.fold_in(key, index), self.sampling), cache

    def tokens(self, prompt: list[int], *, max_tokens: int, seed: int | None = None) -> Iterator[int]:
        """Up to `max_tokens` ids after `prompt`, each as soon as it is known; the last one may be end of text."""
        self._check_length(len(prompt), max_tokens)
        key = jax.random.key(self.sampling.seed if seed is None else seed)
        ids = jnp.asarray([prompt], jnp.int32)
        token, cache = self._prefill(self._params, ids, key, size=len(prompt) + max_tokens)
        for index in range(1, max_tokens + 1):
            known = token
            if index < max_tokens:
                token, cache = self._decode(self._params, cache, token, key, jnp.int32(index))
            found = int(known[0])
            yield found
            if found == self.model.tokenizer.eos_id:
                return

    def _check_length(self, prompt: int, max_tokens: int) -> None:
        longest = self.model.config.max_seq
        if prompt < 1 or max_tokens < 1:
            raise ValueError(f"a prompt of {prompt} tokens and max_tokens {max_tokens}: both must be 1 or more")
        if prompt + max_tokens > longest:
            raise ValueError(
                f"{prompt} tokens of prompt and {max_tokens} to generate are more than the model's max_seq {longest}; "
                f"shorten the prompt, or ask for at most {max(longest - prompt, 0)} tokens"
            )

    def generate(
        self, prompt: str, *, max_tokens: int, seed: int | None = None, show: Callable[[str], None] | None = None
    ) -> GeneratedText:
        """The continuation of `prompt`: `max_tokens` at most, or as many as the model holds; `show` gets it in pieces
        as it is made. A prompt begins a document."""
        tokenizer = self.model.tokenizer
        ids = tokenizer.encode(prompt, bos=True)
        max_tokens = min(max_tokens, max(1, self.model.config.max_seq - len(ids)))
        found: list[int] = []
        shown, begun, ended = "", 0.0, False
        for token in self.tokens(ids, max_tokens=max_tokens, seed=seed):
            begun = begun or time.perf_counter()
            ended = token == tokenizer.eos_id
            if ended:
                break
            found.append(token)
            whole = decode_continuation(tokenizer, ids, found)
            if show is not None and not whole.endswith(REPLACEMENT) and whole.startswith(shown):
                show(whole[len(shown) :])
                shown = whole
        text = decode_continuation(tokenizer, ids, found)
        if show is not None and text != shown and text.startswith(shown):
            show(text[len(shown) :])
        seconds = time.perf_counter() - begun if begun else 0.0
        return GeneratedText(prompt, text, tuple(found), len(ids), ended, seconds)


def sample_tokens(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Draws a token for each row of float32 logits [batch, vocab]: int32 [batch]. Temperature 0 takes the likeliest
    token, the lowest id among equals.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, filter_logits(logits, sampling), axis=-1).astype(jnp.int32)


def filter_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns logits over the temperature, -inf for every token that `top_k` and `top_p` leave out.

    `top_k` keeps the k likeliest tokens. `top_p` (nucleus sampling, arXiv 1904.09751) keeps the smallest set of
    likeliest tokens whose probabilities add up to at least p, after the temperature and `top_k`.
    """
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][..., -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p < 1:
        falling = -jnp.sort(-logits, axis=-1)
        chances = jax.nn.softmax(falling, axis=-1)
        before = jnp.cumsum(chances, axis=-1) - chances  # of all likelier tokens: 0 for the first, which always stays
        least = jnp.min(jnp.where(before < sampling.top_p, falling, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def decode_continuation(tokenizer: Any, prompt: list[int], found: list[int]) -> str:
    """The text that `found` adds to the prompt. Decoded together with the prompt's end, whose spacing it depends on."""
    tail = prompt[-8:]
    return tokenizer.decode([*tail, *found])[len(tokenizer.decode(tail)) :]
