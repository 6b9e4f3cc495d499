"""Tasks scored: requests made from texts, scores turned into metrics with standard errors.

    acc       the likeliest text is the right one; for a word: every token of it is the likeliest
    acc_norm  the same, log-likelihoods divided by the length of the choice or sentence in characters
    ppl       of a word: exp of the mean negative log-likelihood of whole words; of text: exp of nats a token
    nats_per_token, bits_per_byte    of text

A standard error is that of the mean over examples. The tokens of a text depend on each other, so its error is taken
over windows, those of a validation split too: sqrt(sum of (nll_w - mean * tokens_w)^2 * W / (W - 1)) / tokens.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from halfbyte.data import Tokenizer
from halfbyte.evaluation.scoring import Request, Score, Scorer, Watch
from halfbyte.evaluation.task_files import Example


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
    items: Sequence[Example],
    scorer: Scorer,
    *,
    stride: int | None = None,
    watch: Watch | None = None,
) -> Result:
    """Every example scored. `stride` is for text: how far each window starts after the last, and what it scores."""
    if not items:
        raise ValueError(f"{name}: there is no example to score")
    tokenizer, window = scorer.model.tokenizer, scorer.window
    if kind == "text":
        requests = [text_requests(tokenizer, example, window, stride or window) for example in items]
    else:
        requests = [[encode_pair(tokenizer, *pair) for pair in example.texts] for example in items]
    flat = [request for made in requests for request in made]
    found = iter(scorer.score(flat, watch=watch))
    scores = [[next(found) for _ in made] for made in requests]
    metrics = METRICS[kind]
    names = sorted({example.group for example in items} - {""})
    groups = {
        group: metrics([(e, s) for e, s in zip(items, scores, strict=True) if e.group == group]) for group in names
    }
    return Result(
        task=name,
        kind=kind,
        examples=len(items),
        tokens=sum(score.tokens for example in scores for score in example),
        metrics=metrics(list(zip(items, scores, strict=True))),
        chance=None if kind in ("text", "word") else float(np.mean([1 / len(example.texts) for example in items])),
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


def text_requests(tokenizer: Tokenizer, example: Example, window: int, stride: int) -> list[Request]:
    """The document in windows of `window` tokens: every token scored once, given at least window - stride tokens before
    it, where the document has them."""
    if not 1 <= stride <= window:
        raise ValueError(f"stride {stride}: it lies between 1 and the window of {window} tokens")
    ids = tokenizer.encode(example.texts[0][1], bos=True)
    requests, done = [], 1
    while done < len(ids):
        scored = min(window if done == 1 else stride, len(ids) - done)
        stop = done + scored
        requests.append(Request(tuple(ids[max(0, stop - window - 1) : stop]), scored))
        done = stop
    return requests


def first_windows(tokenizer: Tokenizer, example: Example, count: int, window: int) -> Example:
    """The beginning of a text: as much as fills `count` windows. 0: all of it."""
    ids = tokenizer.encode(example.texts[0][1])
    if not 0 < count * window < len(ids):
        return example
    text = tokenizer.decode(ids[: count * window])
    return Example((("", text),), 0, (len(text),), example.group)


# Metrics

Scored = Sequence[tuple[Example, Sequence[Score]]]


def choice_metrics(scored: Scored) -> dict[str, Metric]:
    """acc and acc_norm of picking the likeliest text."""
    plain = [wins(example.gold, scores, None) for example, scores in scored]
    normed = [wins(example.gold, scores, example.lengths) for example, scores in scored]
    return {"acc": mean(plain), "acc_norm": mean(normed)}


def word_metrics(scored: Scored) -> dict[str, Metric]:
    """acc of greedy decoding, and perplexity a word."""
    nll = mean([scores[0].nll for _, scores in scored])
    return {"acc": mean([scores[0].greedy for _, scores in scored]), "ppl": exponential(nll)}


def text_metrics(scored: Scored) -> dict[str, Metric]:
    """nats a token, bits a byte, perplexity a token and a whitespace-separated word."""
    windows = [score for _, scores in scored for score in scores]
    texts = [example.texts[0][1] for example, _ in scored]
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


METRICS: dict[str, Callable[[Scored], dict[str, Metric]]] = {
    "choice": choice_metrics,
    "schema": lambda scored: {"acc": choice_metrics(scored)["acc"]},  # of one continuation: length cannot matter
    "word": word_metrics,
    "pair": choice_metrics,
    "text": text_metrics,
}


def validation_result(name: str, scores: Sequence[Score], *, bytes_per_token: float) -> Result:
    """The result of a data set's validation split, from the scores of its windows."""
    tokens, metrics = sum(score.tokens for score in scores), loss_metrics(scores, bytes_per_token)
    return Result(name, "validation", len(scores), tokens, metrics)


def wins(gold: int, scores: Sequence[Score], lengths: Sequence[int] | None) -> bool:
    """Whether text `gold` has the highest log-likelihood (by length, if given). A tie is not a win."""
    nll = [score.nll / (lengths[at] if lengths else 1) for at, score in enumerate(scores)]
    return all(nll[gold] < other for at, other in enumerate(nll) if at != gold)


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
