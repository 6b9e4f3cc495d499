"""Text from a model, token by token, with a key-value cache.

The next step is dispatched before the last token is read, so the device does not wait for the host. Random bits are a
function of (seed, position): the same prompt and seed give the same text.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from halfbyte import models
from halfbyte.evaluation.language_model import LanguageModel
from halfbyte.evaluation.sampling import Sampling, draw

GREEDY = Sampling()
REPLACEMENT = "\ufffd"  # what a tokenizer writes for bytes that are not yet a whole character


@dataclass(frozen=True)
class Generated:
    """A finished text. `ended` says that the model wrote its end-of-text token, which is not part of `text`."""

    prompt: str
    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    ended: bool
    seconds: float
    """From the first decoded token to the last; reading the prompt and compiling are not in it."""

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding speed; None for fewer than two tokens."""
        steps = len(self.tokens) + self.ended - 1
        return steps / self.seconds if steps > 0 and self.seconds > 0 else None


class Generator:
    """Generates from one model; programs are compiled once for each prompt length and kept."""

    def __init__(self, model: LanguageModel, sampling: Sampling = GREEDY):
        self.model, self.sampling = model, sampling
        self._params = self._quantized(model.params)
        self._prefill = jax.jit(self._first, static_argnames="size")
        self._decode = jax.jit(self._next, donate_argnums=1)

    def _quantized(self, params: Any) -> Any:
        context = self.model.context
        if context.policy is None:
            return params
        return models.quantize_weights(self.model.config, params, context.policy, context.mesh, context.rules)

    def _first(self, params: Any, ids: jax.Array, key: jax.Array, *, size: int) -> tuple[jax.Array, models.Cache]:
        logits, cache = models.prefill(self.model.config, params, ids, None, self.model.context, size=size)
        return draw(logits, jax.random.fold_in(key, 0), self.sampling), cache

    def _next(self, params: Any, cache: models.Cache, token: jax.Array, key: jax.Array, index: jax.Array) -> Any:
        logits, cache = models.decode_step(self.model.config, params, cache, token, self.model.context)
        return draw(logits, jax.random.fold_in(key, index), self.sampling), cache

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

    def write(
        self, prompt: str, *, max_tokens: int, seed: int | None = None, show: Callable[[str], None] | None = None
    ) -> Generated:
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
            whole = continuation(tokenizer, ids, found)
            if show is not None and not whole.endswith(REPLACEMENT) and whole.startswith(shown):
                show(whole[len(shown) :])
                shown = whole
        text = continuation(tokenizer, ids, found)
        if show is not None and text != shown and text.startswith(shown):
            show(text[len(shown) :])
        seconds = time.perf_counter() - begun if begun else 0.0
        return Generated(prompt, text, tuple(found), len(ids), ended, seconds)


def continuation(tokenizer: Any, prompt: list[int], found: list[int]) -> str:
    """The text that `found` adds to the prompt. Decoded together with the prompt's end, whose spacing it depends on."""
    tail = prompt[-8:]
    return tokenizer.decode([*tail, *found])[len(tokenizer.decode(tail)) :]
