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
from halfbyte.evaluation.scoring import Request, Score, Scorer, Watch
from halfbyte.evaluation.task_files import TEXT, Record, group_of, texts_of


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
    if kind == TEXT:
        requests = [text_requests(tokenizer, item["text"], window, stride or window) for item in items]
    else:
        requests = [[encode_pair(tokenizer, *pair) for pair in texts_of(kind, item)] for item in items]
    flat = [request for made in requests for request in made]
    found = iter(scorer.score(flat, watch=watch))
    scored = [(item, [next(found) for _ in made]) for item, made in zip(items, requests, strict=True)]

    metrics = METRICS.get(kind, choice_metrics)
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


def choice_metrics(scored: Scored) -> dict[str, Metric]:
    """acc and acc_norm of picking the likeliest text."""
    plain = [wins(record, [score.nll for score in scores]) for record, scores in scored]
    normed = []
    for record, scores in scored:
        texts = record["choices"] if "choices" in record else [text for _, text in texts_of("pair", record)]
        normed.append(wins(record, [score.nll / len(text) for score, text in zip(scores, texts, strict=True)]))
    return {"acc": mean(plain), "acc_norm": mean(normed)}


def schema_metrics(scored: Scored) -> dict[str, Metric]:
    """acc; of one continuation length cannot matter."""
    return {"acc": mean([wins(record, [score.nll for score in scores]) for record, scores in scored])}


def word_metrics(scored: Scored) -> dict[str, Metric]:
    """acc of greedy decoding, and perplexity per word."""
    nll = mean([scores[0].nll for _, scores in scored])
    return {"acc": mean([scores[0].greedy for _, scores in scored]), "ppl": exponential(nll)}


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


METRICS = {"schema": schema_metrics, "word": word_metrics, TEXT: text_metrics}


def validation_result(name: str, scores: Sequence[Score], *, bytes_per_token: float) -> Result:
    """The result of a data set's validation split, from the scores of its windows."""
    tokens, metrics = sum(score.tokens for score in scores), loss_metrics(scores, bytes_per_token)
    return Result(name, "validation", len(scores), tokens, metrics)


def wins(record: Record, nll: Sequence[float]) -> bool:
    """Returns True if the gold text has the lowest value. A tie is not a win."""
    gold = record.get("gold", 0)
    return all(nll[gold] < other for place, other in enumerate(nll) if place != gold)


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
