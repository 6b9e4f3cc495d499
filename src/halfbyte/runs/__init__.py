"""Runs by name."""

from .presets import RUNS, names, run_config

__all__ = ["RUNS", "names", "run_config"]
