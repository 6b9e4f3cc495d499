"""The passes that write codes compile for GB300: alone in a process, because Mosaic GPU has one target in each."""

import pytest
from kernel_programs import compiled_codes


@pytest.mark.cuda_compiler
def test_codes_compile():
    assert compiled_codes("gb300").count('custom_call_target="mosaic_gpu_v2"') == 3
