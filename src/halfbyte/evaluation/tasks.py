"""Tasks scored: requests made from texts, scores turned into metrics with standard errors.

    acc, acc_norm                    as lm-evaluation-harness judges an example (`harness_tasks`)
    ppl                              exp of the mean negative log-likelihood, of a whole word or of a token of text
    nats_per_token, bits_per_byte    of text

A standard error is that of the mean over examples. The tokens of a text depend on each other, so its error is taken
over windows, those of a validation split too: sqrt(sum of (nll_w - mean * tokens_w)^2 * W / (W - 1)) / tokens.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from halfbyte.data import Tokenizer
from halfbyte.evaluation.harness_tasks import harness_task, texts_of
from halfbyte.evaluation.scoring import Request, Score, Scorer, Watch
from halfbyte.evaluation.task_files import TEXT, Record, group_of


@dataclass(frozen=True)
class Metric:
    """A mean and its standard error; None where one example gives none."""

    value: float
    error: float | None = None


@dataclass(frozen=True)
class Result:
    """What a task gave. `chance` is the accuracy of guessing; `truncated` examples did not fit the window."""

    task: str
    kind: str
    examples: int
    tokens: int
    metrics: dict[str, Metric]
    chance: float | None = None
    truncated: int = 0
    groups: dict[str, dict[str, Metric]] = field(default_factory=dict)


def run_task(
    name: str,
    kind: str,
    items: Sequence[Record],
    scorer: Scorer,
    *,
    stride: int | None = None,
    watch: Watch | None = None,
) -> Result:
    """Every example scored. `stride` is for text: how far each window starts after the last, and what it scores."""
    if not items:
        raise ValueError(f"{name}: there is no example to score")
    tokenizer, window = scorer.model.tokenizer, scorer.window
    task = None if kind == TEXT else harness_task(name, kind, items)
    if task is None:
        requests = [text_requests(tokenizer, item["text"], window, stride or window) for item in items]
    else:
        requests = [[encode_pair(tokenizer, *pair) for pair in texts_of(task, item)] for item in items]
    flat = [request for made in requests for request in made]
    found = iter(scorer.score(flat, watch=watch))
    scored = [(item, [next(found) for _ in made]) for item, made in zip(items, requests, strict=True)]

    def metrics(part: Scored) -> dict[str, Metric]:
        return text_metrics(part) if task is None else task_metrics(task, part)

    names = sorted({group_of(item) for item in items} - {""})
    groups = {group: metrics([pair for pair in scored if group_of(pair[0]) == group]) for group in names}
    return Result(
        task=name,
        kind=kind,
        examples=len(items),
        tokens=sum(score.tokens for _, scores in scored for score in scores),
        metrics=metrics(scored),
        chance=None if kind in (TEXT, "word") else float(np.mean([1 / len(made) for made in requests])),
        truncated=sum(any(len(request.tokens) > window + 1 for request in made) for made in requests),
        groups=groups if len(groups) > 1 else {},
    )


# Requests


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Request:
    """Begin-of-document, and the tokens of both together, as the model would have seen them. Where a token spans the
    border, it is scored."""
    whole = tokenizer.encode(context + continuation, bos=True)
    before = tokenizer.encode(context, bos=True)
    same = next((at for at, (a, b) in enumerate(zip(whole, before)) if a != b), min(len(whole), len(before)))
    return Request(tuple(whole), len(whole) - min(same, len(whole) - 1))


def text_requests(tokenizer: Tokenizer, text: str, window: int, stride: int) -> list[Request]:
    """The document in windows of `window` tokens: every token scored once, given at least window - stride tokens before
    it, where the document has them."""
    if not 1 <= stride <= window:
        raise ValueError(f"stride {stride}: it lies between 1 and the window of {window} tokens")
    ids = tokenizer.encode(text, bos=True)
    requests, done = [], 1
    while done < len(ids):
        scored = min(window if done == 1 else stride, len(ids) - done)
        stop = done + scored
        requests.append(Request(tuple(ids[max(0, stop - window - 1) : stop]), scored))
        done = stop
    return requests


def first_windows(tokenizer: Tokenizer, text: str, count: int, window: int) -> str:
    """The beginning of a text: as much as fills `count` windows. 0: all of it."""
    ids = tokenizer.encode(text)
    return tokenizer.decode(ids[: count * window]) if 0 < count * window < len(ids) else text


# Metrics

Scored = Sequence[tuple[Record, Sequence[Score]]]


def task_metrics(task: Any, scored: Scored) -> dict[str, Metric]:
    """Returns the means of the harness's metrics per example."""
    rows = [task.process_results(record, [(-score.nll, score.greedy) for score in scores]) for record, scores in scored]
    metrics = {name: mean([row[name] for row in rows]) for name in rows[0]}
    if likelihood := metrics.pop("perplexity", None):  # the harness returns the log-likelihood per example
        metrics["ppl"] = exponential(Metric(-likelihood.value, likelihood.error))
    return metrics


def text_metrics(scored: Scored) -> dict[str, Metric]:
    """nats a token, bits a byte, perplexity a token and a whitespace-separated word."""
    windows = [score for _, scores in scored for score in scores]
    texts = [record["text"] for record, _ in scored]
    size = sum(len(text.encode()) for text in texts)
    words = sum(len(text.split()) for text in texts)
    tokens = sum(score.tokens for score in windows)
    found = loss_metrics(windows, size / tokens)
    return {**found, "word_ppl": exponential(scaled(found["nats_per_token"], tokens / words))} if words else found


def loss_metrics(windows: Sequence[Score], bytes_per_token: float) -> dict[str, Metric]:
    """nats a token, bits a byte and perplexity a token, with errors over the windows."""
    nats = ratio([score.nll for score in windows], [score.tokens for score in windows])
    bits = scaled(nats, 1 / math.log(2) / bytes_per_token)
    return {"nats_per_token": nats, "bits_per_byte": bits, "ppl": exponential(nats)}


def validation_result(name: str, scores: Sequence[Score], *, bytes_per_token: float) -> Result:
    """The result of a data set's validation split, from the scores of its windows."""
    tokens, metrics = sum(score.tokens for score in scores), loss_metrics(scores, bytes_per_token)
    return Result(name, "validation", len(scores), tokens, metrics)


def mean(values: Iterable[float]) -> Metric:
    """The mean and its standard error."""
    array = np.asarray(list(values), np.float64)
    error = float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else None
    return Metric(float(array.mean()), error)


def ratio(sums: Sequence[float], counts: Sequence[int]) -> Metric:
    """sum(sums) / sum(counts), its error over the parts."""
    above, below = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    value = above.sum() / below.sum()
    spread = above - value * below
    many = len(above)
    error = float(np.sqrt((spread**2).sum() * many / (many - 1)) / below.sum()) if many > 1 else None
    return Metric(float(value), error)


def scaled(metric: Metric, factor: float) -> Metric:
    """The metric in another unit."""
    return Metric(metric.value * factor, None if metric.error is None else metric.error * factor)


def exponential(metric: Metric) -> Metric:
    """exp of the metric; its error to first order. Infinite rather than an overflow."""
    value = math.exp(metric.value) if metric.value < 700 else math.inf
    return Metric(value, None if metric.error is None else value * metric.error)
