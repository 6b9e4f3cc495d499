"""Generate text from a trained model with a key-value cache.

`LanguageModel` holds weights, tokenizer and the precision of the forward pass; scoring uses it as well. `sample_tokens`
samples the next token from the logits. The next step is dispatched before the last token is read, so that the device
does not wait for the host. Random bits are a function of (seed, position), so the same prompt and seed give the same
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

# On a mesh, weights are sharded as in training. Scored rows are sharded over data and fsdp, but positions are not,
# because the mesh must not restrict sequence lengths. A generated text is one row, replicated on all devices.
SCORING_RULES = DEFAULT_RULES.replace(seq=(), residual_seq=())
GENERATION_RULES = SCORING_RULES.replace(batch=())
REPLACEMENT = "\ufffd"  # decoded for bytes that are not a whole character yet


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. The default is greedy."""

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
    """A model for generation and scoring. `seq` is the sequence length of its training, the default window of scoring.

    Under a quantized recipe the per-tensor scale depends on all tokens of a tensor, padding included, so the last
    digits of a score depend on the shape of the batch. Under bf16 only the order of summation does.
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
    """A generated text. `hit_end_of_text`: the model generated its end-of-text token, which is not part of `text`."""

    prompt: str
    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    hit_end_of_text: bool
    seconds: float
    """From the first decoded token to the last, without prefill and compilation."""

    @property
    def tokens_per_s(self) -> float | None:
        """Returns the decoding speed, None for fewer than two tokens."""
        steps = len(self.tokens) + self.hit_end_of_text - 1
        return steps / self.seconds if steps > 0 and self.seconds > 0 else None


class TextGenerator:
    """Generates text with one model. Programs are compiled once per prompt length and cached."""

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
        """Yield up to `max_tokens` ids after `prompt`, each as soon as it is known. The last one may be end of text."""
        self._check_length(len(prompt), max_tokens)
        key = jax.random.key(self.sampling.seed if seed is None else seed)
        ids = jnp.asarray([prompt], jnp.int32)
        token, cache = self._prefill(self._params, ids, key, size=len(prompt) + max_tokens)
        for index in range(1, max_tokens + 1):
            last_token = token
            if index < max_tokens:
                token, cache = self._decode(self._params, cache, token, key, jnp.int32(index))
            token_id = int(last_token[0])
            yield token_id
            if token_id == self.model.tokenizer.eos_id:
                return

    def _check_length(self, prompt: int, max_tokens: int) -> None:
        max_seq = self.model.config.max_seq
        if prompt < 1 or max_tokens < 1:
            raise ValueError(f"a prompt of {prompt} tokens and max_tokens {max_tokens}: both must be 1 or more")
        if prompt + max_tokens > max_seq:
            raise ValueError(
                f"{prompt} tokens of prompt and {max_tokens} to generate are more than the model's max_seq {max_seq}; "
                f"shorten the prompt, or ask for at most {max(max_seq - prompt, 0)} tokens"
            )

    def generate(
        self, prompt: str, *, max_tokens: int, seed: int | None = None, show: Callable[[str], None] | None = None
    ) -> GeneratedText:
        """Returns the continuation of `prompt`, of at most `max_tokens` tokens or as many as fit the model's max_seq.
        `show` receives the text in chunks as it is generated. The prompt starts a document."""
        tokenizer = self.model.tokenizer
        ids = tokenizer.encode(prompt, bos=True)
        max_tokens = min(max_tokens, max(1, self.model.config.max_seq - len(ids)))
        token_ids: list[int] = []
        shown, start, hit_end = "", 0.0, False
        for token in self.tokens(ids, max_tokens=max_tokens, seed=seed):
            start = start or time.perf_counter()
            hit_end = token == tokenizer.eos_id
            if hit_end:
                break
            token_ids.append(token)
            text_so_far = decode_continuation(tokenizer, ids, token_ids)
            if show is not None and not text_so_far.endswith(REPLACEMENT) and text_so_far.startswith(shown):
                show(text_so_far[len(shown) :])
                shown = text_so_far
        text = decode_continuation(tokenizer, ids, token_ids)
        if show is not None and text != shown and text.startswith(shown):
            show(text[len(shown) :])
        seconds = time.perf_counter() - start if start else 0.0
        return GeneratedText(prompt, text, tuple(token_ids), len(ids), hit_end, seconds)


def sample_tokens(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Sample one token per row of float32 logits [batch, vocab], int32 [batch]. Temperature 0 takes the most likely
    token, the lowest id among equals."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, filter_logits(logits, sampling), axis=-1).astype(jnp.int32)


def filter_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns logits divided by the temperature, -inf for the tokens that `top_k` and `top_p` exclude.

    `top_k` keeps the k most likely tokens. `top_p` (nucleus sampling, arXiv 1904.09751) keeps the smallest set of most
    likely tokens whose probabilities sum to at least p, after the temperature and `top_k`.
    """
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        threshold = jax.lax.top_k(logits, sampling.top_k)[0][..., -1:]
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    if sampling.top_p < 1:
        sorted_logits = -jnp.sort(-logits, axis=-1)
        probabilities = jax.nn.softmax(sorted_logits, axis=-1)
        # Of the more likely tokens only: 0 for the first, which is therefore always kept.
        cumulative = jnp.cumsum(probabilities, axis=-1) - probabilities
        threshold = jnp.min(jnp.where(cumulative < sampling.top_p, sorted_logits, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    return logits


def decode_continuation(tokenizer: Any, prompt: list[int], token_ids: list[int]) -> str:
    """Returns the text that `token_ids` add to the prompt. They are decoded together with the end of the prompt,
    because tokenizers derive spacing from it."""
    tail = prompt[-8:]
    return tokenizer.decode([*tail, *token_ids])[len(tokenizer.decode(tail)) :]
