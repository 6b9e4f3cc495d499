"""The tiny run of tests/train is measured here too; compiles quickly, as there."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))


@pytest.fixture(autouse=True, scope="package")
def quick_compiles():
    """Compiling is most of what these tests cost: leave out the optimizations that only make programs fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
