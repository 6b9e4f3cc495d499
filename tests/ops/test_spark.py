"""Programs for compute capability 12.1, compiled on a machine without a GPU, in a process of their own: JAX 0.11 cannot
compile them after kernels for 12.0 (tests/conftest.py). Oracle: the program's own text."""

import pytest
from test_workstation import check_linear, shared_memory  # noqa: F401  a fixture

pytestmark = [pytest.mark.cuda_compiler, pytest.mark.slow]


@pytest.mark.parametrize("backend, native", [("auto", 3), ("emulated", 0)])
def test_linear_compiles_for_spark(backend, native, shared_memory):  # noqa: F811
    check_linear("spark", backend, native, shared_memory)
