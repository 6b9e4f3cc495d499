"""The oracle, the shapes and the instruments of these tests are modules beside them, which benchmarks also import; the
readers of programs are those of tests/hlo."""

import pathlib
import sys

import jax
import pytest

from halfbyte import kernels

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1] / "hlo")]


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
