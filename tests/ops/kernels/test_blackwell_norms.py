"""RMSNorm kernels compile for Blackwell. JAX 0.11 needs a process per architecture (tests/conftest.py)."""

import pytest
import test_norm_kernels
import test_normed


@pytest.mark.cuda_compiler
@pytest.mark.parametrize("module", [test_norm_kernels, test_normed], ids=lambda module: module.__name__)
def test_norm_kernels_compile_for_gb300(module):
    module.check_program("gb300")
