"""The GEMMs of experts over codes, and passes that choose, compile for GB200 and B200, capability 10.0: a process of
their own, as for 10.3 in test_blackwell_codes.py."""

import pytest
from kernel_programs import blackwell_experts, compiled_choosing

pytestmark = pytest.mark.cuda_compiler


def test_passes_that_choose_compile():
    compiled_choosing("b200", ("squared",))


def test_experts_are_multiplied_as_codes(tmp_path, monkeypatch):
    blackwell_experts("gb200", "sm_100a", tmp_path, monkeypatch)
