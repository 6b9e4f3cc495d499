"""Runs from Python, without a terminal: load one, write with it, score with it. (`halfbyte.train` trains one.)"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .scores import results

if TYPE_CHECKING:
    from halfbyte.evaluation import Result
    from halfbyte.interchange.opening import LoadedRun


def load(run: str | Path, *, recipe: str = "", mesh: str = "", step: int | None = None) -> LoadedRun:
    """The model of a run directory (its newest whole checkpoint, or that of `step`) or of a Hugging Face folder.

    `config`, `params` and `tokenizer` are its parts; `recipe` is that of the forward pass, by default the one that the
    run trained with.
    """
    from halfbyte.evaluation import WRITING_RULES
    from halfbyte.interchange.opening import open_model

    return open_model(run, recipe_name=recipe, mesh=mesh, rules=WRITING_RULES, step=step)


def generate(
    model: LoadedRun | str | Path, prompt: str, *, max_tokens: int = 100, temperature: float = 0.8, top_p: float = 0.95,
    seed: int = 0,
) -> str:  # fmt: skip
    """What the model writes after `prompt`: at most `max_tokens`, fewer where the text ends or the context is full."""
    from halfbyte.evaluation import Generator, Sampling

    generator = Generator(_loaded(model).model, Sampling(temperature, top_p, 0, seed))
    return str(generator.write(prompt, max_tokens=max_tokens, seed=seed).text)


def evaluate(model: LoadedRun | str | Path, files: Iterable[str | Path] = (), *, limit: int = 0) -> Sequence[Result]:
    """The results of the task files (or text files) `files`, or the loss on the run's own validation split if there are
    none; `limit` examples of each, 0 for all.
    """
    from halfbyte.data.files import find_files
    from halfbyte.evaluation import Scorer, open_task

    loaded = _loaded(model)
    tasks = [open_task(file) for name in files for file in find_files([str(name)])]
    return list(results(loaded, Scorer(loaded.model), tasks, limit=limit))


def _loaded(model: LoadedRun | str | Path) -> LoadedRun:
    return load(model) if isinstance(model, str | Path) else model
