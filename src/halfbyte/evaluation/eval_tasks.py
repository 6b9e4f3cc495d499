"""Tasks scored: requests made from texts, scores turned into metrics with standard errors.

    acc       the likeliest text is the right one; for a word: every token of it is the likeliest
    acc_norm  the same, log-likelihoods divided by the length of the choice or sentence in characters
    ppl       exp of the mean negative log-likelihood, of a whole word or of a token of text
    nats_per_token, bits_per_byte    of text

A standard error is that of the mean over examples. The tokens of a text depend on each other, so its error is taken
over windows, those of a validation split too: sqrt(sum of (nll_w - mean * tokens_w)^2 * W / (W - 1)) / tokens.
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
    """A mean and its standard error; None where one example gives none."""

    value: float
    error: float | None = None


@dataclass(frozen=True)
class TaskResult:
    """What a task gave. `chance` is the accuracy of guessing; `truncated` examples did not fit the window."""

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
    """Every example scored. `stride` is for text: how far each window starts after the last, and what it scores."""
    if not items:
        raise ValueError(f"{name}: there is no example to score")
    tokenizer, window = scorer.model.tokenizer, scorer.window
    if kind == TEXT_FORMAT:
        requests = [text_requests(tokenizer, item["text"], window, stride or window) for item in items]
    else:
        requests = [[tokenize_pair(tokenizer, *pair) for pair in texts_of(kind, item)] for item in items]
    flat = [request for made in requests for request in made]
    found = iter(scorer.score(flat, watch=watch))
    scored = [(item, [next(found) for _ in made]) for item, made in zip(items, requests, strict=True)]

    metrics = METRICS_OF_KIND.get(kind, choice_metrics)
    names = sorted({group_of(item) for item in items} - {""})
    groups = {group: metrics([pair for pair in scored if group_of(pair[0]) == group]) for group in names}
    return TaskResult(
        task=name,
        kind=kind,
        examples=len(items),
        tokens=sum(score.tokens for _, scores in scored for score in scores),
        metrics=metrics(scored),
        chance=None if kind in (TEXT_FORMAT, "word") else float(np.mean([1 / len(made) for made in requests])),
        truncated=sum(any(len(request.tokens) > window + 1 for request in made) for made in requests),
        groups=groups if len(groups) > 1 else {},
    )


# Requests


def tokenize_pair(tokenizer: Tokenizer, context: str, continuation: str) -> ScoreRequest:
    """Begin-of-document, and the tokens of both together, as the model would have seen them. Where a token spans the
    border, it is scored."""
    whole = tokenizer.encode(context + continuation, bos=True)
    before = tokenizer.encode(context, bos=True)
    same = next((at for at, (a, b) in enumerate(zip(whole, before)) if a != b), min(len(whole), len(before)))
    return ScoreRequest(tuple(whole), len(whole) - min(same, len(whole) - 1))


def text_requests(tokenizer: Tokenizer, text: str, window: int, stride: int) -> list[ScoreRequest]:
    """The document in windows of `window` tokens: every token scored once, given at least window - stride tokens before
    it, where the document has them."""
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
    """The beginning of a text: as much as fills `count` windows. 0: all of it."""
    ids = tokenizer.encode(text)
    return tokenizer.decode(ids[: count * window]) if 0 < count * window < len(ids) else text


# Metrics

ScoredExamples = Sequence[tuple[Record, Sequence[SequenceScore]]]


def choice_metrics(scored: ScoredExamples) -> dict[str, MetricEstimate]:
    """acc and acc_norm of picking the likeliest text."""
    normed = []
    for record, scores in scored:
        texts = record["choices"] if "choices" in record else [text for _, text in texts_of("pair", record)]
        nll = [score.nll / len(text) for score, text in zip(scores, texts, strict=True)]
        normed.append(is_gold_most_likely(record, nll))
    return {**schema_metrics(scored), "acc_norm": mean_with_error(normed)}


def schema_metrics(scored: ScoredExamples) -> dict[str, MetricEstimate]:
    """acc; of one continuation length cannot matter."""
    found = [is_gold_most_likely(record, [score.nll for score in scores]) for record, scores in scored]
    return {"acc": mean_with_error(found)}


def word_metrics(scored: ScoredExamples) -> dict[str, MetricEstimate]:
    """acc of greedy decoding, and perplexity per word."""
    nll = mean_with_error([scores[0].nll for _, scores in scored])
    return {"acc": mean_with_error([scores[0].greedy for _, scores in scored]), "ppl": exp_metric(nll)}


def text_metrics(scored: ScoredExamples) -> dict[str, MetricEstimate]:
    """nats a token, bits a byte, perplexity a token and a whitespace-separated word."""
    windows = [score for _, scores in scored for score in scores]
    texts = [record["text"] for record, _ in scored]
    size = sum(len(text.encode()) for text in texts)
    words = sum(len(text.split()) for text in texts)
    tokens = sum(score.tokens for score in windows)
    found = loss_metrics(windows, size / tokens)
    return {**found, "word_ppl": exp_metric(scale_metric(found["nats_per_token"], tokens / words))} if words else found


def loss_metrics(windows: Sequence[SequenceScore], bytes_per_token: float) -> dict[str, MetricEstimate]:
    """nats a token, bits a byte and perplexity a token, with errors over the windows."""
    nats = ratio_with_error([score.nll for score in windows], [score.tokens for score in windows])
    bits = scale_metric(nats, 1 / math.log(2) / bytes_per_token)
    return {"nats_per_token": nats, "bits_per_byte": bits, "ppl": exp_metric(nats)}


METRICS_OF_KIND = {"schema": schema_metrics, "word": word_metrics, TEXT_FORMAT: text_metrics}


def validation_result(name: str, scores: Sequence[SequenceScore], *, bytes_per_token: float) -> TaskResult:
    """The result of a data set's validation split, from the scores of its windows."""
    tokens, metrics = sum(score.tokens for score in scores), loss_metrics(scores, bytes_per_token)
    return TaskResult(name, "validation", len(scores), tokens, metrics)


def is_gold_most_likely(record: Record, nll: Sequence[float]) -> bool:
    """Returns True if the gold text has the lowest value. A tie is not a win."""
    gold = record.get("gold", 0)
    return all(nll[gold] < other for place, other in enumerate(nll) if place != gold)


def mean_with_error(values: Iterable[float]) -> MetricEstimate:
    """The mean and its standard error."""
    array = np.asarray(list(values), np.float64)
    error = float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else None
    return MetricEstimate(float(array.mean()), error)


def ratio_with_error(sums: Sequence[float], counts: Sequence[int]) -> MetricEstimate:
    """sum(sums) / sum(counts), its error over the parts."""
    above, below = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    value = above.sum() / below.sum()
    spread = above - value * below
    many = len(above)
    error = float(np.sqrt((spread**2).sum() * many / (many - 1)) / below.sum()) if many > 1 else None
    return MetricEstimate(float(value), error)


def scale_metric(metric: MetricEstimate, factor: float) -> MetricEstimate:
    """The metric in another unit."""
    return MetricEstimate(metric.value * factor, None if metric.error is None else metric.error * factor)


def exp_metric(metric: MetricEstimate) -> MetricEstimate:
    """exp of the metric; its error to first order. Infinite rather than an overflow."""
    value = math.exp(metric.value) if metric.value < 700 else math.inf
    return MetricEstimate(value, None if metric.error is None else value * metric.error)
