"""Task files as tasks of lm-evaluation-harness (extra `harness`): texts of an example, and its metrics from their
log-likelihoods.

A query that asks ("Question: ...") is continued by a line "Answer: ", any other by a space. Tokenizers join a space to
the word that follows it, so a context ends before it.
"""

import logging
from collections.abc import Sequence
from typing import Any

from halfbyte.evaluation.task_files import FIELDS, Record

QUESTION, ANSWER = "Question:", "\nAnswer:"
ACC, ACC_NORM, PERPLEXITY = ({"metric": name} for name in ("acc", "acc_norm", "perplexity"))


def prompt(text: str) -> str:
    """Returns the context up to the space before what continues it."""
    asks = text.startswith(QUESTION) or f"\n{QUESTION}" in text
    return text.rstrip(" ") + ANSWER * asks


def has_own_space(record: Record) -> bool:
    """Returns True if the continuation of a `word` brings its own space."""
    return bool(record["continuation"][0].isspace())


# Callables, not templates: of a string the harness reads digits as an index, and brackets as a list.
KINDS: dict[str, dict[str, Any]] = {
    "choice": {
        "doc_to_text": lambda record: prompt(record["query"]),
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
    },
    "schema": {  # an int as text: each choice is a context
        "doc_to_text": "gold",
        "doc_to_choice": lambda record: [prompt(option) for option in record["context_options"]],
        "doc_to_target": lambda record: record["continuation"],
        "metric_list": [ACC],  # of one continuation: length cannot matter
    },
    "word": {
        "output_type": "loglikelihood",
        "doc_to_text": lambda record: record["context"] if has_own_space(record) else prompt(record["context"]),
        "doc_to_target": lambda record: " " * (not has_own_space(record)) + record["continuation"],
        "metric_list": [ACC, PERPLEXITY],
    },
    # The harness takes the first of equal scores (or NaN), so the good sentence comes second: a tie is no win.
    "pair": {
        "doc_to_text": lambda record: "",
        "doc_to_choice": lambda record: [record["sentence_bad"], record["sentence_good"]],
        "doc_to_target": lambda record: 1,
        "target_delimiter": "",
    },
}


class Records(list[Record]):
    """A split as the harness reads it."""

    features: dict[str, None]


def harness_task(name: str, kind: str, records: Sequence[Record]) -> Any:
    """Returns the task of these records."""
    from lm_eval.api.task import ConfigurableTask

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    split = Records(records)
    split.features = dict.fromkeys(FIELDS[kind])
    source = {"custom_dataset": lambda **_: {"test": split}, "test_split": "test", "output_type": "multiple_choice"}
    return ConfigurableTask(config={"task": name, **source, "metric_list": [ACC, ACC_NORM], **KINDS[kind]})


def texts_of(task: Any, record: Record) -> list[tuple[str, str]]:
    """Returns the (context, continuation) pairs to score."""
    requests = task.construct_requests(record, task.fewshot_context(record, 0))
    return [request.args for request in (requests if isinstance(requests, list) else [requests])]
