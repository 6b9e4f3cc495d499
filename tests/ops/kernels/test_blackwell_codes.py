"""The passes that write codes and the GEMMs of experts that read them compile for GB300: alone in a process, because
Mosaic GPU has one target in each."""

import pytest
from kernel_programs import blackwell_experts, compiled_codes

pytestmark = pytest.mark.cuda_compiler


def test_codes_compile():
    assert compiled_codes("gb300").count('custom_call_target="mosaic_gpu_v2"') == 3


def test_experts_are_multiplied_as_codes(tmp_path, monkeypatch):
    blackwell_experts("gb300", "sm_103a", tmp_path, monkeypatch)
