"""Runs by name, and runs from Python."""

from .presets import RUNS, names, run_config
from .python import evaluate, generate, load

__all__ = ["RUNS", "evaluate", "generate", "load", "names", "run_config"]
