"""Evaluation tasks: build score requests from texts, and metrics with standard errors from scores.

    acc       the most likely text is the right one; for a word: each of its tokens is the most likely
    acc_norm  the same, log-likelihoods divided by the length of the choice or sentence in characters
    ppl       exp of the mean negative log-likelihood, per word or per token of text
    nats_per_token, bits_per_byte    of text

The standard error is that of the mean over examples. Tokens of a text are correlated, so its error is computed over
windows, also for a validation split: sqrt(sum of (nll_w - mean * tokens_w)^2 * W / (W - 1)) / tokens.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from halfbyte.data import Tokenizer
from halfbyte.evaluation.scoring import ProgressFn, Scorer, ScoreRequest, SequenceScore
from halfbyte.evaluation.task_files import TEXT_FORMAT, Record, group_of, texts_of


@dataclass(frozen=True)
class MetricEstimate:
    """A mean and its standard error, None for a single example."""

    value: float
    error: float | None = None


@dataclass(frozen=True)
class TaskResult:
    """Metrics of a task. `chance` is the accuracy of guessing; `truncated` examples did not fit the window."""

    task: str
    kind: str
    examples: int
    tokens: int
    metrics: dict[str, MetricEstimate]
    chance: float | None = None
    truncated: int = 0
    groups: dict[str, dict[str, MetricEstimate]] = field(default_factory=dict)


def run_task(
    name: str,
    kind: str,
    items: Sequence[Record],
    scorer: Scorer,
    *,
    stride: int | None = None,
    watch: ProgressFn | None = None,
) -> TaskResult:
    """Score all examples of a task. `stride`, for text only, is the offset between windows and the number of tokens
    that each window after the first scores."""
    if not items:
        raise ValueError(f"{name}: there is no example to score")
    tokenizer, window = scorer.model.tokenizer, scorer.window
    if kind == TEXT_FORMAT:
        requests = [text_requests(tokenizer, item["text"], window, stride or window) for item in items]
    else:
        requests = [[tokenize_pair(tokenizer, *pair) for pair in texts_of(kind, item)] for item in items]
    flat = [request for item_requests in requests for request in item_requests]
    scores = iter(scorer.score(flat, watch=watch))
    scored = [
        (item, [next(scores) for _ in item_requests]) for item, item_requests in zip(items, requests, strict=True)
    ]

    metrics = METRICS_OF_KIND.get(kind, choice_metrics)
    names = sorted({group_of(item) for item in items} - {""})
    groups = {group: metrics([pair for pair in scored if group_of(pair[0]) == group]) for group in names}
    return TaskResult(
        task=name,
        kind=kind,
        examples=len(items),
        tokens=sum(score.tokens for _, scores in scored for score in scores),
        metrics=metrics(scored),
        chance=None if kind in (TEXT_FORMAT, "word") else float(np.mean([1 / len(choices) for choices in requests])),
        truncated=sum(any(len(request.tokens) > window + 1 for request in choices) for choices in requests),
        groups=groups if len(groups) > 1 else {},
    )


# Requests


def tokenize_pair(tokenizer: Tokenizer, context: str, continuation: str) -> ScoreRequest:
    """Returns the request for `continuation` after `context`, tokenized together with begin-of-document, as the model
    would have seen them. A token that spans the border is scored."""
    ids = tokenizer.encode(context + continuation, bos=True)
    context_ids = tokenizer.encode(context, bos=True)
    num_common = next(
        (index for index, (a, b) in enumerate(zip(ids, context_ids)) if a != b), min(len(ids), len(context_ids))
    )
    return ScoreRequest(tuple(ids), len(ids) - min(num_common, len(ids) - 1))


def text_requests(tokenizer: Tokenizer, text: str, window: int, stride: int) -> list[ScoreRequest]:
    """Split a document into windows of `window` tokens that score every token once. Each scored token has at least
    window - stride tokens of context, if the document has as many before it."""
    if not 1 <= stride <= window:
        raise ValueError(f"stride {stride}: it lies between 1 and the window of {window} tokens")
    ids = tokenizer.encode(text, bos=True)
    requests, done = [], 1
    while done < len(ids):
        scored = min(window if done == 1 else stride, len(ids) - done)
        stop = done + scored
        requests.append(ScoreRequest(tuple(ids[max(0, stop - window - 1) : stop]), scored))
        done = stop
    return requests


def truncate_to_windows(tokenizer: Tokenizer, text: str, count: int, window: int) -> str:
    """Returns the beginning of a text that fills `count` windows; 0: all of it."""
    ids = tokenizer.encode(text)
    return tokenizer.decode(ids[: count * window]) if 0 < count * window < len(ids) else text


# Metrics

ScoredExamples = Sequence[tuple[Record, Sequence[SequenceScore]]]


def choice_metrics(scored: ScoredExamples) -> dict[str, MetricEstimate]:
    """Returns acc and acc_norm of choosing the most likely text."""
    is_correct = []
    for record, scores in scored:
        texts = record["choices"] if "choices" in record else [text for _, text in texts_of("pair", record)]
        nll = [score.nll / len(text) for score, text in zip(scores, texts, strict=True)]
        is_correct.append(is_gold_most_likely(record, nll))
    return {**schema_metrics(scored), "acc_norm": mean_with_error(is_correct)}


def schema_metrics(scored: ScoredExamples) -> dict[str, MetricEstimate]:
    """Returns acc. There is no acc_norm, because all options have the same continuation."""
    is_correct = [is_gold_most_likely(record, [score.nll for score in scores]) for record, scores in scored]
    return {"acc": mean_with_error(is_correct)}


def word_metrics(scored: ScoredExamples) -> dict[str, MetricEstimate]:
    """Returns acc of greedy decoding, and perplexity per word."""
    nll = mean_with_error([scores[0].nll for _, scores in scored])
    return {"acc": mean_with_error([scores[0].greedy for _, scores in scored]), "ppl": exp_metric(nll)}


def text_metrics(scored: ScoredExamples) -> dict[str, MetricEstimate]:
    """Returns nats per token, bits per byte, and perplexity per token and per whitespace-separated word."""
    windows = [score for _, scores in scored for score in scores]
    texts = [record["text"] for record, _ in scored]
    num_bytes = sum(len(text.encode()) for text in texts)
    num_words = sum(len(text.split()) for text in texts)
    num_tokens = sum(score.tokens for score in windows)
    metrics = loss_metrics(windows, num_bytes / num_tokens)
    return (
        {**metrics, "word_ppl": exp_metric(scale_metric(metrics["nats_per_token"], num_tokens / num_words))}
        if num_words
        else metrics
    )


def loss_metrics(windows: Sequence[SequenceScore], bytes_per_token: float) -> dict[str, MetricEstimate]:
    """Returns nats per token, bits per byte and perplexity per token, with errors over the windows."""
    nats = ratio_with_error([score.nll for score in windows], [score.tokens for score in windows])
    bits = scale_metric(nats, 1 / math.log(2) / bytes_per_token)
    return {"nats_per_token": nats, "bits_per_byte": bits, "ppl": exp_metric(nats)}


METRICS_OF_KIND = {"schema": schema_metrics, "word": word_metrics, TEXT_FORMAT: text_metrics}


def validation_result(name: str, scores: Sequence[SequenceScore], *, bytes_per_token: float) -> TaskResult:
    """Returns the result of a dataset's validation split from the scores of its windows."""
    tokens, metrics = sum(score.tokens for score in scores), loss_metrics(scores, bytes_per_token)
    return TaskResult(name, "validation", len(scores), tokens, metrics)


def is_gold_most_likely(record: Record, nll: Sequence[float]) -> bool:
    """Returns True if the gold text has the lowest value, False for a tie."""
    gold = record.get("gold", 0)
    return all(nll[gold] < value for index, value in enumerate(nll) if index != gold)


def mean_with_error(values: Iterable[float]) -> MetricEstimate:
    """Returns the mean and its standard error."""
    array = np.asarray(list(values), np.float64)
    error = float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else None
    return MetricEstimate(float(array.mean()), error)


def ratio_with_error(sums: Sequence[float], counts: Sequence[int]) -> MetricEstimate:
    """Returns sum(sums) / sum(counts) with its standard error over the windows."""
    numerators, denominators = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    value = numerators.sum() / denominators.sum()
    residuals = numerators - value * denominators
    count = len(numerators)
    error = float(np.sqrt((residuals**2).sum() * count / (count - 1)) / denominators.sum()) if count > 1 else None
    return MetricEstimate(float(value), error)


def scale_metric(metric: MetricEstimate, factor: float) -> MetricEstimate:
    """Returns the metric in another unit."""
    return MetricEstimate(metric.value * factor, None if metric.error is None else metric.error * factor)


def exp_metric(metric: MetricEstimate) -> MetricEstimate:
    """Returns exp of the metric, its error to first order. The value is inf instead of an overflow."""
    value = math.exp(metric.value) if metric.value < 700 else math.inf
    return MetricEstimate(value, None if metric.error is None else value * metric.error)
