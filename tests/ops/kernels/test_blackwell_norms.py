"""RMSNorm kernels compile for Blackwell. JAX 0.11 needs a process per architecture (tests/conftest.py)."""

import pytest
import test_norm_kernels


@pytest.mark.cuda_compiler
def test_norm_kernels_compile_for_gb300():
    test_norm_kernels.check_program("gb300")
