"""The scores of a run on tasks, or its validation loss, source by source: what `halfbyte eval RUN` and
`halfbyte.evaluate(RUN)` give."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfbyte.evaluation import Result, TaskFile
    from halfbyte.interchange.opening import LoadedRun

Progress = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


def unwatched(name: str) -> AbstractContextManager[Callable[[int, int], None]]:
    """Progress that nobody sees."""
    return contextlib.nullcontext(lambda done, total: None)


def results(
    loaded: LoadedRun, scorer: Any, tasks: Sequence[TaskFile], *, limit: int = 0, stride: int | None = None,
    progress: Progress = unwatched,
) -> Iterator[Result]:  # fmt: skip
    """The result of each task in turn, or of the validation split if there is none; `limit` examples of each (windows
    of a text), 0 for all. `progress` opens a bar by name."""
    from halfbyte.evaluation import chosen, examples, first_windows, run_task

    if not tasks:
        yield from validation_results(loaded, scorer, limit=limit, progress=progress)
    read = []  # every file is read before any is scored: a malformed line costs seconds, not the hour before it
    for task in tasks:
        items = chosen(list(examples(task)), limit)
        if task.file.kind == "text":
            items = [{"text": first_windows(loaded.model.tokenizer, items[0]["text"], limit, scorer.window)}]
        read.append(items)
    for task, items in zip(tasks, read, strict=True):
        with progress(task.name) as watch:
            yield run_task(task.name, task.kind, items, scorer, stride=stride, watch=watch)


def validation_results(loaded: LoadedRun, scorer: Any, *, limit: int, progress: Progress) -> Iterator[Result]:
    """The loss on each source of the run's own validation split; `limit` windows of each from its beginning, 0 for all.
    A bar is told (windows done, of all). Raises ValueError where there is no split.
    """
    from halfbyte import data

    if loaded.run is None:
        raise ValueError(f"{loaded.directory} is a folder without data of its own; name files to score")
    dataset = loaded.run.source().dataset
    if dataset is None:
        raise ValueError(
            "the run has no data set (imported, or synthetic tokens), so no validation text; name files to score"
        )
    for source in data.validation_sources(dataset):
        yield _of_source(dataset, source, scorer, limit=limit, progress=progress)


def _of_source(dataset: Any, source: str, scorer: Any, *, limit: int, progress: Progress) -> Result:
    from halfbyte import data
    from halfbyte.evaluation import validation_result

    name, rows = f"validation/{source}", scorer.rows(dataset.seq_len)
    most = -(-limit // rows) if limit else None
    loader = data.loader(dataset, batch=rows, split="validation", source=source, max_batches=most)
    scores: list[Any] = []
    with loader, progress(name) as watch:
        for score in scorer.score_packed(loader):
            scores.append(score)
            watch(len(scores), loader.batches * rows)
    return validation_result(name, scores[: limit or None], bytes_per_token=_bytes_per_token(dataset, source))


def _bytes_per_token(dataset: Any, source: str) -> float:
    from halfbyte import data

    totals = [part.manifest.splits["validation"].get(source) for part in data.dataset.as_mixture(dataset).datasets]
    size, tokens = (sum(getattr(t, field) for t in totals if t) for field in ("text_bytes", "tokens"))
    return float(size / tokens)
