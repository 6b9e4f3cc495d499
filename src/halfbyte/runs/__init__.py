"""Runs by name, and runs from Python."""

from .presets import RUNS, names, run_config
from .python import evaluate, generate, load
