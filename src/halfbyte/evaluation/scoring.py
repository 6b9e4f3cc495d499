"""Log-probabilities of given tokens, for many requests at once.

A request is a row of tokens whose last `scored` ones are judged given all before them. Rows are padded on the right to
a few lengths and batches to a few sizes, so that thousands of requests cost a handful of programs. Logits exist for a
slice of positions at a time.

Attention is causal, so that no token reads the padding behind it. But a quantized recipe takes the scale of a tensor
from all of its tokens, other rows and padding among them: a score then moves with what else is in its batch, a little
also under bf16, whose sums are cut otherwise for another shape. `scales="window"` gives every row a batch of its own,
always of the shape that its length is padded to, so that a score is a function of its request alone.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfbyte import models
from halfbyte.distributed import axis_size, named_sharding
from halfbyte.evaluation.generation import LanguageModel
from halfbyte.io import check_int
from halfbyte.models.embedding import head_weight

MIN_PADDED_LENGTH = 32  # of the padded lengths
NUM_PADDED_LENGTHS = 5  # padded lengths at most, each half of the next
LOGIT_BYTES = 2**28  # float32 logits that exist at one time
PACKED_BATCH_KEYS = ("tokens", "targets", "segments", "positions")
AMAX_SCOPES = ("batch", "window")
Batch = dict[str, Any]
ProgressFn = Callable[[int, int], None]


@dataclass(frozen=True)
class ScoreRequest:
    """Tokens of which the last `scored` are judged."""

    tokens: tuple[int, ...]
    num_scored: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_scored < len(self.tokens):
            raise ValueError(
                f"{self.num_scored} of {len(self.tokens)} tokens to score: need at least 1, and one before it"
            )

    def truncate_to(self, window: int) -> "ScoreRequest":
        """The same request if the model can read it at once, else its end: the last `window` + 1 tokens."""
        if len(self.tokens) <= window + 1:
            return self
        return ScoreRequest(self.tokens[-window - 1 :], min(self.num_scored, window))


@dataclass(frozen=True)
class SequenceScore:
    """`nll`: negative log-likelihood in nats, summed over `tokens`. `greedy`: each of them was the likeliest."""

    nll: float
    tokens: int
    greedy: bool


def token_scores(
    config: models.LlamaConfig, params: models.Params, batch: Batch, ctx: models.ModelContext
) -> tuple[jax.Array, jax.Array]:
    """(negative log-likelihood of each target, float32 [batch, seq], 0 where it is -1; whether it is the likeliest
    token, bool)."""
    hidden, targets = models.hidden_states(config, params, batch, ctx), batch["targets"]
    head = head_weight(params).astype(hidden.dtype)
    rows, seq, width = hidden.shape
    most = max(1, LOGIT_BYTES // (4 * rows * config.vocab_size))
    size = next(size for size in range(min(most, seq), 0, -1) if seq % size == 0)

    def visit(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, target = part
        logits = jnp.dot(x, head, preferred_element_type=jnp.float32)  # [rows, size, vocab]
        logits = ctx.constrain(logits, "batch", None, "vocab")
        found = jnp.take_along_axis(logits, jnp.maximum(target, 0)[..., None], axis=-1)[..., 0]
        nll = jax.nn.logsumexp(logits, axis=-1) - found
        return jnp.where(target >= 0, nll, 0.0), found >= jnp.max(logits, axis=-1)

    if size == seq:
        return visit((hidden, targets))
    # [rows, seq, ...] -> [slices, rows, size, ...]
    parts = (
        jnp.moveaxis(hidden.reshape(rows, seq // size, size, width), 1, 0),
        jnp.moveaxis(targets.reshape(rows, seq // size, size), 1, 0),
    )
    nll, greedy = lax.map(visit, parts)
    return tuple(jnp.moveaxis(x, 0, 1).reshape(rows, seq) for x in (nll, greedy))  # type: ignore[return-value]


class Scorer:
    """Scores requests with one model, in windows of at most `window` tokens and about `batch_tokens` a program.

    `scales` says what shares the scale of a quantized tensor: the whole "batch", or each "window" alone, one a program.
    """

    def __init__(
        self, model: LanguageModel, *, window: int | None = None, batch_tokens: int = 8192, scales: str = "batch"
    ):
        self.model = model
        self.window = window or model.seq
        self.batch_tokens = batch_tokens
        self.scales = scales
        if scales not in AMAX_SCOPES:
            raise ValueError(f"scales must be one of {', '.join(AMAX_SCOPES)}, got {scales!r}")
        if scales == "window" and self._num_batch_shards > 1:
            raise ValueError(
                f"scales='window' scores one window a program, and this mesh cuts a batch into "
                f"{self._num_batch_shards}; use a mesh of tensor alone, or scales='batch'"
            )
        if not 1 <= self.window <= model.config.max_seq:
            raise ValueError(f"seq {self.window}: windows lie between 1 and the model's max_seq {model.config.max_seq}")
        check_int("batch_tokens", batch_tokens, least=1)
        self.compiled: set[tuple[int, int]] = set()
        self._program, self._sums = jax.jit(self._row_scores), jax.jit(self._window_sums)

    def _row_scores(self, params: models.Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """(summed nll, all scored tokens greedy) of each row."""
        nll, greedy = token_scores(self.model.config, params, batch, self.model.context)
        return jnp.sum(nll, axis=1), jnp.all(greedy | (batch["targets"] < 0), axis=1)

    def _window_sums(self, params: models.Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """(summed nll, number of targets) of each window."""
        nll, _ = token_scores(self.model.config, params, batch, self.model.context)
        return jnp.sum(nll, axis=1), jnp.sum(batch["targets"] >= 0, axis=1)

    def score(self, requests: Sequence[ScoreRequest], *, watch: ProgressFn | None = None) -> list[SequenceScore]:
        """A score for each request, in order. `watch` is told (requests done, of all) after each batch."""
        within = [request.truncate_to(self.window) for request in requests]
        running = (
            (at, self._program(self.model.params, self._put_on_mesh(batch))) for at, batch in self._batches(within)
        )
        scores: dict[int, SequenceScore] = {}
        for numbers, found in _prefetch_one(running):
            for number, nll, greedy in zip(numbers, *jax.device_get(found)):  # rows after the last number are padding
                scores[number] = SequenceScore(float(nll), within[number].num_scored, bool(greedy))
            if watch is not None:
                watch(len(scores), len(requests))
        return [scores[number] for number in range(len(requests))]

    def score_packed(self, batches: Iterable[Batch]) -> Iterator[SequenceScore]:
        """The score of each window of packed batches, as the loader yields them.

        Windows without a target are left out; `greedy` is not looked at, and False.
        """
        placed = (self._put_on_mesh({key: batch[key] for key in PACKED_BATCH_KEYS}) for batch in batches)
        for found in _prefetch_one(self._sums(self.model.params, batch) for batch in placed):
            for nll, tokens in zip(*jax.device_get(found), strict=True):
                if tokens:
                    yield SequenceScore(float(nll), int(tokens), False)

    def _batches(self, requests: Sequence[ScoreRequest]) -> Iterator[tuple[list[int], Batch]]:
        """(request numbers, padded batch): one shape a padded length, filled in order."""
        by_length: dict[int, list[int]] = {}
        lengths = padded_lengths(self.window)
        for number, request in enumerate(requests):
            fits = next(length for length in lengths if len(request.tokens) - 1 <= length)
            by_length.setdefault(fits, []).append(number)
        for length, numbers in sorted(by_length.items(), reverse=True):
            rows = self.rows(length)
            self.compiled.add((rows, length))
            for start in range(0, len(numbers), rows):
                chosen = numbers[start : start + rows]
                yield chosen, pad_batch([requests[number] for number in chosen], rows, length)

    def rows(self, length: int) -> int:
        """Rows of a batch, the same for every task: what `batch_tokens` allows, whole on the mesh; or one."""
        if self.scales == "window":
            return 1
        rows = max(1, self.batch_tokens // length)
        return -(-rows // self._num_batch_shards) * self._num_batch_shards

    @property
    def _num_batch_shards(self) -> int:
        """Into how many parts the mesh cuts a batch."""
        return axis_size(self.model.context.mesh, self.model.context.rules.mesh_axes("batch"))

    def _put_on_mesh(self, batch: Batch) -> Batch:
        mesh = self.model.context.mesh
        if mesh is None:
            return batch
        where = named_sharding(("batch", "seq"), mesh, self.model.context.rules)
        return {name: jax.device_put(np.asarray(value, np.int32), where) for name, value in batch.items()}


def padded_lengths(window: int) -> list[int]:
    """The lengths that rows are padded to, shortest first: `window`, half of it, ... in multiples of 16."""
    lengths = {window}
    for _ in range(NUM_PADDED_LENGTHS - 1):
        shorter = -(-min(lengths) // 32) * 16
        if shorter < MIN_PADDED_LENGTH or shorter >= min(lengths):
            break
        lengths.add(shorter)
    return sorted(lengths)


def pad_batch(requests: Sequence[ScoreRequest], rows: int, length: int) -> Batch:
    """`tokens` and `targets`, int32 [rows, length]; the target of what is not scored is -1."""
    tokens = np.zeros((rows, length), np.int32)
    targets = np.full((rows, length), -1, np.int32)
    for row, request in enumerate(requests):
        ids = np.asarray(request.tokens, np.int32)
        tokens[row, : len(ids) - 1] = ids[:-1]
        targets[row, len(ids) - 1 - request.num_scored : len(ids) - 1] = ids[-request.num_scored :]
    return {"tokens": tokens, "targets": targets}


def _prefetch_one(running: Iterable[Any]) -> Iterator[Any]:
    """What was dispatched, each after the next was: the device works on that one while the host reads."""
    return (before for before, _ in itertools.pairwise(itertools.chain(running, [None])))
