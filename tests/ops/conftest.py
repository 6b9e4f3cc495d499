"""Shapes and instruments are modules next to the tests, which benchmarks also import; oracles are in tests/oracle, and
readers of programs in tests/hlo."""

import pathlib
import sys

import jax
import pytest

from halfbyte import kernels

TESTS = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("ops", "oracle", "hlo")]


@pytest.fixture
def on_cpu():
    """For tests that compare the bits of two programs: a GPU may choose another order of summation in each."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def interpreted():
    """Kernels run as NumPy and XLA."""
    with kernels.interpret_kernels():
        yield


@pytest.fixture
def interpreted_without_gpu(request):
    """The same where no GPU would run them."""
    if jax.default_backend() != "gpu":
        request.getfixturevalue("interpreted")
