"""Evaluate trained models: generate text, score tasks, compare loss curves, and replay a step to judge its GEMMs."""

from typing import TYPE_CHECKING

from halfbyte.evaluation.eval_tasks import MetricEstimate, TaskResult, run_task, truncate_to_windows, validation_result
from halfbyte.evaluation.generation import (
    GENERATION_RULES,
    SCORING_RULES,
    GeneratedText,
    LanguageModel,
    Sampling,
    TextGenerator,
)
from halfbyte.evaluation.scoring import Scorer, ScoreRequest, SequenceScore
from halfbyte.evaluation.task_files import (
    TEXT_FORMAT,
    TaskFile,
    UnknownTaskFormatError,
    iter_examples,
    open_task,
    subsample,
)
from halfbyte.renamed import old_names

if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
