"""Python interface to runs: load a model, generate text, evaluate it. `halfbyte.train` trains one.

`score_tasks` computes what `halfbyte eval RUN` prints: the results of tasks, or the validation loss source by source.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.train.run_presets import RUN_PRESETS, run_config, run_names

if TYPE_CHECKING:
    from halfbyte.evaluation import TaskFile, TaskResult
    from halfbyte.hf.model_loading import LoadedModel
    from halfbyte.train import PrecisionManifest, TrainConfig

__all__ = ["RUN_PRESETS", "evaluate", "generate", "load", "precision_plan", "run_config", "run_names"]

ProgressFactory = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


def precision_plan(run: str | TrainConfig, *, device: str | None = None, step: int = 0) -> PrecisionManifest:
    """Returns the format and backend of each GEMM of a run at `step` on a device, without tracing anything.

    `run` is a config or the name of one, `device` a name in `hb.DEVICES` (default: the device that JAX has here). The
    mesh is that of the config; without one, fsdp over the devices here. `print` shows it as a table; `to_json()` is
    what `halfbyte train` writes to manifest.json. Raises ValueError if a backend cannot serve a linear.
    """
    import jax

    from halfbyte.devices import device_by_name, lookup
    from halfbyte.train import build_precision_manifest, phases
    from halfbyte.train.precision_phases import phase_at

    config = run_config(run) if isinstance(run, str) else run
    if not 0 <= step < config.steps:
        raise ValueError(f"step must be between 0 and {config.steps - 1}, the last step of {config.name}, got {step}")
    target = lookup(jax.local_devices()[0]) if device is None else device_by_name(device)
    phase, seq = phase_at(phases(config), step), config.seq or config.model.max_seq
    return build_precision_manifest(config, phase.resolved(config), phase.recipe, seq=seq, device=target)


def load(run: str | Path, *, recipe: str = "", mesh: str = "", step: int | None = None) -> LoadedModel:
    """The model of a run directory (its newest whole checkpoint, or that of `step`) or of a Hugging Face folder.

    `config`, `params` and `tokenizer` are its parts; `recipe` is that of the forward pass, by default the one that the
    run trained with.
    """
    from halfbyte.evaluation import GENERATION_RULES
    from halfbyte.hf.model_loading import open_model

    return open_model(run, recipe_name=recipe, mesh=mesh, rules=GENERATION_RULES, step=step)


def generate(
    model: LoadedModel | str | Path, prompt: str, *, max_tokens: int = 100, temperature: float = 0.8,
    top_p: float = 0.95, seed: int = 0,
) -> str:  # fmt: skip
    """What the model writes after `prompt`: at most `max_tokens`, fewer where the text ends or the context is full."""
    from halfbyte.evaluation import Sampling, TextGenerator

    generator = TextGenerator(_loaded(model).model, Sampling(temperature, top_p, 0, seed))
    return str(generator.generate(prompt, max_tokens=max_tokens, seed=seed).text)


def evaluate(
    model: LoadedModel | str | Path, files: Iterable[str | Path] = (), *, limit: int = 0
) -> Sequence[TaskResult]:
    """The results of the task files (or text files) `files`, or the loss on the run's own validation split if there are
    none; `limit` examples of each, 0 for all.
    """
    from halfbyte.data.text_files import find_files
    from halfbyte.evaluation import Scorer, open_task

    loaded = _loaded(model)
    tasks = [open_task(file) for name in files for file in find_files([str(name)])]
    return list(score_tasks(loaded, Scorer(loaded.model), tasks, limit=limit))


def no_progress(name: str) -> AbstractContextManager[Callable[[int, int], None]]:
    """Returns a progress context that shows nothing."""
    return contextlib.nullcontext(lambda done, total: None)


def score_tasks(
    loaded: LoadedModel, scorer: Any, tasks: Sequence[TaskFile], *, limit: int = 0, stride: int | None = None,
    progress: ProgressFactory = no_progress,
) -> Iterator[TaskResult]:  # fmt: skip
    """The result of each task in turn, or of the validation split if there is none; `limit` examples of each (windows
    of a text), 0 for all. `progress` opens a bar by name."""
    from halfbyte.evaluation import iter_examples, run_task, subsample, truncate_to_windows

    if not tasks:
        yield from score_validation(loaded, scorer, limit=limit, progress=progress)
    read = []  # every file is read before any is scored: a malformed line costs seconds, not the hour before it
    for task in tasks:
        items = subsample(list(iter_examples(task)), limit)
        if task.file.kind == "text":
            items = [{"text": truncate_to_windows(loaded.model.tokenizer, items[0]["text"], limit, scorer.window)}]
        read.append(items)
    for task, items in zip(tasks, read, strict=True):
        with progress(task.name) as watch:
            yield run_task(task.name, task.kind, items, scorer, stride=stride, watch=watch)


def score_validation(
    loaded: LoadedModel, scorer: Any, *, limit: int, progress: ProgressFactory
) -> Iterator[TaskResult]:
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
        yield _score_source(dataset, source, scorer, limit=limit, progress=progress)


def _loaded(model: LoadedModel | str | Path) -> LoadedModel:
    return load(model) if isinstance(model, str | Path) else model


def _score_source(dataset: Any, source: str, scorer: Any, *, limit: int, progress: ProgressFactory) -> TaskResult:
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
