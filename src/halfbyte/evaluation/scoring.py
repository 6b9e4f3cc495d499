"""Log-likelihoods of tokens under a model, for many requests at once.

A request is a row of tokens; its last `num_scored` tokens are scored, each conditioned on all tokens before it. Rows
are right-padded to a few lengths and batches to a few sizes, so that thousands of requests need only a few compiled
programs. Logits are computed for a slice of positions at a time, which bounds their memory.

Attention is causal, so that no token attends to the padding after it. But a quantized recipe computes the per-tensor
scale from all tokens, including other rows and padding, so that a score depends on the rest of its batch. Under bf16 it
depends on it slightly as well, because the order of summation changes with the shape. `scales="window"` scores every
row as a batch of one, always of the shape that its length is padded to, so that a score is a function of its request
only.
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

MIN_PADDED_LENGTH = 32  # tokens
NUM_PADDED_LENGTHS = 5  # at most, each half of the next
LOGIT_BYTES = 2**28  # float32 logits in memory at a time
PACKED_BATCH_KEYS = ("tokens", "targets", "segments", "positions")
AMAX_SCOPES = ("batch", "window")
Batch = dict[str, Any]
ProgressFn = Callable[[int, int], None]


@dataclass(frozen=True)
class ScoreRequest:
    """Tokens of which the last `num_scored` are scored."""

    tokens: tuple[int, ...]
    num_scored: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_scored < len(self.tokens):
            raise ValueError(
                f"{self.num_scored} of {len(self.tokens)} tokens to score: need at least 1, and one before it"
            )

    def truncate_to(self, window: int) -> "ScoreRequest":
        """Returns the request if it fits the window, else its last `window` + 1 tokens."""
        if len(self.tokens) <= window + 1:
            return self
        return ScoreRequest(self.tokens[-window - 1 :], min(self.num_scored, window))


@dataclass(frozen=True)
class SequenceScore:
    """`nll`: negative log-likelihood in nats, summed over `tokens`. `greedy`: each of them was the most likely."""

    nll: float
    tokens: int
    greedy: bool


def token_scores(
    config: models.LlamaConfig, params: models.Params, batch: Batch, ctx: models.ModelContext
) -> tuple[jax.Array, jax.Array]:
    """Returns (negative log-likelihood of each target, float32 [batch, seq], 0 for target -1; whether the target is the
    most likely token, bool [batch, seq])."""
    hidden, targets = models.hidden_states(config, params, batch, ctx), batch["targets"]
    head = head_weight(params).astype(hidden.dtype)
    rows, seq, width = hidden.shape
    max_positions = max(1, LOGIT_BYTES // (4 * rows * config.vocab_size))
    size = next(size for size in range(min(max_positions, seq), 0, -1) if seq % size == 0)

    def score_slice(slice_inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, target = slice_inputs
        logits = jnp.dot(x, head, preferred_element_type=jnp.float32)  # [rows, size, vocab]
        logits = ctx.constrain(logits, "batch", None, "vocab")
        target_logits = jnp.take_along_axis(logits, jnp.maximum(target, 0)[..., None], axis=-1)[..., 0]
        nll = jax.nn.logsumexp(logits, axis=-1) - target_logits
        return jnp.where(target >= 0, nll, 0.0), target_logits >= jnp.max(logits, axis=-1)

    if size == seq:
        return score_slice((hidden, targets))
    # [rows, seq, ...] -> [slices, rows, size, ...]
    slices = (
        jnp.moveaxis(hidden.reshape(rows, seq // size, size, width), 1, 0),
        jnp.moveaxis(targets.reshape(rows, seq // size, size), 1, 0),
    )
    nll, greedy = lax.map(score_slice, slices)
    return tuple(jnp.moveaxis(x, 0, 1).reshape(rows, seq) for x in (nll, greedy))  # type: ignore[return-value]


class Scorer:
    """Scores requests with one model, in windows of at most `window` tokens and batches of about `batch_tokens`.

    `scales` is the extent over which a quantized tensor shares its scale: the whole "batch", or one "window", which is
    then a batch of its own.
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
        """Returns (summed nll, whether all scored tokens are greedy) per row."""
        nll, greedy = token_scores(self.model.config, params, batch, self.model.context)
        return jnp.sum(nll, axis=1), jnp.all(greedy | (batch["targets"] < 0), axis=1)

    def _window_sums(self, params: models.Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns (summed nll, number of targets) per window."""
        nll, _ = token_scores(self.model.config, params, batch, self.model.context)
        return jnp.sum(nll, axis=1), jnp.sum(batch["targets"] >= 0, axis=1)

    def score(self, requests: Sequence[ScoreRequest], *, watch: ProgressFn | None = None) -> list[SequenceScore]:
        """Returns a score per request, in order. `watch` is called with (requests done, total) after each batch."""
        truncated = [request.truncate_to(self.window) for request in requests]
        running = (
            (indices, self._program(self.model.params, self._put_on_mesh(batch)))
            for indices, batch in self._batches(truncated)
        )
        scores: dict[int, SequenceScore] = {}
        for indices, outputs in _prefetch_one(running):
            for index, nll, greedy in zip(indices, *jax.device_get(outputs)):  # rows after the last index are padding
                scores[index] = SequenceScore(float(nll), truncated[index].num_scored, bool(greedy))
            if watch is not None:
                watch(len(scores), len(requests))
        return [scores[index] for index in range(len(requests))]

    def score_packed(self, batches: Iterable[Batch]) -> Iterator[SequenceScore]:
        """Yield the score of each window of packed batches, in the order of the loader. Windows without a target are
        skipped. `greedy` is not computed and is False."""
        batches_on_mesh = (self._put_on_mesh({key: batch[key] for key in PACKED_BATCH_KEYS}) for batch in batches)
        for sums in _prefetch_one(self._sums(self.model.params, batch) for batch in batches_on_mesh):
            for nll, tokens in zip(*jax.device_get(sums), strict=True):
                if tokens:
                    yield SequenceScore(float(nll), int(tokens), False)

    def _batches(self, requests: Sequence[ScoreRequest]) -> Iterator[tuple[list[int], Batch]]:
        """Yield (request indices, padded batch): one shape per padded length, filled in order."""
        by_length: dict[int, list[int]] = {}
        lengths = padded_lengths(self.window)
        for index, request in enumerate(requests):
            padded_length = next(length for length in lengths if len(request.tokens) - 1 <= length)
            by_length.setdefault(padded_length, []).append(index)
        for length, indices in sorted(by_length.items(), reverse=True):
            rows = self.rows(length)
            self.compiled.add((rows, length))
            for start in range(0, len(indices), rows):
                batch_indices = indices[start : start + rows]
                yield batch_indices, pad_batch([requests[index] for index in batch_indices], rows, length)

    def rows(self, length: int) -> int:
        """Returns the rows of a batch, the same for every task: as many as `batch_tokens` allows, rounded up to a
        multiple of the batch shards; 1 for scales="window"."""
        if self.scales == "window":
            return 1
        rows = max(1, self.batch_tokens // length)
        return -(-rows // self._num_batch_shards) * self._num_batch_shards

    @property
    def _num_batch_shards(self) -> int:
        """Returns the number of shards of the batch dim on the mesh."""
        return axis_size(self.model.context.mesh, self.model.context.rules.mesh_axes("batch"))

    def _put_on_mesh(self, batch: Batch) -> Batch:
        mesh = self.model.context.mesh
        if mesh is None:
            return batch
        sharding = named_sharding(("batch", "seq"), mesh, self.model.context.rules)
        return {name: jax.device_put(np.asarray(value, np.int32), sharding) for name, value in batch.items()}


def padded_lengths(window: int) -> list[int]:
    """Returns the lengths that rows are padded to, ascending: `window`, half of it, and so on, in multiples of 16."""
    lengths = {window}
    for _ in range(NUM_PADDED_LENGTHS - 1):
        shorter = -(-min(lengths) // 32) * 16
        if shorter < MIN_PADDED_LENGTH or shorter >= min(lengths):
            break
        lengths.add(shorter)
    return sorted(lengths)


def pad_batch(requests: Sequence[ScoreRequest], rows: int, length: int) -> Batch:
    """Returns `tokens` and `targets`, int32 [rows, length]. The target of a token that is not scored is -1."""
    tokens = np.zeros((rows, length), np.int32)
    targets = np.full((rows, length), -1, np.int32)
    for row, request in enumerate(requests):
        ids = np.asarray(request.tokens, np.int32)
        tokens[row, : len(ids) - 1] = ids[:-1]
        targets[row, len(ids) - 1 - request.num_scored : len(ids) - 1] = ids[-request.num_scored :]
    return {"tokens": tokens, "targets": targets}


def _prefetch_one(running: Iterable[Any]) -> Iterator[Any]:
    """Yield dispatched results, each after the next one was dispatched, so that the device computes while the host
    reads."""
    return (result for result, _ in itertools.pairwise(itertools.chain(running, [None])))
