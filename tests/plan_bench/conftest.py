"""The tiny run of tests/train and the program of tests/hlo are measured here too; compiles quickly, as there."""

import sys
from pathlib import Path

import jax
import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / room) for room in ("plan_bench", ".", "hlo")]


@pytest.fixture(autouse=True, scope="package")
def quick_compiles():
    """Compiling is most of what these tests cost: leave out the optimizations that only make programs fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
